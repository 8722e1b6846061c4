"""What the device's fused operators ask of sizes on one rank: where they fail, and where they are slow.

The limits are those that the simulator enforces (`vllm_neuron/functional`): 128 partitions of on-chip memory, and
kernels that work on two physical cores. Attention of a hidden size that they refuse is composed.
"""

from collections.abc import Iterator

from autoport.analysis.attention import PARTITIONS
from autoport.analysis.dimensions import EXPERT, SHARED, Dimensions
from autoport.analysis.padding import padded_shard, padded_sizes
from autoport.schema.parallel import Violation

SEGMENT_SIZES = (512, 1024, 2048, 4096, 8192)  # tokens of a prompt that segmented attention takes in a step
LARGEST_QKV_COLUMNS = 4096
LARGEST_MLP_COLUMNS = 4096  # 8 tiles of 512 columns


def device_violations(size: Dimensions, tp: int) -> Iterator[Violation]:
    """Sizes with which a fused operator raises an error on the device."""
    inner = size.expert_sizes.get(EXPERT, 0)
    if inner and inner % tp == 0 and inner // tp >= PARTITIONS and inner // tp % 16:
        text = (
            f"an expert's intermediate size {inner} / {tp} = {inner // tp} is not a multiple of 16 (moe_cte)"
        )
        yield Violation("DEV-INNER", text)


def has_segments(tp: int) -> bool:
    """Whether `tp` ranks, which split the tokens of a prefill, can split a segment."""
    return any(size % tp == 0 for size in SEGMENT_SIZES)


def slow_paths(size: Dimensions, tp: int) -> Iterator[Violation]:
    """Sizes with which the device leaves a fused operator for a slow path."""
    hidden, kv_heads = size.hidden_size, max(1, size.num_kv_heads // tp)
    users = ["the MLP"] if size.intermediate_size or SHARED in size.expert_sizes else []
    users += ["the experts"] if EXPERT in size.expert_sizes and size.fused_experts else []
    if hidden % PARTITIONS and (size.fused or users):
        users = (["attention"] if size.fused else []) + users
        text = f"hidden_size {hidden} is not a multiple of {PARTITIONS}: slow paths in {' and '.join(users)}"
        yield Violation("PERF-HIDDEN", text)
    elif hidden % (2 * PARTITIONS) and users:
        text = f"hidden_size {hidden} is not a multiple of {2 * PARTITIONS}: decode of {' and '.join(users)} is slow"
        yield Violation("PERF-HIDDEN", text)
    if size.fused and kv_heads > 1:
        even = size.num_heads % (2 * size.num_kv_heads) == 0  # otherwise R2 forbids that size
        better = f"; TP {size.num_kv_heads} has one" if even else ""
        text = f"{kv_heads} KV heads per rank: decode attention takes a slow path{better}"
        yield Violation("PERF-KV-HEADS", text)
    columns = qkv_columns(size, tp)
    if size.fused and columns > LARGEST_QKV_COLUMNS:
        text = f"{columns} columns of q, k and v per rank, above {LARGEST_QKV_COLUMNS}: qkv_proj takes a slow path"
        yield Violation("PERF-QKV", text)
    elif size.fused and columns > hidden:
        text = f"{columns} columns of q, k and v per rank, above hidden_size {hidden}: qkv_proj takes a slow path"
        yield Violation("PERF-QKV", text)
    yield from _wide_mlps(size, tp)
    inner = size.expert_sizes.get(EXPERT, 0)
    columns = padded_shard(EXPERT, inner, tp) if EXPERT in padded_sizes(size) else inner // tp
    slow = ["decode"] if size.fused_experts and columns % PARTITIONS else []
    slow += ["prefill"] if columns < PARTITIONS else []
    if inner and slow:
        verb = "take slow paths" if len(slow) > 1 else "takes a slow path"
        text = f"{columns} of an expert's intermediate size per rank, no multiple of {PARTITIONS}: "
        yield Violation("PERF-EXPERTS", f"{text}{' and '.join(slow)} of the experts {verb}")


def _wide_mlps(size: Dimensions, tp: int) -> Iterator[Violation]:
    """MLPs of more columns per rank than the prefill kernel holds; an odd hidden size is slow already."""
    for name, inner in (
        ("intermediate_size", size.intermediate_size),
        (SHARED, size.expert_sizes.get(SHARED, 0)),
    ):
        if size.hidden_size % PARTITIONS == 0 and inner // tp > LARGEST_MLP_COLUMNS:
            columns = f"{inner // tp} columns of {name} per rank, above {LARGEST_MLP_COLUMNS}"
            yield Violation("PERF-MLP", f"{columns}: prefill of the MLP takes a slow path")


def qkv_columns(size: Dimensions, tp: int) -> int:
    """Columns of the fused q, k and v weight on one rank."""
    return (size.num_heads // tp + 2 * max(1, size.num_kv_heads // tp)) * size.head_dim

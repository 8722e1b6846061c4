"""Expert parallelism: a sub-group for attention and dense layers, all ranks for the experts.

The world is split into ``ep_degree = world / tp`` sub-groups of `tp` ranks. Attention and dense layers are sharded
over a sub-group (and held once per sub-group); the experts are divided among the sub-groups. Every collective runs
on the whole world: the device cannot handle two sizes of collective group in one graph.
"""

from autoport.analysis.device_rules import device_violations
from autoport.analysis.dimensions import EXPERT, Dimensions
from autoport.analysis.instances import Instance
from autoport.analysis.tensor_parallel import check_rules, memory_violations
from autoport.schema.parallel import EpCandidate, EpPlan, TpPlan, Violation, WeightBytes

UNIFIED_GROUP = (
    "all collectives run on the whole world; weights of o_proj and dense down_proj are divided by ep_degree"
)


def plan_expert_parallel(
    size: Dimensions,
    num_experts: int,
    dense: WeightBytes,
    expert_bytes: int,
    tp_plan: TpPlan,
    instance: Instance,
) -> EpPlan:
    """Evaluate every sub-group size that is a power of two.

    Args:
        dense: Bytes of everything but the routed experts.
        expert_bytes: Bytes of all routed experts of all layers.
        tp_plan: Has the cache of a rank at each size.
    """
    world = instance.cores
    candidates = []
    cache = {item.tp_size: item.kv_bytes_per_rank for item in tp_plan.candidates}
    tp = 1
    while tp <= world:
        degree = world // tp
        broken = check_rules(size, tp, exempt=(EXPERT,))  # EP2 is about that size
        broken += _expert_rules(size, num_experts, tp, degree)
        bytes_per_rank = dense.per_rank(tp, size.num_kv_heads) + -(-expert_bytes // world)
        broken += device_violations(size, tp) if size.num_heads % tp == 0 else []
        broken += memory_violations(bytes_per_rank, cache[tp], instance)
        candidates.append(EpCandidate(tp, degree, broken, -(-num_experts // degree), bytes_per_rank))
        tp *= 2
    valid = [item for item in candidates if item.valid and item.ep_degree > 1]
    return EpPlan(
        world_size=world,
        num_experts=num_experts,
        candidates=candidates,
        recommended=min((item.tp_size for item in valid if item.tp_size >= 2), default=None),
        note=UNIFIED_GROUP,
    )


def _expert_rules(size: Dimensions, num_experts: int, tp: int, degree: int) -> list[Violation]:
    broken = []
    if num_experts % degree:
        divisors = ", ".join(str(n) for n in range(1, num_experts + 1) if num_experts % n == 0)
        text = f"{num_experts} experts do not divide among {degree} groups (ep_degree can be {divisors})"
        broken.append(Violation("EP1", text))
    inner = size.expert_sizes.get(EXPERT, 0)
    if inner % tp:
        broken.append(Violation("EP2", f"{EXPERT} {inner} is not a multiple of {tp}"))
    return broken

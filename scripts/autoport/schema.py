"""The files that steps hand to each other, as types.

`facts.json` (Step 1) and `checkpoint.json` (Step 1) describe the model as found, `plan.json` (Step 2) says what
will be generated. Every number in them can be traced: a `Fact` carries the place it was read from.
"""

from typing import Any, Literal

import msgspec


class Fact(msgspec.Struct, frozen=True):
    """A value and the place it comes from.

    `source` is ``"config.json: <key path>"``, ``"<Class> default (transformers <version>, <file>:<line>)"`` or
    ``"derived: <formula>"``.
    """

    value: Any
    source: str


class TensorHeader(msgspec.Struct, frozen=True):
    """One entry of a safetensors header.

    `dtype` is the format's own name (``"BF16"``, ``"F32"``, ...); `offset` is where the data begins in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    file: str
    num_bytes: int
    offset: int = 0


class Checkpoint(msgspec.Struct):
    """What the safetensors headers say; no tensor data is ever read.

    Attributes:
        source: Local folder or hub id.
        files: The safetensors files, in name order.
        tensors: Header entry by checkpoint key.
        total_bytes: Sum of the tensors' sizes in bytes.
        bytes_read: Bytes read to learn this.
        notes: What a reader must know, e.g. files that were left out.
    """

    source: str
    files: list[str]
    tensors: dict[str, TensorHeader]
    total_bytes: int
    bytes_read: int
    notes: list[str] = []


class Facts(msgspec.Struct):
    """Step 1: what is known of the model, each value with its source.

    Attributes:
        config: The config as it was read.
        architecture: Exact string of `architectures`, the one used for registration.
        fields: Semantic fields under their standard names (``hidden_size``, ``norm_eps``, ``rope``, ...).
        text_path: Where the decoder's config stands in `config`, e.g. ``"text_config."``; empty for the top.
        unconsumed: Config keys that no field took and that look semantic.
        remote_code: The `auto_map` of the config; present means a review gate.
        warnings: What a reader must know but what does not stop the run.
    """

    source: str
    config_file: str
    config: dict[str, Any]
    architecture: Fact
    model_type: Fact
    fields: dict[str, Fact]
    text_path: str = ""
    unconsumed: dict[str, Any] = {}
    remote_code: dict[str, Any] = {}
    warnings: list[str] = []


# --- Architecture: the typed description that code generation renders -------------------------------------------


class Norm(msgspec.Struct, frozen=True):
    kind: Literal["rms"]
    eps: float


class Rope(msgspec.Struct, frozen=True):
    """Rotary embedding; `parameters` holds the numbers of the scaling (empty for ``default``)."""

    kind: Literal["default", "llama3"]
    theta: float
    parameters: dict[str, float | int] = {}


class Attention(msgspec.Struct, frozen=True):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool
    o_bias: bool = False


class Mlp(msgspec.Struct, frozen=True):
    kind: Literal["gated"]
    activation: Literal["silu"]
    intermediate_size: int
    bias: bool = False


class Block(msgspec.Struct, frozen=True):
    topology: Literal["pre_norm"]


class Head(msgspec.Struct, frozen=True):
    tied: bool


class Architecture(msgspec.Struct, frozen=True):
    """A decoder, as the generator sees it."""

    hf_name: str
    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position_embeddings: int
    dtype: Literal["bfloat16", "float16", "float32"]
    norm: Norm
    rope: Rope
    attention: Attention
    mlp: Mlp
    block: Block
    head: Head


# --- Weight map ---------------------------------------------------------------------------------------------------


class WeightEntry(msgspec.Struct, frozen=True):
    """One parameter of the port and the checkpoint keys it is loaded from.

    `{i}` in names stands for the layer index; entries with it are expanded over all layers.

    Attributes:
        parameter: Name of the `nn.Parameter` in the generated model.
        keys: Checkpoint keys, in the order in which the loader takes them.
        shapes: Full (unsharded) shape of each key in the checkpoint.
        transform: How the keys become this rank's parameter: ``replicated``, ``vocab`` (rows split, padded),
            ``column`` ([out, in] rows split, stored transposed), ``row`` (columns split, stored transposed),
            ``fused_qkv`` (q, k, v rows split by head and concatenated, stored transposed), ``fused_qkv_bias``.
    """

    parameter: str
    keys: list[str]
    shapes: list[tuple[int, ...]]
    transform: Literal["replicated", "vocab", "column", "row", "fused_qkv", "fused_qkv_bias"]


class IgnoredKeys(msgspec.Struct, frozen=True):
    """Checkpoint keys that are left out on purpose. `pattern` is a regular expression over the whole key."""

    pattern: str
    reason: str


class WeightMap(msgspec.Struct):
    entries: list[WeightEntry]
    ignored: list[IgnoredKeys] = []


# --- Parallel plan ------------------------------------------------------------------------------------------------


class Violation(msgspec.Struct, frozen=True):
    """A tensor-parallel rule (``R1`` to ``R5``, ``MEM``) that a size breaks, with the numbers."""

    rule: str
    text: str


class TpCandidate(msgspec.Struct, frozen=True):
    """One tensor-parallel size. `relaxed` lists rules it breaks that the user chose to relax."""

    tp_size: int
    violations: list[Violation]
    relaxed: list[Violation]
    kv_heads_per_rank: int
    kv_replicas: int
    weight_bytes_per_rank: int
    kv_bytes_per_rank: int

    @property
    def valid(self) -> bool:
        return not self.violations


class TpPlan(msgspec.Struct):
    """Step 1's tensor-parallel table. `recommended` is None when no size is valid and fits.

    Attributes:
        context_length: Tokens per sequence that the KV-cache estimate is for.
        batch_size: Sequences that the KV-cache estimate is for.
        weight_limit_bytes: Weights per rank above which a size does not fit.
    """

    candidates: list[TpCandidate]
    recommended: int | None
    context_length: int
    batch_size: int
    weight_limit_bytes: int


# --- Plan ---------------------------------------------------------------------------------------------------------


class Section(msgspec.Struct, frozen=True):
    """Step 2: one section of model.py compared with the reference model."""

    name: str
    reference: str
    target: str
    change: str
    source: str


class Pitfall(msgspec.Struct, frozen=True):
    rule: str
    text: str


class Plan(msgspec.Struct):
    """Step 2: everything that code generation needs."""

    name: str
    class_prefix: str
    source: str
    reference_model: str
    architecture: Architecture
    weights: WeightMap
    tp: TpPlan
    sections: list[Section]
    pitfalls: list[Pitfall]


# --- Proof --------------------------------------------------------------------------------------------------------


class HardwareRecord(msgspec.Struct, frozen=True):
    """A device rule that the port met on the simulator.

    `kind` is ``"error"`` where the device would fail, ``"fallback"`` where it would take a slow path.
    """

    operator: str
    kind: Literal["error", "fallback"]
    rule: str
    message: str
    count: int


class Ratio(msgspec.Struct, frozen=True):
    """R-ratio with the 5 % and 95 % quantiles of resampled positions. None: not finite.

    `baseline_zero`: the bf16 reference equals the fp32 one, so R says nothing and the port has to be exact.
    """

    value: float | None
    low: float | None
    high: float | None
    baseline_zero: bool = False


class PhaseProof(msgspec.Struct, frozen=True):
    """Port against reference in one phase of the scenario.

    Attributes:
        phase: ``"prefill"``, ``"segmented prefill"``, ``"decode"`` or ``"on-device sampling"``.
        positions: Number of compared positions.
        max_relative_error: Largest over the positions of max|port - ref32| / max|ref32|. None: not finite.
        worst: Where that is.
        tokens: Number of greedy tokens compared.
        tokens_differ: How many of them are not the fp32 reference's.
        r_ratio: Only in bfloat16.
        failure: Why the phase is red; empty when it is green.
    """

    phase: str
    positions: int
    max_relative_error: float | None
    worst: str
    tokens: int
    tokens_differ: int
    r_ratio: Ratio | None = None
    failure: str = ""


class ProofRun(msgspec.Struct, frozen=True):
    """One TP size and dtype.

    Attributes:
        phases: Empty when the port raised.
        hardware: Device rules that rank 0 met.
        collectives: Calls in one forward of rank 0 by kind, for each step and bucket, e.g. ``"prefill 64"``.
        failure: Why the run is red, its first failing phase first; empty when it is green.
        log: Output of the rank to look at, relative to the workspace.
    """

    tp_size: int
    dtype: Literal["float32", "bfloat16"]
    phases: list[PhaseProof]
    hardware: list[HardwareRecord]
    collectives: dict[str, dict[str, int]]
    seconds: float
    failure: str
    log: str


class Proof(msgspec.Struct, frozen=True):
    """The tiny twin on the simulator against the Hugging Face class.

    Attributes:
        ran_on: What the port ran on.
        reference: Class of the reference.
        twin: The twin's config.
        seed: Seed of the weights and of the prompts.
        not_run: Why a TP size that one would expect was not run.
        versions: Versions of torch, transformers and vLLM.
    """

    passed: bool
    ran_on: Literal["simulator"]
    reference: str
    twin: dict[str, Any]
    seed: int
    max_relative_error_limit: float
    r_ratio_limit: float
    runs: list[ProofRun]
    not_run: dict[int, str]
    versions: dict[str, str]

"""The files that steps hand to each other, as types.

`facts.json` (Step 1) and `checkpoint.json` (Step 1) describe the model as found, `plan.json` (Step 2) says what
will be generated. Every number in them can be traced: a `Fact` carries the place it was read from.
"""

from typing import Annotated, Any, Literal

import msgspec

from autoport.field_types import check_fields, check_finding, check_names


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
        left_out: Safetensors files beside those of the checkpoint.
    """

    source: str
    files: list[str]
    tensors: dict[str, TensorHeader]
    total_bytes: int
    bytes_read: int
    notes: list[str] = []
    left_out: list[str] = []


class Finding(msgspec.Struct, frozen=True):
    """What the modeling file says, by reading its text.

    Attributes:
        topic: ``norm``, ``rope``, ``block``, ``activation``, ``attention_scale``, ``embedding_scale``, ``scale``,
            ``softcap``, ``sinks``, ``qk_norm`` or ``router``.
        subject: Class and attribute, or function, that it is about.
        where: File and line.
        confirmed: Whether running the piece gave the same, in everything that is compared.
    """

    topic: str
    subject: str
    value: dict[str, Any]
    where: str
    confirmed: bool = False

    def __post_init__(self) -> None:
        check_finding(self.topic, self.value)


class ModelingReading(msgspec.Struct, frozen=True):
    """The reading of a modeling file.

    Attributes:
        file: Name of the file; empty when there is none.
        reads: Config attribute -> the first place that reads it.
        note: Why there is no reading, or what to know about it.
    """

    file: str = ""
    findings: list[Finding] = []
    reads: dict[str, str] = {}
    note: str = ""


class Facts(msgspec.Struct):
    """Step 1: what is known of the model, each value with its source.

    Attributes:
        config: The config as it was read.
        config_digest: SHA-256 of config.json's content as it was read (see `research.config.config_digest`).
        config_content: The hub's id of that content, empty for a local folder (see `research.source.Source`).
        architecture: Exact string of `architectures`, the one used for registration.
        fields: Semantic fields under their standard names (``hidden_size``, ``norm_eps``, ``rope``, ...).
        text_path: Where the decoder's config stands in `config`, e.g. ``"text_config."``; empty for the top.
        declared: Config keys beside the fields that the declaration of the class reads.
        unconsumed: Config keys that neither a field nor a declaration took and that look semantic.
        inert: Such keys that neither the config class nor the modeling file reads.
        remote_code: The `auto_map` of the config; present means a review gate.
        modeling: What the modeling file computes.
        stored_as: Weight format of a quantised checkpoint, e.g. ``mxfp4``; `config` and the checkpoint are then
            those of the dequantised model.
        warnings: What a reader must know but what does not stop the run.

    Raises:
        ValueError: A field that has another type than `autoport.field_types` says; `msgspec` turns it into its
            `ValidationError` when it decodes.
    """

    source: str
    config_file: str
    config: dict[str, Any]
    architecture: Fact
    model_type: Fact
    fields: dict[str, Fact]
    config_digest: str = ""
    config_content: str = ""
    text_path: str = ""
    declared: dict[str, Fact] = {}
    unconsumed: dict[str, Any] = {}
    inert: list[str] = []
    remote_code: dict[str, Any] = {}
    modeling: ModelingReading = ModelingReading()
    stored_as: str = ""
    warnings: list[str] = []

    def __post_init__(self) -> None:
        check_names(architecture=self.architecture.value, model_type=self.model_type.value)
        check_fields({name: fact.value for name, fact in self.fields.items()})


# --- Architecture: the typed description that code generation renders -------------------------------------------


class Norm(msgspec.Struct, frozen=True):
    """A norm over the hidden dimension or over a head.

    Attributes:
        kind: Root mean square, or mean and variance.
        weight: ``one_plus``: the checkpoint holds w, the norm multiplies by 1 + w. ``none``: no weight.
        bias: Whether there is an additive bias (``layer`` only).
        rounding: In low precision, where the normalised value is rounded: ``before_weight`` or
            ``after_weight``. A LayerNorm rounds once, at the end.
    """

    kind: Literal["rms", "layer"]
    eps: float
    weight: Literal["plain", "one_plus", "none"] = "plain"
    bias: bool = False
    rounding: Literal["before_weight", "after_weight"] = "before_weight"


class Rope(msgspec.Struct, frozen=True):
    """Rotary embedding; `parameters` holds the numbers of the scaling (empty for ``default``).

    Attributes:
        pairing: Which dimensions of a head rotate together in the checkpoint: i with i + rotary_dim / 2, or
            2i with 2i + 1. The weight loader reorders them, so that the graph always rotates halves.
        rotary_dim: Dimensions that rotate; None for the whole head.
        sign: -1 where the class rotates the other way.
        mscale: Whether ``longrope`` scales cos and sin by its two mscale numbers, and has the short factors at
            every length.
    """

    kind: Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
    theta: float
    parameters: dict[str, Any] = {}
    pairing: Literal["half", "interleaved"] = "half"
    rotary_dim: int | None = None
    sign: Literal[1, -1] = 1
    mscale: bool = False


class QkNorm(msgspec.Struct, frozen=True):
    """A norm on queries and keys.

    Attributes:
        width: ``head``: one weight of head_dim for all heads. ``each_head``: a weight per head. ``full``:
            over all heads of the model together.
    """

    norm: Norm
    width: Literal["head", "each_head", "full"] = "head"
    place: Literal["before_rope", "after_rope"] = "before_rope"


class OutputGate(msgspec.Struct, frozen=True):
    """A factor of the heads' outputs before the output projection, computed from the attention's input.

    Attributes:
        width: One factor for each head, or one for each of a head's dimensions.
    """

    activation: Literal["sigmoid", "softplus"]
    width: Literal["head", "element"]


class Attention(msgspec.Struct, frozen=True):
    """Multi-head, grouped-query or multi-query attention.

    Attributes:
        scale: Factor of the scores; None for head_dim ** -0.5.
        scale_by_layer: The scale is divided by the layer's number, counted from one.
        softcap: c in c * tanh(scores / c).
        sinks: One more logit per head in the softmax, without a value.
        alibi: Scores get a per-head slope times the key's distance, instead of rotary embeddings.
        qkv_clip: Limit of the absolute values of q, k and v.
        q_temperature: Queries are scaled by a function of their position.
        float32_scores: The class computes scores from float32 queries and keys, whatever the dtype.
        composed: Reasons why attention is built of smaller operators; empty for the fused operators.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool
    o_bias: bool = False
    qk_norm: QkNorm | None = None
    scale: float | None = None
    scale_by_layer: bool = False
    softcap: float | None = None
    sinks: bool = False
    output_gate: OutputGate | None = None
    alibi: bool = False
    qkv_clip: float | None = None
    q_temperature: bool = False
    float32_scores: bool = False
    composed: tuple[str, ...] = ()


class Mlp(msgspec.Struct, frozen=True):
    """A feed-forward block: down(act(gate(x)) * up(x)), or plain down(act(up(x)))."""

    kind: Literal["gated", "plain"]
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu"]
    intermediate_size: int
    bias: bool = False


class Routing(msgspec.Struct, frozen=True):
    """How a token's experts are chosen and weighted, all in float32.

    Attributes:
        score: Function of the router's logits. ``sparsemixer``: two experts, one after the other, each weighted
            by a softmax over the experts whose logit is near its own.
        score_over: Whether it sees the logits of all experts, or of the chosen ones only.
        bias: The router's projection has a bias.
        correction_bias: A bias of the scores that counts for the choice only, not for the weights.
        correction_rows: The checkpoint holds it as one row of a matrix.
        groups: Experts form groups of equal size; only those in the `top_groups` best groups (by the sum of a
            group's two best scores) can be chosen.
        normalise: The chosen experts' weights are divided by their sum (plus `epsilon`, or at least `minimum`).
        scaling: Factor of the weights, after that; None for 1.
        logit_softcap: c in c * tanh(logits / c).
        threshold: How far below the best logit, relative to the logit, ``sparsemixer`` still counts an expert.
    """

    num_experts: int
    top_k: int
    score: Literal["softmax", "sigmoid", "sparsemixer"]
    score_over: Literal["all", "chosen"]
    bias: bool
    correction_bias: bool
    correction_rows: bool
    groups: int
    top_groups: int
    normalise: bool
    epsilon: float
    minimum: float | None
    scaling: float | None
    logit_softcap: float | None
    threshold: float | None


class SharedExperts(msgspec.Struct, frozen=True):
    """A gated MLP beside the experts that every token passes.

    Attributes:
        gated: Its output is multiplied by the sigmoid of a projection to one number.
        combine: Whether its output and the experts' are added or averaged.
        storage: As `Storage.gate_up`.
    """

    intermediate_size: int
    activation: Literal["silu", "gelu", "gelu_tanh"]
    gated: bool
    combine: Literal["sum", "average"]
    storage: Literal["separate", "concat"]


class Moe(msgspec.Struct, frozen=True):
    """A mixture of experts; each expert is down(act(gate(x)) * up(x)).

    Attributes:
        intermediate_size: Of one expert.
        activation: ``swish_1702``: g * sigmoid(1.702 g).
        clamp: Limit of the gate (from above) and of the absolute value of up; None for none.
        up_offset: What is added to up after the clamp.
        bias: Experts have biases.
        storage: ``separate`` tensors per expert; one tensor for all with gate rows, then up rows
            (``stacked``, [E, 2I, H]), the same transposed (``stacked_transposed``, [E, H, 2I]), or transposed
            with gate and up columns alternating (``interleaved``).
        composed: Why decode is composed of smaller operators; empty for the fused operator.
    """

    routing: Routing
    intermediate_size: int
    activation: Literal["silu", "gelu", "swish_1702"]
    clamp: float | None = None
    up_offset: float | None = None
    bias: bool = False
    shared: SharedExperts | None = None
    storage: Literal["separate", "stacked", "stacked_transposed", "interleaved"] = "separate"
    composed: tuple[str, ...] = ()


class Block(msgspec.Struct, frozen=True):
    """How norms, attention and MLP are joined.

    Attributes:
        residual_scale: Factor of what attention and MLP add to the residual stream; None for 1.
    """

    topology: Literal[
        "pre_norm", "parallel", "parallel_two_norms", "sandwich", "post_norm", "post_residual_norm"
    ]
    residual_scale: float | None = None


class Embedding(msgspec.Struct, frozen=True):
    """What is done to the token embeddings before the first layer.

    Attributes:
        scale: Their factor; None for 1.
        scale_rounded: Whether the factor is rounded to their dtype first.
        norm: Whether they are normalised.
        positions: Absolute position embeddings that are added: a table of the checkpoint, or computed with
            frequencies whose exponents end at 1 (``sinusoidal``) or just below (``sinusoidal_halves``).
        position_offset: What is added to a position before it is looked up.
    """

    scale: float | None = None
    scale_rounded: bool = False
    norm: bool = False
    positions: Literal["none", "learned", "sinusoidal", "sinusoidal_halves"] = "none"
    position_offset: int = 0


class Head(msgspec.Struct, frozen=True):
    """The projection to the vocabulary; logits are scaled first, then capped."""

    tied: bool
    bias: bool = False
    scale: float | None = None
    softcap: float | None = None


class Layers(msgspec.Struct, frozen=True):
    """What differs from layer to layer. An empty list: the same for all.

    Attributes:
        windows: Sliding window in tokens, or None for full attention.
        ropes: Label of the layer's rotary embedding (a key of `Architecture.ropes`), None for none (NoPE).
        moe: Whether the layer's MLP is a mixture of experts.
    """

    windows: list[int | None] = []
    ropes: list[str | None] = []
    moe: list[bool] = []


class Storage(msgspec.Struct, frozen=True):
    """How the checkpoint lays out what the port wants separate.

    Attributes:
        qkv: ``separate``; one tensor with all of q, then k, then v (``concat``), or per group of query heads
            its q, k and v (``groups``), or four blocks of q, v, k (``codegen``).
        gate_up: ``separate``, or one tensor with gate first (``concat``).
        transposed: Linear weights are [in, out] (Conv1D), not [out, in].
    """

    qkv: Literal["separate", "concat", "groups", "codegen"] = "separate"
    gate_up: Literal["separate", "concat"] = "separate"
    transposed: bool = False


class Architecture(msgspec.Struct, frozen=True):
    """A decoder, as the generator sees it.

    Attributes:
        rope: The rotary embedding; None when no layer rotates.
        ropes: Rotary embeddings by label, when layers differ in it.
        readings: Field of the generated config class -> expression over the Hugging Face config's attributes
            (see `autoport.expressions`).
        checks: Expression over those attributes -> the value that this description was made for.
    """

    hf_name: str
    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position_embeddings: int
    dtype: Literal["bfloat16", "float16", "float32"]
    norm: Norm
    rope: Rope | None
    attention: Attention
    mlp: Mlp
    block: Block
    head: Head
    embedding: Embedding = Embedding()
    layers: Layers = Layers()
    storage: Storage = Storage()
    final_norm: bool = True
    moe: Moe | None = None
    ropes: dict[str, Rope] = {}
    readings: dict[str, str] = {}
    checks: dict[str, Any] = {}


# --- Weight map ---


class WeightEntry(msgspec.Struct, frozen=True):
    """One parameter of the port and the checkpoint keys it is loaded from.

    `{i}` in names stands for the layer index; entries with it are expanded over all layers.

    Attributes:
        parameter: Name of the `nn.Parameter` in the generated model.
        keys: Checkpoint keys, in the order in which the loader takes them.
        shapes: Full (unsharded) shape of each key in the checkpoint.
        transform: How the keys become this rank's parameter: ``replicated``, ``vocab`` (rows split, padded),
            ``column`` ([out, in] rows split, stored transposed), ``row`` (columns split, stored transposed),
            ``fused_qkv`` (q, k, v rows split by head and concatenated, stored transposed), ``fused_qkv_bias``,
            ``column_bias`` (split), ``row_bias`` (divided by the ranks, which are summed), ``heads`` (split by
            query head), ``q_heads`` and ``kv_heads`` (vectors over the heads of q or k), ``expert_gate_up`` and
            ``expert_down`` (stacked over the experts, each split as ``column`` and ``row``), their biases.
        steps: What is done before that, in order: ``split q, k, v: <layout>``, ``split gate, up``,
            ``head dimensions to halves``, ``add one``, ``transposed``, ``experts: <storage>``,
            ``add one to up``, ``flattened``.
        layers: Which layers have it: those with experts, those without, or all.
        experts: Number of experts that ``{e}`` in the keys stands for, one key after the other; 0 without it.
    """

    parameter: str
    keys: Annotated[list[str], msgspec.Meta(min_length=1)]
    shapes: list[tuple[int, ...]]
    transform: Literal[
        "replicated",
        "vocab",
        "column",
        "row",
        "fused_qkv",
        "fused_qkv_bias",
        "column_bias",
        "row_bias",
        "heads",
        "q_heads",
        "kv_heads",
        "expert_gate_up",
        "expert_gate_up_bias",
        "expert_down",
    ]
    steps: list[str] = []
    layers: Literal["all", "dense", "moe"] = "all"
    experts: int = 0


class IgnoredKeys(msgspec.Struct, frozen=True):
    """Checkpoint keys that are left out on purpose. `pattern` is a regular expression over the whole key."""

    pattern: str
    reason: str


class WeightMap(msgspec.Struct):
    entries: list[WeightEntry]
    ignored: list[IgnoredKeys] = []


# --- Parallel plan ---


class Violation(msgspec.Struct, frozen=True):
    """A tensor-parallel rule (``R1`` to ``R4``, ``MEM``) that a size breaks, with the numbers."""

    rule: str
    text: str


class WeightBytes(msgspec.Struct, frozen=True):
    """Bytes of weights in the port's dtype, before sharding, by how they are sharded.

    `embeddings` are the part of `split` that are embeddings and the head.
    """

    split: int = 0
    kv_heads: int = 0
    copied: int = 0
    embeddings: int = 0

    def __add__(self, other: "WeightBytes") -> "WeightBytes":
        return WeightBytes(
            *(
                a + b
                for a, b in zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
            )
        )

    @property
    def total(self) -> int:
        return self.split + self.kv_heads + self.copied

    def per_rank(self, tp_size: int, num_kv_heads: int) -> int:
        """Bytes on one rank: a KV head is never split, so ranks beyond the KV heads hold copies."""
        kv_shards = min(tp_size, num_kv_heads)
        return self.copied + -(-self.split // tp_size) + -(-self.kv_heads // kv_shards)


class TpCandidate(msgspec.Struct, frozen=True):
    """One tensor-parallel size. `relaxed` lists rules it breaks that the user chose to relax.

    Attributes:
        embedding_bytes_per_rank: Part of the weights that are embeddings and the head.
        reserve_bytes: Kept for compiled graphs, activations and collectives.
        padded_vocab_size: The next multiple of the size.
        padded: Other sizes that are filled up with zeros (``PAD-INNER``).
        slow_paths: What the device will do without a fused operator at this size (``PERF-...``).
    """

    tp_size: int
    violations: list[Violation]
    relaxed: list[Violation]
    kv_heads_per_rank: int
    kv_replicas: int
    weight_bytes_per_rank: int
    kv_bytes_per_rank: int
    embedding_bytes_per_rank: int = 0
    reserve_bytes: int = 0
    padded_vocab_size: int = 0
    padded: list[Violation] = []
    slow_paths: list[Violation] = []

    @property
    def valid(self) -> bool:
        return not self.violations


class TpPlan(msgspec.Struct):
    """Step 1's tensor-parallel table. `recommended` is None when no size is valid and fits.

    Attributes:
        context_length: Tokens per sequence that the KV-cache estimate is for.
        batch_size: Sequences that the KV-cache estimate is for.
        weight_limit_bytes: Weights per rank above which a size does not fit.
        instance, lnc, cores, bytes_per_core: What the table is for.
        parts: Bytes of the weights by parameter, or by part of the model where only its config is known.
        latent_cache: The cache is that of latent attention, whole on every rank.
        hardware_assumed: No document says what the instance has.
        reserve_assumed: Nobody has measured what has to be kept of a logical core.
        assumptions: What the numbers rest on and no document says.
    """

    candidates: list[TpCandidate]
    recommended: int | None
    context_length: int
    batch_size: int
    weight_limit_bytes: int
    instance: str = ""
    lnc: int = 0
    cores: int = 0
    bytes_per_core: int = 0
    parts: dict[str, WeightBytes] = {}
    latent_cache: bool = False
    num_kv_heads: int = 0
    hardware_assumed: bool = False
    reserve_assumed: bool = True
    assumptions: list[str] = []


class EpCandidate(msgspec.Struct, frozen=True):
    """One split of the world: sub-groups of `tp_size` ranks, experts divided among `ep_degree` of them."""

    tp_size: int
    ep_degree: int
    violations: list[Violation]
    experts_per_group: int
    weight_bytes_per_rank: int

    @property
    def valid(self) -> bool:
        return not self.violations


class EpPlan(msgspec.Struct, frozen=True):
    """Expert parallelism over all ranks of the instance. `recommended` is a sub-group size, or None."""

    world_size: int
    num_experts: int
    candidates: list[EpCandidate]
    recommended: int | None
    note: str


# --- Plan ---


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


class GapParameter(msgspec.Struct, frozen=True):
    """A tensor of the checkpoint that a section written by hand will use, whole on every rank.

    Attributes:
        name: Name of the parameter, with ``{i}`` for the layer.
        sizes: The shape as expressions over the generated config.
    """

    name: str
    shape: tuple[int, ...]
    sizes: list[str]


class Gap(msgspec.Struct, frozen=True):
    """A section of model.py that is left to be written by hand.

    Attributes:
        found: What no declaration covers.
        where: The class and lines of the modeling file that compute it.
        operators: The nearest operators of the workspace, with their places.
    """

    section: Literal["attention", "mlp", "decoder"]
    found: list[str]
    where: str
    parameters: list[GapParameter] = []
    operators: list[str] = []


class Override(msgspec.Struct, frozen=True):
    """A decision that a person took in place of the program's.

    Attributes:
        field: ``section.field``.
        who: Who decided, and how it was said.
        previous: The value that it replaced.
    """

    field: str
    value: Any
    who: str
    when: str
    previous: Any = None


class Plan(msgspec.Struct):
    """Step 2: everything that code generation needs.

    Attributes:
        overrides: Decisions that a person took.
        stored_as: Weight format of the checkpoint, whose variant is generated as well; empty for a plain one.
        ep: Expert parallelism; None for a model without experts.
    """

    name: str
    class_prefix: str
    source: str
    reference_model: str
    architecture: Architecture
    weights: WeightMap
    tp: TpPlan
    sections: list[Section]
    pitfalls: list[Pitfall]
    overrides: list[Override] = []
    gaps: list[Gap] = []
    ep: EpPlan | None = None
    stored_as: str = ""


# --- Proof ---


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


class SectionError(msgspec.Struct, frozen=True):
    """One section of the port in one phase, against the same place in the reference.

    Attributes:
        section: ``rope``, ``embedding``, ``norm``, ``attention``, ``mlp``, ``decoder`` (what joins them: residuals,
            scales, the order), ``final norm`` or ``head``.
        module: Path of the module in the port, e.g. ``model.layers.0.self_attn``.
        layer: None for what is not in a layer.
        where: ``model.py:<line> (<Class>.forward)``.
        error: Largest over the positions of max|port - ref32| / max|ref32|. None: not finite.
        r_ratio: Only in bfloat16. None: not finite, or float32.
        worst: Where the largest error is.
    """

    section: str
    module: str
    layer: int | None
    where: str
    error: float | None
    worst: str = ""
    r_ratio: float | None = None


class ProofRun(msgspec.Struct, frozen=True):
    """One TP size and dtype.

    Attributes:
        phases: Empty when the port raised.
        hardware: Device rules that rank 0 met.
        collectives: Calls in one forward of rank 0 by kind, for each step and bucket, e.g. ``"prefill 64"``.
        failure: Why the run is red, its first failing phase first; empty when it is green.
        twins: Twins with weights and prompts of their own that the phases are judged on together; several where
            R of the first was over the limit by no more than its spread.
        log: Output of the rank to look at, relative to the workspace.
        sections: When a phase is red, the sections of the first red one in the order in which the port runs them.
        diverges: The first of them that differs from the reference.
    """

    tp_size: int
    dtype: Literal["float32", "bfloat16"]
    phases: list[PhaseProof]
    hardware: list[HardwareRecord]
    collectives: dict[str, dict[str, int]]
    seconds: float
    failure: str
    log: str
    sections: list[SectionError] = []
    diverges: SectionError | None = None
    twins: int = 1


class RealSize(msgspec.Struct, frozen=True):
    """The port at the sizes of the real config, in shapes alone: no weights and no values.

    Attributes:
        tp_size: The recommended TP size.
        num_layers: One layer of each kind, which all others are like.
        context_length: Tokens of the prompt that was prefilled, and of the sequences that were decoded.
        segment: Tokens of a step of segmented prefill.
        batch_size: Sequences that were decoded.
        hardware: Device rules that were met, each once.
        failure: Why the device would not run it; empty if it would.
    """

    tp_size: int
    num_layers: int
    context_length: int
    segment: int
    batch_size: int
    hardware: list[HardwareRecord]
    seconds: float
    failure: str = ""


class Proof(msgspec.Struct, frozen=True):
    """The tiny twin on the simulator against the Hugging Face class.

    Attributes:
        ran_on: What the port ran on.
        reference: Class of the reference.
        twin: The twin's config.
        seed: Seed of the weights and of the prompts.
        not_run: Why a TP size that one would expect was not run.
        versions: Versions of torch, transformers and vLLM.
        too_short: Windows and lengths of the twin that no prompt exceeds; the proof is then not green.
        real_size: The shapes at real size; None when a run is red, or no TP size is recommended.
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
    too_short: list[str] = []
    real_size: RealSize | None = None

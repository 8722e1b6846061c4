"""The typed description of a decoder that code generation renders."""

from typing import Any, Literal

import msgspec


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

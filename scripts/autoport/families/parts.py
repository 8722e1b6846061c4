"""Parts that no declaration has, whatever the class: found in a modeling file by the names of classes and attributes.

`owner` and `text` are regular expressions here; `owner` matches the whole name of a class.
"""

from autoport.families.feature import Feature

STATE = (
    "no operator or reference model of the workspace keeps a state: a cache of it beside the paged KV cache (its "
    "layers have no LayerSpec), a scan over the prompt in prefill and one step in decode, in plain torch that traces "
    "under fullgraph"
)

STATE_SPACE = Feature(
    "a state-space mixer, with a state for each sequence",
    r"\w*(Mixer|MambaLayer|RecurrentBlock)|RwkvSelfAttention|xLSTMModel",
    "",
    ("attention", "decoder", "backbone", "weights"),
    STATE,
)
LINEAR_ATTENTION = Feature(
    "linear attention, with a state for each sequence in place of keys and values",
    r"\w*(GatedDeltaNet|DeltaAttention|LightningAttention)",
    "",
    ("attention", "decoder", "backbone", "weights"),
    STATE,
)
MLA = Feature(
    "multi-head latent attention: keys and values of all heads come from one cached vector",
    r"\w*(Attention|MLA)",
    r"self\.kv_b_proj =",
    ("attention", "weights"),
    "start from the attention of deepseek_v32/ (without its indexer where the class has none): the cache holds "
    "the latent vector and the rotated key, on every rank; the projections to heads are sharded",
    nearest="deepseek_v32",
)
SHORT_CONVOLUTION = Feature(
    "a short convolution over the last tokens",
    r"\w*(ShortConv|ShortConvolution|CCAProjection)",
    "",
    ("attention", "decoder", "backbone", "weights"),
    STATE,
)
EXPERTS = Feature(
    "a mixture of experts",
    r"\w*(MoE|Moe|SparseMoeBlock|MOE)",
    "",
    ("moe", "weights"),
    "router in float32 (NF.router) and experts as in qwen3_moe/, or in gpt_oss/ where they need expert parallelism: "
    "NF.build_blockwise_mapping and NF.moe_cte in prefill, NF.moe_block_tkg in decode",
    nearest="gpt_oss",
)

STATES = (STATE_SPACE, LINEAR_ATTENTION, SHORT_CONVOLUTION)
TOWERS = (
    Feature(
        "a vision tower",
        r"\w+",
        r"self\.(vision_tower|vision_model|visual|image_encoder|vision_embed\w*|embed_vision|image_embed|vqmodel) =",
        ("backbone", "weights"),
        "start from qwen3_vl/: the tower, and the places of the prompt that its outputs take",
        nearest="qwen3_vl",
    ),
    Feature(
        "an audio tower",
        r"\w+",
        r"self\.(audio_tower|audio_embed|embed_audio) =",
        ("backbone", "weights"),
        "as a vision tower in qwen3_vl/: the tower, and the places of the prompt that its outputs take",
        nearest="qwen3_vl",
    ),
)
PARTS: tuple[Feature, ...] = (
    *TOWERS,
    Feature(
        "M-RoPE: three positions for a token",
        r"\w*RotaryEmbedding",
        r"mrope_section",
        ("rope", "backbone"),
        "as in qwen3_vl/: each part of the frequencies takes one of the three; in text they are the same",
        nearest="qwen3_vl",
    ),
    Feature(
        "outputs of the vision tower added to hidden states between layers (DeepStack)",
        r"\w*TextModel",
        r"def _deepstack_process",
        ("backbone",),
        "as in qwen3_vl/: after each of the first layers, at the places of the prompt's images",
        nearest="qwen3_vl",
    ),
    MLA,
    Feature(
        "sparse attention: an indexer picks the keys of each query",
        r"\w*Indexer",
        "",
        ("attention", "backbone", "weights"),
        "the indexer of deepseek_v32/, with a cache of its keys and its top-k in plain torch",
        nearest="deepseek_v32",
    ),
    *STATES,
    EXPERTS,
    Feature(
        "a norm on the experts' sum",
        "AXK1MoE",
        r"self\.post_mlp_layernorm =",
        ("moe", "weights"),
        "after the reduction of the experts, on whole rows",
    ),
    Feature(
        "norms followed by a gate of low rank",
        "AXK2GatedRMSNorm",
        "",
        ("norm", "weights"),
        "y * sigmoid(fc2(silu(fc1(y)))) after the norm, in plain torch with replicated weights",
    ),
    Feature(
        "a gate on the heads' outputs",
        "AXK2Attention",
        r"torch\.sigmoid\(gate_states",
        ("attention", "weights"),
        "its weights are in q_b_proj; multiply before NF.o_proj, as generated ports of AfmoeForCausalLM do",
    ),
    Feature(
        "two attentions and two MLPs in a layer, with the experts beside them",
        "LongcatFlashDecoderLayer",
        r"shortcut_mlp_output = ",
        ("decoder", "weights"),
        "two cached attentions by layer, each with a LayerSpec; the experts read the first one's normed output and "
        "are added at the end",
    ),
    Feature(
        "experts that return their input (zero_expert_num)",
        "LongcatFlashExperts",
        r"self\.identity_expert =",
        ("moe",),
        "add the input times the sum of their weights, beside NF.moe_cte over the others",
    ),
    Feature(
        "hyper-connections: several residual streams, mixed in each layer",
        r"\w*HyperConnection",
        "",
        ("decoder", "backbone", "weights"),
        "plain torch in float32 around attention and MLP; the streams begin as copies of the embeddings and are "
        "joined before the last norm",
    ),
    Feature(
        "attention sinks",
        r"\w*Attention",
        r"self\.sinks = nn\.Parameter",
        ("attention", "weights"),
        "as in gpt_oss/: sink of NF.flash_attention, a parameter by query head",
        nearest="gpt_oss",
    ),
    Feature(
        "gate and up clamped before the product",
        r"\w*Experts",
        r"self\.swiglu_limit =",
        ("moe",),
        "the experts' operators clamp, as in gpt_oss/; NF.mlp does not: compose a shared expert of plain torch",
        nearest="gpt_oss",
    ),
    Feature(
        "cross-attention to an encoder or to another tower",
        r"\w*(DecoderLayer)",
        r"self\.(encoder_attn|cross_attn) =",
        ("attention", "decoder", "weights"),
        "no operator or reference model of the workspace has it: scores over the other tower's keys, in plain torch",
    ),
    Feature(
        "embeddings of token types, as an encoder of BERT's kind has",
        r"\w*Embeddings",
        r"self\.token_type_embeddings =",
        ("backbone", "weights"),
        "for text they are one row: add it to the position embeddings at load time; see generated ports of "
        "OPTForCausalLM for positions that are learned",
    ),
    Feature(
        "scores with relative positions that are learned",
        r"XLNetRelativeAttention|CpmAntSegmentPositionEmbedding|InklingRelativeLogits|ProphetNetNgramSelfAttention",
        "",
        ("attention", "weights"),
        "compose it of plain torch: a bias on the scores, as generated ports of BloomForCausalLM add ALiBi",
    ),
)

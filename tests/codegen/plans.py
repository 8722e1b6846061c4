"""Plans made by hand, for the tests of code generation."""

import msgspec
from autoport.schema.architecture import Architecture, Attention, Block, Head, Mlp, Norm, Rope
from autoport.schema.parallel import TpCandidate, TpPlan
from autoport.schema.plan import Pitfall, Plan, Section
from autoport.schema.weights import WeightEntry, WeightMap


def weight_map(arch: Architecture) -> WeightMap:
    """The weight map of a checkpoint in Llama's layout."""
    hidden, inter = arch.hidden_size, arch.mlp.intermediate_size
    q = arch.attention.num_heads * arch.attention.head_dim
    kv = arch.attention.num_kv_heads * arch.attention.head_dim
    layer = "model.layers.{i}"
    attn = f"{layer}.self_attn"
    embed = "model.embed_tokens.weight"
    entries = [
        WeightEntry(embed, [embed], [(arch.vocab_size, hidden)], "vocab"),
        WeightEntry(
            f"{layer}.input_layernorm.weight", [f"{layer}.input_layernorm.weight"], [(hidden,)], "replicated"
        ),
        WeightEntry(
            f"{attn}.qkv_proj_weight",
            [f"{attn}.{p}_proj.weight" for p in "qkv"],
            [(q, hidden), (kv, hidden), (kv, hidden)],
            "fused_qkv",
        ),
        WeightEntry(f"{attn}.o_proj_weight", [f"{attn}.o_proj.weight"], [(hidden, q)], "row"),
        WeightEntry(
            f"{layer}.post_attention_layernorm.weight",
            [f"{layer}.post_attention_layernorm.weight"],
            [(hidden,)],
            "replicated",
        ),
        WeightEntry(
            f"{layer}.mlp.gate_proj_weight", [f"{layer}.mlp.gate_proj.weight"], [(inter, hidden)], "column"
        ),
        WeightEntry(
            f"{layer}.mlp.up_proj_weight", [f"{layer}.mlp.up_proj.weight"], [(inter, hidden)], "column"
        ),
        WeightEntry(
            f"{layer}.mlp.down_proj_weight", [f"{layer}.mlp.down_proj.weight"], [(hidden, inter)], "row"
        ),
        WeightEntry("model.norm.weight", ["model.norm.weight"], [(hidden,)], "replicated"),
        WeightEntry(
            "lm_head.weight",
            [embed if arch.head.tied else "lm_head.weight"],
            [(arch.vocab_size, hidden)],
            "vocab",
        ),
    ]
    if arch.attention.qkv_bias:
        keys = [f"{attn}.{p}_proj.bias" for p in "qkv"]
        entries.insert(3, WeightEntry(f"{attn}.qkv_proj_bias", keys, [(q,), (kv,), (kv,)], "fused_qkv_bias"))
    return WeightMap(entries)


LLAMA_READINGS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "norm_eps": "rms_norm_eps",
    "activation": "hidden_act",
    "num_key_value_heads": "num_key_value_heads",
    "rope_parameters": "rope_parameters",
}

YI = Architecture(
    hf_name="LlamaForCausalLM",
    model_type="llama",
    vocab_size=64000,
    hidden_size=4096,
    num_layers=32,
    max_position_embeddings=4096,
    dtype="bfloat16",
    norm=Norm("rms", 1e-05),
    rope=Rope("default", 5000000.0),
    attention=Attention(num_heads=32, num_kv_heads=4, head_dim=128, qkv_bias=False),
    mlp=Mlp("gated", "silu", 11008),
    block=Block("pre_norm"),
    head=Head(tied=False),
    readings=LLAMA_READINGS,
)

LLAMA3 = Architecture(
    hf_name="LlamaForCausalLM",
    model_type="llama",
    vocab_size=128256,
    hidden_size=2048,
    num_layers=16,
    max_position_embeddings=131072,
    dtype="bfloat16",
    norm=Norm("rms", 1e-05),
    rope=Rope(
        "llama3",
        500000.0,
        {
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    attention=Attention(num_heads=32, num_kv_heads=8, head_dim=64, qkv_bias=False),
    mlp=Mlp("gated", "silu", 8192),
    block=Block("pre_norm"),
    head=Head(tied=True),
    readings=LLAMA_READINGS,
)

QWEN2 = msgspec.structs.replace(
    YI,
    hf_name="Qwen2ForCausalLM",
    model_type="qwen2",
    vocab_size=152064,
    hidden_size=3584,
    num_layers=28,
    max_position_embeddings=131072,
    norm=Norm("rms", 1e-06),
    rope=Rope("default", 1000000.0),
    attention=Attention(num_heads=28, num_kv_heads=4, head_dim=128, qkv_bias=True),
    mlp=Mlp("gated", "silu", 18944),
)


def plan(
    architecture: Architecture, name: str = "yi", prefix: str = "Yi", source: str = "01-ai/Yi-6B"
) -> Plan:
    """A plan for `architecture` with one valid TP size."""
    candidate = TpCandidate(
        tp_size=2,
        violations=[],
        relaxed=[],
        kv_heads_per_rank=architecture.attention.num_kv_heads // 2,
        kv_replicas=1,
        weight_bytes_per_rank=6_000_000_000,
        kv_bytes_per_rank=200_000_000,
    )
    return Plan(
        name=name,
        class_prefix=prefix,
        source=source,
        reference_model="llama3",
        architecture=architecture,
        weights=weight_map(architecture),
        tp=TpPlan([candidate], 2, context_length=4096, batch_size=1, weight_limit_bytes=20_000_000_000),
        sections=[
            Section("rope", "llama3 scaling", "no scaling", "drop the scaling", "config.json: rope_theta"),
            Section("mlp", "gated SiLU", "gated SiLU", "none", "config.json: hidden_act"),
        ],
        pitfalls=[Pitfall("ROPE-THETA", "theta is 5000000, not the usual 10000")],
    )

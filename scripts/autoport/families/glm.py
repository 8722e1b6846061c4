"""GLM: interleaved RoPE on half of each head, gate and up in one tensor."""

from autoport.families.family import Family, Keys

GLM_FAMILIES = [
    Family(
        model_type="glm",
        hf_name="GlmForCausalLM",
        keys=Keys(gate_up="mlp.gate_up_proj"),
        qkv_bias="attention_bias",
        o_bias="False",
        mlp_bias="False",
        gate_up_layout="concat",
        pairing="interleaved",
        partial_rotary_factor=0.5,
    ),
    Family(
        model_type="glm4",
        hf_name="Glm4ForCausalLM",
        keys=Keys(
            gate_up="mlp.gate_up_proj",
            norms=(
                "input_layernorm",
                "post_self_attn_layernorm",
                "post_attention_layernorm",
                "post_mlp_layernorm",
            ),
        ),
        qkv_bias="attention_bias",
        o_bias="False",
        mlp_bias="False",
        gate_up_layout="concat",
        topology="'sandwich'",
        pairing="interleaved",
        partial_rotary_factor=0.5,
    ),
]

"""Llama and those that differ from it in a few traits."""

from autoport.analysis.families.family import Family, QkNormStyle

WINDOW_BY_TYPE = "[sliding_window if kind == 'sliding_attention' else None for kind in layer_types]"
WINDOW_EVERYWHERE = "[sliding_window] * num_hidden_layers"

LLAMA_FAMILIES = [
    Family(
        model_type="llama",
        hf_name="LlamaForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    Family(
        model_type="mistral",
        hf_name="MistralForCausalLM",
        qkv_bias="False",
        o_bias="False",
        mlp_bias="False",
        windows=WINDOW_EVERYWHERE,
    ),
    Family(
        model_type="qwen2",
        hf_name="Qwen2ForCausalLM",
        qkv_bias="True",
        o_bias="False",
        mlp_bias="False",
        windows=WINDOW_BY_TYPE,
    ),
    Family(
        model_type="qwen3",
        hf_name="Qwen3ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="False",
        qk_norm=QkNormStyle(),
        windows=WINDOW_BY_TYPE,
    ),
]

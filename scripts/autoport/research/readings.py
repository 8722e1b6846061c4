"""Where a config class has a field that it does not simply hold: by model type, as expressions.

Each is what the class's modeling or configuration file computes, see `autoport.expressions`. A number that the
code fixes stands here as a literal.
"""

N_INNER = {"intermediate_size": "n_inner if n_inner is not None else 4 * n_embd"}

# The sinusoids of GPT-J's and CodeGen's modeling files.
ROPE_10000 = {"rope_parameters": "{'rope_type': 'default', 'rope_theta': 10000.0}"}

READINGS: dict[str, dict[str, str]] = {
    "biogpt": {"norm_eps": "1e-05"},
    "bloom": {
        "intermediate_size": "4 * hidden_size",
        "activation": "'gelu_pytorch_tanh'",
        "max_position_embeddings": "2048",
    },
    "codegen": N_INNER | ROPE_10000,
    "cohere2_moe": {
        "intermediate_size": (
            "prefix_dense_intermediate_size if prefix_dense_intermediate_size is not None else intermediate_size"
        ),
        "moe_intermediate_size": "intermediate_size",
        "norm_eps": "layer_norm_eps",
        "layer_rope": (
            "[layer_types[i] == 'sliding_attention' or "
            "(mlp_layer_types[i] == 'dense' and prefix_dense_sliding_window_pattern == 1) "
            "for i in range(num_hidden_layers)]"
        ),
    },
    "ctrl": {"activation": "'relu'", "norm_eps": "1e-06"},
    "dbrx": {
        "activation": "ffn_config['ffn_act_fn']['name']",
        "intermediate_size": "ffn_config['ffn_hidden_size']",
        "moe_intermediate_size": "ffn_config['ffn_hidden_size']",
        "norm_eps": "1e-05",
        "num_experts": "ffn_config['moe_num_experts']",
        "num_experts_per_tok": "ffn_config['moe_top_k']",
    },
    "falcon": {
        "num_kv_heads": (
            "num_kv_heads if new_decoder_architecture else 1 if multi_query else num_attention_heads"
        ),
    },
    "gpt-sw3": N_INNER,
    "gpt2": N_INNER,
    "gpt_bigcode": N_INNER,
    "gpt_neo": {
        "intermediate_size": "intermediate_size if intermediate_size is not None else 4 * hidden_size"
    },
    "gpt_neox_japanese": {"intermediate_size": "hidden_size * intermediate_multiple_size"},
    "gptj": N_INNER | ROPE_10000,
    "llama4_text": {
        "intermediate_size": "intermediate_size_mlp",
        "moe_intermediate_size": "intermediate_size",
        "num_shared_experts": "1",
    },
    "mpt": {"activation": "'gelu'", "intermediate_size": "4 * d_model"},
    "olmo": {"norm_eps": "1e-05"},
    "openai-gpt": {
        "intermediate_size": "4 * n_embd",
        "activation": "'gelu_new' if afn == 'gelu' else afn",
    },
    "opt": {"norm_eps": "1e-05"},
    "solar_open": {"intermediate_size": "moe_intermediate_size"},
    "xglm": {"norm_eps": "1e-05"},
}


def reading(model_type: str, field: str) -> str | None:
    """The expression for a field of `Facts`, or None when it is the attribute of one of the usual names."""
    return READINGS.get(model_type, {}).get(field)

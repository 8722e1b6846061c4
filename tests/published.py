"""The parts of published models' config.json files that describe the decoder."""

from typing import Any


def _decoder(architecture: str, model_type: str, sizes: tuple[int, ...], **rest: Any) -> dict[str, Any]:
    """Sizes: hidden, intermediate, layers, heads, key/value heads, vocabulary, positions."""
    names = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "max_position_embeddings",
    )
    start = {"architectures": [architecture]} if architecture else {}
    return (
        start
        | {"model_type": model_type, "torch_dtype": "bfloat16"}
        | dict(zip(names, sizes, strict=True))
        | rest
    )


RMS5: dict[str, Any] = {"rms_norm_eps": 1e-5, "hidden_act": "silu"}
RMS6: dict[str, Any] = {"rms_norm_eps": 1e-6, "hidden_act": "silu"}
LAYER5: dict[str, Any] = {"layer_norm_eps": 1e-5, "hidden_act": "silu"}
GEMMA: dict[str, Any] = {"head_dim": 256, "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh"}
LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
DEEPSEEK_YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
DEEPSEEK_V3: dict[str, Any] = RMS6 | {
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_scaling": DEEPSEEK_YARN,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
}
PHI_FACTORS = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48, "type": "longrope"}

PUBLISHED: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _decoder(
        "LlamaForCausalLM", "llama", (4096, 14336, 32, 32, 8, 128256, 131072),
        **RMS5, attention_bias=False, mlp_bias=False, pretraining_tp=1, rope_scaling=LLAMA3, rope_theta=500000.0,
        tie_word_embeddings=False,
    ),
    "mistral-7b-v0.1": _decoder(
        "MistralForCausalLM", "mistral", (4096, 14336, 32, 32, 8, 32000, 32768),
        **RMS5, rope_theta=10000.0, sliding_window=4096, tie_word_embeddings=False,
    ),
    "qwen2.5-7b": _decoder(
        "Qwen2ForCausalLM", "qwen2", (3584, 18944, 28, 28, 4, 152064, 131072),
        **RMS6, max_window_layers=28, rope_theta=1000000.0, sliding_window=131072, tie_word_embeddings=False,
        use_mrope=False, use_sliding_window=False,
    ),
    "qwen3-8b": _decoder(
        "Qwen3ForCausalLM", "qwen3", (4096, 12288, 36, 32, 8, 151936, 40960),
        **RMS6, attention_bias=False, head_dim=128, max_window_layers=36, rope_scaling=None, rope_theta=1000000,
        sliding_window=None, tie_word_embeddings=False, use_sliding_window=False,
    ),
    "qwen3-30b-a3b": _decoder(
        "Qwen3MoeForCausalLM", "qwen3_moe", (2048, 6144, 48, 32, 4, 151936, 40960),
        **RMS6, attention_bias=False, decoder_sparse_step=1, head_dim=128, max_window_layers=48, mlp_only_layers=[],
        moe_intermediate_size=768, norm_topk_prob=True, num_experts=128, num_experts_per_tok=8,
        output_router_logits=False, rope_scaling=None, rope_theta=1000000.0, router_aux_loss_coef=0.001,
        sliding_window=None, tie_word_embeddings=False, use_sliding_window=False,
    ),
    "qwen2-57b-a14b": _decoder(
        "Qwen2MoeForCausalLM", "qwen2_moe", (3584, 18944, 28, 28, 4, 151936, 32768),
        **RMS6, decoder_sparse_step=1, max_window_layers=28, moe_intermediate_size=2560, norm_topk_prob=False,
        num_experts=64, num_experts_per_tok=8, rope_theta=1000000.0, shared_expert_intermediate_size=20480,
        sliding_window=65536, tie_word_embeddings=False, use_sliding_window=False,
    ),
    "mixtral-8x7b": _decoder(
        "MixtralForCausalLM", "mixtral", (4096, 14336, 32, 32, 8, 32000, 32768),
        **RMS5, num_experts_per_tok=2, num_local_experts=8, output_router_logits=False, rope_theta=1000000.0,
        router_aux_loss_coef=0.02, sliding_window=None, tie_word_embeddings=False,
    ),
    "gemma-2b": _decoder(
        "GemmaForCausalLM", "gemma", (2048, 16384, 18, 8, 1, 256000, 8192),
        head_dim=256, hidden_act="gelu", hidden_activation=None, rms_norm_eps=1e-6, rope_scaling=None,
        rope_theta=10000.0,
    ),
    "gemma-2-9b": _decoder(
        "Gemma2ForCausalLM", "gemma2", (3584, 14336, 42, 16, 8, 256000, 8192),
        **GEMMA, attention_bias=False, attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
        hidden_act="gelu_pytorch_tanh", query_pre_attn_scalar=256, rope_theta=10000.0, sliding_window=4096,
        sliding_window_size=4096,
    ),
    "gemma-3-1b": _decoder(
        "Gemma3ForCausalLM", "gemma3_text", (1152, 6912, 26, 4, 1, 262144, 32768),
        **GEMMA, attention_bias=False, attn_logit_softcapping=None, final_logit_softcapping=None,
        query_pre_attn_scalar=256, rope_local_base_freq=10000, rope_scaling=None, rope_theta=1000000,
        sliding_window=512, sliding_window_pattern=6,
    ),
    "gemma-3-4b": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "torch_dtype": "bfloat16",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "model_type": "siglip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
        },
    },
    "phi-3-mini-4k": _decoder(
        "Phi3ForCausalLM", "phi3", (3072, 8192, 32, 32, 32, 32064, 4096),
        **RMS5, auto_map={"AutoConfig": "configuration_phi3.Phi3Config"}, original_max_position_embeddings=4096,
        attention_bias=False, rope_scaling=None, rope_theta=10000.0, sliding_window=2047, tie_word_embeddings=False,
    ),
    "phi-3.5-mini": _decoder(
        "Phi3ForCausalLM", "phi3", (3072, 8192, 32, 32, 32, 32064, 131072),
        **RMS5, original_max_position_embeddings=4096, rope_scaling=PHI_FACTORS, rope_theta=10000.0,
        sliding_window=262144, tie_word_embeddings=False,
    ),
    "phi-4": _decoder(
        "Phi3ForCausalLM", "phi3", (5120, 17920, 40, 40, 10, 100352, 16384),
        **RMS5, attention_bias=False, original_max_position_embeddings=16384, rope_scaling=None, rope_theta=250000,
        sliding_window=None, tie_word_embeddings=False,
    ),
    "phi-4-mini": _decoder(
        "Phi3ForCausalLM", "phi3", (3072, 8192, 32, 24, 8, 200064, 131072),
        **RMS5, original_max_position_embeddings=4096, partial_rotary_factor=0.75, rope_scaling=PHI_FACTORS,
        rope_theta=10000.0, sliding_window=262144, tie_word_embeddings=True,
    ),
    "phi-3.5-moe": _decoder(
        "PhiMoEForCausalLM", "phimoe", (4096, 6400, 32, 32, 8, 32064, 131072),
        **RMS5, attention_bias=True, input_jitter_noise=0.01, lm_head_bias=True, num_experts_per_tok=2,
        num_local_experts=16, original_max_position_embeddings=4096, output_router_logits=False, rope_theta=10000.0,
        rope_scaling={
            "long_factor": [1.5] * 64, "long_mscale": 1.243163121016122, "original_max_position_embeddings": 4096,
            "short_factor": [1.0] * 64, "short_mscale": 1.243163121016122, "type": "longrope",
        },
        router_aux_loss_coef=0.0, router_jitter_noise=0.01, sliding_window=131072, tie_word_embeddings=False,
    ),
    "stablelm-2-1.6b": _decoder(
        "StableLmForCausalLM", "stablelm", (2048, 5632, 24, 32, 32, 100352, 4096),
        **LAYER5, partial_rotary_factor=0.25, rope_theta=10000, tie_word_embeddings=False, use_qkv_bias=True,
    ),
    "olmo-1b": _decoder(
        "OlmoForCausalLM", "olmo", (2048, 8192, 16, 16, 16, 50304, 2048),
        hidden_act="silu", attention_bias=False, clip_qkv=None, rope_scaling=None, rope_theta=10000.0,
        tie_word_embeddings=True,
    ),
    "olmo-2-7b": _decoder(
        "Olmo2ForCausalLM", "olmo2", (4096, 11008, 32, 32, 32, 100352, 4096),
        **RMS6, attention_bias=False, rope_scaling=None, rope_theta=500000, tie_word_embeddings=False,
    ),
    "granite-3.1-8b": _decoder(
        "GraniteForCausalLM", "granite", (4096, 12800, 40, 32, 8, 49155, 131072),
        **RMS5, attention_bias=False, attention_multiplier=0.0078125, embedding_multiplier=12.0, logits_scaling=16.0,
        mlp_bias=False, residual_multiplier=0.22, rope_scaling=None, rope_theta=10000000.0, tie_word_embeddings=True,
    ),
    "command-r": _decoder(
        "CohereForCausalLM", "cohere", (8192, 22528, 40, 64, 64, 256000, 8192),
        **LAYER5, attention_bias=False, logit_scale=0.0625, model_max_length=131072, rope_theta=8000000.0,
        use_qk_norm=False,
    ),
    "command-r7b": _decoder(
        "Cohere2ForCausalLM", "cohere2", (4096, 14336, 32, 32, 8, 256000, 8192),
        **LAYER5, attention_bias=False, head_dim=128, layer_switch=4, logit_scale=0.25, rope_scaling=None,
        order_of_interleaved_layers="local_attn_first", position_embedding_type="rope_gptj", rope_theta=50000,
        rotary_pct=1.0, sliding_window=4096, sliding_window_pattern=4, use_embedding_sharing=True,
        use_gated_activation=True, use_parallel_block=True, use_parallel_embedding=True, use_qk_norm=False,
    ),
    "glm-4-9b": _decoder(
        "GlmForCausalLM", "glm", (4096, 13696, 40, 32, 2, 151552, 131072),
        rms_norm_eps=1.5625e-07, hidden_act="silu", attention_bias=True, head_dim=128, partial_rotary_factor=0.5,
        rope_theta=10000.0, tie_word_embeddings=False,
    ),
    "glm-4-9b-0414": _decoder(
        "Glm4ForCausalLM", "glm4", (4096, 13696, 40, 32, 2, 151552, 32768),
        **RMS5, attention_bias=True, head_dim=128, partial_rotary_factor=0.5, rope_theta=10000.0,
        tie_word_embeddings=False,
    ),
    "smollm3-3b": _decoder(
        "SmolLM3ForCausalLM", "smollm3", (2048, 11008, 36, 16, 4, 128256, 65536),
        **RMS6, attention_bias=False, max_window_layers=28, mlp_bias=False, no_rope_layer_interval=4,
        no_rope_layers=[1, 1, 1, 0] * 9, rope_scaling=None, rope_theta=5000000.0, sliding_window=None,
        tie_word_embeddings=True, use_sliding_window=False,
    ),
    "gpt-oss-20b": _decoder(
        "GptOssForCausalLM", "gpt_oss", (2880, 2880, 24, 64, 8, 201088, 131072),
        **RMS5, attention_bias=True, experts_per_token=4, head_dim=64, initial_context_length=4096,
        layer_types=["sliding_attention", "full_attention"] * 12, num_experts_per_tok=4, num_local_experts=32,
        output_router_logits=False, rope_theta=150000, router_aux_loss_coef=0.9, sliding_window=128,
        rope_scaling={
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        swiglu_limit=7.0, tie_word_embeddings=False,
    ),
    "deepseek-v2-lite": _decoder(
        "DeepseekV2ForCausalLM", "deepseek_v2", (2048, 10944, 27, 16, 16, 102400, 163840),
        **RMS6, aux_loss_alpha=0.001, first_k_dense_replace=1, kv_lora_rank=512, moe_intermediate_size=1408,
        moe_layer_freq=1, n_group=1, n_routed_experts=64, n_shared_experts=2, norm_topk_prob=False,
        num_experts_per_tok=6, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, rope_theta=10000,
        rope_scaling=DEEPSEEK_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}, routed_scaling_factor=1.0,
        scoring_func="softmax", seq_aux=True, tie_word_embeddings=False, topk_group=1, topk_method="greedy",
        v_head_dim=128,
    ),
    "deepseek-v3": _decoder(
        "DeepseekV3ForCausalLM", "deepseek_v3", (7168, 18432, 61, 128, 128, 129280, 163840), **DEEPSEEK_V3
    ),
    "deepseek-v3.2": _decoder(
        "DeepseekV32ForCausalLM", "deepseek_v32", (7168, 18432, 61, 128, 128, 129280, 163840),
        **DEEPSEEK_V3, index_head_dim=128, index_n_heads=64, index_topk=2048,
    ),
    "falcon-7b": {
        "alibi": False, "architectures": ["FalconForCausalLM"], "bias": False, "hidden_size": 4544,
        "layer_norm_epsilon": 1e-5, "model_type": "falcon", "multi_query": True, "new_decoder_architecture": False,
        "num_attention_heads": 71, "num_hidden_layers": 32, "parallel_attn": True, "torch_dtype": "bfloat16",
        "vocab_size": 65024,
    },
    "falcon-40b": {
        "alibi": False, "architectures": ["FalconForCausalLM"], "bias": False, "hidden_size": 8192,
        "layer_norm_epsilon": 1e-5, "model_type": "falcon", "multi_query": True, "new_decoder_architecture": True,
        "num_attention_heads": 128, "num_hidden_layers": 60, "num_kv_heads": 8, "parallel_attn": True,
        "torch_dtype": "bfloat16", "vocab_size": 65024,
    },
    "gpt-neox-20b": {
        "architectures": ["GPTNeoXForCausalLM"], "hidden_act": "gelu_fast", "hidden_size": 6144,
        "intermediate_size": 24576, "layer_norm_eps": 1e-5, "max_position_embeddings": 2048,
        "model_type": "gpt_neox", "num_attention_heads": 64, "num_hidden_layers": 44, "rotary_emb_base": 10000,
        "rotary_pct": 0.25, "tie_word_embeddings": False, "torch_dtype": "float16", "use_parallel_residual": True,
        "vocab_size": 50432,
    },
    "gpt2": {
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "layer_norm_epsilon": 1e-5,
        "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
        "vocab_size": 50257,
    },
    "starcoder2-3b": _decoder(
        "Starcoder2ForCausalLM", "starcoder2", (3072, 12288, 30, 24, 2, 49152, 16384),
        hidden_act="gelu_pytorch_tanh", norm_epsilon=1e-5, norm_type="layer_norm", mlp_type="default",
        rope_theta=999999.4420358813, sliding_window=4096, use_bias=True,
    ),
    "minitron-4b": _decoder(
        "NemotronForCausalLM", "nemotron", (3072, 9216, 32, 24, 8, 256000, 4096),
        attention_bias=False, head_dim=128, hidden_act="relu2", mlp_bias=False, norm_eps=1e-5,
        partial_rotary_factor=0.5, rope_theta=10000.0, tie_word_embeddings=False,
    ),
    "llama-4-scout": {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "text_config": _decoder(
            "", "llama4_text", (5120, 8192, 48, 40, 8, 202048, 10485760),
            **RMS5, attention_bias=False, attention_chunk_size=8192, attn_scale=0.1, attn_temperature_tuning=True,
            floor_scale=8192, head_dim=128, interleave_moe_layer_step=1, intermediate_size_mlp=16384,
            no_rope_layers=[], num_experts_per_tok=1, num_local_experts=16, output_router_logits=False,
            rope_scaling=LLAMA3 | {"factor": 16.0, "high_freq_factor": 1.0}, rope_theta=500000.0,
            router_aux_loss_coef=0.001, router_jitter_noise=0.0, use_qk_norm=True,
        ),
        "vision_config": {
            "hidden_size": 1408, "intermediate_size": 5632, "num_attention_heads": 16, "num_hidden_layers": 34,
        },
    },
    "qwen3-vl-8b": {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "tie_word_embeddings": False,
        "text_config": _decoder(
            "", "qwen3_vl_text", (4096, 12288, 36, 32, 8, 151936, 262144),
            **RMS6, attention_bias=False, head_dim=128, rope_theta=5000000,
            rope_scaling={"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        ),
        "vision_config": {
            "deepstack_visual_indexes": [8, 16, 24], "depth": 27, "hidden_size": 1152, "intermediate_size": 4304,
            "num_heads": 16,
        },
    },
}  # fmt: skip

# The same classes at their largest published sizes.
PUBLISHED["mixtral-8x22b"] = PUBLISHED["mixtral-8x7b"] | {
    "hidden_size": 6144, "intermediate_size": 16384, "max_position_embeddings": 65536, "num_attention_heads": 48,
    "num_hidden_layers": 56, "vocab_size": 32768,
}  # fmt: skip
PUBLISHED["qwen3-235b-a22b"] = PUBLISHED["qwen3-30b-a3b"] | {
    "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_attention_heads": 64,
    "num_hidden_layers": 94, "max_window_layers": 94,
}  # fmt: skip
PUBLISHED["gpt-oss-120b"] = PUBLISHED["gpt-oss-20b"] | {
    "layer_types": ["sliding_attention", "full_attention"] * 18, "num_hidden_layers": 36, "num_local_experts": 128,
}  # fmt: skip
PUBLISHED["deepseek-v2"] = PUBLISHED["deepseek-v2-lite"] | {
    "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_group": 8,
    "n_routed_experts": 160, "num_attention_heads": 128, "num_hidden_layers": 60, "num_key_value_heads": 128,
    "q_lora_rank": 1536, "routed_scaling_factor": 16.0, "topk_group": 3, "topk_method": "group_limited_greedy",
}  # fmt: skip

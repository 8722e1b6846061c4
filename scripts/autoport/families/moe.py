"""Decoders with a mixture of experts whose lineage has no file of its own."""

from msgspec.structs import replace

from autoport.families.family import Family, Keys, QkNormStyle
from autoport.families.llama import WINDOW_BY_TYPE, WINDOW_EVERYWHERE
from autoport.families.moe_style import SPARSE_BY_TYPE, MoeKeys, MoeStyle

SPARSE_BY_STEP = (
    "[(i + 1) % decoder_sparse_step == 0 and i not in mlp_only_layers for i in range(num_hidden_layers)]"
)
SPARSE_AFTER_FIRST = "[i >= first_k_dense_replace for i in range(num_hidden_layers)]"

# Mixtral's names of the experts' projections.
W_KEYS = MoeKeys(
    router="block_sparse_moe.gate",
    correction="block_sparse_moe.e_score_correction_bias",
    gate="block_sparse_moe.experts.{e}.w1.weight",
    up="block_sparse_moe.experts.{e}.w3.weight",
    down="block_sparse_moe.experts.{e}.w2.weight",
)
HUNYUAN_SHARED = {
    "shared_gate": "mlp.shared_mlp.gate_proj",
    "shared_up": "mlp.shared_mlp.up_proj",
    "shared_down": "mlp.shared_mlp.down_proj",
}
QWEN_SHARED = {
    "shared_gate": "mlp.shared_expert.gate_proj",
    "shared_up": "mlp.shared_expert.up_proj",
    "shared_down": "mlp.shared_expert.down_proj",
}

# The router of DeepSeek-V3: sigmoid scores, a correction bias, groups, a scaling.
SIGMOID = MoeStyle(
    num_experts="n_routed_experts",
    score="'sigmoid'",
    correction_bias=True,
    normalise="norm_topk_prob",
    epsilon=1e-20,
    scaling="routed_scaling_factor",
    groups="n_group",
    top_groups="topk_group",
    shared_size="moe_intermediate_size * n_shared_experts",
)

MOE_FAMILIES = [
    Family(
        model_type="mixtral",
        hf_name="MixtralForCausalLM",
        qkv_bias="False",
        o_bias="False",
        mlp_bias="False",
        windows=WINDOW_EVERYWHERE,
        moe=MoeStyle(keys=W_KEYS, num_experts="num_local_experts", intermediate_size="intermediate_size"),
    ),
    Family(
        model_type="qwen3_moe",
        hf_name="Qwen3MoeForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="False",
        qk_norm=QkNormStyle(),
        windows=WINDOW_EVERYWHERE,
        moe=MoeStyle(layers=SPARSE_BY_STEP, normalise="norm_topk_prob"),
    ),
    Family(
        model_type="qwen2_moe",
        hf_name="Qwen2MoeForCausalLM",
        qkv_bias="qkv_bias",
        o_bias="False",
        mlp_bias="False",
        windows=WINDOW_BY_TYPE,
        moe=MoeStyle(
            keys=MoeKeys(**QWEN_SHARED),
            layers=SPARSE_BY_STEP,
            normalise="norm_topk_prob",
            shared_size="shared_expert_intermediate_size",
            shared_gated=True,
        ),
    ),
    Family(
        model_type="glm4_moe",
        hf_name="Glm4MoeForCausalLM",
        # The last layer of these sizes predicts further tokens and is not run.
        keys=Keys(ignored=((r"model\.layers\.(46|92)\..*", "layers for multi-token prediction"),)),
        qkv_bias="attention_bias",
        o_bias="False",
        mlp_bias="False",
        qk_norm=QkNormStyle(when="use_qk_norm"),
        partial_rotary_factor=0.5,
        moe=replace(SIGMOID, layers=SPARSE_AFTER_FIRST),
    ),
    Family(
        model_type="dots1",
        hf_name="Dots1ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="False",
        qk_norm=QkNormStyle(),
        windows=WINDOW_BY_TYPE,
        moe=replace(SIGMOID, layers=SPARSE_AFTER_FIRST),
    ),
    Family(
        model_type="solar_open",
        hf_name="SolarOpenForCausalLM",
        qkv_bias="attention_bias",
        o_bias="False",
        mlp_bias="False",
        moe=SIGMOID,
    ),
    Family(
        model_type="exaone_moe",
        hf_name="ExaoneMoeForCausalLM",
        qkv_bias="False",
        o_bias="False",
        mlp_bias="False",
        qk_norm=QkNormStyle(),
        windows=WINDOW_BY_TYPE,
        rope_labels=(
            "[kind if sliding_window is None or kind == 'sliding_attention' else None for kind in layer_types]"
        ),
        moe=replace(
            SIGMOID,
            keys=MoeKeys(correction="mlp.e_score_correction_bias"),
            num_experts="num_experts",
            layers=SPARSE_BY_TYPE,
            shared_size="moe_intermediate_size * num_shared_experts",
        ),
    ),
    Family(
        model_type="minimax_m2",
        hf_name="MiniMaxM2ForCausalLM",
        partial_rotary_factor=1.0,
        qkv_bias="False",
        o_bias="False",
        mlp_bias="False",
        qk_norm=QkNormStyle(width="full"),
        moe=MoeStyle(
            keys=W_KEYS,
            num_experts="num_local_experts",
            intermediate_size="intermediate_size",
            score="'sigmoid'",
            correction_bias=True,
        ),
    ),
    Family(
        model_type="hy_v3",
        hf_name="HYV3ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="False",
        qk_norm=QkNormStyle(),
        moe=MoeStyle(
            keys=MoeKeys(router="mlp.router.gate", correction="mlp.expert_bias", **HUNYUAN_SHARED),
            layers=SPARSE_BY_TYPE,
            score="'sigmoid'",
            correction_bias=True,
            epsilon=1e-20,
            scaling="router_scaling_factor",
            shared_size="moe_intermediate_size * num_shared_experts",
        ),
    ),
    Family(
        model_type="hunyuan_v1_moe",
        hf_name="HunYuanMoEV1ForCausalLM",
        keys=Keys(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm"),
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="False",
        qk_norm=QkNormStyle(place="after_rope"),
        moe=MoeStyle(
            keys=MoeKeys(router="mlp.gate.wg", **HUNYUAN_SHARED),
            top_k="moe_topk if isinstance(moe_topk, int) else moe_topk[0]",
            intermediate_size="intermediate_size",
            shared_size="intermediate_size",
        ),
    ),
    Family(
        model_type="ernie4_5_moe",
        hf_name="Ernie4_5_MoeForCausalLM",
        qkv_bias="use_bias",
        o_bias="use_bias",
        mlp_bias="use_bias",
        pairing="interleaved",
        requires=(
            ("not use_bias", "SCOPE-BIAS", "biases in the MLPs, in the shared experts and on the head"),
        ),
        moe=MoeStyle(
            keys=MoeKeys(correction="mlp.moe_statics.e_score_correction_bias"),
            num_experts="moe_num_experts",
            top_k="moe_k",
            layers=(
                "[(i + 1) % moe_layer_interval == 0 and i >= moe_layer_start_index and "
                "(moe_layer_end_index == -1 or i <= moe_layer_end_index) for i in range(num_hidden_layers)]"
            ),
            correction_bias=True,
            correction_rows=True,
            minimum="moe_norm_min",
            shared_size="moe_intermediate_size * moe_num_shared_experts",
        ),
    ),
    Family(
        model_type="gpt_oss",
        hf_name="GptOssForCausalLM",
        norm_rounding="after_weight",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="False",
        sinks="True",
        windows=WINDOW_BY_TYPE,
        moe=MoeStyle(
            keys=MoeKeys(
                router="mlp.router",
                gate_up="mlp.experts.gate_up_proj",
                down="mlp.experts.down_proj",
            ),
            layout="interleaved",
            num_experts="num_local_experts",
            intermediate_size="intermediate_size",
            score_over="'chosen'",
            normalise="False",
            bias=True,
            expert_bias=True,
            clamp="swiglu_limit",
            alpha="swiglu_alpha",
        ),
    ),
    Family(
        model_type="phimoe",
        rope_mscale=True,
        head_bias=True,
        hf_name="PhimoeForCausalLM",
        norm="layer",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="False",
        windows=WINDOW_EVERYWHERE,
        moe=MoeStyle(
            keys=W_KEYS,
            num_experts="num_local_experts",
            intermediate_size="intermediate_size",
            score="'sparsemixer'",
            normalise="False",
            threshold="router_jitter_noise",
        ),
    ),
    Family(
        model_type="aria_text",
        hf_name="AriaTextForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="False",
        requires=(("not mlp_bias", "SCOPE-BIAS", "biases in the shared experts"),),
        moe=MoeStyle(
            keys=MoeKeys(
                router="mlp.router", gate_up="mlp.experts.fc1.weight", down="mlp.experts.fc2.weight"
            ),
            layout="stacked_transposed",
            num_experts="moe_num_experts",
            top_k="moe_topk",
            intermediate_size="intermediate_size",
            score_over="'chosen'",
            normalise="False",
            activation="'silu'",
            shared_size="intermediate_size * moe_num_shared_experts",
        ),
    ),
    Family(
        model_type="mellum",
        hf_name="MellumForCausalLM",
        partial_rotary_factor=1.0,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="False",
        qk_norm=QkNormStyle(),
        windows=WINDOW_BY_TYPE,
        rope_labels="layer_types",
        moe=MoeStyle(layers=SPARSE_BY_TYPE, normalise="norm_topk_prob"),
    ),
    Family(
        model_type="afmoe",
        hf_name="AfmoeForCausalLM",
        keys=Keys(
            norms=(
                "input_layernorm",
                "post_attention_layernorm",
                "pre_mlp_layernorm",
                "post_mlp_layernorm",
            ),
            output_gate="self_attn.gate_proj",
        ),
        norm_rounding="after_weight",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="False",
        qk_norm=QkNormStyle(rounding="after_weight"),
        output_gate="sigmoid",
        topology="'sandwich'",
        windows=WINDOW_BY_TYPE,
        rope_labels="[kind if kind == 'sliding_attention' else None for kind in layer_types]",
        embedding_scale="hidden_size ** 0.5 if mup_enabled else 1",
        moe=MoeStyle(
            keys=MoeKeys(router="mlp.router.gate", correction="mlp.expert_bias"),
            layers="[i >= num_dense_layers for i in range(num_hidden_layers)]",
            score="'sigmoid'",
            correction_bias=True,
            epsilon=1e-20,
            scaling="route_scale",
            shared_size="moe_intermediate_size * num_shared_experts",
        ),
    ),
    Family(
        model_type="laguna",
        hf_name="LagunaForCausalLM",
        keys=Keys(output_gate="self_attn.g_proj"),
        partial_rotary_factor=1.0,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="False",
        qk_norm=QkNormStyle(),
        output_gate="softplus",
        output_gate_width="'head' if gating == True or gating == 'per-head' else 'element'",
        windows=WINDOW_BY_TYPE,
        rope_labels="layer_types",
        requires=(
            (
                "len([heads for heads in num_attention_heads_per_layer if heads != num_attention_heads]) == 0",
                "SCOPE-HEADS",
                "layers with different numbers of heads",
            ),
            (
                "not moe_apply_router_weight_on_input",
                "MOE-ROUTER",
                "the router's weight on the experts' input",
            ),
        ),
        moe=MoeStyle(
            keys=MoeKeys(correction="mlp.experts.e_score_correction_bias", **QWEN_SHARED),
            layers=SPARSE_BY_TYPE,
            score="'sigmoid'",
            correction_bias=True,
            scaling="moe_routed_scaling_factor",
            logit_softcap="moe_router_logit_softcapping",
            shared_size="shared_expert_intermediate_size",
        ),
    ),
]

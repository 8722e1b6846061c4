"""OLMo: norms after the blocks, and over all of q and k."""

from autoport.families.family import Family, QkNormStyle
from autoport.families.llama import WINDOW_BY_TYPE
from autoport.families.moe_style import MoeStyle

OLMO_FAMILIES = [
    Family(
        model_type="olmo",
        hf_name="OlmoForCausalLM",
        norm="layer",
        norm_weight="none",
        qkv_bias="attention_bias",
        qkv_clip="clip_qkv",
    ),
    Family(
        model_type="olmo2",
        hf_name="Olmo2ForCausalLM",
        norm_rounding="after_weight",
        topology="'post_norm'",
        qkv_bias="attention_bias",
        qk_norm=QkNormStyle(width="full", rounding="after_weight"),
    ),
    Family(
        model_type="olmo3",
        hf_name="Olmo3ForCausalLM",
        norm_rounding="after_weight",
        topology="'post_norm'",
        qkv_bias="attention_bias",
        qk_norm=QkNormStyle(width="full", rounding="after_weight"),
        windows=WINDOW_BY_TYPE,
        rope_labels="layer_types",
    ),
    Family(
        model_type="olmoe",
        hf_name="OlmoeForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="False",
        qk_norm=QkNormStyle(width="full"),
        qkv_clip="clip_qkv",
        moe=MoeStyle(intermediate_size="intermediate_size", normalise="norm_topk_prob"),
    ),
    Family(
        model_type="flex_olmo",
        hf_name="FlexOlmoForCausalLM",
        norm_rounding="after_weight",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="False",
        qk_norm=QkNormStyle(width="full", rounding="after_weight"),
        topology="'post_norm'",
        moe=MoeStyle(intermediate_size="intermediate_size", normalise="norm_topk_prob"),
    ),
]

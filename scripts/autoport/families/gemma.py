"""Gemma: RMSNorm with 1 + w, scaled embeddings, norms around the blocks, softcaps."""

from autoport.families.family import Family, Keys, QkNormStyle
from autoport.families.llama import WINDOW_BY_TYPE

SANDWICH = Keys(
    norms=(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
)

GEMMA_FAMILIES = [
    Family(
        model_type="gemma",
        hf_name="GemmaForCausalLM",
        norm_weight="one_plus",
        norm_rounding="after_weight",
        embedding_scale="hidden_size ** 0.5",
        embedding_scale_rounded=True,
        requires=(("not use_bidirectional_attention", "SCOPE-MASK", "attention in both directions"),),
    ),
    Family(
        model_type="gemma2",
        hf_name="Gemma2ForCausalLM",
        keys=SANDWICH,
        norm_weight="one_plus",
        norm_rounding="after_weight",
        topology="'sandwich'",
        scale="query_pre_attn_scalar ** -0.5",
        softcap="attn_logit_softcapping",
        logit_softcap="final_logit_softcapping",
        embedding_scale="hidden_size ** 0.5",
        embedding_scale_rounded=True,
        windows=WINDOW_BY_TYPE,
        requires=(("not use_bidirectional_attention", "SCOPE-MASK", "attention in both directions"),),
    ),
    Family(
        model_type="gemma3_text",
        hf_name="Gemma3ForCausalLM",
        keys=SANDWICH,
        norm_weight="one_plus",
        norm_rounding="after_weight",
        topology="'sandwich'",
        qk_norm=QkNormStyle(weight="one_plus", rounding="after_weight"),
        scale="query_pre_attn_scalar ** -0.5",
        logit_softcap="final_logit_softcapping",
        embedding_scale="hidden_size ** 0.5",
        embedding_scale_rounded=True,
        windows=WINDOW_BY_TYPE,
        rope_labels="layer_types",
        requires=(("not use_bidirectional_attention", "SCOPE-MASK", "attention in both directions"),),
    ),
    Family(
        model_type="vaultgemma",
        hf_name="VaultGemmaForCausalLM",
        keys=Keys(norms=("input_layernorm", "pre_feedforward_layernorm")),
        norm_weight="one_plus",
        norm_rounding="after_weight",
        scale="query_pre_attn_scalar ** -0.5",
        softcap="attn_logit_softcapping",
        logit_softcap="final_logit_softcapping",
        embedding_scale="hidden_size ** 0.5",
        embedding_scale_rounded=True,
        windows=WINDOW_BY_TYPE,
    ),
]

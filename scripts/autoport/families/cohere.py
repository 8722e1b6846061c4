"""Cohere: LayerNorm without bias, attention and MLP in parallel, interleaved RoPE, scaled logits."""

from autoport.families.family import Family, QkNormStyle
from autoport.families.llama import WINDOW_BY_TYPE
from autoport.families.moe_style import SPARSE_BY_TYPE, MoeStyle

COHERE_FAMILIES = [
    Family(
        model_type="cohere",
        hf_name="CohereForCausalLM",
        norm="layer",
        topology="'parallel'",
        pairing="interleaved",
        qk_norm=QkNormStyle(when="use_qk_norm", width="each_head"),
        logit_scale="logit_scale",
    ),
    Family(
        model_type="cohere2",
        hf_name="Cohere2ForCausalLM",
        norm="layer",
        topology="'parallel'",
        pairing="interleaved",
        logit_scale="logit_scale",
        windows=WINDOW_BY_TYPE,
        rope_labels="['rope' if kind == 'sliding_attention' else None for kind in layer_types]",
    ),
    Family(
        model_type="cohere2_moe",
        hf_name="Cohere2MoeForCausalLM",
        norm="layer",
        requires=(("rms_norm_eps is None", "SCOPE-NORM", "RMSNorm in the place of LayerNorm"),),
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="False",
        pairing="interleaved",
        topology="'parallel'",
        windows=WINDOW_BY_TYPE,
        rope_labels=(
            "['rope' if layer_types[i] == 'sliding_attention' or "
            "(mlp_layer_types[i] == 'dense' and prefix_dense_sliding_window_pattern == 1) else None "
            "for i in range(num_hidden_layers)]"
        ),
        logit_scale="logit_scale",
        moe=MoeStyle(
            layers=SPARSE_BY_TYPE,
            intermediate_size="intermediate_size",
            score="expert_selection_fn",
            score_over="'chosen'",
            normalise="expert_selection_fn == 'sigmoid' and norm_topk_prob",
            shared_size="intermediate_size * num_shared_experts",
            combine="shared_expert_combination_strategy",
        ),
    ),
]

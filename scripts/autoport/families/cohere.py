"""Cohere: LayerNorm without bias, attention and MLP in parallel, interleaved RoPE, scaled logits."""

from autoport.families.family import Family, QkNormStyle
from autoport.families.llama import WINDOW_BY_TYPE

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
]

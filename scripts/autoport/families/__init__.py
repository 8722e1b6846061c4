"""The Hugging Face classes that can be ported, by name: one declaration each, grouped by lineage."""

from autoport.families.cohere import COHERE_FAMILIES
from autoport.families.family import Family
from autoport.families.gemma import GEMMA_FAMILIES
from autoport.families.glm import GLM_FAMILIES
from autoport.families.gpt2 import GPT2_FAMILIES
from autoport.families.gpt_neox import GPT_NEOX_FAMILIES
from autoport.families.granite import GRANITE_FAMILIES
from autoport.families.llama import LLAMA_FAMILIES
from autoport.families.moe import MOE_FAMILIES
from autoport.families.olmo import OLMO_FAMILIES
from autoport.families.phi import PHI_FAMILIES

FAMILIES: dict[str, Family] = {
    family.hf_name: family
    for lineage in (
        LLAMA_FAMILIES,
        GEMMA_FAMILIES,
        OLMO_FAMILIES,
        COHERE_FAMILIES,
        GLM_FAMILIES,
        PHI_FAMILIES,
        GRANITE_FAMILIES,
        GPT2_FAMILIES,
        GPT_NEOX_FAMILIES,
        MOE_FAMILIES,
    )
    for family in lineage
}


def find_family(hf_name: str, model_type: str) -> Family | None:
    """The declaration of a class; checkpoints may spell its name with other capitals (PhiMoE, Phimoe)."""
    if hf_name in FAMILIES:
        return FAMILIES[hf_name]
    same = (family for name, family in FAMILIES.items() if name.lower() == hf_name.lower())
    return next((family for family in same if family.model_type == model_type), None)

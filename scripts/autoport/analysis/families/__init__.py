"""The Hugging Face classes that can be ported, by name: one declaration each, grouped by lineage."""

from autoport.analysis.families.family import Family
from autoport.analysis.families.llama import LLAMA_FAMILIES

FAMILIES: dict[str, Family] = {family.hf_name: family for family in LLAMA_FAMILIES}

"""Operators of the plugin, imported as `import vllm_neuron.functional as NF`."""

from vllm_neuron.functional.argsort_unstable import argsort_unstable
from vllm_neuron.functional.attention.attention_cte import flash_attention
from vllm_neuron.functional.attention.attention_decode import attention_decode
from vllm_neuron.functional.attention.attention_decode_mask import gen_attention_decode_mask
from vllm_neuron.functional.attention.attention_segmented_cte import segmented_attention
from vllm_neuron.functional.attention.o_proj import o_proj
from vllm_neuron.functional.attention.qkv import qkv_proj
from vllm_neuron.functional.cumsum import cumsum
from vllm_neuron.functional.embedding import embedding
from vllm_neuron.functional.mlp import mlp
from vllm_neuron.functional.prompt_embeds import merge_prompt_embeds
from vllm_neuron.functional.sampling import sample

__all__ = [
    "argsort_unstable",
    "attention_decode",
    "cumsum",
    "embedding",
    "flash_attention",
    "gen_attention_decode_mask",
    "merge_prompt_embeds",
    "mlp",
    "o_proj",
    "qkv_proj",
    "sample",
    "segmented_attention",
]

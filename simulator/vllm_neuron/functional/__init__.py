"""Operators of the plugin, imported as `import vllm_neuron.functional as NF`."""

from vllm_neuron.functional.argsort_unstable import argsort_unstable
from vllm_neuron.functional.attention.attention_cte import flash_attention
from vllm_neuron.functional.attention.attention_decode import attention_decode
from vllm_neuron.functional.attention.attention_decode_mask import gen_attention_decode_mask
from vllm_neuron.functional.attention.attention_segmented_cte import segmented_attention
from vllm_neuron.functional.attention.o_proj import o_proj
from vllm_neuron.functional.attention.qkv import qkv_proj
from vllm_neuron.functional.attention.swa_fused import swa_fused_attention
from vllm_neuron.functional.collectives.all_to_all import all_to_all
from vllm_neuron.functional.cumsum import cumsum
from vllm_neuron.functional.embedding import embedding
from vllm_neuron.functional.expert_parallel import (
    calculate_local_expert_indices,
    get_local_expert_affinities,
    validate_expert_parallelism_config,
)
from vllm_neuron.functional.mlp import mlp
from vllm_neuron.functional.moe.moe_block_tkg import moe_block_tkg
from vllm_neuron.functional.moe.moe_blockwise import build_blockwise_mapping
from vllm_neuron.functional.moe.moe_cte import moe_cte
from vllm_neuron.functional.moe.moe_tkg import moe_tkg
from vllm_neuron.functional.moe.rmsnorm_router_topk_tkg import rmsnorm_router_topk_tkg
from vllm_neuron.functional.moe.router import router
from vllm_neuron.functional.process_groups import create_row_col_groups, get_group_slice_indices
from vllm_neuron.functional.prompt_embeds import merge_prompt_embeds
from vllm_neuron.functional.rmsnorm_quant import rmsnorm_quant
from vllm_neuron.functional.sampling import sample

__all__ = [
    "all_to_all",
    "argsort_unstable",
    "attention_decode",
    "build_blockwise_mapping",
    "calculate_local_expert_indices",
    "create_row_col_groups",
    "cumsum",
    "embedding",
    "flash_attention",
    "gen_attention_decode_mask",
    "get_group_slice_indices",
    "get_local_expert_affinities",
    "merge_prompt_embeds",
    "mlp",
    "moe_block_tkg",
    "moe_cte",
    "moe_tkg",
    "o_proj",
    "qkv_proj",
    "rmsnorm_quant",
    "rmsnorm_router_topk_tkg",
    "router",
    "sample",
    "segmented_attention",
    "swa_fused_attention",
    "validate_expert_parallelism_config",
]

# Context parallelism, speculative decoding, and expert parallelism over several nodes.
_NOT_SIMULATED = frozenset(
    {
        "all_gather_v",
        "all_to_all_v",
        "build_all2all_combine_metadata",
        "build_all2all_dispatch_metadata",
        "build_all_gatherv_metadata",
        "correct_spec_decode_positions_and_slot_mapping",
        "hierarchical_all2all_combine_reduce",
        "hierarchical_all2all_dispatch_permute",
        "pack_tokens",
        "permute_routed_tokens",
        "reduce_scatter_v",
        "segmented_attention_cp",
        "topk_reduce",
    }
)


def __getattr__(name: str) -> object:
    if name in _NOT_SIMULATED:
        raise AttributeError(f"vllm_neuron.functional.{name} exists in the plugin but not in the simulator")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

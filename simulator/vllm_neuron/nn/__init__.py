"""Parallel modules. Their `tp_group` is a torch ProcessGroup: pass ``get_tp_group().device_group``."""

from vllm_neuron.nn.cpl import ColumnParallelLinear
from vllm_neuron.nn.embedding import EmbedDimShardedEmbedding, VocabDimShardedEmbedding
from vllm_neuron.nn.rpl import RowParallelLinear
from vllm_neuron.nn.sampler import Sampler

__all__ = [
    "ColumnParallelLinear",
    "EmbedDimShardedEmbedding",
    "RowParallelLinear",
    "Sampler",
    "VocabDimShardedEmbedding",
]

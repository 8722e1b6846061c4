"""Model and KV cache set-up, in the order in which the model runner does it."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import get_tp_group

from vllm_neuron.model.kv_cache import KVSpec
from vllm_neuron.model.neuron_config import NeuronConfig
from vllm_neuron.simulator.guards import check_loaded
from vllm_neuron.simulator.metadata import KVGroup

DEVICE = torch.device("cpu")


def make_vllm_config(
    hf_config: Any, checkpoint_path: str, dtype: torch.dtype, block_size: int, max_model_len: int
) -> VllmConfig:
    """Return the engine configuration that a model may ask for while it is built and loaded.

    ``model_config`` is a plain namespace with what models read: vLLM's own class inspects the architecture.
    """
    config = VllmConfig()
    config.cache_config.block_size = block_size
    config.parallel_config.tensor_parallel_size = get_tp_group().world_size
    config.model_config = SimpleNamespace(
        model=checkpoint_path,
        revision=None,
        hf_config=hf_config,
        dtype=dtype,
        max_model_len=max_model_len,
        runner_type="generate",
    )
    return config


def load_model(
    factory_class: Any,
    hf_config: Any,
    neuron_config: NeuronConfig,
    checkpoint_path: str,
    vllm_config: VllmConfig,
) -> nn.Module:
    """Build a model on the meta device, load its weights and move it to the device.

    Raises:
        NotImplementedError: A tensor is left on the meta device.
    """
    with set_current_vllm_config(vllm_config):
        with torch.device("meta"):
            model = factory_class.from_configs(hf_config, neuron_config)
        model.load_weights(checkpoint_path, DEVICE, vllm_config.load_config.download_dir)
        check_loaded(model)
        return model.to(DEVICE)


def allocate_kv_caches(
    spec: KVSpec, num_blocks: int, block_size: int, dtype: torch.dtype, packed_k: bool = False
) -> dict[str, list[torch.Tensor]]:
    """Return zeroed caches by layer name: [k, v], each [num_blocks, num_kv_heads, block_size, head_size].

    With `packed_k`, k is the same memory as [num_blocks, num_kv_heads, block_size / 2, head_size, 2].
    """
    caches = {}
    for layer in spec.layers:
        both = torch.zeros(2, num_blocks, layer.num_kv_heads, block_size, layer.head_size, dtype=dtype)
        k, v = both[0], both[1]
        if packed_k:
            k = k.view(num_blocks, layer.num_kv_heads, block_size // 2, layer.head_size, 2)
        caches[layer.name] = [k, v]
    return caches


def kv_groups(spec: KVSpec) -> list[KVGroup]:
    """Group the layers by their sliding window: layers of a group have the same block tables."""
    names: dict[int | None, list[str]] = {}
    for layer in spec.layers:
        names.setdefault(layer.sliding_window_size, []).append(layer.name)
    return [KVGroup(tuple(layers), window) for window, layers in names.items()]

"""The simulated device as a vLLM platform."""

import os
from typing import Any, ClassVar

import torch
from vllm.platforms.interface import Platform, PlatformEnum


class NeuronPlatform(Platform):
    """An out-of-tree platform whose device is the CPU and whose collectives are gloo's.

    It is not `PlatformEnum.CPU`: vLLM binds threads to cores and calls its own CPU kernels for that one.
    """

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"
    device_control_env_var = "NEURON_VISIBLE_DEVICES"
    supported_quantization: ClassVar[list[str]] = []

    @classmethod
    def import_kernels(cls) -> None:
        """Nothing to import: no operator of vLLM's own is used."""

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "neuron-simulator"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Memory of this machine in bytes."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    @classmethod
    def inference_mode(cls) -> Any:
        return torch.no_grad()

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """Nothing to set: there is one CPU."""

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """Nothing to seed beside torch's CPU generator."""

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        return True

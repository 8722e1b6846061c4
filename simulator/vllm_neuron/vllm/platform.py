"""The simulated device as a vLLM platform."""

import gc
import os
from typing import Any, ClassVar

import torch
from vllm.platforms.interface import Platform, PlatformEnum

WORKER = "vllm_neuron.vllm.worker.neuron_worker.NeuronWorker"
SCHEDULER = "vllm_neuron.vllm.core.scheduler.NeuronScheduler"
BLOCK_SIZE = 32  # tokens, unless the user sets another one


def _without_accelerator() -> None:
    """Make the calls do nothing that vLLM's clean-up makes on any platform but its own CPU one."""
    if not torch.accelerator.is_available():
        for name in ("synchronize", "empty_cache", "empty_host_cache"):
            if hasattr(torch.accelerator, name):
                setattr(torch.accelerator, name, lambda *args, **kwargs: None)


_without_accelerator()
# A worker is a fork of the engine's process. Process groups and sockets of an engine that ran there before have no
# threads in the worker: to collect them hangs or aborts it.
os.register_at_fork(after_in_child=gc.freeze)


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

    _vllm_config: ClassVar[Any] = None  # of the last engine, for validate_request

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

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        """Register the models, before vLLM asks what the checkpoint's architecture is."""
        from vllm_neuron.simulator.registration import register_models

        register_models()

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Take the plugin's worker, scheduler and block size.

        Raises:
            ValueError: The configuration asks for what the plugin or the simulator does not do; all of it.
        """
        from vllm_neuron.vllm.checks import check_config

        parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
        if parallel.worker_cls == "auto":
            parallel.worker_cls = WORKER
        if parallel.distributed_executor_backend not in ("mp", "uni"):
            parallel.distributed_executor_backend = "mp"
        if not cache.user_specified_block_size:
            cache.block_size = BLOCK_SIZE
        scheduler = vllm_config.scheduler_config
        scheduler.async_scheduling = False
        if scheduler.scheduler_cls is None:
            scheduler.scheduler_cls = SCHEDULER
        cls._turn_compilation_off(vllm_config.compilation_config)
        if vllm_config.model_config is not None:
            check_config(vllm_config)
            cls._vllm_config = vllm_config

    @classmethod
    def validate_request(cls, processed_inputs: Any, params: Any) -> None:
        """Refuse a request that would be answered as if it had asked for less.

        Raises:
            VLLMValidationError: See `check_sampling_params`; the server answers with HTTP 400.
        """
        from vllm_neuron.vllm.checks import check_sampling_params

        if cls._vllm_config is not None:
            check_sampling_params(params, cls._vllm_config)

    @classmethod
    def validate_environ(cls, hard_fail: bool) -> None:
        """Look for unknown ``VLLM_`` variables; the plugin's own are known."""
        own = {name: value for name, value in os.environ.items() if name.startswith("VLLM_NEURON_")}
        for name in own:
            del os.environ[name]
        try:
            super().validate_environ(hard_fail)
        finally:
            os.environ.update(own)

    @staticmethod
    def _turn_compilation_off(compilation: Any) -> None:
        """Of vLLM's own layers: the model runner compiles the model."""
        from vllm.config import CompilationMode, CUDAGraphMode

        compilation.mode = CompilationMode.NONE
        compilation.cudagraph_mode = CUDAGraphMode.NONE
        compilation.cudagraph_capture_sizes = []

"""One rank of the engine."""

import functools
import os
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import (
    destroy_distributed_environment,
    destroy_model_parallel,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.utils.torch_utils import set_random_seed

from vllm_neuron.parallel.neuron_parallel_state import (
    destroy_neuron_parallel_state,
    initialize_neuron_parallel_state,
)
from vllm_neuron.simulator import rules
from vllm_neuron.vllm.checks import get_neuron_config, resolve_ep_degree
from vllm_neuron.vllm.internals import (
    CompilationTimes,
    DraftTokenIds,
    GrammarOutput,
    KVCacheConfig,
    KVCacheSpec,
    ModelRunnerOutput,
    SchedulerOutput,
    WorkerBase,
)
from vllm_neuron.vllm.worker.neuron_model_runner import NeuronModelRunner

KV_CACHE_LIMIT = 2**30  # bytes

P = ParamSpec("P")
T = TypeVar("T")


def _starting(method: Callable[P, T]) -> Callable[P, T]:
    """Mark a method of the start: when it fails, the process leaves the groups, and may start another engine."""

    @functools.wraps(method)
    def marked(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except Exception:
            destroy_neuron_parallel_state()
            destroy_model_parallel()
            destroy_distributed_environment()
            raise

    return marked


class NeuronWorker(WorkerBase):
    """Sets a rank up and hands the steps to the model runner.

    The engine calls the methods in the order in which they stand here.
    """

    model_runner: NeuronModelRunner

    @_starting
    def init_device(self) -> None:
        """Join the process groups."""
        torch.set_num_threads(1)
        # vLLM calls collectives under names that newer versions of torch warn about.
        warnings.filterwarnings("ignore", "`torch.distributed.*` is deprecated", FutureWarning)
        self.device = torch.device("cpu")
        parallel = self.parallel_config
        init_distributed_environment(
            parallel.world_size, self.rank, self.distributed_init_method, self.local_rank, "gloo"
        )
        ensure_model_parallel_initialized(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        ep_degree = get_neuron_config(self.vllm_config).ep_degree
        initialize_neuron_parallel_state(
            resolve_ep_degree(ep_degree, parallel.world_size, parallel.enable_expert_parallel)
        )
        set_random_seed(self.model_config.seed)
        rules.reset()
        self.model_runner = NeuronModelRunner(self.vllm_config, self.device)

    @_starting
    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Build the model and load its weights.

        Raises:
            ValueError: Weights are to be made up.
        """
        if load_dummy_weights or self.load_config.load_format == "dummy":
            raise ValueError("load_format='dummy' is not simulated: models load their weights themselves")
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.load_model()

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return self.model_runner.get_kv_cache_spec()

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """One, with the heads outside a block; vLLM would ask an attention backend."""
        return ["LBHNC"]

    def determine_available_memory(self) -> int:
        """Bytes for the KV cache: enough for `max_num_seqs` sequences of full length, but at most 1 GiB.

        It is filled with zeros at the start, so that it is real memory. One sequence fits in any case, as long
        as this machine has the memory.
        """
        if self.cache_config.kv_cache_memory_bytes:
            return self.cache_config.kv_cache_memory_bytes
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        share = free * self.cache_config.gpu_memory_utilization / self.parallel_config.world_size
        needed = self.model_runner.kv_cache_bytes(self.scheduler_config.max_num_seqs)
        limit = max(KV_CACHE_LIMIT, self.model_runner.kv_cache_bytes(1))
        return min(int(share), needed, limit)

    def update_max_model_len(self, max_model_len: int) -> None:
        """Take the length that fits the cache, with ``max_model_len=-1``."""
        self.model_config.max_model_len = max_model_len

    @_starting
    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        self.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
        self.model_runner.initialize_kv_cache(kv_cache_config)

    @_starting
    def compile_or_warm_up_model(self) -> CompilationTimes:
        seconds = self.model_runner.warm_up()
        set_random_seed(self.model_config.seed)
        return CompilationTimes(language_model=seconds, encoder=0.0)

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        return self.model_runner.execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        return self.model_runner.sample_tokens(grammar_output)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        return self.model_runner.take_draft_token_ids()

    def shutdown(self) -> None:
        if hasattr(self, "model_runner") and self.model_runner is not None:
            self.model_runner.record()
        destroy_neuron_parallel_state()

    # --- Called by name, for features that are off -------------------------------------------------------

    def get_model(self) -> torch.nn.Module:
        return self.model_runner.model

    def execute_dummy_batch(self) -> None:
        return None

    def reset_encoder_cache(self) -> None:
        return None

    def list_loras(self) -> set[int]:
        return set()

    def get_kv_connector_handshake_metadata(self) -> None:
        return None

    def profile(self, is_start: bool = True, profile_prefix: str | None = None, **options: Any) -> None:
        raise NotImplementedError("profiling is not simulated")

"""Every name of vLLM's that it does not promise to keep, so that a new version breaks here and nowhere else.

Written for vLLM 0.32. The rest of the simulator imports these from here; it imports vLLM's configuration,
platform and process-group modules directly.
"""

from dataclasses import dataclass, replace
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.model_executor.models import registry
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec, SlidingWindowSpec
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    DraftTokenIds,
    LogprobsLists,
    LogprobsTensors,
    ModelRunnerOutput,
)
from vllm.v1.sample.logits_processor import build_logitsprocs
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.structured_output.utils import apply_grammar_bitmask
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

__all__ = [
    "EMPTY_MODEL_RUNNER_OUTPUT",
    "CachedRequestState",
    "CompilationTimes",
    "DraftTokenIds",
    "FullAttentionSpec",
    "GrammarOutput",
    "InputBatch",
    "KVCacheConfig",
    "KVCacheSpec",
    "LogprobsLists",
    "LogprobsTensors",
    "ModelRunnerOutput",
    "Sampler",
    "SamplingMetadata",
    "Scheduler",
    "SchedulerOutput",
    "SlidingWindowSpec",
    "SpecDecodeMetadata",
    "VLLMValidationError",
    "WorkerBase",
    "apply_grammar_bitmask",
    "build_logitsprocs",
    "register_contract_model",
]


class _TextGenerator:
    """The least that vLLM takes for a text-generation model; never instantiated."""

    def __init__(self, *, vllm_config: Any = None, prefix: str = ""): ...

    def embed_input_ids(self, input_ids: Any) -> Any: ...

    def forward(self, input_ids: Any, positions: Any) -> Any: ...

    def compute_logits(self, hidden_states: Any) -> Any: ...


@dataclass(frozen=True)
class _ContractModel(registry._BaseRegisteredModel):
    """A row of vLLM's registry whose class has the plugin's methods and not those of a vLLM model."""

    module: str
    class_name: str

    def inspect_model_cls(self) -> Any:
        return replace(registry._ModelInfo.from_model_cls(_TextGenerator), architecture=self.class_name)

    def load_model_cls(self) -> Any:
        import importlib

        return getattr(importlib.import_module(self.module), self.class_name)


def register_contract_model(architecture: str, module: str, class_name: str) -> None:
    """Register a model with vLLM without importing it.

    vLLM's own `register_model` imports a class to look at its methods, in a process of its own when it is
    given by name, keeps the answer on disk, and refuses one that is not written to vLLM's model interface.
    """
    registry.ModelRegistry.models[architecture] = _ContractModel(module, class_name)
    # A loaded class would survive the change of workspace, as rows with equal names are equal.
    registry._try_load_model_cls.cache_clear()

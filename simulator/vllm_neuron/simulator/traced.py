"""A loaded model as the device runs it: one graph per shape, compiled or with the device's rules held."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vllm_neuron import envs
from vllm_neuron.simulator.guards import ForwardReport, guard_forward


class Traced:
    """Calls a model.

    The rules of the device are held in the first forward of each shape, as the device traces each shape once.

    Args:
        compiled: Run the model through ``torch.compile``, one graph per shape. Then only shapes that `warm_up`
            has seen can be run.

    Attributes:
        reports: What the first forward of each shape did, by the name that it was called with.
    """

    def __init__(self, model: nn.Module, compiled: bool = False):
        self.model = model
        self.reports: dict[tuple[str, int], ForwardReport] = {}
        self._seen: set[tuple[Any, ...]] = set()
        self._compiled = _compile(model) if compiled else None

    def __call__(self, name: tuple[str, int], arguments: dict[str, Any]) -> Any:
        """Return what the model does.

        Args:
            name: Step and bucket.
        """
        with torch.no_grad():
            if self._compiled is None:
                return self._guarded(name, arguments)
            with torch.compiler.set_stance("fail_on_recompile"):
                return self._compiled(**arguments)

    def warm_up(self, name: tuple[str, int], arguments: dict[str, Any]) -> None:
        """Run a synthetic step, so that its shapes can be run from then on."""
        with torch.no_grad():
            self._guarded(name, arguments)
            if self._compiled is not None:
                self._compiled(**arguments)

    def _guarded(self, name: tuple[str, int], arguments: dict[str, Any]) -> Any:
        shape = _shape(arguments)
        if shape in self._seen:
            return self.model(**arguments)
        with guard_forward() as report:
            output = self.model(**arguments)
        self._seen.add(shape)
        self.reports[name] = report
        return output


def _compile(model: nn.Module) -> Callable[..., Any]:
    """The model as the device compiles it, except that the graphs run as they are."""
    torch._dynamo.config.cache_size_limit = 2**62
    torch._dynamo.config.accumulated_cache_size_limit = 2**62
    return torch.compile(model, backend="eager", fullgraph=not envs.VLLM_NEURON_DEBUG_MODE, dynamic=False)


def _shape(arguments: dict[str, Any]) -> tuple[Any, ...]:
    """What a graph depends on: shapes of tensors, and the values of everything else."""
    metadata = {id(entry): entry for entry in arguments["attn_metadata"].values()}
    parts: list[Any] = []
    for values in (arguments, *metadata.values()):
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                parts.append((name, tuple(value.shape)))
            elif isinstance(value, int):
                parts.append((name, value))
    return tuple(parts)

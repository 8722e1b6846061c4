"""What the device does not allow in a model: checked on the loaded model and around one forward."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_neuron.simulator import rules

MODEL = "model"

# Names in reports of torch.distributed's operators, as dispatched; others go by their own name.
COLLECTIVES = {
    "allreduce": "all_reduce",
    "allgather_base": "all_gather",
    "allgather": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "alltoall_base": "all_to_all",
    "alltoall": "all_to_all",
    "all_to_all_single": "all_to_all",
}


@dataclass
class ForwardReport:
    """What one forward did.

    Attributes:
        collectives: Number of collectives over more than one rank, by kind.
        group_sizes: Sizes of their groups.
    """

    collectives: Counter[str] = field(default_factory=Counter)
    group_sizes: set[int] = field(default_factory=set)


@contextlib.contextmanager
def guard_forward() -> Iterator[ForwardReport]:
    """Hold the device's rules while a model's forward runs.

    Raises (or, if the simulator is not strict, records):
        NotImplementedError: ``.to(device)``, ``.cpu()`` or ``.cuda()``.
        RuntimeError: A tensor is read as a Python number, or collectives use groups of two sizes.
    """
    report = ForwardReport()
    with _CallGuard(), _DispatchGuard(report):
        yield report


def check_loaded(model: torch.nn.Module) -> None:
    """Check that no tensor of a loaded model is still on the meta device.

    Parameters and buffers stop ``Module.to`` on the device. It passes over plain attributes, and a forward that uses
    one finds no values; that they stop the load, used or not, is the simulator's own strictness.

    Raises (or, if the simulator is not strict, records):
        NotImplementedError: Parameters, buffers or plain attributes are; the message names all of them.
    """
    moved = [*model.named_parameters(), *model.named_buffers()]
    parts = {
        "load_weights left on the meta device": [name for name, tensor in moved if tensor.is_meta],
        "plain attributes are on the meta device (the simulator stops for them at load, the device only in a "
        "forward that uses them)": [name for name, tensor in _plain_attributes(model) if tensor.is_meta],
    }
    rules.require(
        not any(parts.values()),
        MODEL,
        "meta-tensor",
        "Cannot copy out of meta tensor; no data! "
        + "; ".join(f"{text}: {', '.join(names)}" for text, names in parts.items() if names),
        NotImplementedError,
    )


def _plain_attributes(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                yield from _tensors_in(f"{path}.{name}" if path else name, value)


def _tensors_in(name: str, value: object) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors_in(f"{name}[{index}]", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors_in(f"{name}[{key!r}]", item)


class _CallGuard(TorchFunctionMode):
    """Sees methods of tensors by name, before torch turns them into operators."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not rules.inside_operator():
            rules.require(
                not _moves(func, args, kwargs),
                MODEL,
                "to-device",
                "unimplemented _copy_from xla:0 neuron:0: the forward moves a tensor to a device",
                NotImplementedError,
            )
            rules.require(
                func not in (torch.Tensor.tolist, torch.Tensor.numpy),
                MODEL,
                "item",
                f"Unsupported Tensor.{getattr(func, '__name__', 'item')}() call",
                RuntimeError,
            )
        return func(*args, **kwargs)


def _moves(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func in (torch.Tensor.cpu, torch.Tensor.cuda):
        return True
    if func is not torch.Tensor.to:
        return False
    return kwargs.get("device") is not None or any(isinstance(a, torch.device | str) for a in args[1:])


class _DispatchGuard(TorchDispatchMode):
    """Sees operators as dispatched: reads of single values and collectives."""

    def __init__(self, report: ForwardReport):
        super().__init__()
        self.report = report

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            rules.require(
                rules.inside_operator(), MODEL, "item", "Unsupported Tensor.item() call", RuntimeError
            )
        elif func.namespace in ("c10d", "_c10d_functional"):
            self._count(func, args)
        return func(*args, **(kwargs or {}))

    def _count(self, func: Any, args: tuple[Any, ...]) -> None:
        kind = func._schema.name.split("::")[1].strip("_")
        size = _group_size(func, args)
        if size == 1 or "barrier" in kind:
            return
        self.report.collectives[COLLECTIVES.get(kind, kind)] += 1
        self.report.group_sizes.add(size)
        sizes = " and ".join(str(n) for n in sorted(self.report.group_sizes))
        rules.require(
            len(self.report.group_sizes) == 1,
            MODEL,
            "collective-group-size",
            f"NEFF Warmup failed with status 1006: one forward has collectives over groups of {sizes} ranks; "
            "all must go over groups of one size",
            RuntimeError,
        )


def _group_size(func: Any, args: tuple[Any, ...]) -> int:
    """Ranks of the group that an operator was called with; 1 for operators without a group."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name == "process_group":
            return dist.ProcessGroup.unbox(value).size()
        if argument.name == "group_name":
            return dist.distributed_c10d._resolve_process_group(value).size()
    return 1

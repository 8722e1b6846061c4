"""The port's side of the search for the section that diverges: what every section gave, in one phase."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

if TYPE_CHECKING:
    import torch
    from torch import nn
    from vllm_neuron.simulator.harness import Harness
    from vllm_neuron.simulator.metadata import Row

Side = Literal["input", "output"]


class Event(msgspec.Struct, frozen=True):
    """A place in the port: what goes into a module, or what comes out of it."""

    module: str
    side: Side
    section: str
    layer: int | None

    @property
    def owner(self) -> str:
        """The module that computes it: what goes into a module is computed by the one around it."""
        if self.side == "output":
            return self.module
        return self.module.rpartition(".")[0].removesuffix(".layers")


class Rows(NamedTuple):
    """Float32 [positions, width] of one sequence, from `start` on."""

    sequence: str
    start: int
    values: "torch.Tensor"


class PortSections(NamedTuple):
    """What rank 0 recorded.

    Attributes:
        rows: By event, in the order in which the port came to them.
        places: ``model.py:<line> (<Class>.forward)`` by module.
        mappings: Checkpoint keys of each parameter, as the port loads them.
    """

    rows: dict[Event, list[Rows]]
    places: dict[str, str]
    mappings: dict[str, list[str]]


class Recorder:
    """Records the sections of loaded ports, in prefill or in decode; all ranks have one each.

    Args:
        sequences: Token ids by name; which of them a row belongs to is told by its tokens.
    """

    def __init__(self, sequences: dict[str, list[int]], is_prefill: bool):
        self._rows: dict[Event, list[Rows]] = {}
        self._places: dict[str, str] = {}
        self._mappings: dict[str, list[str]] = {}
        self._is_prefill = is_prefill
        self._sequences = sequences
        self._names: dict[int, str] = {}
        self._seen: list[tuple[Event, torch.Tensor]] = []

    def watch(self, harness: "Harness") -> None:
        """Record what this port does from now on."""
        model = harness.model
        self._places[""] = _place(model)
        for event, module in events(model).items():
            self._hook(event, module)
            self._places[event.owner] = _place(model.get_submodule(event.owner))
        # A port that was written by hand may do without.
        mappings: dict[str, Any] = getattr(model, "weight_mappings", dict)()
        for name, keys in mappings.items():
            self._mappings[name] = [keys] if isinstance(keys, str) else list(keys)
        forward = harness._forward

        def recorded(rows: "list[Row]", is_prefill: bool, all_positions: bool) -> "torch.Tensor":
            if is_prefill:
                self._names[id(rows[0].blocks)] = self._name(rows[0])
            self._seen.clear()
            try:
                return forward(rows, is_prefill, all_positions)
            finally:  # also what came before an exception
                if is_prefill == self._is_prefill:
                    self._sort(rows, harness.prefill_buckets)

        harness._forward = recorded  # type: ignore[method-assign]

    def result(self) -> PortSections:
        return PortSections(self._rows, self._places, self._mappings)

    def _name(self, row: "Row") -> str:
        tokens = list(row.token_ids)
        return next(
            name for name, ids in self._sequences.items() if ids[row.start :][: len(tokens)] == tokens
        )

    def _hook(self, event: Event, module: "nn.Module") -> None:
        def after(module: Any, args: Any, output: Any) -> None:
            self._keep(event, output)

        def before(module: Any, args: Any, kwargs: Any) -> None:
            self._keep(event, (*args, *kwargs.values()))

        if event.side == "output":
            module.register_forward_hook(after)
        else:
            module.register_forward_pre_hook(before, with_kwargs=True)

    def _keep(self, event: Event, value: Any) -> None:
        import torch

        if event.section == "rope":
            value = torch.cat(value[:2], dim=-1)  # cos and sin
        tensor = value if isinstance(value, torch.Tensor) else value[0]
        self._seen.append((event, tensor.detach().clone()))

    def _sort(self, rows: "list[Row]", buckets: Sequence[int]) -> None:
        """Give the rows of what was seen in one step to their sequences."""
        count = sum(len(row.token_ids) for row in rows)
        bucket = min((size for size in buckets if size >= count), default=count)
        for event, tensor in self._seen:
            values, first = self._whole(tensor, bucket)[:count].float(), 0
            for row in rows:
                part = values[first : first + len(row.token_ids)].clone()
                first += len(row.token_ids)
                self._rows.setdefault(event, []).append(Rows(self._names[id(row.blocks)], row.start, part))

    def _whole(self, tensor: "torch.Tensor", bucket: int) -> "torch.Tensor":
        """All rows of a step; between the blocks of a prefill, a rank has a part of them."""
        from vllm.distributed.parallel_state import get_tp_group

        group = get_tp_group()
        if self._is_prefill and tensor.shape[0] * group.world_size == bucket:
            return group.all_gather(tensor, dim=0)
        return tensor


def events(model: "nn.Module") -> "dict[Event, nn.Module]":
    """The places that are recorded, by the names that modules have in a port."""
    found: dict[Event, nn.Module] = {}
    for name, module in model.named_modules():
        parts = name.split(".")
        if parts[0] != "model":
            continue
        if parts[1:2] in (["rotary_emb"], ["rotary_embs"]) and not list(module.children()):
            found[Event(name, "output", "rope", None)] = module
        elif name == "model.norm":
            found[Event(name, "output", "final norm", None)] = module
        elif parts[1:2] == ["layers"] and len(parts) == 3:
            layer = int(parts[2])
            if layer == 0:
                found[Event(name, "input", "embedding", None)] = module
            found[Event(name, "output", "decoder", layer)] = module
        elif parts[1:2] == ["layers"] and len(parts) == 4:
            layer = int(parts[2])
            section = {"self_attn": "attention", "mlp": "mlp"}.get(parts[3], "norm")
            if section == "norm":
                found[Event(name, "input", "decoder", layer)] = module
            found[Event(name, "output", section, layer)] = module
    return found


def _place(module: "nn.Module") -> str:
    kind = type(module)
    forward = inspect.unwrap(kind.forward)
    file = inspect.getsourcefile(forward) or ""
    return f"{Path(file).name}:{inspect.getsourcelines(forward)[1]} ({kind.__name__}.forward)"

"""The same places in the Hugging Face class: which of its modules they are, and what these gave."""

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from autoport.validation.port_sections import Event

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

# Parameters of the port whose checkpoint key names the module with a block's output.
OUTPUTS = {
    "attention": ("self_attn.o_proj_weight",),
    "mlp": ("mlp.down_proj_weight",),
}
# Float32 [tokens, width] by event and sequence. One tensor each, but every reading of a rotary embedding's tables.
Captured = dict[Event, dict[str, "list[torch.Tensor]"]]

ROTARY = re.compile(r"Rotary\w*Embedding")


class ReferenceSections:
    """Finds the reference's modules by the checkpoint keys that the port's parameters are loaded from.

    Args:
        mappings: Checkpoint keys of each parameter of the port.
    """

    def __init__(self, model: "PreTrainedModel", mappings: dict[str, list[str]]):
        self.model = model
        self.mappings = mappings

    def run(self, events: Iterable[Event], sequences: dict[str, list[int]]) -> Captured:
        """Run the sequences, and return what the class has for the events; those it has no place for are left out."""
        import torch

        found: Captured = {}
        seen: dict[Event, list[torch.Tensor]] = {}
        handles = []
        for event in events:
            modules = self._rotary() if event.section == "rope" else [self.module(event)]
            handles += [_watch(module, event, seen) for module in modules if module is not None]
        for name, ids in sequences.items():
            seen.clear()
            with torch.no_grad():
                self.model(input_ids=torch.tensor([ids]), use_cache=False)
            for event, tensors in seen.items():
                found.setdefault(event, {})[name] = [t for t in tensors if len(t) == len(ids)]
        for handle in handles:
            handle.remove()
        return found

    def _rotary(self) -> "list[nn.Module | None]":
        return [module for module in self.model.modules() if ROTARY.search(type(module).__name__)]

    def module(self, event: Event) -> "nn.Module | None":
        """The module whose input or output is the same, None where the class has no such module."""
        if event.section == "embedding" or (event.section == "decoder" and event.side == "output"):
            return self._module(self._layer(event.layer or 0))
        if event.section in OUTPUTS:
            keys = [k for name in OUTPUTS[event.section] for k in self._keys(f"{_layer_path(event)}.{name}")]
            if keys:
                return self._module(keys[0].rpartition(".")[0])
            return self._experts(event) if event.section == "mlp" else None
        keys = self._keys(f"{event.module}.weight")
        layer = self._layer(event.layer) if event.layer is not None else ""
        path = keys[0].rpartition(".")[0] if keys else f"{layer}.{event.module.rpartition('.')[2]}"
        return self._module(path)

    def _experts(self, event: Event) -> "nn.Module | None":
        """The block with the experts: around all keys of the port's; or the one that no other part has."""
        prefix = f"{event.module}."
        keys = [key for name, keys in self.mappings.items() if name.startswith(prefix) for key in keys]
        layer = self._layer(event.layer or 0)
        columns = zip(*(key.split(".") for key in keys), strict=False)
        path = [names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, columns)]
        block = self._module(".".join(path))
        if block is not None and len(path) > len(layer.split(".")):
            return block
        around = self._module(layer)
        taken = {key for name, keys in self.mappings.items() if not name.startswith(prefix) for key in keys}
        free = [
            child
            for name, child in (around.named_children() if around is not None else ())
            if not any(key.startswith(f"{layer}.{name}.") for key in taken) and list(child.parameters())
        ]
        return free[0] if len(free) == 1 else None

    def _keys(self, parameter: str) -> list[str]:
        return self.mappings.get(parameter, [])

    def _layer(self, layer: int) -> str:
        """Path of a decoder layer: what its attention's keys have before and up to the index."""
        keys = self._keys(f"model.layers.{layer}.self_attn.o_proj_weight")
        match = re.match(rf"(.*?\.{layer})\.", keys[0]) if keys else None
        return match[1] if match else ""

    def _module(self, path: str) -> "nn.Module | None":
        try:
            return self.model.get_submodule(path) if path else None
        except AttributeError:
            return None


def _layer_path(event: Event) -> str:
    return event.module.rpartition(".")[0]


def _watch(module: "nn.Module", event: Event, seen: "dict[Event, list[torch.Tensor]]") -> Any:
    def after(module: Any, args: Any, output: Any) -> None:
        seen.setdefault(event, []).extend(_rows(event, output))

    def before(module: Any, args: Any, kwargs: Any) -> None:
        seen.setdefault(event, []).extend(_rows(event, (*args, *kwargs.values())))

    if event.side == "output":
        return module.register_forward_hook(after)
    return module.register_forward_pre_hook(before, with_kwargs=True)


def _rows(event: Event, value: Any) -> "list[torch.Tensor]":
    """Float32 [tokens, width]: the first tensor, or every reading of cosines and sines.

    A class may hold each frequency once, or twice: in halves, or side by side.
    """
    import torch

    values: Sequence[Any] = value if isinstance(value, (tuple, list)) else (value,)
    tensors = [item.detach().float() for item in values if isinstance(item, torch.Tensor)]
    if event.section != "rope":
        return [tensor.reshape(-1, tensor.shape[-1]).clone() for tensor in tensors[:1]]
    if len(tensors) != 2:
        return []
    cos, sin = (tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors)
    readings = (slice(None), slice(cos.shape[-1] // 2), slice(None, None, 2))
    return [torch.cat((cos[:, columns], sin[:, columns]), dim=-1) for columns in readings]

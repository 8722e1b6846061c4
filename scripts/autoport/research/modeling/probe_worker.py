"""The process that measures: reads a request on stdin, writes one line of JSON.

Modules are taken out of a model that was built on the meta device, so no weights of the real size are needed.
"""

import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

TOLERANCE = 1e-4
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "relu": nn.functional.relu,
    "relu2": lambda x: nn.functional.relu(x).square(),
}


def main() -> None:
    request = json.load(sys.stdin)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        print(json.dumps(measure(request)))
    except Exception as error:  # whatever a class raises is reported, not a traceback
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Index of a finding -> what was measured for it, or that this config builds no such module."""
    from transformers import AutoModel, AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.utils import logging

    logging.set_verbosity_error()
    config = CONFIG_MAPPING[request["model_type"]].from_dict(dict(request["config"]))
    with torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(config)
        except ValueError:  # the decoder of a larger model has no head of its own
            model = AutoModel.from_config(config)
    source = importlib.import_module(type(model).__module__)
    measured: dict[str, Any] = {}
    for index, finding in enumerate(request["findings"]):
        result: dict[str, Any] | None
        if finding["topic"] in ("norm", "activation") and not is_built(model, finding["subject"]):
            result = {"absent": True}
        elif finding["topic"] == "norm":
            result = measure_norm(find_norm(model, finding))
        elif finding["topic"] == "rope":
            result = measure_rotation(getattr(source, finding["subject"], None))
        elif finding["topic"] == "activation":
            result = measure_activation(model, config, finding)
        else:
            continue
        if result:
            measured[str(index)] = result
    return measured


def is_built(model: nn.Module, subject: str) -> bool:
    """Whether the model has a module of the class ``Owner``, or one with the part, for ``Owner.part``."""
    owner, _, part = subject.partition(".")
    modules = (module for module in model.modules() if type(module).__name__ == owner)
    return any(not part or getattr(module, part, None) is not None for module in modules)


def find_norm(model: nn.Module, finding: dict[str, Any]) -> nn.Module | None:
    owner, _, attribute = finding["subject"].rpartition(".")
    for module in model.modules():
        if type(module).__name__ == owner and isinstance(getattr(module, attribute, None), nn.Module):
            found = getattr(module, attribute)
            if type(found).__name__ == finding["value"]["class"]:
                return found
    return None


def measure_norm(module: nn.Module | None) -> dict[str, Any] | None:
    """Feed a norm and compare with the formulas.

    x has a mean far from 0 (which tells LayerNorm from RMSNorm), weights are far from 0 and 1, biases from 0.
    """
    if module is None:
        return None
    module = module.to_empty(device="cpu").float()
    parameters = dict(module.named_parameters())
    for parameter in parameters.values():
        nn.init.uniform_(parameter, 0.3, 0.7)
    weight = parameters.get("weight")
    width = (
        weight.shape[-1] if weight is not None else (getattr(module, "normalized_shape", None) or (64,))[-1]
    )
    if weight is not None and weight.dim() != 1:
        return None
    x = torch.randn(3, width) + 1.5
    try:
        y = module(x).detach()
    except Exception:
        return None
    eps = float(getattr(module, "variance_epsilon", getattr(module, "eps", 1e-6)) or 1e-6)
    bias = parameters.get("bias")
    best = TOLERANCE
    chosen: dict[str, Any] | None = None
    for kind in ("rms", "layer"):
        for form in ("plain", "one_plus", "none"):
            if weight is None and form != "none":
                continue
            for shift in (False, True) if bias is not None else (False,):
                expected = norm(x, kind, eps) * gain(weight, form) + (bias if shift else 0)
                error = float((y - expected).detach().abs().max())
                if error < best:
                    best, chosen = error, {"kind": kind, "weight": form, "bias": shift}
    if chosen and chosen["weight"] != "none":
        chosen["rounding"] = measure_rounding(module, x, eps, chosen)
    return chosen


def norm(x: torch.Tensor, kind: str, eps: float) -> torch.Tensor:
    x = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def gain(weight: torch.Tensor | None, form: str) -> Any:
    return 1.0 if weight is None or form == "none" else weight.float() + (1 if form == "one_plus" else 0)


def measure_rounding(module: nn.Module, x: torch.Tensor, eps: float, measured: dict[str, Any]) -> str | None:
    """In bfloat16: whether the value is rounded before or after the weight; None when the bits do not tell.

    Args:
        measured: Kind, weight and bias of the norm.
    """
    module = module.to(torch.bfloat16)
    x = x.to(torch.bfloat16)
    parameters = dict(module.named_parameters())
    weight, bias = parameters["weight"], parameters["bias"] if measured["bias"] else torch.zeros(())
    form = measured["weight"]
    normed = norm(x.float(), measured["kind"], eps)
    after = (normed * gain(weight, form) + bias.float()).to(torch.bfloat16)
    before = normed.to(torch.bfloat16) * (weight if form == "plain" else (1 + weight)) + bias.to(
        torch.bfloat16
    )
    y = module(x)
    same = [
        name for name, value in (("before_weight", before), ("after_weight", after)) if torch.equal(y, value)
    ]
    return same[0] if len(same) == 1 else None


def measure_rotation(function: Callable[..., Any] | None) -> dict[str, Any] | None:
    """Rotate one-hot vectors: the dimension that ends up in the same places as dimension 0 is its partner.

    A function may also return the pairs in another order than it takes them.
    """
    if function is None:
        return None
    size = 8
    for arguments in _attempts(size):
        first = _rotated(function, 0, size, arguments)
        if first is None:
            continue
        places = _places(first)
        if len(places) == 1 and not arguments:  # the partner only, as rotate_half gives it
            partner = places[0]
            target = partner
        else:
            shared = [j for j in (1, size // 2) if _places(_rotated(function, j, size, arguments)) == places]
            if len(places) != 2 or len(shared) != 1:
                continue
            partner = shared[0]
            moved = _rotated(function, partner, size, arguments)
            target = int(moved.abs().argmax()) if moved is not None else 0
        if partner in (1, size // 2):
            pairing = "interleaved" if partner == 1 else "half"
            return {"pairing": pairing, "sign": 1 if float(first[target]) > 0 else -1}
    return None


def _attempts(size: int) -> list[tuple[Any, ...]]:
    """What to pass after the vector (None: the vector again), for the signatures in use. The angle is 0.5."""
    full, half = torch.full((1, 1, size), 0.5), torch.full((1, 1, size // 2), 0.5)
    return [
        (),
        (None, full.cos(), full.sin()),
        (half.cos(), half.sin()),
        (None, torch.polar(torch.ones_like(half), half)),
    ]


def _rotated(
    function: Callable[..., Any], dimension: int, size: int, rest: tuple[Any, ...]
) -> torch.Tensor | None:
    hot = torch.zeros(1, 1, 1, size)
    hot[..., dimension] = 1.0
    try:
        result = function(hot, *(hot if item is None else item for item in rest))
    except Exception:  # another signature
        return None
    return (result[0] if isinstance(result, tuple) else result).flatten()


def _places(rotated: torch.Tensor | None) -> list[int]:
    return [] if rotated is None else [i for i in range(rotated.numel()) if abs(float(rotated[i])) > 1e-3]


def measure_activation(model: nn.Module, config: Any, finding: dict[str, Any]) -> dict[str, Any] | None:
    """The function behind the config's name for it."""
    name = getattr(config, finding["value"]["config"], None)
    owner = next((module for module in model.modules() if type(module).__name__ == finding["subject"]), None)
    function = next(
        (getattr(owner, key) for key in ("act_fn", "act", "activation_fn") if hasattr(owner, key)), None
    )
    if function is None or not isinstance(name, str):
        return None
    x = torch.linspace(-3, 3, 61)
    y = function(x)
    same = [key for key, formula in ACTIVATIONS.items() if float((y - formula(x)).abs().max()) < 1e-5]
    return {"function": same[0]} if same else None


if __name__ == "__main__":
    main()

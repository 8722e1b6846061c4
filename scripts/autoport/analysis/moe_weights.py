"""The part of the weight map that a mixture of experts adds."""

from collections.abc import Iterator

from autoport.analysis.keys import CheckpointKeys
from autoport.families.moe_style import MoeStyle
from autoport.schema.architecture import Architecture, Moe, SharedExperts
from autoport.schema.weights import WeightEntry

PREFIX = "model.layers.{i}.mlp."


def moe_entries(architecture: Architecture, keys: CheckpointKeys, style: MoeStyle) -> Iterator[WeightEntry]:
    """Where the parameters of a layer with experts come from."""
    moe = architecture.moe
    if moe is None:
        return
    yield from _router(architecture, moe, keys.layer, style)
    yield from _experts(architecture, moe, keys.layer, style)
    if moe.shared:
        yield from _shared(architecture, moe.shared, keys.layer, style)


def _router(architecture: Architecture, moe: Moe, layer: str, style: MoeStyle) -> Iterator[WeightEntry]:
    names = style.keys
    count = moe.routing.num_experts
    yield _entry(
        "router_weight", [f"{layer}{names.router}.weight"], (count, architecture.hidden_size), "replicated"
    )
    if moe.routing.bias:
        yield _entry("router_bias", [f"{layer}{names.router}.bias"], (count,), "replicated")
    if moe.routing.correction_bias:
        shape, steps = ((1, count), ["flattened"]) if style.correction_rows else ((count,), [])
        yield _entry("correction_bias", [f"{layer}{names.correction}"], shape, "replicated", steps)


def _experts(architecture: Architecture, moe: Moe, layer: str, style: MoeStyle) -> Iterator[WeightEntry]:
    names = style.keys
    count, inner, hidden = moe.routing.num_experts, moe.intermediate_size, architecture.hidden_size
    steps = [f"experts: {moe.storage}"]
    if moe.storage == "separate":
        shapes: list[tuple[int, ...]] = [(inner, hidden), (inner, hidden), (hidden, inner)]
        keys = [f"{layer}{name}" for name in (names.gate, names.up, names.down)]
        yield WeightEntry(
            f"{PREFIX}expert_gate_up_weight", keys[:2], shapes[:2], "expert_gate_up", steps, "moe", count
        )
        yield WeightEntry(
            f"{PREFIX}expert_down_weight", keys[2:], shapes[2:], "expert_down", steps, "moe", count
        )
        return
    transposed = moe.storage != "stacked"
    gate_up = (count, hidden, 2 * inner) if transposed else (count, 2 * inner, hidden)
    down = (count, inner, hidden) if transposed else (count, hidden, inner)
    yield _entry("expert_gate_up_weight", [f"{layer}{names.gate_up}"], gate_up, "expert_gate_up", steps)
    yield _entry("expert_down_weight", [f"{layer}{names.down}"], down, "expert_down", steps)
    if moe.bias:
        offset = ["add one to up"] if moe.up_offset else []
        gate_up_bias, down_bias = f"{layer}{names.gate_up}_bias", f"{layer}{names.down}_bias"
        yield _entry(
            "expert_gate_up_bias", [gate_up_bias], (count, 2 * inner), "expert_gate_up_bias", steps + offset
        )
        yield _entry("expert_down_bias", [down_bias], (count, hidden), "row_bias")


def _shared(
    architecture: Architecture, shared: SharedExperts, layer: str, style: MoeStyle
) -> Iterator[WeightEntry]:
    names = style.keys
    inner, hidden = shared.intermediate_size, architecture.hidden_size
    split = ["split gate, up"] if names.shared_gate_up else []
    rows = 2 * inner if names.shared_gate_up else inner
    for part, name in (("gate", names.shared_gate), ("up", names.shared_up)):
        key = f"{layer}{names.shared_gate_up or name}.weight"
        yield _entry(f"shared_{part}_proj_weight", [key], (rows, hidden), "column", split)
    yield _entry("shared_down_proj_weight", [f"{layer}{names.shared_down}.weight"], (hidden, inner), "row")
    if shared.gated:
        key = f"{layer}{names.shared_sigmoid}.weight"
        yield _entry("shared_sigmoid_weight", [key], (1, hidden), "replicated")


def _entry(
    name: str, keys: list[str], shape: tuple[int, ...], transform: str, steps: list[str] | None = None
) -> WeightEntry:
    return WeightEntry(f"{PREFIX}{name}", keys, [shape], transform, steps or [], "moe")  # type: ignore[arg-type]

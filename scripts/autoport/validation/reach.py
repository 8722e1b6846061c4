"""Whether the scenario's prompts go where windows and scaled rotary embeddings matter."""

from collections.abc import Iterable, Mapping
from typing import Any

from autoport.schema.facts import Facts
from autoport.validation.scenario import LONG, SPLIT

SCALED = ("llama3", "yarn", "longrope")  # they depend on the length that the config gives as the original one
ORIGINAL = "original_max_position_embeddings"


def beyond_reach(facts: Facts) -> list[str]:
    """What of the twin the prompts are too short for, so that a proof with it would say nothing.

    A window must be exceeded by single-shot prefill, too; the original length of the rotary embedding by the
    segmented prompt, which is the longest.

    Args:
        facts: The twin's.
    """
    windows = [
        facts.fields[name].value for name in ("sliding_window", "layer_windows") if name in facts.fields
    ]
    sizes = {size for value in windows for size in (value if isinstance(value, list) else [value])}
    found = [
        f"no single-shot prompt exceeds the window of {size} tokens"
        for size in sorted(size for size in sizes if size is not None)
        if size >= LONG.prompt_length
    ]
    return found + [
        f"no prompt exceeds the original length of {length} tokens of the rotary embedding"
        for length in sorted(_original_lengths(facts))
        if length >= SPLIT.prompt_length
    ]


def _original_lengths(facts: Facts) -> set[int]:
    """Lengths at which a rotary embedding was trained before it was scaled; several where layers differ."""
    kind, parameters = facts.fields["rope_type"].value, facts.fields["rope_parameters"].value or {}
    blocks: Iterable[Mapping[str, Any]] = [{"rope_type": kind, **parameters}]
    if kind == "per_layer_type":
        blocks = parameters.values()
    return {
        block[ORIGINAL]
        for block in blocks
        if block and block.get("rope_type") in SCALED and block.get(ORIGINAL)
    }

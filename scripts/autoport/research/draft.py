"""Telling a draft model of speculative decoding from a model that generates text by itself."""

import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from autoport.errors import Problem
from autoport.research.fields import is_integer
from autoport.schema.facts import Checkpoint

Kind = Literal["EAGLE-1", "Eagle3"]
LAYER_CONFIG = "transformer_layer_config"  # of the speculators library: the draft's decoder layers
EAGLE3_HIDDEN_STATES = 3
EAGLE3_NAME = re.compile(r"^eagle3$|^Eagle3\w*$|ForCausalLMEagle3$")
EAGLE1_NAME = re.compile(r"^eagle$|^Eagle(?!3)\w*(ForCausalLM|DraftModel)$")


class Draft(msgspec.Struct, frozen=True):
    """What config and headers say of a draft model.

    Attributes:
        by_config: Kind that config.json names, empty when it does not.
        by_keys: Kind that the tensors have, empty without weights, or when nothing tells.
        vocab_size, draft_vocab_size: Of the target, and of the draft; 0 where config.json has none.
        fc: Shape of ``fc.weight``, empty when there is none.
    """

    by_config: Kind | Literal[""]
    by_keys: Kind | Literal[""]
    vocab_size: int = 0
    draft_vocab_size: int = 0
    fc: tuple[int, ...] = ()


def find_draft(config: Mapping[str, Any], checkpoint: Checkpoint | None) -> Draft | None:
    """Return what is known of a draft model, None for any other model."""
    tensors = checkpoint.tensors if checkpoint else {}
    shapes = {name.removeprefix("model."): tuple(header.shape) for name, header in tensors.items()}
    found = Draft(
        _kind_by_config(config),
        _kind_by_keys(shapes),
        _size(config, "vocab_size"),
        _size(config, "draft_vocab_size"),
        shapes.get("fc.weight", ()),
    )
    return found if found.by_config or found.by_keys else None


def draft_problems(draft: Draft, config_file: str, source: str) -> list[Problem]:
    """Why it is no model that generates text by itself; more than one where config and tensors disagree.

    Args:
        source: Folder or hub id, for the next step.
    """
    problems = []
    if draft.by_config and draft.by_keys and draft.by_config != draft.by_keys:
        text = f"config.json names an {draft.by_config} draft, but the tensors are of an {draft.by_keys} one"
        problems.append(
            Problem("DRAFT-KIND", f"{text} (fc.weight {list(draft.fc)})", config_file, "correct config.json")
        )
    kind = draft.by_keys or draft.by_config
    if kind == "EAGLE-1":
        text = "a draft model of EAGLE-1, which joins a token with one hidden state; the plugin drafts with Eagle3"
        step = "use an Eagle3 draft for the same target, and port the target"
        return [*problems, Problem("DRAFT-EAGLE1", text, config_file, step)]
    parts = [f"fc.weight {list(draft.fc)}"] if draft.fc else []
    if draft.draft_vocab_size and draft.draft_vocab_size != draft.vocab_size:
        parts.append(f"draft vocabulary {draft.draft_vocab_size} of {draft.vocab_size}")
    text = f"a draft model of Eagle3 ({', '.join(parts)})" if parts else "a draft model of Eagle3"
    step = f"autoport draft NAME {source}; its target is ported as any other model"
    return [*problems, Problem("DRAFT-EAGLE3", text, config_file, step)]


def _kind_by_config(config: Mapping[str, Any]) -> Kind | Literal[""]:
    names = config.get("architectures")
    listed = names if isinstance(names, list) else []
    texts = [*listed, config.get("model_type"), config.get("speculators_model_type")]
    words = [text for text in texts if isinstance(text, str)]
    if any(EAGLE3_NAME.search(word) for word in words):
        return "Eagle3"
    return "EAGLE-1" if any(EAGLE1_NAME.search(word) for word in words) else ""


def _kind_by_keys(shapes: Mapping[str, tuple[int, ...]]) -> Kind | Literal[""]:
    """By the layer that joins the inputs: EAGLE-1 takes the embedding and one state, Eagle3 three states."""
    fc = shapes.get("fc.weight", ())
    if len(fc) != 2 or 0 in fc or not any(name.startswith(("midlayer.", "layers.0.")) for name in shapes):
        return ""
    if "d2t" in shapes or any(name.startswith("midlayer.") for name in shapes):
        return "Eagle3"
    if fc[1] == EAGLE3_HIDDEN_STATES * fc[0]:
        return "Eagle3"
    return "EAGLE-1" if fc[1] == 2 * fc[0] else ""


def _size(config: Mapping[str, Any], name: str) -> int:
    nested = config.get(LAYER_CONFIG)
    for part in (config, nested if isinstance(nested, Mapping) else {}):
        if is_integer(part.get(name)) is None:
            return int(part[name])
    return 0

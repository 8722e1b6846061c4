"""The landscape: every decoder class of transformers with a tiny config, and how to build its checkpoint."""

import json
from pathlib import Path
from typing import Any

import msgspec

from autoport.errors import refuse
from autoport.research.aliases import ALIASES
from autoport.resources import references_dir
from autoport.validation.twin import heat, reference_class


class Entry(msgspec.Struct, frozen=True):
    """One model type.

    Attributes:
        hf_name: The class for causal language modelling.
        category: ``dense``, ``moe`` or ``mla``.
        config: What is set in a tiny config beside the class's defaults.
        variants: Names of features that only some published configs switch on -> what is set for them.
    """

    hf_name: str = msgspec.field(name="class")
    category: str
    config: dict[str, Any]
    variants: dict[str, dict[str, Any]] = {}


def load() -> dict[str, Entry]:
    """The table by model type (`references/landscape.json`)."""
    text = (references_dir() / "landscape.json").read_bytes()
    return msgspec.json.decode(text, type=dict[str, Entry])


def names() -> list[str]:
    """Model types, and ``<model type>: <variant>`` for each variant."""
    found = []
    for name, entry in load().items():
        found += [name, *(f"{name}: {variant}" for variant in entry.variants)]
    return found


def doubled_heads(config: dict[str, Any]) -> dict[str, Any]:
    """The config with twice the heads, so that four ranks have an even number of them.

    A single KV head stays one. The width doubles, too, where head_dim follows from it.
    """
    kv_heads = [name for name in ALIASES["num_kv_heads"] if config.get(name) != 1]
    names = [*ALIASES["num_heads"], *kv_heads, *(() if "head_dim" in config else ALIASES["hidden_size"])]
    return config | {name: 2 * config[name] for name in names if name in config}


def build_checkpoint(name: str, folder: Path, seed: int = 0, double_heads: bool = False) -> Path:
    """Write a tiny checkpoint of the real class, as one of `names`, with random weights.

    Args:
        double_heads: Build it with `doubled_heads`.

    Raises:
        Refusal: SWEEP-NAME for an unknown name, PROOF-CLASS when transformers lacks the class.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, _, variant = name.partition(": ")
    entry = load().get(model_type)
    if entry is None or (variant and variant not in entry.variants):
        raise refuse("SWEEP-NAME", f"{name!r} is not in the landscape", "option --arch", "see landscape.json")
    values = {**entry.config, **entry.variants.get(variant, {})}
    values = (doubled_heads(values) if double_heads else values) | {"architectures": [entry.hf_name]}
    reference_class(values, folder / "config.json")
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **values, dtype="bfloat16")
    model = AutoModelForCausalLM.from_config(config)
    heat(model, seed)
    model.to(torch.bfloat16).save_pretrained(folder)
    path = folder / "config.json"
    saved = json.loads(path.read_text())
    saved["architectures"] = [entry.hf_name]
    path.write_text(json.dumps(saved, indent=2))
    return folder

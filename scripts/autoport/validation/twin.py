"""The tiny twin: the real config shrunk to the smallest sizes that keep its structure, with hot weights.

With the usual initialisation (normal, std 0.02) attention is nearly uniform and every layer adds next to
nothing, so a port whose K is scaled by 0.9 still gives the same tokens. The twin's weights are *hot*:
attention is peaked, norms and biases are away from the values they start at, and logits are spread.
"""

import copy
import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from autoport.analysis.architecture import assemble
from autoport.analysis.scope import facts_problems
from autoport.errors import Refusal, refuse
from autoport.research.config import read_facts
from autoport.research.source import open_source
from autoport.schema import Architecture, Rope
from autoport.validation.scenario import SEGMENTED_MODEL_LEN, SPLIT
from autoport.workspace import write_atomic

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

TP_SIZES = (1, 2, 4)  # the sizes that the twin admits exactly when the real model does
MIN_HEAD_DIM = 16  # eight RoPE frequencies
MAX_HEAD_DIM = 128  # the attention kernels' limit
MIN_VOCAB = 512
HIDDEN_MULTIPLE = 256  # what the decode MLP kernel needs

# Standard deviation of a matrix is gain / sqrt(fan_in). With unit-variance inputs, attention scores then have
# a standard deviation of QK_GAIN ** 2, logits of HEAD_GAIN. GAIN is above one so that the layers, and not the
# embedding, decide the next token; with tied embeddings the model would repeat its input for ever.
GAIN = 2.0
QK_GAIN = 1.7
HEAD_GAIN = 4.0
VECTOR_OFFSET = (0.25, 0.75)  # distance of norm weights and biases from their initial value


# --- Shrinking the config ---------------------------------------------------------------------------------


def shrink(config: dict[str, Any], architecture: Architecture) -> dict[str, Any]:
    """Return `config` with every dimension shrunk, and everything else untouched.

    Kept: the ratio of query to KV heads, which of TP 1, 2 and 4 are valid (and whether they shard or
    replicate KV heads), whether head_dim is given or derived and how heads * head_dim compares to
    hidden_size, divisibility of the vocabulary and the MLP by the TP sizes, every kind of layer, and every
    band of the RoPE scaling.

    Args:
        config: The real model's config.json.
        architecture: What the analysis made of it.

    Raises:
        Refusal: TWIN-SHRINK when no small config keeps the structure.
    """
    attention = architecture.attention
    heads, kv_heads = _shrink_heads(attention.num_heads, attention.num_kv_heads)
    head_dim, hidden, original_context = _shrink_widths(architecture, heads)
    num_layers = _shrink_layers(config, architecture.num_layers)
    vocab = min(architecture.vocab_size, _next_divisible_as(architecture.vocab_size, MIN_VOCAB))
    intermediate = architecture.mlp.intermediate_size

    twin = copy.deepcopy(config)
    for key, value in config.items():
        if isinstance(value, list) and len(value) == architecture.num_layers:
            twin[key] = value[:num_layers]
    twin |= {
        "hidden_size": hidden,
        "intermediate_size": min(intermediate, _next_divisible_as(intermediate, hidden + hidden // 2)),
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "vocab_size": vocab,
        "max_position_embeddings": SEGMENTED_MODEL_LEN,
        "torch_dtype" if "torch_dtype" in config else "dtype": "bfloat16",
    }
    if config.get("num_key_value_heads") is not None or kv_heads != heads:
        twin["num_key_value_heads"] = kv_heads
    if config.get("head_dim") is not None:
        twin["head_dim"] = head_dim
    if original_context is not None:
        _replace(twin, "original_max_position_embeddings", original_context)
    _move_token_ids(twin, vocab)
    return twin


def _shrink_heads(num_heads: int, num_kv_heads: int) -> tuple[int, int]:
    """Fewest (query, KV) heads of the same ratio that shard over the TP sizes as the real ones do."""
    if num_heads % num_kv_heads:
        raise refuse(
            "TWIN-SHRINK",
            f"{num_heads} heads are not a multiple of {num_kv_heads} KV heads",
            "config.json: num_key_value_heads",
            "correct the config",
        )
    ratio = num_heads // num_kv_heads

    def pattern(kv_heads: int) -> list[object]:
        heads = ratio * kv_heads
        return [
            (heads % tp == 0, heads % (2 * tp) == 0, kv_heads % tp == 0, tp % kv_heads == 0 and kv_heads < tp)
            for tp in TP_SIZES
        ]

    kv_heads = next(kv for kv in range(1, num_kv_heads + 1) if pattern(kv) == pattern(num_kv_heads))
    return ratio * kv_heads, kv_heads


def _shrink_widths(architecture: Architecture, heads: int) -> tuple[int, int, int | None]:
    """Smallest (head_dim, hidden_size, original context of the RoPE scaling or None) for `heads` heads."""
    attention, rope = architecture.attention, architecture.rope
    real_width = attention.num_heads * attention.head_dim
    multiple = HIDDEN_MULTIPLE if architecture.hidden_size % 128 == 0 else 2
    for head_dim in range(min(MIN_HEAD_DIM, attention.head_dim), MAX_HEAD_DIM + 1, 2):
        width = heads * head_dim
        if architecture.hidden_size == real_width:
            hidden = width
        elif architecture.hidden_size > real_width:
            hidden = (width // multiple + 1) * multiple
        else:
            hidden = multiple
        fits = hidden % multiple == 0 and (hidden < width) == (architecture.hidden_size < real_width)
        if not fits:
            continue
        if rope.kind != "llama3":
            return head_dim, hidden, None
        original_context = _shrink_original_context(rope, head_dim)
        if original_context is not None:
            return head_dim, hidden, original_context
    raise refuse(
        "TWIN-SHRINK",
        f"no head_dim up to {MAX_HEAD_DIM} keeps the structure with {heads} heads",
        "config.json",
        "report this config: the twin cannot be built, so the port cannot be proven",
    )


def _shrink_original_context(rope: Rope, head_dim: int) -> int | None:
    """Smallest original context, below the longest prompt, that leaves no band of llama3 scaling empty.

    Frequencies with a wavelength under context / high_freq_factor are kept, those over context /
    low_freq_factor are divided by the factor, and those between are blended; one must be well inside the
    blend.
    """
    low, high = rope.parameters["low_freq_factor"], rope.parameters["high_freq_factor"]
    wavelengths = [2 * math.pi * rope.theta ** (2 * i / head_dim) for i in range(head_dim // 2)]
    for context in range(64, SPLIT.prompt_length, 32):
        blends = [(context / wavelength - low) / (high - low) for wavelength in wavelengths]
        if min(blends) < 0 and max(blends) > 1 and any(0.25 < blend < 0.75 for blend in blends):
            return context
    return None


def _shrink_layers(config: dict[str, Any], num_layers: int) -> int:
    """At least two layers, and as many as it takes to have every kind that a per-layer list names."""
    patterns = [value for value in config.values() if isinstance(value, list) and len(value) == num_layers]
    kinds = [msgspec.json.encode(kind) for kind in zip(*patterns, strict=True)]
    last_new = max((kinds.index(kind) for kind in kinds), default=0)
    return min(num_layers, max(2, last_new + 1))


def _next_divisible_as(real: int, start: int) -> int:
    """Smallest number from `start` on that is divisible by the TP sizes as `real` is."""
    largest = max(TP_SIZES)
    return next(n for n in range(start, start + largest) if math.gcd(n, largest) == math.gcd(real, largest))


def _replace(node: dict[str, Any], key: str, value: Any) -> None:
    """Set `key` wherever it is present in `node` or a dict inside it."""
    if key in node:
        node[key] = value
    for child in node.values():
        if isinstance(child, dict):
            _replace(child, key, value)


def _move_token_ids(config: dict[str, Any], vocab: int) -> None:
    """Move special token ids that the small vocabulary lacks to its end, each to a place of its own."""
    places: Iterator[int] = iter(range(vocab - 1, -1, -1))
    moved: dict[int, int] = {}

    def move(token: Any) -> Any:
        if isinstance(token, list):
            return [move(item) for item in token]
        if isinstance(token, bool) or not isinstance(token, int) or token < vocab:
            return token
        if token not in moved:
            moved[token] = next(places)
        return moved[token]

    for key in config:
        if key.endswith("token_id"):
            config[key] = move(config[key])


# --- Building the checkpoint ------------------------------------------------------------------------------


def build(config: dict[str, Any], folder: Path, seed: int) -> Path:
    """Write a checkpoint of the real Hugging Face class with hot weights in two files and an index.

    The weights are saved in bfloat16, so float32 and bfloat16 runs load the same values. The same seed gives
    the same bytes.

    Args:
        config: A twin's config.json; written as it is.
        folder: Folder to write to; made when it is missing.

    Raises:
        Refusal: PROOF-CLASS when transformers has no such class.
    """
    import torch
    from transformers import AutoConfig

    write_atomic(folder / "config.json", msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n")
    model_class = reference_class(config, folder / "config.json")
    model = model_class(AutoConfig.from_pretrained(folder))
    heat(model, seed)
    model = model.to(torch.bfloat16)
    size = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(folder, max_shard_size=math.ceil(size * 0.6))
    # save_pretrained writes the config in its own form; the port must meet the form that the source has.
    write_atomic(folder / "config.json", msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n")
    return folder


def reference_class(config: dict[str, Any], config_file: os.PathLike[str]) -> "type[PreTrainedModel]":
    """Return the class that ``architectures[0]`` names.

    Raises:
        Refusal: PROOF-CLASS when transformers has no such class.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    name = (config.get("architectures") or [None])[0]
    model_class = getattr(transformers, name, None) if isinstance(name, str) else None
    if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
        raise refuse(
            "PROOF-CLASS",
            f"transformers {transformers.__version__} has no model class {name!r}",
            f"{config_file}: architectures",
            "install the transformers release that has it",
        )
    return model_class


def heat(model: "PreTrainedModel", seed: int) -> None:
    """Fill every parameter with hot values that bfloat16 can hold.

    Matrices are normal with std gain / sqrt(fan_in); vectors (norm weights, biases) lie on both sides of
    their initial value, at a distance drawn from VECTOR_OFFSET.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    gains = {id(model.get_output_embeddings().weight): HEAD_GAIN}
    gains |= {id(parameter): QK_GAIN for parameter in _query_key_matrices(model)}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                std = gains.get(id(parameter), GAIN) / math.sqrt(parameter.shape[-1])
                values = torch.randn(parameter.shape, generator=generator) * std
            else:
                distance = torch.empty(parameter.shape).uniform_(*VECTOR_OFFSET, generator=generator)
                sign = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
                values = parameter.mean().round() + distance * sign
            parameter.copy_(values.to(torch.bfloat16))


def _query_key_matrices(model: "PreTrainedModel") -> "Iterator[torch.nn.Parameter]":
    """Projections that make attention scores: matrices of an attention module named q... or k..."""
    for module in model.modules():
        if "Attention" not in type(module).__name__:
            continue
        for name, parameter in module.named_parameters():
            if parameter.ndim >= 2 and re.match(r"[qk]", name):
                yield parameter


def build_from(source: str, folder: Path, seed: int) -> Path:
    """Build the twin of a model of which only the config is read.

    Args:
        source: config.json, its folder, or a hub id.
        folder: A new or empty folder. It appears only when the checkpoint is complete.

    Raises:
        Refusal: TWIN-EXISTS, TWIN-SHRINK, PROOF-CLASS, or what research finds wrong with the config.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise refuse("TWIN-EXISTS", "not an empty folder", folder, "pass a new folder")
    facts = read_facts(open_source(source))
    problems = facts_problems(facts)
    if problems:
        raise Refusal(*problems)
    # Biases and dtype are the checkpoint's; neither changes the sizes.
    config = shrink(facts.config, assemble(facts, qkv_bias=False, dtype="bfloat16"))
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    build(config, part, seed)
    return part.replace(folder)

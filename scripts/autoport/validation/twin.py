"""The tiny twin: a checkpoint of the real Hugging Face class at the shrunk sizes, with hot weights.

With the usual initialisation (normal, std 0.02) attention is nearly uniform and every layer adds next to
nothing, so a port whose K is scaled by 0.9 still gives the same tokens. The twin's weights are *hot*:
attention is peaked, norms and biases are away from the values they start at, and logits are spread.
"""

import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from autoport.analysis.scope import facts_problems
from autoport.errors import Refusal, refuse
from autoport.files import write_atomic
from autoport.research.config import read_facts
from autoport.research.source import open_source
from autoport.validation.shrink import shrink

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# Standard deviation of a matrix is gain / sqrt(fan_in). With unit-variance inputs, attention scores then have
# a standard deviation of QK_GAIN ** 2, logits of HEAD_GAIN. GAIN is above one so that the layers, and not the
# embedding, decide the next token; with tied embeddings the model would repeat its input for ever.
GAIN = 2.0
QK_GAIN = 1.7
HEAD_GAIN = 4.0
VECTOR_OFFSET = (0.25, 0.75)  # distance of norm weights and biases from their initial value
# A correction bias is as large as the differences of the scores that it is added to, so that both decide.
CORRECTION_OFFSET = (0.05, 0.3)
CORRECTION = re.compile(r"(correction_bias|expert_bias)$")


def build(config: dict[str, Any], folder: Path, seed: int) -> Path:
    """Write a checkpoint of the real Hugging Face class with hot weights in two files and an index.

    The weights are saved in bfloat16, so float32 and bfloat16 runs load the same values. The same seed gives
    the same bytes.

    Args:
        config: A twin's config.json; written as it is.
        folder: Folder to write to; made when it is missing.

    Raises:
        Refusal: PROOF-CLASS when transformers has no such class, PROOF-CONFIG when it rejects the config,
            TWIN-SHRINK when the class does not run, WS-WRITE.
    """
    import torch
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError
    from transformers import AutoConfig

    write_atomic(folder / "config.json", msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n")
    model_class = reference_class(config, folder / "config.json")
    try:
        hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, KeyError, StrictDataclassError) as error:
        next_step = "correct that field in the model's config.json, and run the same command again"
        raise _refuse("PROOF-CONFIG", "transformers rejects the config", error, folder, next_step) from error
    model = _running(model_class, hf_config, folder, seed)
    model = model.to(torch.bfloat16)
    size = sum(parameter.nbytes for parameter in model.parameters())
    try:
        model.save_pretrained(folder, max_shard_size=math.ceil(size * 0.6))
    except (OSError, SafetensorError) as error:
        raise refuse(
            "WS-WRITE", f"cannot write: {error}", folder, "free space or change the folder's permissions"
        ) from error
    # save_pretrained writes the config in its own form; the port must meet the form that the source has.
    write_atomic(folder / "config.json", msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n")
    return folder


def _running(
    model_class: "type[PreTrainedModel]", hf_config: Any, folder: Path, seed: int
) -> "PreTrainedModel":
    """The model with hot weights, which was seen to run.

    Raises:
        Refusal: TWIN-SHRINK when the class cannot be built or run at these sizes.
    """
    import torch

    try:
        model = model_class(hf_config)
        heat(model, seed)
        with torch.no_grad():
            model.eval()(torch.arange(8)[None])
    except Exception as error:
        what = f"{model_class.__name__} does not run at the twin's sizes: {type(error).__name__}"
        next_step = "report this config: the twin keeps something of it too large or leaves something out"
        raise _refuse("TWIN-SHRINK", what, error, folder, next_step) from error
    return model


def _refuse(rule: str, what: str, error: Exception, folder: Path, next_step: str) -> Refusal:
    """The refusal of a twin's config, with the error's text on one line."""
    return refuse(rule, f"{what}: {' '.join(str(error).split())}", folder / "config.json", next_step)


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
    Correction biases of routers, which may be buffers, lie on both sides of zero.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    gains = {id(model.get_output_embeddings().weight): HEAD_GAIN}
    gains |= {id(parameter): QK_GAIN for parameter in _query_key_matrices(model)}
    transposed = {id(module.weight) for module in model.modules() if type(module).__name__ == "Conv1D"}
    saved = model.state_dict(keep_vars=True)
    biases = {id(tensor): tensor for name, tensor in saved.items() if CORRECTION.search(name)}
    with torch.no_grad():
        for parameter in model.parameters():
            if id(parameter) in biases:
                continue
            if parameter.ndim >= 2:
                fan_in = parameter.shape[0 if id(parameter) in transposed else -1]
                std = gains.get(id(parameter), GAIN) / math.sqrt(fan_in)
                values = torch.randn(parameter.shape, generator=generator) * std
            else:
                values = parameter.mean().round() + _offsets(parameter.shape, VECTOR_OFFSET, generator)
            parameter.copy_(values.to(torch.bfloat16))
        for bias in biases.values():
            bias.copy_(_offsets(bias.shape, CORRECTION_OFFSET, generator).to(torch.bfloat16))


def _offsets(
    shape: "torch.Size", distances: tuple[float, float], generator: "torch.Generator"
) -> "torch.Tensor":
    """Float32 values on both sides of zero, at a distance drawn uniformly from `distances`."""
    import torch

    distance = torch.empty(shape).uniform_(*distances, generator=generator)
    sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return distance * sign


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
    config = shrink(facts)
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    build(config, part, seed)
    return part.replace(folder)

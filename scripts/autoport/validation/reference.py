"""The other side of the proof: the real Hugging Face class with eager attention."""

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from autoport.validation.twin import reference_class

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def load(folder: Path, dtype: "torch.dtype") -> "PreTrainedModel":
    """Load a checkpoint into the class that its config names.

    Raises:
        Refusal: PROOF-CLASS when transformers has no such class.
    """
    config_file = folder / "config.json"
    model_class = reference_class(msgspec.json.decode(config_file.read_bytes()), config_file)
    model = model_class.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model.eval()


def logits(model: "PreTrainedModel", ids: list[int]) -> "torch.Tensor":
    """Logits [len(ids), vocab_size] at every position as float32, from one forward without a cache."""
    import torch

    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()


def greedy(model: "PreTrainedModel", ids: list[int], steps: int) -> list[int]:
    """The `steps` most likely tokens after `ids`, one at a time (with the class's own cache)."""
    import torch

    continuation: list[int] = []
    cache = None
    with torch.no_grad():
        for _ in range(steps):
            if cache is None:
                output = model(input_ids=torch.tensor([ids + continuation]))
            else:
                output = model(input_ids=torch.tensor([continuation[-1:]]), past_key_values=cache)
            cache = output.get("past_key_values")  # not every class has one
            continuation.append(int(output.logits[0, -1].argmax()))
    return continuation

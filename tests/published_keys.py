"""Keys and shapes of published checkpoints, from transformers' own classes on the meta device."""

import copy
import functools
import logging
import re

from checkpoints import KeyTable
from published import PUBLISHED

# What published checkpoints call the experts that the class stacks: experts, router, gate, up, down.
QWEN_EXPERTS = ("mlp.experts", "mlp.gate", "gate_proj", "up_proj", "down_proj")
MIXTRAL_EXPERTS = ("block_sparse_moe.experts", "block_sparse_moe.gate", "w1", "w3", "w2")
EXPERT_NAMES = {
    "qwen2_moe": QWEN_EXPERTS,
    "qwen3_moe": QWEN_EXPERTS,
    "mixtral": MIXTRAL_EXPERTS,
    "phimoe": MIXTRAL_EXPERTS,
}


@functools.cache
def keys_of(name: str) -> KeyTable:
    """Keys and shapes of the class on the meta device, as it saves them."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    logging.disable(logging.WARNING)
    config = CONFIG_MAPPING[PUBLISHED[name]["model_type"]].from_dict(copy.deepcopy(PUBLISHED[name]))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    logging.disable(logging.NOTSET)
    tied = set(model._tied_weights_keys or {}) if config.tie_word_embeddings else set()
    keys = {
        key.replace("lm_head.", "embed_out.") if name == "gpt-neox-20b" else key: ("BF16", tuple(value.shape))
        for key, value in model.state_dict().items()
        if key not in tied
    }
    return as_published(keys, PUBLISHED[name]["model_type"])


def as_published(keys: KeyTable, model_type: str) -> KeyTable:
    """A tensor for each expert and projection, where the published checkpoints have that."""
    if model_type not in EXPERT_NAMES:
        return keys
    experts, router, gate, up, down = EXPERT_NAMES[model_type]
    found: KeyTable = {}
    for key, (dtype, shape) in keys.items():
        start, stacked, _ = key.partition("mlp.experts.")
        if not stacked:
            found[re.sub(r"mlp\.(gate|router)(?=\.)", router, key)] = (dtype, shape)
            continue
        rows, columns = shape[1:]
        both = key.endswith("gate_up_proj")
        for expert in range(shape[0]):
            for part in (gate, up) if both else (down,):
                found[f"{start}{experts}.{expert}.{part}.weight"] = (dtype, (rows // (1 + both), columns))
    return found

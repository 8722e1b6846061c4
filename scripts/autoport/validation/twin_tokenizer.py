"""A tokenizer for a checkpoint that has none: one token a byte, so that text can be sent to a tiny twin.

Its other tokens stand for words that do not exist. What a twin writes with it means nothing.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autoport.errors import refuse
from autoport.files import write_atomic

BYTES = 256
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"
)


def write_tokenizer(folder: Path, config: Mapping[str, Any]) -> None:
    """Write tokenizer.json and tokenizer_config.json beside a checkpoint.

    Args:
        config: The checkpoint's config.json; its special token ids keep their places.

    Raises:
        Refusal: TWIN-TOKENIZER when the vocabulary has no room for the bytes.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab_size = config["vocab_size"]
    specials = special_tokens(config)
    free = [token for token in range(vocab_size) if token not in specials]
    if len(free) < BYTES:
        raise refuse(
            "TWIN-TOKENIZER",
            f"a vocabulary of {vocab_size} has no room for {BYTES} bytes",
            folder / "config.json",
            "use a checkpoint with a tokenizer of its own",
        )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"Ġw{token}" for token in free[BYTES:])]
    vocab = dict(zip(words, free, strict=True)) | {text: token for token, text in specials.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials.values()])
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    for name in ("bos", "eos", "pad"):
        token = _first(config.get(f"{name}_token_id"))
        if token in specials:
            settings[f"{name}_token"] = specials[token]
    write_atomic(folder / "tokenizer.json", tokenizer.to_str().encode())
    write_atomic(folder / "tokenizer_config.json", json.dumps(settings, indent=2).encode())


def special_tokens(config: Mapping[str, Any]) -> dict[int, str]:
    """Text by id of the tokens that the config names as special."""
    named: dict[int, str] = {}
    for key, value in config.items():
        if key.endswith("_token_id"):
            for token in value if isinstance(value, list) else [value]:
                if isinstance(token, int) and 0 <= token < config["vocab_size"]:
                    named.setdefault(token, f"<|{key.removesuffix('_token_id')}-{token}|>")
    return named


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else value

"""Names of models: what can be a module, and the prefix of its classes."""

import keyword
import re

from autoport.errors import refuse

# Words of model names that the plugin writes in capitals; every other word is capitalised.
ACRONYMS = {
    "gpt": "GPT",
    "gptj": "GPTJ",
    "neox": "NeoX",
    "olmo": "OLMo",
    "moe": "Moe",
    "mpt": "MPT",
    "opt": "OPT",
}


LONGEST_NAME = 64


RESERVED_NAMES = {
    "registry", "kv_cache", "neuron_config", "interfaces", "synthetic",  # of the plugin's model package
    "torch", "transformers", "vllm", "vllm_neuron", "private_vllm_neuron", "numpy", "safetensors",
    "none", "true", "false",  # class prefixes None, True, False
}  # fmt: skip


def _snake_case(name: str) -> str:
    """The nearest name that can be used."""
    snake = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_").lstrip("0123456789_")
    return snake if snake and not keyword.iskeyword(snake) and snake not in RESERVED_NAMES else "gpt_neox"


def check_model_name(name: str) -> str:
    """Return `name` if it can be a folder and module name under `model/`.

    Raises:
        Refusal: NAME-LONG, NAME-SNAKE for anything but lower-case snake_case, NAME-RESERVED for a Python keyword, a
            package that a port imports, or a name that the plugin's `model` package uses itself.
    """
    if len(name) > LONGEST_NAME:
        found = f"model name of {len(name)} characters: {name[:40]}..."
        raise refuse("NAME-LONG", found, "argument NAME", f"use at most {LONGEST_NAME} characters, e.g. 'yi'")
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        raise refuse(
            "NAME-SNAKE",
            f"model name {name!r} is not snake_case",
            "argument NAME",
            "use lower-case letters, digits and single underscores, starting with a letter, "
            f"e.g. {_snake_case(name)!r}",
        )
    if keyword.iskeyword(name) or name in RESERVED_NAMES:
        raise refuse(
            "NAME-RESERVED",
            f"model name {name!r} is reserved",
            "argument NAME",
            f"choose another name, e.g. the family with its version, or '{name}_model'",
        )
    return name


def class_prefix(name: str) -> str:
    """PascalCase prefix of the generated classes: ``yi`` -> ``Yi``, ``gpt_neox`` -> ``GPTNeoX``."""
    return "".join(ACRONYMS.get(word, word[0].upper() + word[1:]) for word in name.split("_"))

"""The eps of norms in float32 runs: large enough for a wrong one to show.

A usual eps vanishes beside activations with a variance of about one, so the logits of a port with 1e-5 for 1e-6
are equal. Float32 runs load the twin's weights under a config with other values; bfloat16 runs, whose R depends
on how every sum is rounded, load the twin itself.
"""

import shutil
from pathlib import Path

import msgspec

from autoport.expressions import names
from autoport.families import find_family
from autoport.files import write_atomic
from autoport.research.aliases import ALIASES
from autoport.research.config_defaults import config_defaults
from autoport.research.fields import is_number
from autoport.schema.facts import Facts

# A usual one in its place changes the logits by more than the float32 limit, in nearly every class already where
# only one norm has it.
SHOWN_EPS = 0.1


def shown_eps(facts: Facts) -> dict[str, float]:
    """The eps of float32 runs, by config key: another one for each key of that meaning.

    Keys that the class ignores are among them, since the port must not read them. Left out are those without a
    value, and those of which the family asks for a value.
    """
    model_type = facts.model_type.value
    family = find_family(facts.architecture.value, model_type)
    fixed = {key for condition, *_ in family.requires for key in names(condition)} if family else set()
    held = {key: fact.value for key, fact in config_defaults(model_type).items()} | facts.config
    keys = [key for key in ALIASES["norm_eps"] if key not in fixed and is_number(held.get(key)) is None]
    return {key: SHOWN_EPS * place for place, key in enumerate(keys, start=1)}


def with_eps(checkpoint: Path, eps: dict[str, float]) -> Path:
    """Make a checkpoint beside another one: the same weights, by links, and its config with `eps`."""
    folder = checkpoint.with_name(f"{checkpoint.name}-float32")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for file in checkpoint.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    config = msgspec.json.decode((checkpoint / "config.json").read_bytes()) | eps
    write_atomic(folder / "config.json", msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n")
    return folder

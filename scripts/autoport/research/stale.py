"""Whether config.json is still the one that Step 1 read."""

import os
from pathlib import Path

from autoport.errors import Refusal
from autoport.research.config import config_digest, load_config
from autoport.research.source import HubSource, open_source
from autoport.schema.facts import Facts


def what_changed(source: str, facts: Facts) -> str:
    """What became of config.json since research; empty where it is the same.

    A local file is read again. The hub is asked for the id of its content, and a hub that does not answer is taken
    for one where nothing changed.

    Args:
        source: What the port was started from: an absolute path, or a hub id.

    Raises:
        Refusal: what `load_config` refuses.
    """
    if facts.config_content:
        try:
            hub = HubSource(source)
        except Refusal:
            return ""
        same = hub.contents.get(hub.config_name) == facts.config_content
        return "" if same else "config.json changed on the hub since research"
    if not facts.config_digest or not Path(source).is_absolute():
        return ""
    if not os.path.isfile(facts.config_file):
        return "config.json is gone since research"
    same = config_digest(load_config(open_source(source))) == facts.config_digest
    return "" if same else "config.json changed since research"

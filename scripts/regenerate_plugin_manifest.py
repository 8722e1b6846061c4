#!/usr/bin/env python3
"""Write .claude-plugin/plugin.json anew."""

import json

from autoport.install.manifest import MANIFEST, plugin_manifest
from autoport.resources import bundle_root

path = bundle_root() / MANIFEST
path.parent.mkdir(exist_ok=True)
path.write_text(json.dumps(plugin_manifest(), indent=2) + "\n", encoding="utf-8")
print(path)

"""The plugin manifest for Claude Code, from the same source as everything else."""

from pathlib import Path
from typing import Any

import yaml

from autoport import __version__
from autoport.install.bundle import MAIN_SKILL, bundled_skills
from autoport.resources import bundle_root

MANIFEST = Path(".claude-plugin", "plugin.json")


def frontmatter(skill_file: Path) -> dict[str, Any]:
    """Return the YAML frontmatter of a SKILL.md."""
    values: dict[str, Any] = yaml.safe_load(skill_file.read_text(encoding="utf-8").split("---\n")[1])
    return values


def plugin_manifest() -> dict[str, Any]:
    """Return the content of `.claude-plugin/plugin.json`."""
    main = frontmatter(bundle_root() / "SKILL.md")
    others = [f"./skills/{name}" for name in bundled_skills() if name != MAIN_SKILL]
    return {
        "name": MAIN_SKILL,
        "version": __version__,
        "description": main["description"],
        "license": main["license"],
        "keywords": ["vllm", "neuron", "trainium", "model-porting"],
        "skills": ["./", *others],
    }

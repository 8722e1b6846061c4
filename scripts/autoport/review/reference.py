"""Where a rule of judgement sends its reader in the reference's modeling source."""

from collections.abc import Collection, Iterator
from pathlib import Path

from autoport.research.config_defaults import class_place
from autoport.schema.facts import Facts


def reference_places(facts: Facts, topics: Collection[str]) -> list[str]:
    """``path:line  subject`` of what the modeling file says of these topics, each line once; else the file alone."""
    path = modeling_path(facts)
    if path is None:
        return []
    found = dict.fromkeys(_places(facts, topics))
    return [f"{path.parent / place}" for place in found] or [str(path)]


def modeling_path(facts: Facts) -> Path | None:
    """The modeling file: transformers' own, or the one that came with the checkpoint; None when there is none."""
    name = facts.modeling.file
    place = class_place(str(facts.model_type.value))
    folders = [place[0].parent] if place else []
    if Path(facts.source).is_dir():
        folders.append(Path(facts.source))
    existing = [folder / name for folder in folders if name and (folder / name).is_file()]
    return existing[0] if existing else Path(name) if name else None


def _places(facts: Facts, topics: Collection[str]) -> Iterator[str]:
    subjects: dict[str, list[str]] = {}
    for finding in facts.modeling.findings:
        if finding.topic in topics:
            subjects.setdefault(finding.where, []).append(finding.subject)
    for where, names in subjects.items():
        yield f"{where}  {', '.join(names)}"

"""What the plugin already has is imported, not written again."""

import ast
from pathlib import Path

from autoport.review.finding import Finding, NotChecked, Subject, check, failed, judge, passed
from autoport.review.source import Class
from autoport.review.syntax import calls, dotted, last_name

# Shared classes of which a port never has its own version, whatever prefix it gives it.
NEVER_COPIED = ("ParallelLinear", "ShardedEmbedding", "Sampler", "Checkpoint")
READERS = {"safe_open", "load_file", "torch.load", "hf_hub_download", "snapshot_download"}


@check
def reimplemented(subject: Subject, modules: list[str]) -> list[Finding]:
    """No class or function of the port has the name of one that the plugin offers.

    Args:
        modules: Files or folders of the plugin's package that are looked through.
    """
    offered = _offered(subject, modules)
    if not offered:
        raise NotChecked(f"the workspace has none of {', '.join(modules)}")
    findings = []
    for file in subject.source.files:
        hits = []
        for name, node in file.functions.items():
            if name.lstrip("_") in offered:
                hits.append(
                    failed(
                        file.at(node), f"{name} is written again; import it from {offered[name.lstrip('_')]}"
                    )
                )
        for name, cls in file.classes.items():
            original = next((known for known in offered if known[0].isupper() and name.endswith(known)), "")
            if original and not _derives(Class(file, cls), original):
                text = f"{name} is written again; import {original} from {offered[original]}"
                if name == original or original.endswith(NEVER_COPIED):
                    hits.append(failed(file.at(cls), text))
                else:
                    hits.append(judge(file.at(cls), f"{text}, unless it differs"))
        findings += hits or [
            passed(file.at(file.tree), f"none of the {len(offered)} shared names is defined here")
        ]
    return findings


def _derives(cls: Class, original: str) -> bool:
    return any(last_name(base) == original for base in cls.node.bases)


def _offered(subject: Subject, modules: list[str]) -> dict[str, str]:
    """Public top-level names -> dotted module that defines them."""
    root = subject.workspace.plugin_root
    found: dict[str, str] = {}
    for module in modules:
        path = root / subject.workspace.package / module
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]:
            for name in _public_names(file):
                found.setdefault(name, ".".join(file.relative_to(root).with_suffix("").parts))
    return found


def _public_names(file: Path) -> list[str]:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return []
    return [
        node.name
        for node in tree.body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_")
    ]


@check
def checkpoint_reader(subject: Subject) -> list[Finding]:
    """Weights are read through the plugin's SafetensorsCheckpoint."""
    findings = []
    for file in subject.source.files:
        for call in calls(file.tree):
            name = dotted(call.func)
            if name in READERS or name.rpartition(".")[2] in READERS:
                findings.append(failed(file.at(call), f"{name} reads the checkpoint on its own"))
    for function in subject.source.load_path:
        for call in calls(function.node):
            if last_name(call.func) == "SafetensorsCheckpoint":
                findings.append(passed(function.file.at(call), "read through SafetensorsCheckpoint"))
    return findings or [
        failed(head.at, f"{head.name} does not use SafetensorsCheckpoint") for head in subject.source.heads
    ]

"""Names agree: classes over all files, the factory with the architecture, files with the layout."""

import ast
import builtins
from pathlib import Path

from autoport.package_workspace import PackageWorkspace
from autoport.review.finding import Finding, NotApplicable, Subject, check, failed, passed
from autoport.review.source import Class, SourceFile
from autoport.review.syntax import walk

HEAD_SUFFIXES = ("ForCausalLM", "ForConditionalGeneration", "ForEmbedding", "LMHeadModel")


def prefixes(subject: Subject) -> set[str]:
    """Class prefixes of the port: the plan's, or what its heads are called before ``ForCausalLM``."""
    if subject.plan:
        return {subject.plan.class_prefix}
    found = set()
    for head in subject.source.heads:
        for suffix in HEAD_SUFFIXES:
            if head.name.endswith(suffix):
                found.add(head.name.removesuffix(suffix))
    return found


@check
def class_prefix(subject: Subject) -> list[Finding]:
    """Every module of the port has the port's prefix; a name of the reference model was not left behind."""
    allowed = prefixes(subject)
    if not allowed:
        raise NotApplicable("no class of the port is named like a head (...ForCausalLM)")
    names = " or ".join(sorted(allowed))
    findings = []
    for cls in _modules(subject):
        if cls.name.lstrip("_").startswith(tuple(allowed)):
            findings.append(passed(cls.at, cls.name))
        else:
            findings.append(failed(cls.at, f"{cls.name} does not start with {names}"))
    return findings


def _modules(subject: Subject) -> list[Class]:
    return [
        cls for cls in subject.source.modules if any("Module" in ast.unparse(base) for base in cls.node.bases)
    ]


@check
def names_resolve(subject: Subject) -> list[Finding]:
    """Imports between the port's files find their names; every class used is defined or imported."""
    findings = []
    by_path = {file.path: file for file in subject.source.files}
    for file in subject.source.files:
        hits = [failed(file.at(node), text) for node, text in _bad_imports(file, by_path)]
        hits += [
            failed(file.at(node), f"{node.id} is neither defined nor imported")
            for node in _undefined_classes(file)
        ]
        findings += hits or [passed(file.at(file.tree), "every class is defined or imported")]
    return findings


def _bad_imports(file: SourceFile, by_path: dict[Path, SourceFile]) -> list[tuple[ast.AST, str]]:
    """Imports from the importing file's own folder and below that find no file, or no such name in it."""
    found: list[tuple[ast.AST, str]] = []
    for node in ast.walk(file.tree):
        if not isinstance(node, ast.ImportFrom) or node.level != 1 or not node.module:
            continue
        path = file.path.parent.joinpath(*node.module.split("."))
        target = by_path.get(path.with_suffix(".py")) or by_path.get(path / "__init__.py")
        if target:
            defined = _top_level_names(target) | {"*"}
            found += [(node, f"{node.module} has no {a.name}") for a in node.names if a.name not in defined]
        elif not path.is_dir():
            found.append((node, f"there is no {node.module}"))
    return found


def _top_level_names(file: SourceFile) -> set[str]:
    names = set(file.classes) | set(file.functions) | set(file.imports)
    for node in file.tree.body:
        for target in node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]:
            if isinstance(target, ast.Name):
                names.add(target.id)
    return names


def _undefined_classes(file: SourceFile) -> list[ast.Name]:
    """Uses of a CamelCase name that no assignment, definition, import or parameter of the file binds."""
    if "*" in file.imports:
        return []
    bound = set(file.imports) | set(dir(builtins))
    for node in walk(file.tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            bound.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
    return [
        node
        for node in walk(file.tree)
        if isinstance(node, ast.Name)
        and isinstance(node.ctx, ast.Load)
        and node.id not in bound
        and node.id[:1].isupper()
        and not node.id.isupper()
    ]


@check
def factory_name(subject: Subject) -> list[Finding]:
    """The package exports a class named exactly as the architecture."""
    architecture = subject.architecture
    out_of_tree = isinstance(subject.workspace, PackageWorkspace)
    home = "factory.py" if out_of_tree else "__init__.py"
    exported = [file for file in subject.source.files if file.path.name == home]
    if not exported:
        return [failed(f"{subject.source.files[0].relative}:1", f"the model folder has no {home}")]
    file = exported[0]
    classes = [cls for cls in subject.source.classes if cls.name == architecture]
    if architecture not in _top_level_names(file):
        return [failed(file.at(file.tree), f"{architecture} is not exported")]
    return [passed(cls.at, architecture) for cls in classes] or [
        failed(file.at(file.tree), f"{architecture} is exported and defined in no file of the port")
    ]


@check
def files_present(subject: Subject, files: list[str]) -> list[Finding]:
    """The port's files of the plugin's layout are there.

    Args:
        files: Paths below the workspace; ``{package}`` and ``{name}`` are filled in, ``*`` matches.
    """
    if isinstance(subject.workspace, PackageWorkspace):
        raise NotApplicable("the port is a package of its own")
    findings = []
    root = subject.workspace.root
    for pattern in files:
        path = pattern.format(package=subject.workspace.package, name=subject.name)
        found = sorted(root.glob(path))
        if found:
            findings.append(passed(f"{found[0].relative_to(root).as_posix()}:1", "is there"))
        else:
            findings.append(failed(f"{path}:1", "is missing"))
    return findings

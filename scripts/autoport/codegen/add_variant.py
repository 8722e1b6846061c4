"""Adding a variant to a model: its implementation, the factory's branches, and tests of each way to it."""

import ast
from pathlib import Path

import msgspec

from autoport.codegen.factory_edit import add_variant
from autoport.codegen.factory_layout import (
    Implementation,
    factories,
    parse,
    read_selection,
)
from autoport.codegen.render import Checked, identifier, render_python
from autoport.codegen.variant_tests import selection_cases
from autoport.errors import Problem, Refusal, refuse
from autoport.schema import Plan
from autoport.variants import FORMATS, STATE_FILE, Variant, check_variants, read_variants
from autoport.workspace import Port, write_atomic

# How a format's tensors are stored: template of the view that dequantizes them, and the view's class.
LAYOUTS = {
    "fp8": ("scaled", "ScaledWeight"),
    "int8": ("scaled", "ScaledWeight"),
    "mxfp4": ("mxfp4", "Mxfp4Weight"),
}
WEIGHTS = "quantized_weights.py"
NEEDED = ("load_weights", "weight_mappings")  # methods of the base that a quantized implementation overrides


class Added(msgspec.Struct):
    """What `run` did: the variant, the workspace paths that changed, and what is left to do by hand."""

    variant: Variant
    files: list[str]
    notes: list[str]


def declare(name: str, **declaration: tuple[object, ...]) -> Variant:
    """The variant `name`; one that is named as a weight format loads it and is chosen by its name."""
    known = FORMATS.get(name)
    return Variant(
        name,
        f"model_{name}",
        quantization=(name,) if known else (),
        formats=tuple(known or ()),
        **declaration,  # type: ignore[arg-type]
    )


def run(port: Port, variant: Variant, architecture: str = "") -> Added:
    """Add a variant to a model of the workspace; all or nothing as far as refusals go.

    The model's ``__init__.py`` and the registry are not touched. A factory that a person edited keeps the edits.

    Args:
        architecture: Name of the factory's class, for a file with several.

    Raises:
        Refusal: VAR-MODEL, VAR-DECLARATION, VAR-SYNTAX, VAR-LAYOUT, VAR-BASE; what `Port.write_files` refuses.
    """
    workspace, model = port.workspace, port.name
    path = workspace.model_dir(model) / "factory.py"
    factory = read_factory(port)
    module = parse(factory, path)
    architecture = choose_class(factories(module), architecture or planned(port), path)
    declared = read_variants(workspace, model)
    if variant not in declared:
        declared.append(variant)
        check_variants(declared, f"options of variant {variant.name!r}")
    selection = read_selection(module, architecture, path)
    base = selection.ending.implementation
    if variant.formats:
        check_base(path.parent / f"{base.module}.py", base.class_name)
    edited = add_variant(factory, architecture, variant, path)
    files = implementation(port, variant, base)
    files |= tests(port, variant, declared, architecture, edited.text)
    factory_path = path.relative_to(workspace.root).as_posix()
    ours = port.file_status(factory_path) == "ours"
    if ours:
        files[factory_path] = edited.text
    changed = port.write_files("add-variant", files).changed
    if not ours and edited.text != factory:
        write_atomic(path, edited.text.encode())
        changed = sorted([*changed, factory_path])
    port.write_state(STATE_FILE, declared[1:])
    return Added(variant, changed, edited.notes)


def read_factory(port: Port) -> str:
    """The text of the model's factory.py, its line ends as they are.

    Raises:
        Refusal: VAR-MODEL.
    """
    path = port.workspace.model_dir(port.name) / "factory.py"
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise refuse(
            "VAR-MODEL",
            f"{port.name!r} has no factory that can be read: {error}",
            path,
            f"port the model first: autoport port {port.name} SOURCE",
        ) from error


def planned(port: Port) -> str:
    """The architecture that the model's plan is for, empty without a plan."""
    return (
        port.read_state("plan.json", Plan, "analyze").architecture.hf_name
        if port.has_state("plan.json")
        else ""
    )


def choose_class(classes: list[str], architecture: str, where: Path) -> str:
    """The factory to edit.

    Raises:
        Refusal: VAR-MODEL.
    """
    if architecture in classes:
        return architecture
    if len(classes) == 1 and not architecture:
        return classes[0]
    found = f"factories {', '.join(classes)}" if classes else "no class that selects an implementation"
    raise refuse(
        "VAR-MODEL",
        found + (f", none named {architecture}" if architecture else ""),
        where,
        "name one with --architecture" if classes else "restore the factory",
    )


def check_base(path: Path, class_name: str) -> None:
    """Check that the base implementation loads its weights in the way that a quantized one changes.

    Raises:
        Refusal: VAR-BASE.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError) as error:
        raise refuse("VAR-BASE", f"cannot be read: {error}", path, "restore the implementation") from error
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name]
    methods = {node.name for cls in classes for node in cls.body if isinstance(node, ast.FunctionDef)}
    missing = [name for name in NEEDED if name not in methods]
    if missing:
        raise Refusal(
            *[
                Problem(
                    "VAR-BASE",
                    f"{class_name} has no method {name}",
                    str(path),
                    "write this variant by hand: references/registry-design.md",
                )
                for name in missing
            ]
        )


def implementation(port: Port, variant: Variant, base: Implementation) -> dict[str, str]:
    """The variant's module, and for a weight format what it shares with others: text by workspace path."""
    folder = port.workspace.model_dir(port.name).relative_to(port.workspace.root).as_posix()
    context = {
        "variant": variant,
        "package": port.workspace.package,
        "class_name": Checked(base.class_name),
        "base": Checked(base.module),
    }
    if not variant.formats:
        return {f"{folder}/{variant.module}.py": render_python("variant/plain.py.j2", **context)}
    layout, view = LAYOUTS[variant.name]
    base_text = (port.workspace.model_dir(port.name) / f"{base.module}.py").read_text(encoding="utf-8")
    context |= {"layout": layout, "view": Checked(view), "checks_keys": "unused_keys" in base_text}
    return {
        f"{folder}/{variant.module}.py": render_python("variant/quantized.py.j2", **context),
        f"{folder}/{WEIGHTS}": render_python(f"variant/{WEIGHTS}.j2", **context),
    }


def tests(
    port: Port, variant: Variant, declared: list[Variant], architecture: str, factory: str
) -> dict[str, str]:
    """Tests of the paths that select the variant, and of those that are refused: text by workspace path.

    Of a factory that a person wrote only the selection is tested: what its checks need of a config is not known.
    """
    where = port.workspace.model_dir(port.name) / "factory.py"
    selection = read_selection(parse(factory, where), architecture, where)
    cases = selection_cases(variant, declared)
    if not selection.is_generated:
        cases = [
            case
            for case in cases
            if case.module == variant.module and case.platform and "quantization_config" not in case.hf_config
        ]
    path = f"{port.workspace.variant_tests(port.name)}/test_{port.name}_{variant.name}.py"
    home = ".".join(identifier(part) for part in port.workspace.model_module(port.name).split("."))
    return {
        path: render_python(
            "tests/test_variant.py.j2",
            home=Checked(home),
            architecture=architecture,
            variant=variant,
            modules=sorted({selection.ending.implementation.module, *(item.module for item in declared[1:])}),
            cases=cases,
            is_generated=selection.is_generated,
            others=selection.others,
            hf_config=selection.entry[0],
            neuron_config=selection.entry[1],
        )
    }

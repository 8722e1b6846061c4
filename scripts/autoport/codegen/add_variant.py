"""Adding a variant to a model: its implementation, the factory's branches, and tests of each way to it."""

import ast
from pathlib import Path

import msgspec

from autoport.codegen.factory_edit import Implementation, add_variant, fallback
from autoport.codegen.render import Checked, identifier, render_python
from autoport.codegen.variant_tests import selection_cases
from autoport.errors import Problem, Refusal, refuse
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
    """What `run` did: the variant, and the workspace paths that changed."""

    variant: Variant
    files: list[str]


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


def run(port: Port, variant: Variant) -> Added:
    """Add a variant to a model of the workspace; all or nothing as far as refusals go.

    The model's ``__init__.py`` and the registry are not touched. A factory that a person edited keeps the edits.

    Raises:
        Refusal: VAR-MODEL, VAR-DECLARATION, VAR-SYNTAX, VAR-LAYOUT, VAR-BASE; what `Port.write_files` refuses.
    """
    workspace, model = port.workspace, port.name
    folder = workspace.model_dir(model)
    architecture, factory = read_factory(port)
    declared = read_variants(workspace, model)
    if variant not in declared:
        declared.append(variant)
        check_variants(declared, f"options of variant {variant.name!r}")
    base = fallback(factory, architecture, folder / "factory.py")
    if variant.formats:
        check_base(folder / f"{base.module}.py", base.class_name)
    edited = add_variant(factory, architecture, variant, folder / "factory.py")
    files = implementation(port, variant, base)
    files |= tests(port, variant, declared, architecture)
    factory_path = (folder / "factory.py").relative_to(workspace.root).as_posix()
    ours = port.file_status(factory_path) == "ours"
    if ours:
        files[factory_path] = edited
    changed = port.write_files("add-variant", files).changed
    if not ours and edited != factory:
        write_atomic(folder / "factory.py", edited.encode())
        changed = sorted([*changed, factory_path])
    port.write_state(STATE_FILE, declared[1:])
    return Added(variant, changed)


def read_factory(port: Port) -> tuple[str, str]:
    """The architecture that the model's package exports, and the text of factory.py.

    Raises:
        Refusal: VAR-MODEL.
    """
    folder = port.workspace.model_dir(port.name)
    try:
        factory = (folder / "factory.py").read_text()
        names = [node.name for node in ast.parse(factory).body if isinstance(node, ast.ClassDef)]
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise refuse(
            "VAR-MODEL",
            f"{port.name!r} has no factory that can be read: {error}",
            folder / "factory.py",
            f"port the model first: autoport port {port.name} SOURCE",
        ) from error
    if not names:
        raise refuse("VAR-MODEL", "no class in it", folder / "factory.py", "restore the factory")
    return names[0], factory


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
    context |= {"layout": layout, "view": Checked(view)}
    return {
        f"{folder}/{variant.module}.py": render_python("variant/quantized.py.j2", **context),
        f"{folder}/{WEIGHTS}": render_python(f"variant/{WEIGHTS}.j2", **context),
    }


def tests(port: Port, variant: Variant, declared: list[Variant], architecture: str) -> dict[str, str]:
    """Tests of the paths that select the variant, and of those that are refused: text by workspace path."""
    path = f"{port.workspace.variant_tests(port.name)}/test_{port.name}_{variant.name}.py"
    home = ".".join(identifier(part) for part in port.workspace.model_module(port.name).split("."))
    return {
        path: render_python(
            "tests/test_variant.py.j2",
            home=Checked(home),
            architecture=architecture,
            variant=variant,
            modules=[item.module for item in declared],
            cases=selection_cases(variant, declared),
        )
    }

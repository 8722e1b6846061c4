"""Adding a variant to a model: its implementation, the factory's branches, and tests of each way to it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import msgspec

from autoport.api_generation import neuron_config_fields
from autoport.codegen.factory_edit import FORMAT_READER, add_variant
from autoport.codegen.factory_layout import (
    Implementation,
    factories,
    parse,
    read_selection,
)
from autoport.codegen.out_of_tree import PLUGIN_API, own_files
from autoport.codegen.render import Checked, identifier, render_python
from autoport.codegen.variant_tests import checkpoints, selection_cases
from autoport.errors import Problem, Refusal, refuse
from autoport.files import write_atomic
from autoport.package_workspace import PackageWorkspace
from autoport.port_state import Port
from autoport.schema.plan import Plan
from autoport.variants import FORMATS, STATE_FILE, Variant, check_variants, read_variants
from autoport.workspace import Workspace

# How a format's tensors are stored: template of the view that dequantizes them, and the view's class.
LAYOUTS = {
    "fp8": ("scaled", "ScaledWeight"),
    "fp8_block": ("block_scaled", "BlockScaledWeight"),
    "int8": ("scaled", "ScaledWeight"),
    "mxfp4": ("mxfp4", "Mxfp4Weight"),
}
WEIGHTS = "quantized_weights.py"
READER = "SafetensorsCheckpoint"  # the plugin's, through which a base without `weight_mappings` has to load
BASE_EXAMPLE = (
    "give the class in that file `from_configs(cls, hf_config, ...)` that returns `cls(config)`, and "
    "`load_weights(self, checkpoint_path, device, cache_dir=None)` that calls `SafetensorsCheckpoint("
    "checkpoint_path, cache_dir).load_sharded_pipelined(rank, size, self, self.weight_mappings(), device)`, where "
    "`weight_mappings` returns the keys of each parameter, e.g. {'lm_head.weight': 'model.embed_tokens.weight'}"
)


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
        **{field: tuple(_once(values)) for field, values in declaration.items()},  # type: ignore[arg-type]
    )


def _once(values: tuple[object, ...]) -> Iterator[object]:
    """The values without repetitions; conditions can have lists, which are not hashable."""
    for position, value in enumerate(values):
        if value not in values[:position]:
            yield value


def run(
    port: Port, variant: Variant, architecture: str = "", force: bool = False, keep_edited: bool = False
) -> Added:
    """Add a variant to a model of the workspace; all or nothing as far as refusals go.

    The model's ``__init__.py`` and the registry are not touched. A factory that a person edited keeps the edits.

    Args:
        architecture: Name of the factory's class, for a file with several.
        force: Overwrite files of an earlier run that a person edited; the factory keeps its edits all the same.
        keep_edited: Keep them, and write the new text beside each.

    Raises:
        Refusal: VAR-CONDITION, VAR-MODEL, VAR-DECLARATION, VAR-SYNTAX, VAR-LAYOUT, VAR-BASE, VAR-CHANGED; what
            `Port.write_files` refuses.
    """
    workspace, model = port.workspace, port.name
    check_fields(workspace, variant)
    path = workspace.model_dir(model) / "factory.py"
    factory = read_factory(port)
    module = parse(factory, path)
    architecture = choose_class(factories(module), architecture or planned(port), path)
    declared = read_variants(workspace, model)
    if variant not in declared:
        declared.append(variant)
        check_variants(declared, "arguments of add-variant")
    base = read_selection(module, architecture, path).ending.implementation
    check_alone(path.parent / f"{variant.module}.py", base)
    is_mapped = not variant.formats or reads_mappings(path.parent / f"{base.module}.py", base.class_name)
    home, files = format_reader(port)
    factory_path = path.relative_to(workspace.root).as_posix()
    edited = add_variant(factory, architecture, variant, path, home)
    files = (files if variant.formats else {}) | implementation(port, variant, base, is_mapped)
    files |= tests(port, variant, declared, architecture, edited.text)
    files |= plugin_api(port, files | {factory_path: edited.text})
    if read_factory(port) != factory:
        raise refuse("VAR-CHANGED", "changed while it was being edited", path, "run the command again")
    ours = port.file_status(factory_path) == "ours"
    if ours:
        files[factory_path] = edited.text
    written = port.write_files("add-variant", files, force, keep_edited)
    changed = written.changed + written.beside
    if not ours and edited.text != factory:
        write_atomic(path, edited.text.encode())
        changed = sorted([*changed, factory_path])
    port.write_state(STATE_FILE, declared[1:])
    return Added(variant, changed, edited.notes)


def check_fields(workspace: Workspace, variant: Variant) -> None:
    """Check that the plugin's configuration has what the conditions read of it, as far as its file can be read.

    Raises:
        Refusal: VAR-CONDITION for each field that it does not have.
    """
    known = neuron_config_fields(workspace.plugin_root, workspace.package)
    problems = []
    for option, conditions in (("when", variant.when), ("require", variant.require)):
        for condition in conditions:
            first, *rest = condition.field.split(".")
            if known and first == "neuron_config" and rest[0] not in known:
                found = f"{condition}: the plugin's neuron_config has no field {rest[0]!r}"
                next_step = f"name one of {', '.join(sorted(known))}"
                problems.append(Problem("VAR-CONDITION", found, f"option --{option}", next_step))
    if problems:
        raise Refusal(*problems)


def plugin_api(port: Port, files: dict[str, str]) -> dict[str, str]:
    """Of a package out of tree, what it uses of the plugin with these files; nothing where a person edited that."""
    path = f"{folder_of(port)}/{PLUGIN_API}"
    is_ours = isinstance(port.workspace, PackageWorkspace) and port.file_status(path) == "ours"
    if not (is_ours and port.has_state("plan.json")):
        return {}
    assert isinstance(port.workspace, PackageWorkspace)
    names = {
        Path(name).name: text for name, text in files.items() if Path(name).parent == Path(folder_of(port))
    }
    plan = port.read_state("plan.json", Plan, "analyze")
    return {path: own_files(port.workspace, plan, names)[PLUGIN_API]}


def read_factory(port: Port) -> str:
    """The text of the model's factory.py, its line ends as they are.

    Raises:
        Refusal: VAR-MODEL.
    """
    path = port.workspace.model_dir(port.name) / "factory.py"
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        models = sorted(item.parent.name for item in path.parent.parent.glob("*/factory.py"))
        raise refuse(
            "VAR-MODEL",
            f"{port.name!r} has no factory that can be read: {getattr(error, 'strerror', None) or error}",
            path,
            f"name one of {', '.join(models) or 'no model'}, or port it first: autoport port {port.name} SOURCE",
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


def reads_mappings(path: Path, class_name: str) -> bool:
    """Whether the base has its checkpoint's keys in `weight_mappings`; else only its `load_weights` has them.

    Raises:
        Refusal: VAR-BASE when a quantized implementation could not change what the base loads.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        words = getattr(error, "strerror", None) or error
        raise refuse("VAR-BASE", f"cannot be read: {words}", path, "restore the implementation") from error
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name]
    methods = {node.name: node for cls in classes for node in cls.body if isinstance(node, ast.FunctionDef)}
    if "load_weights" in methods and "weight_mappings" in methods:
        return True
    imported = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    has_reader = any(alias.name == READER and not alias.asname for node in imported for alias in node.names)
    problems = []
    if "load_weights" not in methods:
        problems.append(f"{class_name} has no method load_weights of its own")
    elif not (has_reader and _calls(methods["load_weights"], READER)):
        problems.append(f"load_weights of {class_name} does not read through {READER}, imported at the top")
    if not ("from_configs" in methods and _calls(methods["from_configs"], "cls")):
        problems.append(f"from_configs of {class_name} does not make cls(...), so that no subclass is made")
    if problems:
        raise Refusal(*[Problem("VAR-BASE", found, str(path), BASE_EXAMPLE) for found in problems])
    return False


def _calls(method: ast.FunctionDef, name: str) -> bool:
    calls = (node.func for node in ast.walk(method) if isinstance(node, ast.Call))
    return any(isinstance(called, ast.Name) and called.id == name for called in calls)


def format_reader(port: Port) -> tuple[str, dict[str, str]]:
    """The model's module that has `checkpoint_format`, and its text by workspace path where it is not there yet."""
    config = port.workspace.model_dir(port.name) / "config.py"
    try:
        tree = ast.parse(config.read_bytes())
    except (OSError, SyntaxError, ValueError):
        tree = ast.Module([], [])
    if any(isinstance(node, ast.FunctionDef) and node.name == FORMAT_READER for node in tree.body):
        return "config", {}
    text = render_python("variant/checkpoint_format.py.j2")
    return FORMAT_READER, {f"{folder_of(port)}/{FORMAT_READER}.py": text}


def folder_of(port: Port) -> str:
    """The model's folder below the workspace."""
    return port.workspace.model_dir(port.name).relative_to(port.workspace.root).as_posix()


def implementation(port: Port, variant: Variant, base: Implementation, is_mapped: bool) -> dict[str, str]:
    """The variant's module, and for a weight format what it shares with others: text by workspace path."""
    folder = folder_of(port)
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
    context |= {"layout": layout, "view": Checked(view), "mapped": is_mapped}
    context |= {"checks_keys": "unused_keys" in base_text}
    return {
        f"{folder}/{variant.module}.py": render_python("variant/quantized.py.j2", **context),
        f"{folder}/{WEIGHTS}": render_python(f"variant/{WEIGHTS}.j2", **context),
    }


def check_alone(path: Path, base: Implementation) -> None:
    """Check that the variant's module is not the one of another factory in the same file.

    Raises:
        Refusal: VAR-DECLARATION.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    bases = [
        node for node in tree.body if isinstance(node, ast.ImportFrom) and node.names[0].asname == "Base"
    ]
    if bases and base.class_name not in classes:
        raise refuse(
            "VAR-DECLARATION",
            f"it is the implementation of {bases[0].names[0].name}, another factory of the file",
            path,
            "add the variant under another name",
        )


def tests(
    port: Port, variant: Variant, declared: list[Variant], architecture: str, factory: str
) -> dict[str, str]:
    """Tests of the paths that select the variant, and of those that are refused: text by workspace path.

    Those of the variants that were there are written again, as the new one may take a platform from them, unless
    a person edited them. Of a factory that a person wrote only the selection is tested: what its checks need of a
    config is not known.
    """
    where = port.workspace.model_dir(port.name) / "factory.py"
    module = parse(factory, where)
    selection = read_selection(module, architecture, where)
    home = ".".join(identifier(part) for part in port.workspace.model_module(port.name).split("."))
    others = declared[1:] if len(factories(module)) == 1 else []
    files = {}
    for item in [variant, *others]:
        path = f"{port.workspace.variant_tests(port.name)}/test_{port.name}_{item.name}.py"
        if item != variant and port.file_status(path) != "ours":
            continue
        cases = selection_cases(item, declared)
        if not selection.is_generated:
            cases = [case for case in cases if case.module == item.module and case.platform]
        files[path] = render_python(
            "tests/test_variant.py.j2",
            home=Checked(home),
            architecture=architecture,
            variant=item,
            modules=sorted(
                {selection.ending.implementation.module, *(other.module for other in declared[1:])}
            ),
            cases=cases,
            checkpoints=checkpoints(item),
            is_generated=selection.is_generated,
            others=selection.others,
            hf_config=selection.entry[0],
            neuron_config=selection.entry[1],
        )
    return files

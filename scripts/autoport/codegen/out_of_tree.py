"""What a package outside the plugin's checkout has beside the model: registration, metadata, a check."""

import ast
import contextlib
import shlex
from collections.abc import Iterator, Mapping

from autoport.api_generation import parse, read_api
from autoport.codegen.render import identifier, render, render_python
from autoport.errors import refuse
from autoport.package_workspace import PackageWorkspace
from autoport.port_state import Port
from autoport.resources import simulator_dir
from autoport.schema.plan import Plan
from autoport.step import Options, Outcome
from autoport.workspace import Workspace

PLUGIN_API = "plugin_api.py"
TEMPLATES = {"__init__.py": "out_of_tree/init.py.j2", PLUGIN_API: "out_of_tree/plugin_api.py.j2"}

# Module of the plugin -> name -> what the model passes to it by keyword.
Used = dict[str, dict[str, tuple[str, ...]]]


def distribution(workspace: Workspace) -> str:
    """Name of the package for pip, empty in a checkout."""
    return workspace.distribution if isinstance(workspace, PackageWorkspace) else ""


def own_files(workspace: PackageWorkspace, plan: Plan, written: Mapping[str, str]) -> dict[str, str]:
    """Text by name of the files that take the place of a model's `__init__.py`.

    What the model uses of the plugin is written down in one of them.

    Args:
        written: Text by name of the model's files that are about to change; the others are as they are.
    """
    model_files = _modules(workspace) | dict(written)
    context = _context(workspace, plan.architecture.hf_name) | {
        "generated_for": generation(workspace),
        "used": used_api(model_files, workspace.package),
    }
    return {name: render_python(template, **context) for name, template in TEMPLATES.items()}


def _modules(workspace: PackageWorkspace) -> dict[str, str]:
    """Text by name of the package's modules that are the model's."""
    texts = {}
    for path in workspace.model_dir(workspace.name).glob("*.py"):
        if path.name not in TEMPLATES:
            with contextlib.suppress(OSError, UnicodeDecodeError, SyntaxError, ValueError):
                text = path.read_text(encoding="utf-8")
                ast.parse(text)
                texts[path.name] = text
    return texts


def register(port: Port, workspace: PackageWorkspace, architecture: str, options: Options) -> Outcome:
    """Write the entry point through which vLLM finds the package.

    Raises:
        Refusal: PORT-ORDER, REG-CONFLICT, what `Port.write_files` refuses.
    """
    if not (workspace.model_dir(port.name) / "__init__.py").is_file():
        raise refuse(
            "PORT-ORDER",
            "the model is not generated yet",
            workspace.model_dir(port.name),
            f"run '{port.command('generate')}'",
        )
    check_free(workspace, architecture)
    context = _context(workspace, identifier(architecture))
    files = {
        "pyproject.toml": render("out_of_tree/pyproject.toml.j2", **context),
        "tests/test_registration.py": render_python("out_of_tree/test_registration.py.j2", **context),
    }
    written = port.write_files("register", files, options.force, options.keep_edited)
    only = (
        "; checked against the API and registry of the simulator only" if against_simulator(workspace) else ""
    )
    return Outcome(
        "done",
        f"{architecture} -> {workspace.module} in {workspace.root}{only}{written}",
        files=written.changed + written.beside,
    )


def check_free(workspace: PackageWorkspace, architecture: str) -> None:
    """Stop when the plugin registers the architecture itself.

    Raises:
        Refusal: REG-CONFLICT.
    """
    if architecture not in registered_architectures(workspace):
        return
    bundled = workspace.plugin_root == simulator_dir()
    plugin = "the bundled simulator, which stands for the plugin," if bundled else "the plugin"
    again = ["autoport", "port", workspace.name, "--out-of-tree", str(workspace.root), "--workspace"]
    raise refuse(
        "REG-CONFLICT",
        f"{plugin} registers {architecture!r} itself, and its row would win over the package's",
        workspace.registry_path,
        (
            f"pass the plugin's checkout: {shlex.join(again)} CHECKOUT; where that has a row, too, "
            if bundled
            else ""
        )
        + "serve the plugin's model, or port into the checkout with --replace-row",
    )


def registered_architectures(workspace: Workspace) -> set[str]:
    """Strings of the rows of the plugin's registry."""
    pairs = (node for node in ast.walk(parse(workspace.registry_path)) if isinstance(node, ast.Tuple))
    firsts = (node.elts[0] for node in pairs if len(node.elts) == 2)
    return {str(first.value) for first in firsts if isinstance(first, ast.Constant)}


def against_simulator(workspace: Workspace) -> bool:
    """Whether a package was made for the simulator, and not with the plugin's checkout."""
    return isinstance(workspace, PackageWorkspace) and (
        read_api(workspace.plugin_root, workspace.package).simulator
    )


def generation(workspace: Workspace) -> str:
    """The plugin whose API the package was generated for, e.g. ``"vllm_neuron 0.24.1"``."""
    api = read_api(workspace.plugin_root, workspace.package)
    return f"{workspace.package} {'simulator' if api.simulator else api.version or 'of unknown version'}"


def used_api(files: Mapping[str, str], package: str) -> Used:
    """What Python files use of the plugin: names by module, and the keywords that they are called with."""
    used: dict[str, dict[str, set[str]]] = {}
    for text in files.values():
        tree = ast.parse(text)
        modules, names = _imports(tree, package)
        for module, name in names.values():
            used.setdefault(module, {}).setdefault(name, set())
        for node in ast.walk(tree):
            keywords: set[str] = set()
            target = node
            if isinstance(node, ast.Call):
                keywords, target = {keyword.arg for keyword in node.keywords if keyword.arg}, node.func
            found = _resolve(target, modules, names)
            if found:
                used.setdefault(found[0], {}).setdefault(found[1], set()).update(keywords)
    return {
        module: {name: tuple(sorted(keywords)) for name, keywords in sorted(names.items())}
        for module, names in sorted(used.items())
    }


def _resolve(
    node: ast.AST, modules: Mapping[str, str], names: Mapping[str, tuple[str, str]]
) -> tuple[str, str] | None:
    """Module and name that an expression stands for, if it is one of the plugin's."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
        return modules[node.value.id], node.attr
    return None


def _imports(tree: ast.Module, package: str) -> tuple[dict[str, str], dict[str, tuple[str, str]]]:
    """What is bound to a module of the plugin, and what to a (module, name) in one."""
    modules: dict[str, str] = {}
    names: dict[str, tuple[str, str]] = {}
    for module, name, bound in _imported(tree):
        if f"{module}.".startswith(f"{package}."):
            if name:
                names[bound] = (module, name)
            else:
                modules[bound] = module
    return modules, names


def _imported(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "", alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((str(node.module), alias.name, alias.asname or alias.name) for alias in node.names)


def _context(workspace: PackageWorkspace, architecture: str) -> dict[str, object]:
    return {
        "package": workspace.package,
        "module": workspace.module,
        "distribution": workspace.distribution,
        "hf_name": architecture,
    }

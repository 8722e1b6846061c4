"""Step 5: the architecture's row in the plugin's `registry.py`."""

import keyword
import re
from collections.abc import Sequence

from autoport.codegen import out_of_tree
from autoport.codegen.registry_edit import Row, add_row
from autoport.codegen.render import identifier
from autoport.errors import Problem, Refusal, refuse
from autoport.files import write_atomic
from autoport.naming import class_prefix
from autoport.package_workspace import PackageWorkspace
from autoport.port_state import Port
from autoport.registry import read_registry, row_origins
from autoport.schema.plan import Plan
from autoport.step import Options, Outcome


def run(port: Port, options: Options) -> Outcome:
    """Add the row and its import, unless the user left the architecture to another model.

    For a package out of tree, write its entry point instead.

    Raises:
        Refusal: What `edited` refuses; PORT-ORDER; REG-CHANGED when the file changes meanwhile.
    """
    architecture = port.read_state("plan.json", Plan, "analyze").architecture.hf_name
    path = port.workspace.registry_path
    if isinstance(port.workspace, PackageWorkspace):
        if options.aliases:
            raise refuse(
                "REG-ALIAS",
                f"a package out of tree registers one architecture, {architecture}",
                "option --alias",
                "leave it out; for a checkpoint with another spelling, vLLM has --hf-overrides",
            )
        return out_of_tree.register(port, port.workspace, architecture, options)
    port.manifest.unregistered = stays_out(port, options)
    if port.manifest.unregistered:
        origin = registered_from(port, architecture)
        stays = f"{architecture} stays with {origin}" if origin else f"no row for {architecture}"
        return Outcome("done", f"not registered (--no-register): {stays}")
    if not (port.workspace.model_dir(port.name) / "__init__.py").is_file():
        raise refuse(
            "PORT-ORDER",
            "the model is not generated yet",
            path.parent / port.name,
            f"run '{port.command('generate')}'",
        )
    with port.workspace.lock("registry"):
        before, after = edited(port, architecture, options.replace_row, options.aliases)
        registered = f"{', '.join(dict.fromkeys((architecture, *options.aliases)))} -> {port.name}"
        registered += _also_in(port, architecture)
        if after == before:
            return Outcome("done", registered)
        if path.read_bytes() != before:
            raise refuse("REG-CHANGED", "changed while it was being edited", path, "run the command again")
        write_atomic(path, after, staging=port.state_dir / "staging")
    return Outcome("done", registered, files=[str(path.relative_to(port.workspace.root))])


def _also_in(port: Port, architecture: str) -> str:
    """A remark on the checkout's other packages that have a class for the architecture."""
    others = [
        factory.parent.name
        for factory in sorted(port.workspace.registry_path.parent.glob("*/factory.py"))
        if factory.parent.name != port.name
        and re.search(rf"^class {architecture}\b", factory.read_text(errors="replace"), re.MULTILINE)
    ]
    if not others:
        return ""
    places = ", ".join(f"{name}/" for name in others)
    return f"; {places} has this class, too: the row serves every {architecture} with this port"


def stays_out(port: Port, options: Options) -> bool:
    """Whether the row is left to another model: by the options, else as the port remembers it."""
    if options.no_register is None:
        return port.manifest.unregistered and not options.replace_row
    return options.no_register


def edited(
    port: Port, architecture: str, replace_row: bool, aliases: Sequence[str] = ()
) -> tuple[bytes, bytes]:
    """The registry's text as it is, and with the port's row; nothing is written.

    Args:
        aliases: Other spellings of the architecture that get a row of the same class.

    Raises:
        Refusal: What `add_row` refuses; REG-MISSING; REG-ALIAS.
    """
    path = port.workspace.registry_path
    architecture = identifier(architecture)
    check_aliases(aliases)
    local = class_prefix(port.name) + architecture
    rows = [Row(identifier(name), port.name, local, architecture) for name in (architecture, *aliases)]
    before = text = read_registry(path)
    try:
        for row in rows:
            text = add_row(text, row, replace_row)
    except Refusal as refusal:
        raise Refusal(
            *(Problem(p.rule, p.found, str(path), p.next_step) for p in refusal.problems)
        ) from refusal
    return before.encode(), text.encode()


def check_aliases(aliases: Sequence[str]) -> None:
    """Check that the strings can be architectures.

    Raises:
        Refusal: REG-ALIAS for each that cannot.
    """
    wrong = [
        name
        for name in aliases
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or keyword.iskeyword(name)
    ]
    if wrong:
        next_step = "pass what is in 'architectures' of config.json, e.g. --alias PhimoeForCausalLM"
        raise Refusal(
            *[
                Problem("REG-ALIAS", f"{name!r} is no architecture", "option --alias", next_step)
                for name in wrong
            ]
        )


def registered_from(port: Port, architecture: str) -> str:
    """Where the class of the architecture's row comes from, ``".llama3:LlamaForCausalLM"``; empty without a row."""
    workspace = port.workspace
    if isinstance(workspace, PackageWorkspace):
        if architecture in out_of_tree.registered_architectures(workspace):
            return f"the plugin {workspace.plugin_root}"
        return f".{port.name}:{architecture}" if workspace.registration_path.is_file() else ""
    try:
        text = port.workspace.registry_path.read_text(encoding="utf-8")
        return row_origins(text).get(architecture, "")
    except (OSError, UnicodeDecodeError, Refusal):
        return ""


def is_registered(port: Port, architecture: str) -> bool:
    """Whether the plugin takes the port's class for the architecture."""
    return registered_from(port, architecture).startswith(f".{port.name}:")


def file_with_row(port: Port) -> str:
    """The file that has the port's row, relative to the workspace; empty where it has none, or left it out."""
    if port.manifest.unregistered or "register" not in port.manifest.steps:
        return ""
    architecture = port.read_state("plan.json", Plan, "analyze").architecture.hf_name
    if not is_registered(port, architecture):
        return ""
    return str(port.workspace.registration_path.relative_to(port.workspace.root))


def require_row(port: Port) -> None:
    """Stop unless the plugin would serve this port, rather than another model of the same architecture.

    Raises:
        Refusal: REG-NONE.
    """
    architecture = port.read_state("plan.json", Plan, "analyze").architecture.hf_name
    if not is_registered(port, architecture):
        origin = registered_from(port, architecture)
        found = f"{architecture} is served from {origin}" if origin else f"no row for {architecture}"
        command = f"autoport register {port.name}" + (" --replace-row" if origin else "")
        raise refuse("REG-NONE", f"{found}, not from this port", port.workspace.registry_path, command)

"""Step 5: the architecture's row in the plugin's `registry.py`."""

from autoport.codegen.registry_edit import Row, add_row
from autoport.codegen.render import identifier
from autoport.errors import Problem, Refusal, refuse
from autoport.port import Options, Outcome
from autoport.schema import Plan
from autoport.workspace import Port, write_atomic


def run(port: Port, options: Options) -> Outcome:
    """Add the row and its import.

    Raises:
        Refusal: What `add_row` refuses; REG-MISSING; REG-CHANGED when the file changes meanwhile.
    """
    plan = port.read_state("plan.json", Plan, "analyze")
    architecture = identifier(plan.architecture.hf_name)
    path = port.workspace.registry_path
    relative = str(path.relative_to(port.workspace.root))
    if not (port.workspace.model_dir(port.name) / "__init__.py").is_file():
        raise refuse(
            "PORT-ORDER",
            "the model is not generated yet",
            path.parent / port.name,
            f"run 'autoport generate {port.name}'",
        )
    row = Row(architecture, port.name, alias=plan.class_prefix + architecture)
    with port.workspace.lock("registry"):
        try:
            before = path.read_bytes()
            after = add_row(before.decode(), row, options.replace_row).encode()
        except OSError as error:
            raise refuse(
                "REG-MISSING", f"cannot be read: {error.strerror}", path, "restore the plugin's registry.py"
            ) from error
        except UnicodeDecodeError as error:
            raise refuse("REG-SYNTAX", f"not UTF-8: {error}", path, "correct the file") from error
        except Refusal as refusal:
            raise Refusal(
                *(Problem(p.rule, p.found, str(path), p.next_step) for p in refusal.problems)
            ) from refusal
        if after == before:
            return Outcome("done", f"{architecture} is registered already")
        if path.read_bytes() != before:
            raise refuse("REG-CHANGED", "changed while it was being edited", path, "run the command again")
        write_atomic(path, after, staging=port.state_dir / "staging")
    return Outcome("done", f"{architecture} -> {port.name}", files=[relative])

"""`autoport unregister`: the opposite of `autoport register`."""

from pathlib import Path

from autoport.cli.arguments import AsJson, Name, WorkspacePath


def command(name: Name, workspace: WorkspacePath = Path(), as_json: AsJson = False) -> None:
    """Take a model's rows, and the import that is unused then, out of the plugin's registry.py."""
    from autoport.cli.output import print_json
    from autoport.codegen.registry_rows import unregister
    from autoport.port_state import Port
    from autoport.workspace import Workspace

    port = Port(Workspace.find(workspace), name)
    with port.lock():
        removed = unregister(port)
    if as_json:
        print_json({"removed": removed})
    else:
        print(f"removed: {', '.join(removed)}" if removed else f"{name} has no row")

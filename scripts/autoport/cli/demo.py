"""`autoport demo`: from nothing to a proven port."""

from pathlib import Path
from typing import Annotated

import typer

NAME = "yi"


def command(
    workspace: Annotated[
        Path | None,
        typer.Option("--workspace", "-w", metavar="DIR", help="A new folder (default: a temporary one)."),
    ] = None,
) -> None:
    """Port a tiny Yi-shaped checkpoint into a workspace made from the simulator, and prove the port."""
    import tempfile

    from autoport.cli import port
    from autoport.cli.output import note, working
    from autoport.port_state import Port
    from autoport.resources import references_dir
    from autoport.schema.proof import Proof
    from autoport.validation.ranks import check_installed
    from autoport.validation.summary import summarise
    from autoport.validation.twin import build_from
    from autoport.workspace import Workspace

    check_installed()
    made = Workspace.create(workspace or Path(tempfile.mkdtemp(prefix="autoport-demo-"), "workspace"))
    with working("Building a tiny checkpoint with the shape of Yi-6B ..."):
        config = references_dir() / "yi-6b-config.json"
        checkpoint = build_from(str(config), made.root / "checkpoints" / "yi-tiny", seed=0)
    print(f"Workspace:  {made.root}")
    print(f"Checkpoint: {checkpoint}")
    note(f"$ autoport port {NAME} {checkpoint} --workspace {made.root} --dry-run")
    try:
        port.command(NAME, str(checkpoint), workspace=made.root, dry_run=True)
    finally:
        state = Port(made, NAME)
        if state.has_state("proof.json"):
            proof = state.read_state("proof.json", Proof, "prove")
            print(f"Proof: {'green' if proof.passed else 'RED'}: {summarise(proof)}")

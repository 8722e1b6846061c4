"""`autoport add-variant`: another implementation behind a model's factory."""

from pathlib import Path
from typing import Annotated

import typer

from autoport.cli.arguments import AsJson, Force, KeepEdited, WorkspacePath


def command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model of the workspace, e.g. llama3.", show_default=False)
    ],
    variant: Annotated[
        str,
        typer.Argument(
            metavar="VARIANT", help="fp8, fp8_block, int8, mxfp4, or a name of your own.", show_default=False
        ),
    ],
    workspace: WorkspacePath = Path(),
    platform: Annotated[
        list[str], typer.Option("--platform", help="Where it runs, e.g. trn3; repeat (default: anywhere).")
    ] = [],
    default_on: Annotated[
        list[str],
        typer.Option("--default-on", help="Platform that selects it when nothing else does; repeat."),
    ] = [],
    when: Annotated[
        list[str],
        typer.Option(
            "--when",
            metavar="'FIELD OP VALUE'",
            help="Select it when the Hugging Face config (or neuron_config.FIELD) says so; repeat for all of them.",
        ),
    ] = [],
    require: Annotated[
        list[str],
        typer.Option(
            "--require", metavar="'FIELD OP VALUE'", help="Refuse it where this does not hold; repeat."
        ),
    ] = [],
    architecture: Annotated[
        str,
        typer.Option("--architecture", metavar="CLASS", help="The factory, where factory.py has several."),
    ] = "",
    force: Force = False,
    keep_edited: KeepEdited = False,
    as_json: AsJson = False,
) -> None:
    """Add an implementation to a model: its file, the factory's branches, and a test of each path to it."""
    from autoport.cli.output import note, print_json
    from autoport.codegen.add_variant import declare, run
    from autoport.port_state import Port
    from autoport.variants import parse_conditions
    from autoport.workspace import Workspace

    declared = declare(
        variant,
        platforms=tuple(platform),
        default_on=tuple(default_on),
        **parse_conditions(when=when, require=require),
    )
    port = Port(Workspace.find(workspace), model)
    with port.lock():
        added = run(port, declared, architecture, force, keep_edited)
    if as_json:
        print_json(added)
        return
    print(f"{variant} is an implementation of {model}" if added.files else f"{model} has {variant} already")
    for file in added.files:
        print(f"  {file}")
    for line in added.notes:
        note(f"by hand: {line}")
    test = f"{port.workspace.variant_tests(model)}/test_{model}_{variant}.py"
    print(f"Next, in {port.workspace.root}: python -m pytest {test}")

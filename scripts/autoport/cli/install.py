"""`autoport install`: the skills, where a coding agent finds them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoport.cli.arguments import AsJson
from autoport.install.agents import AGENTS, Scope

if TYPE_CHECKING:
    from autoport.install.installer import Change

AgentName = Annotated[
    str,
    typer.Option("--agent", metavar="|".join(AGENTS), help="The coding agent to install for."),
]
InstallScope = Annotated[
    Scope, typer.Option("--scope", help="For one project, or for all projects of the user.")
]
Project = Annotated[Path, typer.Option("--project", metavar="DIR", help="The project of --scope project.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would change.")]
ForceEdited = Annotated[bool, typer.Option("--force", help="Lose changes made to installed files.")]


def command(
    agent: AgentName = "",
    scope: InstallScope = Scope.PROJECT,
    project: Project = Path(),
    link: Annotated[bool, typer.Option("--link", help="Link to this checkout instead of copying.")] = False,
    status: Annotated[
        bool, typer.Option("--status", help="Show what is installed (exit 1 unless all of it is current).")
    ] = False,
    dry_run: DryRun = False,
    force: ForceEdited = False,
    as_json: AsJson = False,
) -> None:
    """Install the skills for a coding agent, or update them; every file is verified by its hash."""
    from autoport.cli.output import note, print_json
    from autoport.install.agents import skills_folder
    from autoport.install.installer import install

    if status:
        show_status([agent] if agent else list(AGENTS), project, as_json)
        return
    target = skills_folder(agent, scope, project)
    changes = install(target, link=link, dry_run=dry_run, force=force)
    files = sum(change.files for change in changes)
    if as_json:
        print_json({"agent": agent, "scope": scope, "dry_run": dry_run, "files": files, "skills": changes})
        return
    print_changes(changes)
    if dry_run:
        note("dry run: nothing was changed")
    else:
        print(f"{len(changes)} skills, {files} files, verified by hash")


def print_changes(changes: list["Change"]) -> None:
    """Print one row per skill, then the files of other origin that stay."""
    from autoport.cli.output import note, print_table

    rows = [(c.skill, c.action, c.files, c.written, c.removed, c.folder) for c in changes]
    print_table(("Skill", "Action", "Files", "Written", "Removed", "Folder"), rows)
    for change in changes:
        for file in change.foreign:
            note(f"left alone, not ours: {change.folder}/{file}")


def show_status(agents: list[str], project: Path, as_json: bool) -> None:
    """Print the state of every skill that is installed for one of `agents`, in both scopes."""
    from autoport import __version__
    from autoport.cli.output import note, print_json, print_table
    from autoport.errors import ExitCode
    from autoport.install.agents import skills_folder
    from autoport.install.folder import inspect_skill, installed_skills

    found = []
    for agent in agents:
        for scope in Scope:
            target = skills_folder(agent, scope, project)
            states = [inspect_skill(target, skill) for skill in installed_skills(target)]
            found += [(agent, scope.value, state) for state in states if state.state != "absent"]
    if as_json:
        rows = [{"agent": agent, "scope": scope, "skill": state} for agent, scope, state in found]
        print_json({"version": __version__, "installed": rows})
    else:
        print_table(
            ("Agent", "Scope", "Skill", "State", "Version", "Files", "Folder"),
            [(a, scope, s.skill, s.state, s.version, s.files, s.folder) for a, scope, s in found],
            title=f"autoport {__version__}",
        )
        for _, _, state in found:
            for kind in ("edited", "missing", "foreign"):
                for file in getattr(state, kind):
                    note(f"{kind}: {state.folder}/{file}")
    current = all(state.state in ("current", "linked") for _, _, state in found)
    raise typer.Exit(ExitCode.DONE if current else ExitCode.RED)

"""`autoport uninstall`: take the skills away again."""

from pathlib import Path

from autoport.cli.arguments import AsJson
from autoport.cli.install import AgentName, DryRun, ForceEdited, InstallScope, Project, print_changes
from autoport.install.agents import Scope


def command(
    agent: AgentName = "",
    scope: InstallScope = Scope.PROJECT,
    project: Project = Path(),
    dry_run: DryRun = False,
    force: ForceEdited = False,
    as_json: AsJson = False,
) -> None:
    """Remove the skills that `install` put there; files of other origin stay."""
    from autoport.cli.output import note, print_json
    from autoport.install.agents import skills_folder
    from autoport.install.installer import uninstall

    # Printed first: the program may be about to remove itself, and could not load rich any more afterwards.
    target = skills_folder(agent, scope, project)
    changes = uninstall(target, dry_run=True, force=force)
    if as_json:
        print_json({"agent": agent, "scope": scope, "dry_run": dry_run, "skills": changes})
    elif changes:
        print_changes(changes)
    else:
        note("nothing of ours is installed there")
    if dry_run:
        note("dry run: nothing was changed")
    else:
        uninstall(target, force=force)

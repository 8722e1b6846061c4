"""Where coding agents look for skills, as of November 2026."""

import enum
from pathlib import Path

import msgspec

from autoport.errors import refuse


class Scope(str, enum.Enum):
    """Whom a skill is installed for: one project, or all projects of the user."""

    PROJECT = "project"
    USER = "user"


class Agent(msgspec.Struct, frozen=True):
    """A coding agent; both folders hold one folder per skill.

    Attributes:
        project: Skills folder, relative to the project.
        user: Skills folder, relative to the home directory.
    """

    title: str
    project: str
    user: str


AGENTS: dict[str, Agent] = {
    "claude-code": Agent("Claude Code", ".claude/skills", ".claude/skills"),
    "kiro": Agent("Kiro", ".kiro/skills", ".kiro/skills"),
    "codex": Agent("Codex CLI", ".agents/skills", ".agents/skills"),
    "cursor": Agent("Cursor", ".cursor/skills", ".cursor/skills"),
    "gemini": Agent("Gemini CLI", ".gemini/skills", ".gemini/skills"),
    "copilot": Agent("GitHub Copilot", ".github/skills", ".copilot/skills"),
}


def skills_folder(agent: str, scope: Scope, project: Path) -> Path:
    """Return the absolute folder in which `agent` looks for skills.

    Raises:
        Refusal: INSTALL-AGENT for a name that is not in the table, INSTALL-PROJECT for no folder.
    """
    if agent not in AGENTS:
        found = f"no agent named {agent!r}" if agent else "no agent given"
        raise refuse(
            "INSTALL-AGENT", found, "option --agent", f"pass --agent with one of {', '.join(AGENTS)}"
        )
    if scope is Scope.USER:
        return Path.home() / AGENTS[agent].user
    root = project.expanduser().absolute()
    if not root.is_dir():
        raise refuse("INSTALL-PROJECT", "not a folder", root, "pass the project's folder with --project")
    return root / AGENTS[agent].project

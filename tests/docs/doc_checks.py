"""What a document says that can be checked: commands, links, paths, rule ids and help texts."""

import enum
import functools
import inspect
import re
import shlex
import string
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from autoport.cli import app
from typer.main import get_command
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
COMMANDS = get_command(app).commands
SHELL_OPERATOR = re.compile(r"[|;&]+|\d*>+(&\d)?|<")
PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*|<.+>|\.\.\.|-")
TOP_FOLDERS = ("references", "skills", "templates", "checklists", "scripts", "simulator", "evals", "tests")


class Block(NamedTuple):
    """A fenced code block."""

    language: str
    text: str


def blocks(text: str) -> list[Block]:
    return [
        Block(match["language"], re.sub(rf"(?m)^{match['indent']}", "", match["body"]))
        for match in re.finditer(r"(?ms)^(?P<indent> *)```(?P<language>\w*)\n(?P<body>.*?)^ *```$", text)
    ]


def prose(text: str) -> str:
    """The text without its code blocks, with each paragraph's line breaks undone."""
    return re.sub(r"(?<!\n)\n(?!\n|\||#|-|\d\.)", " ", re.sub(r"(?ms)^ *```.*?^ *```$", "", text))


def code_spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(text))


# --- Commands -----------------------------------------------------------------------------------------------


def block_commands(text: str) -> Iterator[list[str]]:
    """Words of each `autoport` command line in the shell blocks."""
    for block in blocks(text):
        if block.language in ("bash", "sh", "console", ""):
            for line in block.text.replace("\\\n", " ").splitlines():
                yield from _autoport_commands(line.removeprefix("$ "))


def span_commands(text: str) -> Iterator[list[str]]:
    """Words of each `autoport` command in the running text; brackets mark what is optional."""
    for span in code_spans(text):
        if span.startswith("autoport "):
            yield from _autoport_commands(re.sub(r"[\[\]]", "", span))


def _autoport_commands(line: str) -> Iterator[list[str]]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return
    while words:
        end = next((i for i, word in enumerate(words) if SHELL_OPERATOR.fullmatch(word)), len(words))
        command, words = words[:end], words[end + 1 :]
        while command and re.match(r"\w+=", command[0]):
            command = command[1:]
        if command and Path(command[0]).name == "autoport":
            yield command[1:]


def command_problem(words: list[str], complete: bool) -> str:
    """Why the program would not take these arguments, or an empty string.

    Args:
        complete: Required arguments must be there, too.
    """
    if not words or words == ["--help"]:
        return ""
    command = COMMANDS.get(words[0])
    if command is None:
        return f"no command {words[0]!r}"
    options = {name: param for param in command.params for name in (*param.opts, *param.secondary_opts)}
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    rest, given = iter(words[1:]), 0
    for word in rest:
        name, _, value = word.partition("=")
        if name == "--help":
            return ""
        if not name.startswith("-") or name == "-":
            given += 1
        elif name not in options:
            return f"autoport {words[0]} has no option {name}"
        elif not options[name].is_flag and not value:
            value = next(rest, "")
            if not value:
                return f"autoport {words[0]} {name} needs a value"
            choices = _choices(command.callback, options[name].name)
            if choices and not PLACEHOLDER.fullmatch(value) and value not in choices:
                return f"autoport {words[0]} {name} does not take {value!r}"
    if given > len(arguments):
        return f"autoport {words[0]} takes {len(arguments)} arguments, not {given}"
    if complete and given < sum(argument.required for argument in arguments):
        return f"autoport {words[0]} needs more arguments"
    return ""


def _choices(function: Callable[..., object], parameter: str) -> list[str]:
    kind = typing.get_type_hints(inspect.unwrap(function))[parameter]
    return [member.value for member in kind] if isinstance(kind, type) and issubclass(kind, enum.Enum) else []


def help_problems(text: str) -> list[str]:
    """Blocks that start with `$ autoport ... --help` must go on with what the program prints."""
    problems = []
    for block in blocks(text):
        first, _, shown = block.text.partition("\n")
        if re.fullmatch(r"\$ autoport( [\w-]+)? --help", first):
            printed = CliRunner().invoke(app, shlex.split(first)[2:], prog_name="autoport").output
            if printed.split() != shown.split():
                problems.append(f"{first[2:]} prints something else")
    return problems


# --- Links and paths ----------------------------------------------------------------------------------------


def links(text: str) -> list[tuple[str, str]]:
    """(path, anchor) of each link that stays in the bundle."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(text))
    return [target.partition("#")[::2] for target in targets if not re.match(r"[a-z]+:", target)]


def link_problems(document: Path, text: str) -> list[str]:
    problems = []
    for path, anchor in links(text):
        linked = (document.parent / path) if path else document
        if not linked.exists():
            problems.append(f"link to {path}: no such file")
        elif anchor and anchor not in _anchors(text if not path else linked.read_text(encoding="utf-8")):
            problems.append(f"link to {path}#{anchor}: no such heading")
    return problems


def _anchors(text: str) -> set[str]:
    keep = string.ascii_lowercase + string.digits + "_- "
    headings = re.findall(r"(?m)^#+ +(.+?)\s*$", text)
    return {
        "".join(char for char in heading.lower() if char in keep).replace(" ", "-") for heading in headings
    }


def path_problems(text: str) -> list[str]:
    """Paths into the bundle that do not exist, in code spans, commands and trees."""
    words = [word for span in code_spans(text) for word in span.split()]
    words += [word.strip("\"'") for block in blocks(text) for word in block.text.split()]
    inside = re.compile(rf"(?:\$SKILL_DIR/|\./)?((?:{'|'.join(TOP_FOLDERS)})/[\w./*-]*)")
    found = [match[1] for word in words if (match := inside.fullmatch(word))]
    problems = [f"no such path: {path}" for path in found if not list(ROOT.glob(path.rstrip("/")))]
    for block in blocks(text):
        if "── " in block.text:
            problems += tree_problems(block.text)
    return problems


def tree_problems(tree: str) -> list[str]:
    """Entries of a file tree that do not exist; trees of placeholders (upper case, <...>) are left out."""
    first, *lines = tree.rstrip().splitlines()
    root = first.split()[0].rstrip("/")
    if PLACEHOLDER.fullmatch(root) or "<" in root:
        return []
    folders, problems = [ROOT if root in (".", "autoport-vllm-neuron") else ROOT / root], []
    for line in lines:
        match = re.match(r"((?:[│ ] {2,3})*)[├└]── (\S+)", line)
        if match:
            depth = len(match[1]) // 4
            path = folders[depth] / match[2].rstrip("/")
            folders[depth + 1 :] = [path]
            if not path.exists():
                problems.append(f"tree: no such path: {path.relative_to(ROOT)}")
    return problems


# --- Names --------------------------------------------------------------------------------------------------


@functools.cache
def sources() -> str:
    """Everything that a rule id or a state file's name can come from."""
    files = [*(ROOT / "scripts").rglob("*.py"), *(ROOT / "simulator").rglob("*.py")]
    files += [*(ROOT / "checklists").glob("*.yaml"), *(ROOT / "references").glob("*.yaml")]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def name_problems(text: str) -> list[str]:
    """Rule ids in code spans, and names of json files, that the program does not know."""
    rules = [span for span in code_spans(text) if re.fullmatch(r"[A-Z]+(-[A-Z0-9]+)+", span)]
    files = re.findall(r"(?<![\w/.-])([a-z_]+\.json)\b", text)
    return [f"the program has no {name!r}" for name in [*rules, *files] if f'"{name}"' not in sources()]

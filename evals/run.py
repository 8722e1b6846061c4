#!/usr/bin/env python3
"""Prepare and check the scenarios of evals.json; no model is needed for either.

Usage:
    run.py structure             check evals.json and the files it names
    run.py prepare ID FOLDER     make the scenario's starting point in a new folder, and print its prompt
    run.py check ID FOLDER       check the assertions; the agent's last message is FOLDER/reply.md

An agent gets the prompt with FOLDER as its current directory, once with the skill and once without it.
"""

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SKILL = HERE.parent
REPLY = "reply.md"

SETUP_WORDS = {"autoport": None, "copy": 3, "remove": 2, "replace": 4, "set": 4}
ASSERTION = re.compile(
    r"""(?P<path>[\w./-]+)(?:
        \ (?P<state>exists|is\ absent)
      | \ (?P<verb>contains|lacks)\ (?P<text>".+")
      | :\ (?P<key>[\w.-]+)\ is\ (?P<value>.+)
    )""",
    re.VERBOSE,
)


def load() -> dict[str, Any]:
    data: dict[str, Any] = json.loads((HERE / "evals.json").read_text(encoding="utf-8"))
    return data


# --- Structure ----------------------------------------------------------------------------------------------


def structure_problems(data: dict[str, Any]) -> list[str]:
    """Everything that is wrong with the content of evals.json."""
    problems = []
    skill = re.search(r"(?m)^name: (.+)$", (SKILL / "SKILL.md").read_text(encoding="utf-8"))
    if skill is None or data.get("skill_name") != skill[1]:
        problems.append(f"skill_name is {data.get('skill_name')!r}")
    ids = [case.get("id") for case in data["evals"]]
    problems += [f"id {name!r} is used twice" for name in sorted({i for i in ids if ids.count(i) > 1})]
    for case in data["evals"]:
        where = f"eval {case.get('id')!r}"
        for key in ("id", "prompt", "expected_output"):
            if not isinstance(case.get(key), str) or not case[key].strip():
                problems.append(f"{where}: no {key}")
        problems += [f"{where}: no file {file}" for file in case["files"] if not (SKILL / file).is_file()]
        problems += [f"{where}: not a setup command: {line}" for line in case["setup"] if not _is_setup(line)]
        if not case["assertions"]:
            problems.append(f"{where}: no assertions")
        for text in case["assertions"]:
            try:
                _parse(text)
            except ValueError as error:
                problems.append(f"{where}: {error}")
    return problems


def _is_setup(line: str) -> bool:
    words = shlex.split(line)
    return words[0] in SETUP_WORDS and SETUP_WORDS[words[0]] in (None, len(words))


def _parse(text: str) -> re.Match[str]:
    match = ASSERTION.fullmatch(text)
    if match is None:
        raise ValueError(f"not an assertion: {text}")
    json.loads(match["text"] or match["value"] or "null")
    return match


# --- Prepare ------------------------------------------------------------------------------------------------


def prepare(case: dict[str, Any], folder: Path) -> None:
    """Copy the scenario's files into `folder`/files and run its setup commands there.

    Raises:
        ValueError: A text to replace is not in its file.
        subprocess.CalledProcessError: An autoport command failed.
    """
    (folder / "files").mkdir(parents=True)
    for file in case["files"]:
        shutil.copy(SKILL / file, folder / "files")
    for line in case["setup"]:
        command, *words = shlex.split(line)
        if command == "autoport":
            subprocess.run([sys.executable, "-m", "autoport", *words], cwd=folder, check=True)
        elif command == "copy":
            shutil.copytree(folder / words[0], folder / words[1])
        elif command == "remove":
            shutil.rmtree(folder / words[0])
        elif command == "replace":
            path, text = folder / words[0], (folder / words[0]).read_text(encoding="utf-8")
            if words[1] not in text:
                raise ValueError(f"{words[0]} has no {words[1]!r}")
            path.write_text(text.replace(words[1], words[2]), encoding="utf-8")
        elif command == "set":
            path = folder / words[0]
            values = json.loads(path.read_text(encoding="utf-8")) | {words[1]: json.loads(words[2])}
            path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


# --- Check --------------------------------------------------------------------------------------------------


def holds(text: str, folder: Path) -> bool:
    """Whether an assertion holds for what is in `folder`."""
    match = _parse(text)
    path = folder / match["path"]
    if match["state"]:
        return path.exists() is (match["state"] == "exists")
    if not path.is_file():
        return False
    content = path.read_text(encoding="utf-8")
    if match["verb"]:
        return (json.loads(match["text"]).lower() in content.lower()) is (match["verb"] == "contains")
    value = json.loads(content)
    for part in match["key"].split("."):
        if isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            value = value.get(part) if isinstance(value, dict) else None
    return bool(value == json.loads(match["value"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("structure")
    for name in ("prepare", "check"):
        subparser = commands.add_parser(name)
        subparser.add_argument("id")
        subparser.add_argument("folder", type=Path)
    arguments = parser.parse_args()

    data = load()
    problems = structure_problems(data)
    if problems or arguments.command == "structure":
        print("\n".join(problems) or f"{len(data['evals'])} evals, well formed")
        return 1 if problems else 0
    case = next((case for case in data["evals"] if case["id"] == arguments.id), None)
    if case is None:
        parser.error(f"no eval {arguments.id!r}; there are {', '.join(case['id'] for case in data['evals'])}")
    if arguments.command == "prepare":
        if arguments.folder.exists():
            parser.error(f"{arguments.folder} exists; pass a new folder")
        prepare(case, arguments.folder)
        print(case["prompt"])
        return 0
    if not (arguments.folder / REPLY).is_file():
        parser.error(f"no {arguments.folder / REPLY}: save the agent's last message there")
    results = {text: holds(text, arguments.folder) for text in case["assertions"]}
    for text, passed in results.items():
        print("pass" if passed else "FAIL", text)
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())

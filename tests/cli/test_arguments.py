"""Options that several commands share."""

import pytest
from autoport.cli import app
from typer.testing import CliRunner


@pytest.mark.parametrize(
    "command",
    ["port yi nowhere --dry-run", "generate yi", "document yi", "add-variant llama3 fp8"],
)
@pytest.mark.parametrize("options", ["--force --keep-edited", "--keep-edited --force"])
def test_edits_are_overwritten_or_kept(command, options):
    result = CliRunner().invoke(app, f"{command} {options}".split())
    (problem,) = result.exception.problems
    assert problem.rule == "OPT-EDITED"


@pytest.mark.parametrize("option", ["--force", "--keep-edited"])
def test_each_alone_is_taken(option, tmp_path):
    result = CliRunner().invoke(app, ["generate", "yi", "--workspace", str(tmp_path), option])
    assert [problem.rule for problem in result.exception.problems] == ["WS-MISSING"]

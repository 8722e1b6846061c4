"""`autoport analyze`: the account that a person reads, and the same as data."""

import json
import re

import pytest
import typer
from autoport.cli.analyze import command
from autoport.port_state import Port
from autoport.research.step import run as run_research
from autoport.step import Options
from autoport.workspace import Workspace
from checkpoints import real_config, write_checkpoint
from typer.testing import CliRunner

app = typer.Typer()
app.command()(command)


@pytest.fixture
def analyze(tmp_path):
    port = Port(
        Workspace.create(tmp_path / "ws"),
        "qwen",
        str(write_checkpoint(tmp_path / "model", real_config("qwen2-7b"))),
    )
    run_research(port, Options())
    port.save()

    def run(*arguments):
        return CliRunner().invoke(app, ["qwen", "--workspace", str(port.workspace.root), *arguments])

    return run


def test_everything_that_was_decided_is_printed_with_its_source(analyze):
    result = analyze("--context-length", "8192")
    assert result.exit_code == 0
    text = re.sub(r"[\s│]+", " ", result.stdout)
    for part in (
        "Change to llama3/",
        "28 query and 4 KV heads of 128",
        "modeling_qwen2.py:",
        "R1: 28 heads are not a multiple of 8",
        "Recommended: TP 2",
        "Memory of one rank at TP 2",
        "model.layers.{i}.self_attn.qkv_proj_weight",
        "1 x 8192 tokens",
        "Assumption: 2 GB",
        "PIT-BIAS-2D",
        "Composed attention: nothing",
    ):
        assert part in text, part
    assert "no tokenizer" in result.stderr


def test_the_same_as_data(analyze):
    data = json.loads(analyze("--json", "--instance", "trn2.3xlarge").stdout)["data"]
    assert data["tensor_parallel"]["instance"] == "trn2.3xlarge"
    assert {section["name"] for section in data["sections"]} >= {"norm", "rope", "attention", "head"}
    assert data["pitfalls"]
    assert data["composed"] == {"attention": [], "experts": []}
    assert data["expert_parallel"] is None

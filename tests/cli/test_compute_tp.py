"""`autoport compute-tp` and scripts/compute_tp.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from autoport.cli.compute_tp import command
from autoport.errors import Refusal
from checkpoints import DATA, small_config
from typer.testing import CliRunner

CONFIGS = DATA / "configs"
SCRIPT = Path(__file__).parents[2] / "scripts" / "compute_tp.py"

app = typer.Typer()
app.command()(command)


def run(*arguments, **options):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **options)


def test_the_table_names_the_recommendation_and_every_reason():
    result = run(CONFIGS / "qwen2-7b.json")
    assert result.exit_code == 0
    assert "TP 2 (valid: 1, 2)" in result.stdout
    assert "R2: 28 heads / 4 = 7 per rank is odd" in " ".join(result.stdout.split())
    assert "estimated from the config" in result.stdout


def test_a_folder_without_a_checkpoint_will_do(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(small_config()))
    assert run(tmp_path).exit_code == 0


def test_no_valid_size_is_exit_code_1_with_a_row_for_each():
    result = run(CONFIGS / "smollm2-135m.json", "--json")
    assert result.exit_code == 1
    plan = json.loads(result.stdout)["plan"]
    assert plan["recommended"] is None
    assert all(candidate["violations"] for candidate in plan["candidates"])


def test_relaxing_and_sizing():
    result = run(CONFIGS / "smollm2-135m.json", "--relax", "even-heads", "--context-length", 100, "--json")
    assert result.exit_code == 0
    plan = json.loads(result.stdout)["plan"]
    assert plan["context_length"] == 100
    assert plan["candidates"][0]["relaxed"][0]["rule"] == "R2"


@pytest.mark.parametrize("key", ["num_experts", "kv_lora_rank"])
def test_a_layout_with_other_sizes_is_refused(tmp_path, key):
    (tmp_path / "config.json").write_text(json.dumps(small_config(**{key: 8})))
    with pytest.raises(Refusal, match="SCOPE-LAYOUT"):
        run(tmp_path, catch_exceptions=False)


def test_the_script_prints_the_same_from_any_folder(tmp_path):
    folder = tmp_path / "with spaces"
    folder.mkdir()
    (folder / "config.json").write_text((CONFIGS / "yi-6b.json").read_text())
    process = subprocess.run(
        [sys.executable, SCRIPT, "config.json", "--json"], cwd=folder, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout == run(CONFIGS / "yi-6b.json", "--json").stdout

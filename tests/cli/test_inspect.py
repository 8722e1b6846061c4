"""`autoport inspect` and scripts/inspect_checkpoint.py."""

import json
import subprocess
import sys
from pathlib import Path

import typer
from autoport.cli.inspect import command
from checkpoints import real_config, small_config, write_checkpoint
from typer.testing import CliRunner

SCRIPT = Path(__file__).parents[2] / "scripts" / "inspect_checkpoint.py"

app = typer.Typer()
app.command()(command)


def test_keys_are_folded_and_bytes_counted(tmp_path):
    write_checkpoint(tmp_path, real_config("qwen2-7b"), shards=3)
    result = CliRunner().invoke(app, [str(tmp_path), "--json"])
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["dtypes"] == {"BF16": 339}
    assert report["total_bytes"] == sum(report["files"].values()) == 15_231_233_024
    assert report["bytes_read"] < 200_000
    bias = next(row for row in report["keys"] if row["key"].endswith("q_proj.bias"))
    assert bias == {
        "key": "model.layers.{i}.self_attn.q_proj.bias",
        "indices": "0-27",
        "shape": [3584],
        "dtype": "BF16",
    }
    assert len(report["keys"]) == 15


def test_a_layer_of_another_shape_has_a_row_of_its_own(tmp_path):
    keys = {f"layers.{index}.w": ("BF16", (4,)) for index in (0, 1, 3)} | {"layers.2.w": ("F32", (4,))}
    write_checkpoint(tmp_path, small_config(), keys)
    rows = json.loads(CliRunner().invoke(app, [str(tmp_path), "--json"]).stdout)["keys"]
    assert [(row["indices"], row["dtype"]) for row in rows] == [("0-1, 3", "BF16"), ("2", "F32")]


def test_the_text_form(tmp_path):
    write_checkpoint(tmp_path, small_config())
    result = CliRunner().invoke(app, [str(tmp_path)])
    assert "model.layers.{i}.mlp.up_proj.weight" in result.stdout
    assert "bytes read" in result.stdout


def test_a_config_alone_is_no_checkpoint(tmp_path):
    folder = write_checkpoint(tmp_path, small_config())
    (problem,) = CliRunner().invoke(app, [str(folder / "config.json")]).exception.problems
    assert problem.rule == "CKPT-NONE"
    assert problem.next_step.startswith("pass the model's folder")
    assert CliRunner().invoke(app, [str(folder / "model.safetensors")]).exit_code == 0


def test_the_script_refuses_with_exit_code_2_from_any_folder(tmp_path):
    write_checkpoint(tmp_path / "a model", small_config())
    arguments = [sys.executable, SCRIPT, tmp_path / "a model"]
    process = subprocess.run(arguments, cwd="/", capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert "lm_head.weight" in process.stdout
    (tmp_path / "a model" / "model.safetensors").write_bytes(b"abc")
    process = subprocess.run(arguments, cwd="/", capture_output=True, text=True)
    assert process.returncode == 2
    assert process.stdout == ""
    assert process.stderr.startswith("error CKPT-HEADER")

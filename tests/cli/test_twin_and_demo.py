"""The commands that need nothing but this checkout: a twin, and the whole way on a tiny Yi."""

import json

import pytest
import typer
from autoport.cli import demo, twin
from autoport.errors import Refusal
from autoport.resources import references_dir
from checkpoints import real_config, small_config


def test_the_embedded_config_is_the_published_one():
    assert json.loads((references_dir() / "yi-6b-config.json").read_text()) == real_config("yi-6b")


def test_twin_of_a_config_file(tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(real_config("smollm2-135m")))
    twin.command(str(config), tmp_path / "twin")
    assert capsys.readouterr().out == f"{tmp_path / 'twin'}\n"
    assert sorted(file.suffix for file in (tmp_path / "twin").iterdir()).count(".safetensors") == 2
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []


def test_twin_does_not_overwrite(tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(Refusal, match="TWIN-EXISTS"):
        twin.command(str(references_dir() / "yi-6b-config.json"), tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.txt"]


def test_twin_of_an_architecture_out_of_scope_is_refused_and_leaves_nothing(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(small_config(hidden_act="mish")))
    with pytest.raises(Refusal):
        twin.command(str(config), tmp_path / "twin")
    assert not (tmp_path / "twin").exists()


@pytest.mark.slow
def test_demo_goes_from_nothing_to_a_green_proof(tmp_path, capsys):
    with pytest.raises(typer.Exit) as ended:
        demo.command(tmp_path / "workspace")
    assert ended.value.exit_code == 0
    output = capsys.readouterr()
    assert f"autoport port yi {tmp_path}/workspace/checkpoints/yi-tiny" in output.err
    assert "vllm_neuron/model/yi/model.py" in output.out
    assert "Recommended: TP 2" in output.out
    assert "Proof: green: equals LlamaForCausalLM on the simulator at TP 1, 2" in output.out

"""`generate --explain`: which decision brought which lines, told by the render itself."""

import json

import msgspec
import pytest
from autoport.codegen import explain as explaining
from autoport.codegen.explain import explain
from autoport.codegen.generate import render_package
from autoport.resources import references_dir
from autoport.schema.plan import Override, Plan, Section


def reference_plan(name):
    file = references_dir() / "reference-models" / f"{name}.json"
    return msgspec.json.decode(file.read_bytes(), type=Plan)


def found(plan, field):
    text = render_package(plan, "vllm_neuron")["model.py"].splitlines()
    return {
        block.template: "\n".join(text[block.first - 1 : block.last])
        for block in explain(plan, "vllm_neuron")
        if field in block.decisions
    }


@pytest.mark.parametrize("name", ["llama3", "smollm3", "gpt_oss"])
def test_the_text_that_is_explained_is_the_one_that_is_generated(monkeypatch, name):
    plan, finished = reference_plan(name), []
    finish = explaining.finish_python
    monkeypatch.setattr(
        explaining, "finish_python", lambda *args: finished.append(finish(*args)) or finished[-1]
    )
    blocks = explain(plan, "vllm_neuron")
    text = render_package(plan, "vllm_neuron")["model.py"]
    assert finished == [text]
    assert all(1 <= block.first <= block.last <= text.count("\n") for block in blocks)


def test_every_line_of_another_kind_of_model_is_explained():
    """What gpt_oss has in its classes and llama3 has not, apart from a line break and a value of every model."""
    base = render_package(reference_plan("llama3"), "vllm_neuron")["model.py"].replace("Llama", "X")
    plan = reference_plan("gpt_oss")
    text = render_package(plan, "vllm_neuron")["model.py"].replace("GptOss", "X")
    explained = {
        line for block in explain(plan, "vllm_neuron") for line in range(block.first, block.last + 1)
    }
    known = {line.strip() for line in base.splitlines()}
    lines = list(enumerate(text.splitlines(), 1))
    classes = lines[text[: text.index("class X")].count("\n") :]
    left = [line.strip() for at, line in classes if at not in explained and line.strip() not in known]
    assert [line for line in left if not line.startswith(("unused_keys = ", "hidden_states = layer("))] == []


def test_blocks_are_the_lines_that_a_decision_brings():
    sinks = found(reference_plan("gpt_oss"), "attention.sinks")
    assert len(sinks) == 4
    assert all("sink" in text for text in sinks.values())
    assert found(reference_plan("llama3"), "attention.sinks") == {}
    norm = found(reference_plan("llama3"), "norm.kind")
    (text,) = norm.values()
    assert text.startswith("class LlamaRMSNorm(nn.Module):")
    moe = found(reference_plan("qwen3_moe"), "has_experts")
    assert any("class Qwen3MoeMoE(nn.Module):" in text for text in moe.values())


def test_a_decision_has_its_section_value_and_source():
    plan = reference_plan("llama3")
    plan.sections = [Section("norm", "", "", "", "config.json: rms_norm_eps")]
    plan.overrides = [Override("norm.kind", "rms", "a person with --set", "now")]
    block = next(b for b in explain(plan, "vllm_neuron") if "norm.kind" in b.decisions)
    assert (block.section, block.decisions["norm.kind"]) == ("Normalization", "rms")
    assert block.sources == ["norm.kind: a person with --set", "config.json: rms_norm_eps"]


def test_the_command_writes_nothing(port, capsys):
    from autoport.cli.generate import command

    port.write_state("plan.json", reference_plan("llama3"))
    before = {path: path.stat().st_mtime_ns for path in port.workspace.root.rglob("*")}
    command(port.name, port.workspace.root, explain=True, as_json=True)
    assert {path: path.stat().st_mtime_ns for path in port.workspace.root.rglob("*")} == before
    assert json.loads(capsys.readouterr().out)[0]["section"] == "header"
    command(port.name, port.workspace.root, explain=True)
    captured = capsys.readouterr()
    assert "norm.kind = rms" in captured.out
    assert "is not as it was generated" in captured.err

"""Step 5: the row in registry.py, and that the file is never damaged."""

import threading

import msgspec
import pytest
from autoport.codegen import register
from autoport.errors import Refusal
from autoport.port_state import Port
from autoport.step import Options
from autoport.workspace import EMPTY_REGISTRY
from plans import YI, plan


@pytest.fixture
def generated(port: Port) -> Port:
    """A port whose package is there, in a workspace with an empty registry."""
    return add_port(port, "yi")


def add_port(port: Port, name: str, architecture: str = "LlamaForCausalLM") -> Port:
    added = Port(port.workspace, name)
    added.write_state(
        "plan.json", plan(msgspec.structs.replace(YI, hf_name=architecture), name, name.title())
    )
    folder = added.workspace.model_dir(name)
    folder.mkdir()
    (folder / "__init__.py").touch()
    if not port.workspace.registry_path.exists():
        port.workspace.registry_path.write_text(EMPTY_REGISTRY)
    return added


def test_adds_the_row_once(generated: Port) -> None:
    outcome = register.run(generated, Options())
    assert outcome.files == ["vllm_neuron/model/registry.py"]
    text = generated.workspace.registry_path.read_text()
    assert '("LlamaForCausalLM", LlamaForCausalLM)' in text
    again = register.run(generated, Options())
    assert (again.status, again.files) == ("done", [])
    assert generated.workspace.registry_path.read_text() == text


def test_other_packages_with_the_class_are_named(generated: Port) -> None:
    models = generated.workspace.registry_path.parent
    for name, architecture in (("llama3", "LlamaForCausalLM"), ("llama_like", "LlamaForCausalLMPlus")):
        (models / name).mkdir()
        (models / name / "factory.py").write_text(f"class {architecture}(nn.Module):\n    pass\n")
    summary = register.run(generated, Options()).summary
    assert "; llama3/ has this class, too: the row serves every LlamaForCausalLM with this port" in summary


def test_a_second_port_of_the_architecture_has_to_be_asked_for(generated: Port) -> None:
    register.run(generated, Options())
    other = add_port(generated, "other")
    before = other.workspace.registry_path.read_text()
    with pytest.raises(Refusal, match="REG-CONFLICT") as caught:
        register.run(other, Options())
    assert caught.value.problems[0].where == str(other.workspace.registry_path)
    assert other.workspace.registry_path.read_text() == before
    register.run(other, Options(replace_row=True))
    assert "from .other import LlamaForCausalLM\n" in other.workspace.registry_path.read_text()
    assert ".yi" not in other.workspace.registry_path.read_text()


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"def get_models(:\n", "REG-SYNTAX"),
        (b"\xff\xfe\x00", "REG-SYNTAX"),
        (b"", "REG-LAYOUT"),
        (b"def get_models():\n    return {}\n", "REG-LAYOUT"),
    ],
)
def test_a_registry_that_is_not_understood_is_left_alone(generated: Port, content: bytes, rule: str) -> None:
    generated.workspace.registry_path.write_bytes(content)
    with pytest.raises(Refusal, match=rule):
        register.run(generated, Options())
    assert generated.workspace.registry_path.read_bytes() == content


def test_a_missing_registry_is_refused(generated: Port) -> None:
    generated.workspace.registry_path.unlink()
    with pytest.raises(Refusal, match="REG-MISSING"):
        register.run(generated, Options())


def test_a_model_that_is_not_generated_is_not_registered(generated: Port) -> None:
    (generated.workspace.model_dir("yi") / "__init__.py").unlink()
    with pytest.raises(Refusal, match="PORT-ORDER"):
        register.run(generated, Options())
    assert generated.workspace.registry_path.read_text() == EMPTY_REGISTRY


def test_an_edit_by_somebody_else_is_not_overwritten(
    generated: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = generated.workspace.registry_path
    add_row = register.add_row

    def slow_add_row(*args: object) -> str:
        path.write_text(EMPTY_REGISTRY + "# edited meanwhile\n")
        return add_row(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(register, "add_row", slow_add_row)
    with pytest.raises(Refusal, match="REG-CHANGED"):
        register.run(generated, Options())
    assert path.read_text().endswith("# edited meanwhile\n")


def test_ports_that_register_at_the_same_time_all_get_their_row(generated: Port) -> None:
    names = [f"m{i}" for i in range(6)]
    ports = [add_port(generated, name, f"{name.title()}ForCausalLM") for name in names]
    threads = [threading.Thread(target=register.run, args=(port, Options())) for port in ports]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    text = generated.workspace.registry_path.read_text()
    assert [name for name in names if f'("{name.title()}ForCausalLM", ' not in text] == []


@pytest.mark.parametrize("name", ["Llama ForCausalLM", 'A"), ("B', "class", ""])
def test_an_architecture_that_is_no_identifier_is_refused(generated: Port, name: str) -> None:
    generated.write_state("plan.json", plan(msgspec.structs.replace(YI, hf_name=name)))
    with pytest.raises(Refusal, match="GEN-IDENTIFIER"):
        register.run(generated, Options())
    assert generated.workspace.registry_path.read_text() == EMPTY_REGISTRY

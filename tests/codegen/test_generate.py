"""Steps 3 and 4: the files that are generated from a plan."""

import ast
import importlib.util
import re
import sys
from pathlib import Path

import msgspec
import pytest
from autoport.codegen.context import config_checks
from autoport.codegen.generate import render_package, run
from autoport.codegen.render import LINE_LENGTH
from autoport.errors import Refusal
from autoport.port_state import Port
from autoport.schema.parallel import Violation
from autoport.step import Options
from plans import LLAMA3, QWEN2, YI, plan

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def yi() -> dict[str, str]:
    return render_package(plan(YI), "vllm_neuron")


@pytest.fixture(scope="module")
def llama3() -> dict[str, str]:
    return render_package(plan(LLAMA3, "llama3", "Llama"), "vllm_neuron")


@pytest.fixture(scope="module")
def qwen2() -> dict[str, str]:
    return render_package(plan(QWEN2, "qwen2", "Qwen2"), "vllm_neuron")


def classes(source: str) -> list[str]:
    return [node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]


def test_classes_have_the_prefix_and_the_plugins_order(yi: dict[str, str]) -> None:
    parts = ("RMSNorm", "RotaryEmbedding", "Attention", "MLP", "DecoderLayer", "Model", "ForCausalLM")
    assert classes(yi["model.py"]) == [f"Yi{part}" for part in parts]
    assert classes(yi["factory.py"]) == ["LlamaForCausalLM"]
    assert "from .model import YiForCausalLM as Model" in yi["factory.py"]
    assert "from .factory import LlamaForCausalLM" in yi["__init__.py"]


def test_only_what_the_model_needs_is_there(
    yi: dict[str, str], llama3: dict[str, str], qwen2: dict[str, str]
) -> None:
    assert "bias" not in re.sub(r"bias=False|no biases", "", yi["model.py"])
    assert "low_freq_factor" not in yi["model.py"]
    assert "import math" not in yi["model.py"]
    assert "low_freq_factor" in llama3["model.py"]
    assert "weight_loaders.py" not in yi
    assert "def fused_qkv_bias_loader" in qwen2["weight_loaders.py"]
    assert "fused_qkv_bias_loader" in qwen2["model.py"]
    assert "bias_qkv=self.qkv_proj_bias.unsqueeze(0)" in qwen2["model.py"]
    assert len(llama3["model.py"].splitlines()) < 500


def test_an_odd_number_of_heads_is_refused_unless_the_plan_relaxed_the_rule(yi: dict[str, str]) -> None:
    relaxed = plan(YI)
    relaxed.tp.candidates[0].relaxed.append(Violation("R2", "9 heads on a rank"))
    assert "an even number of the" in yi["factory.py"]
    assert "an even number of the" not in render_package(relaxed, "vllm_neuron")["factory.py"]


def test_no_number_of_the_source_is_written_into_the_code(yi: dict[str, str]) -> None:
    text = "".join(yi.values())
    for number in ("5000000", "4096", "11008", "64000", "1e-05"):
        assert number not in text


def test_marks_are_there(llama3: dict[str, str]) -> None:
    lines = llama3["model.py"].splitlines()
    kept = [line for line in lines if re.search(r"# >>> PARALLELISM: .+ <<<$", line)]
    changed = [line for line in lines if "# <-- MODEL-SPECIFIC: " in line]
    assert len(kept) >= 8
    assert len(changed) >= 4


def test_a_tied_head_reads_the_embedding(yi: dict[str, str], llama3: dict[str, str]) -> None:
    assert '"lm_head.weight": "lm_head.weight"' in yi["model.py"]
    assert '"lm_head.weight": "model.embed_tokens.weight"' in llama3["model.py"]


def test_the_private_package_is_imported_under_its_name() -> None:
    files = render_package(plan(YI), "private_vllm_neuron")
    modules = {
        node.module
        for text in files.values()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0
    }
    assert not [module for module in modules if module.startswith("vllm_neuron")]
    assert "private_vllm_neuron.utils.weight_loader" in modules


@pytest.mark.parametrize(
    "name",
    [
        'Llama"ForCausalLM',
        "Llama\nForCausalLM",
        "{{ 7 }}",
        "__import__('os')",
        "Llama-ForCausalLM",
        "",
        "class",
    ],
)
def test_a_name_that_is_no_identifier_is_refused(name: str) -> None:
    with pytest.raises(Refusal, match="GEN-IDENTIFIER"):
        render_package(plan(msgspec.structs.replace(YI, hf_name=name)), "vllm_neuron")
    with pytest.raises(Refusal, match="GEN-IDENTIFIER"):
        render_package(plan(YI, prefix=name), "vllm_neuron")


@pytest.mark.parametrize("key", ['a"b', "a{{ 7 }}b", "a\nb", "a b", "f('x')", "{layer}", "{i!r}"])
def test_a_checkpoint_key_cannot_bring_code(key: str) -> None:
    hostile = plan(YI)
    hostile.weights.entries[0] = msgspec.structs.replace(hostile.weights.entries[0], keys=[key])
    with pytest.raises(Refusal, match="GEN-KEY"):
        render_package(hostile, "vllm_neuron")


def test_a_weight_map_that_does_not_fit_is_refused() -> None:
    wrong = plan(YI)
    entries = {entry.parameter: entry for entry in wrong.weights.entries}
    o_proj = entries.pop("model.layers.{i}.self_attn.o_proj_weight")
    entries["extra"] = msgspec.structs.replace(o_proj, parameter="model.layers.{i}.self_attn.extra")
    norm = entries["model.norm.weight"]
    entries["model.norm.weight"] = msgspec.structs.replace(norm, transform="column")
    wrong.weights.entries = list(entries.values())
    with pytest.raises(Refusal) as caught:
        render_package(wrong, "vllm_neuron")
    assert sorted(problem.found.split(":")[0] for problem in caught.value.problems) == [
        "model.layers.{i}.self_attn.extra",
        "model.layers.{i}.self_attn.o_proj_weight",
        "model.norm.weight",
    ]


@pytest.mark.parametrize(
    ("expression", "setting"),
    [
        ("not alibi", "not alibi"),
        ("[w for w in [sliding_window] * num_layers if w]", "sliding_window with num_layers:"),
        ("'a' if parallel else 'b'", "parallel"),
    ],
)
def test_a_refused_setting_is_named_by_the_fields_of_the_config(expression: str, setting: str) -> None:
    changed = msgspec.structs.replace(YI, checks={expression: "b"})
    [(named, read, _)] = config_checks(changed)
    assert (named, read) == (setting, expression)
    assert f'"{setting}"' in render_package(plan(changed), "vllm_neuron")["factory.py"]


def test_committed_reference_models_are_the_rendered_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("regenerate", SCRIPTS / "regenerate_reference_models.py")
    assert spec is not None
    assert spec.loader is not None
    regenerate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(regenerate)
    files = regenerate.rendered()
    assert [path for path, text in files.items() if path.read_text() != text] == []
    assert max(len(line) for text in files.values() for line in text.splitlines()) <= LINE_LENGTH
    path = next(iter(files))
    monkeypatch.setattr(sys, "argv", ["regenerate", "--check"])
    assert regenerate.main() == 0
    regenerate.rendered = lambda: {path: "drifted"}
    assert regenerate.main() == 1
    assert path.read_text() == files[path]


# --- The step -----------------------------------------------------------------------------------------


def test_the_step_writes_the_package_once(port: Port) -> None:
    port.write_state("plan.json", plan(YI))
    outcome = run(port, Options())
    assert outcome.status == "done"
    assert outcome.files == [
        f"vllm_neuron/model/yi/{name}" for name in ("__init__.py", "config.py", "factory.py", "model.py")
    ]
    assert run(port, Options()).files == []


def test_the_step_keeps_an_edited_file(port: Port) -> None:
    port.write_state("plan.json", plan(YI))
    run(port, Options())
    model = port.workspace.model_dir("yi") / "model.py"
    edited = model.read_text() + "# mine\n"
    model.write_text(edited)
    assert "kept: vllm_neuron/model/yi/model.py" in run(port, Options()).summary
    assert model.read_text() == edited
    run(port, Options(force=True))
    assert model.read_text() != edited


def test_the_step_needs_a_plan(port: Port) -> None:
    with pytest.raises(Refusal, match="PORT-ORDER"):
        run(port, Options())


def test_a_refused_plan_writes_nothing(port: Port) -> None:
    port.write_state("plan.json", plan(msgspec.structs.replace(YI, hf_name="a b")))
    with pytest.raises(Refusal, match="GEN-IDENTIFIER"):
        run(port, Options())
    assert not port.workspace.model_dir("yi").exists()

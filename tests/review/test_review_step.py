import shutil
import sys
from pathlib import Path

import msgspec
import pytest
from autoport.cli.review import report
from autoport.codegen.add_variant import declare
from autoport.codegen.add_variant import run as add_variant
from autoport.codegen.generate import render_package
from autoport.errors import Refusal
from autoport.port_state import Port
from autoport.resources import simulator_dir
from autoport.review.checklist import load_checklists
from autoport.review.step import Review, run
from autoport.schema.architecture import Architecture
from autoport.step import Options
from autoport.workspace import Workspace

sys.path.append(str(Path(__file__).parent.parent / "codegen"))
import plans

NOVA = Path(__file__).parent / "ports" / "nova"


def review(port: Port) -> Review:
    return run(port, Options()).data


def statuses(result: Review, *rules: str) -> list[str]:
    by_id = {rule.id: rule.status for rule in result.rules}
    return [by_id[rule] for rule in rules]


def problems_of(result: Review) -> dict[str, list[str]]:
    return {
        rule.id: [f"{finding.where}: {finding.text}" for finding in rule.findings if finding.status == "fail"]
        for rule in result.rules
        if rule.status == "fail" and rule.severity == "error"
    }


ARCHITECTURES = sorted(name for name, value in vars(plans).items() if isinstance(value, Architecture))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_false_alarm_on_a_generated_model(workspace: Workspace, architecture: str):
    plan = plans.plan(getattr(plans, architecture))
    folder = workspace.model_dir(plan.name)
    folder.mkdir(exist_ok=True)
    for name, text in render_package(plan, workspace.package).items():
        (folder / name).write_text(text)
    factory = plan.architecture.hf_name
    workspace.registry_path.write_text(
        f"from .{plan.name} import {factory}\n\n\ndef get_models():\n    return [('{factory}', {factory})]\n"
    )
    port = Port(workspace, plan.name)
    port.write_state("plan.json", plan)
    result = review(port)
    assert problems_of(result) == {}
    judged = {rule.id for rule in result.rules if rule.status == "judge"}
    assert report(result).count(f"come from: autoport research {plan.name} SOURCE") == len(judged)
    assert judged == {"ATTN-SCALE", "ROPE-STYLE", "NORM-REFERENCE"}
    (rope,) = (rule for rule in result.rules if rule.id == "ROPE-STYLE")
    assert [finding.text.rpartition(".")[2] for finding in rope.findings] == ["forward", "cos_sin"]
    assert statuses(result, "PAR-REDUCE", "WGT-MAPPED", "KV-NAMES", "NAME-PREFIX") == ["pass"] * 4


def test_no_false_alarm_on_the_simulators_models(tmp_path: Path):
    shutil.copytree(simulator_dir() / "vllm_neuron", tmp_path / "vllm_neuron")
    workspace = Workspace.find(tmp_path)
    models = [path.parent.name for path in (tmp_path / "vllm_neuron" / "model").glob("*/factory.py")]
    assert models
    for name in models:
        assert problems_of(review(Port(workspace, name))) == {}, name


def test_no_false_alarm_on_variants(tmp_path: Path):
    shutil.copytree(simulator_dir() / "vllm_neuron", tmp_path / "vllm_neuron")
    port = Port(Workspace.find(tmp_path), "gpt_oss")
    before = review(port)
    for variant in (declare("mxfp4"), declare("fp8"), declare("own", default_on=("trn3",))):
        add_variant(port, variant)
    after = review(port)
    assert [(rule.id, rule.status) for rule in after.rules] == [
        (rule.id, rule.status) for rule in before.rules
    ]
    assert next(rule for rule in after.rules if rule.id == "FACTORY-LAZY").status == "pass"


def test_a_hand_written_port_needs_no_state(workspace: Workspace):
    shutil.copytree(NOVA, workspace.model_dir("nova"))
    result = review(Port(workspace, "nova"))
    by_id = {rule.id: rule for rule in result.rules}
    for rule in ("NAME-FACTORY", "REG-ARCH", "WGT-KEYS"):
        assert by_id[rule].status == "not checked"
        assert "autoport research nova SOURCE" in by_id[rule].reason
    assert problems_of(result) == {
        "REG-ROW": ["vllm_neuron/model/registry.py:1: no row names a class of nova"]
    }


def test_a_port_in_the_private_package(tmp_path: Path):
    source = simulator_dir() / "vllm_neuron"
    shutil.copytree(source, tmp_path / "private_vllm_neuron", ignore=shutil.ignore_patterns("llama3"))
    workspace = Workspace.find(tmp_path)
    shutil.copytree(NOVA, workspace.model_dir("nova"))
    for path in workspace.model_dir("nova").glob("*.py"):
        path.write_text(path.read_text().replace("vllm_neuron", "private_vllm_neuron"))
    workspace.registry_path.write_text(
        'from .nova import NovaForCausalLM\n\nROWS = [("NovaForCausalLM", NovaForCausalLM)]\n'
    )
    result = review(Port(workspace, "nova"))
    assert problems_of(result) == {}
    assert statuses(result, "BIAS-2D", "PAR-REDUCE") == ["pass", "pass"]


def test_every_variant_of_a_port_is_reviewed(workspace: Workspace):
    folder = workspace.model_dir("nova")
    shutil.copytree(NOVA, folder)
    text = (folder / "model_bf16.py").read_text()
    (folder / "model_fp8.py").write_text(
        text.replace("bias_qkv=self.qkv_proj_bias.view(1, -1)", "bias_qkv=self.qkv_proj_bias")
    )
    (folder / "layers").mkdir()
    (folder / "rope.py").rename(folder / "layers" / "rope.py")
    model = folder / "model_bf16.py"
    model.write_text(text.replace("from .rope import", "from .layers.rope import"))
    problems = problems_of(review(Port(workspace, "nova")))
    assert set(problems) == {"REG-ROW", "NAME-RESOLVE", "BIAS-2D"}  # model_fp8.py still imports .rope
    (where,) = problems["BIAS-2D"]
    assert where.startswith("vllm_neuron/model/nova/model_fp8.py:")


def test_a_red_review_says_where_and_is_written_down(workspace: Workspace):
    shutil.copytree(NOVA, workspace.model_dir("nova"))
    rope = workspace.model_dir("nova") / "rope.py"
    rope.write_text(
        rope.read_text().replace(
            "angles = positions", "top = positions.max().item()\n        angles = positions"
        )
    )
    port = Port(workspace, "nova")
    outcome = run(port, Options())
    assert outcome.status == "red"
    assert "FWD-SCALAR" in outcome.summary
    written = msgspec.json.decode((port.state_dir / "review.json").read_bytes(), type=Review)
    assert written == outcome.data
    line = next(i for i, text in enumerate(rope.read_text().splitlines(), 1) if ".item()" in text)
    text = report(outcome.data)
    assert (
        f"vllm_neuron/model/nova/rope.py:{line}  NovaRotaryEmbedding.forward: positions.max().item()" in text
    )
    assert text.index("FWD-SCALAR") < text.index("FWD-DEVICE")


def test_a_class_chosen_at_run_time_is_put_to_the_reader(workspace: Workspace):
    shutil.copytree(NOVA, workspace.model_dir("nova"))
    model = workspace.model_dir("nova") / "model_bf16.py"
    model.write_text(model.read_text().replace("self.mlp = NovaMLP(config)", "self.mlp = mlp_cls(config)"))
    result = {rule.id: rule for rule in review(Port(workspace, "nova")).rules}
    assert result["WGT-MAPPED"].status == "judge"
    assert any(f.status == "judge" and "mlp" in f.text for f in result["WGT-MAPPED"].findings)
    assert result["PAR-REDUCE"].status == "pass"


def test_files_that_cannot_be_parsed_are_all_refused(workspace: Workspace):
    folder = workspace.model_dir("nova")
    folder.mkdir()
    (folder / "model.py").write_text("def forward(:\n")
    (folder / "config.py").write_bytes(b"x = '\xff'\n")
    with pytest.raises(Refusal) as refusal:
        run(Port(workspace, "nova"), Options())
    assert [problem.rule for problem in refusal.value.problems] == ["REV-SYNTAX", "REV-SYNTAX"]
    assert not (workspace.root / ".autoport" / "nova").exists()


def test_a_port_that_does_not_exist_is_refused(workspace: Workspace):
    with pytest.raises(Refusal) as refusal:
        run(Port(workspace, "nova"), Options())
    assert refusal.value.problems[0].rule == "REV-NONE"


RULE = """\
title: t
rules:
  - {id: A, severity: error, title: t, text: t, why: w, check: CHECK, with: WITH}
"""


@pytest.mark.parametrize(
    ("check", "with_", "found"),
    [
        ("no_such_check", "{}", "there is no check named 'no_such_check'"),
        ("files_present", "{}", "files_present: missing a required argument: 'files'"),
        ("files_present", "{files: [], more: 1}", "got an unexpected keyword argument 'more'"),
    ],
)
def test_a_faulty_checklist_is_refused(tmp_path: Path, check: str, with_: str, found: str):
    (tmp_path / "a.yaml").write_text(RULE.replace("CHECK", check).replace("WITH", with_))
    (tmp_path / "b.yaml").write_text("title: [")
    with pytest.raises(Refusal) as refusal:
        load_checklists(tmp_path)
    assert [problem.rule for problem in refusal.value.problems] == ["CHK-CHECK", "CHK-FILE"]
    assert found in refusal.value.problems[0].found


def test_an_id_is_used_once(tmp_path: Path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text(RULE.replace("CHECK", "debug_left").replace("WITH", "{}"))
    with pytest.raises(Refusal) as refusal:
        load_checklists(tmp_path)
    assert [problem.rule for problem in refusal.value.problems] == ["CHK-ID"]

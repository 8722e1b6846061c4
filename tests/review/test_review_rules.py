import shutil
from pathlib import Path

import msgspec
import pytest
from autoport.port_state import Port
from autoport.review.checklist import load_checklists
from autoport.review.finding import CHECKS
from autoport.review.step import Review, run
from autoport.schema.facts import Checkpoint, Fact, Facts, TensorHeader
from autoport.step import Options
from autoport.workspace import Workspace

HERE = Path(__file__).parent
PORTS = HERE / "ports"
LAYOUT = (
    "vllm_neuron/model/{name}/README.md",
    "examples/vllm_neuron/models/{name}/run.py",
    "examples/vllm_neuron/models/{name}/results/results.md",
    "test/vllm_neuron/model/{name}/bf16/e2e/test_logits.py",
)
REGISTRY = """\
from .mixa import MixaForCausalLM
from .nova import NovaForCausalLM


def get_models():
    return [("NovaForCausalLM", NovaForCausalLM), ("MixaForCausalLM", MixaForCausalLM)]
"""


class Breakage(msgspec.Struct):
    """A change of one file of a sound port, `old` -> `new`; `also` names other rules that it breaks."""

    port: str
    file: str
    old: str
    new: str
    rule: str = ""
    what: str = ""
    also: list[str] = []


BREAKAGES = msgspec.yaml.decode((HERE / "breakages.yaml").read_bytes(), type=list[Breakage])
VARIATIONS = msgspec.yaml.decode((HERE / "variations.yaml").read_bytes(), type=list[Breakage])
RULES = {rule.id: rule for checklist in load_checklists().values() for rule in checklist.rules}


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with both ports and what research says of their checkpoints."""
    workspace = Workspace.create(tmp_path_factory.mktemp("sound") / "workspace")
    for unused in ("simulator", "vllm", "parallel", "model/llama3"):
        shutil.rmtree(workspace.root / workspace.package / unused)
    workspace.registry_path.write_text(REGISTRY)
    for name in ("nova", "mixa"):
        shutil.copytree(PORTS / name, workspace.model_dir(name))
        for file in LAYOUT:
            path = workspace.root / file.format(name=name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        port = Port(workspace, name)
        port.write_state("facts.json", facts(name))
        port.write_state("checkpoint.json", checkpoint(name))
    return workspace.root


def facts(name: str) -> Facts:
    source = "config.json"
    sizes = ("head_dim", "hidden_size", "intermediate_size", "max_position_embeddings", "num_heads")
    values: dict[str, object] = dict.fromkeys((*sizes, "num_kv_heads", "num_layers", "vocab_size"), 2)
    values |= {"activation": "silu", "norm_eps": 1e-5, "rope_type": "default", "rope_parameters": {}}
    values["tie_word_embeddings"] = name == "nova"
    return Facts(
        source=name,
        config_file="config.json",
        config={},
        architecture=Fact(f"{name.capitalize()}ForCausalLM", source),
        model_type=Fact(name, source),
        fields={field: Fact(value, source) for field, value in values.items()},
    )


def checkpoint(name: str) -> Checkpoint:
    keys = ["model.embed_tokens.weight", "model.norm.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"]
    if name == "mixa":
        keys.append("lm_head.weight")
    kinds = ("weight", "bias") if name == "nova" else ("weight",)
    for i in range(2):
        layer = f"model.layers.{i}"
        keys += [f"{layer}.{norm}.weight" for norm in ("input_layernorm", "post_attention_layernorm")]
        keys += [f"{layer}.self_attn.{x}_proj.{kind}" for x in "qkvo" for kind in kinds]
        mlp = f"{layer}.mlp" if name == "nova" else f"{layer}.mlp.shared_expert"
        keys += [f"{mlp}.{x}_proj.weight" for x in ("gate", "up", "down")]
        if name == "mixa":
            keys += [
                f"{layer}.mlp.{x}"
                for x in ("gate.weight", "gate.bias", "experts.gate_up_proj", "experts.down_proj")
            ]
    headers = {key: TensorHeader("BF16", (8, 8), "model.safetensors", 128) for key in keys}
    return Checkpoint(source=name, files=["model.safetensors"], tensors=headers, total_bytes=0, bytes_read=0)


def review(root: Path, name: str) -> Review:
    outcome = run(Port(Workspace.find(root), name), Options())
    assert outcome.status == outcome.data.status
    return outcome.data


def broken(root: Path, breakage: Breakage, folder: Path) -> Path:
    """A copy of the workspace at `root` with the change made."""
    shutil.copytree(root, folder)
    workspace = Workspace.find(folder)
    path = workspace.model_dir(breakage.port) / breakage.file
    if breakage.file == "registry.py":
        path = workspace.registry_path
    text = path.read_text()
    assert breakage.old in text
    path.write_text(text.replace(breakage.old, breakage.new))
    return folder


@pytest.mark.parametrize("name", ["nova", "mixa"])
def test_a_sound_port_breaks_no_rule(sound: Path, name: str):
    result = review(sound, name)
    assert {rule.id for rule in result.rules if rule.status in ("fail", "not checked")} == set()
    assert {rule.id for rule in result.rules if rule.status == "judge"} == {
        rule.id for rule in RULES.values() if rule.question
    } - {"CFG-UNREAD"} - ({"MOE-ROUTING"} if name == "nova" else {"ROPE-STYLE"})


@pytest.mark.parametrize("breakage", BREAKAGES, ids=[f"{b.rule}-{i}" for i, b in enumerate(BREAKAGES)])
def test_a_breakage_is_found(sound: Path, breakage: Breakage, tmp_path: Path):
    root = broken(sound, breakage, tmp_path / "workspace")
    result = review(root, breakage.port)
    failed = {rule.id: rule for rule in result.rules if rule.status == "fail"}
    assert breakage.rule in failed
    assert set(failed) == {breakage.rule, *breakage.also}
    assert result.status == ("red" if any(rule.severity == "error" for rule in failed.values()) else "done")
    for finding in failed[breakage.rule].findings:
        path, _, line = finding.where.rpartition(":")
        assert line.isdigit(), finding.where
        assert (root / path).exists() or breakage.rule == "FILES"


@pytest.mark.parametrize("variation", VARIATIONS, ids=lambda variation: variation.what)
def test_another_way_to_write_it_is_no_breakage(sound: Path, variation: Breakage, tmp_path: Path):
    result = review(broken(sound, variation, tmp_path / "workspace"), variation.port)
    assert [rule.id for rule in result.rules if rule.status == "fail"] == variation.also


def test_every_check_has_a_rule():
    assert set(CHECKS) == {rule.check for rule in RULES.values()}


def test_every_rule_that_a_program_decides_has_a_breakage():
    decided = {rule.id for rule in RULES.values() if not rule.question}
    tested_alone = {"FILES", "OOT-ENTRY"}
    assert decided - {breakage.rule for breakage in BREAKAGES} == tested_alone


def test_missing_files_are_warned_about(sound: Path, tmp_path: Path):
    shutil.copytree(sound, tmp_path / "workspace")
    (tmp_path / "workspace/examples/vllm_neuron/models/nova/run.py").unlink()
    result = review(tmp_path / "workspace", "nova")
    (files,) = (rule for rule in result.rules if rule.id == "FILES")
    assert [f.where for f in files.findings if f.status == "fail"] == [
        "examples/vllm_neuron/models/nova/run.py:1"
    ]
    assert (files.status, result.status) == ("fail", "done")


def test_rules_of_judgement_say_where_to_look(sound: Path):
    result = {rule.id: rule for rule in review(sound, "nova").rules}
    model = (sound / "vllm_neuron/model/nova/model_bf16.py").read_text().splitlines()
    places = [finding.where for finding in result["ATTN-SCALE"].findings]
    assert len(places) == 2
    for place in places:
        line = model[int(place.rpartition(":")[2]) - 1]
        assert "NF.segmented_attention" in line or "NF.attention_decode" in line
    assert "rope.py:" in result["ROPE-STYLE"].findings[0].where
    assert result["ROPE-STYLE"].question.endswith("?")


def test_config_keys_that_nothing_reads_are_put_to_the_reader(sound: Path, tmp_path: Path):
    shutil.copytree(sound, tmp_path / "workspace")
    port = Port(Workspace.find(tmp_path / "workspace"), "nova")
    known = facts("nova")
    known.unconsumed = {"residual_multiplier": 0.22, "head_dim": 64}
    port.write_state("facts.json", known)
    result = {rule.id: rule for rule in review(tmp_path / "workspace", "nova").rules}
    assert [(f.status, f.text.split()[0]) for f in result["CFG-UNREAD"].findings] == [
        ("judge", "residual_multiplier"),
        ("pass", "head_dim"),
    ]

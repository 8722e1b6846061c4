"""Pausing for review, confirming, and overriding decisions."""

import json

import pytest
import yaml
from autoport.analysis import decisions
from autoport.analysis.step import run
from autoport.codegen.document import readme
from autoport.errors import Refusal
from autoport.port import next_step, run_port, run_step
from autoport.port_state import Port
from autoport.research.step import run as run_research
from autoport.schema.plan import Plan
from autoport.step import Options
from autoport.workspace import Workspace
from checkpoints import small_config, write_checkpoint


@pytest.fixture
def port(tmp_path):
    (tmp_path / "ws" / "vllm_neuron" / "model").mkdir(parents=True)
    (tmp_path / "ws" / "vllm_neuron" / "__init__.py").touch()

    def start(**config):
        folder = write_checkpoint(tmp_path / "model", small_config(**config))
        port = Port(Workspace.find(tmp_path / "ws"), "small", str(folder))
        run_research(port, Options())
        return port

    return start


def override(port, *texts):
    decisions.record(port, decisions.parse_overrides(texts, "a person with --set"))
    return run(port, Options())


@pytest.mark.parametrize("value", ["nan", ".nan", "inf", "-.inf", "1e999", f"0x{'f' * 5000}", str(2**64)])
def test_a_value_that_is_no_number_of_a_model(port, value):
    port = port()
    with pytest.raises(Refusal, match=r"DEC-SET.* no finite number"):
        override(port, f"head.scale={value}")
    assert not port.has_state("overrides.json")


def plan_of(port):
    return port.read_state("plan.json", Plan, "analyze")


def test_a_review_waits_with_the_decisions_written_down(port):
    port = port()
    outcome = run(port, Options(review=True))
    assert outcome.status == "waiting"
    shown = yaml.safe_load((port.state_dir / "decisions.yaml").read_text())
    assert shown["reference"] == "llama3"
    assert [section["name"] for section in shown["sections"]][:3] == ["norm", "rope", "attention"]
    assert shown["overrides"] == {}
    assert run(port, Options(confirm=True)).status == "done"


def test_a_confirmation_holds_until_the_decisions_change(port):
    port = port(foo_multiplier=3.0)
    assert run(port, Options()).status == "waiting"
    assert run(port, Options(confirm=True)).status == "done"
    assert run(port, Options()).status == "done"
    assert override(port, "norm.eps=0.25").status == "waiting"


def test_a_confirmation_is_for_the_context_that_was_shown(port):
    port = port(foo_multiplier=3.0)
    assert run(port, Options(confirm=True)).status == "done"
    assert run(port, Options(context_length=128)).status == "waiting"
    text = (port.state_dir / "decisions.yaml").read_text()
    command = f"autoport port small --workspace {port.workspace.root} --context-length 128 --confirm"
    assert f"{command} (without a Neuron device: with --dry-run)\n" in text
    assert yaml.safe_load(text)["parallel"]["context_length"] == 128
    run(port, Options(dry_run=True, review=True))
    assert " --dry-run --confirm\n" in (port.state_dir / "decisions.yaml").read_text()


def test_keys_that_nothing_took_and_remote_code_pause_without_review(port):
    outcome = run(port(foo_multiplier=3.0), Options())
    assert outcome.status == "waiting"
    assert "foo_multiplier 3.0" in outcome.summary
    assert outcome.data["unconsumed"] == {"foo_multiplier": 3.0}


def test_remote_code_pauses(port):
    outcome = run(port(auto_map={"AutoModelForCausalLM": "modeling_x.X"}), Options())
    assert outcome.status == "waiting"
    assert "own code (auto_map), which was not run" in outcome.summary


def test_an_override_reaches_the_plan_with_who_decided(port):
    port = port()
    assert override(port, "norm.eps=0.25", "attention.scale=0.5", "parallel.tp_size=1").status == "done"
    plan = plan_of(port)
    assert plan.architecture.norm.eps == 0.25
    assert plan.architecture.readings["norm_eps"] == "0.25"
    assert plan.architecture.attention.scale == 0.5
    assert plan.tp.recommended == 1
    assert {(item.field, item.previous, item.who) for item in plan.overrides} >= {
        ("norm.eps", 1e-5, "a person with --set"),
        ("attention.scale", None, "a person with --set"),
    }
    section = next(section for section in plan.sections if section.name == "norm")
    assert "eps 0.25" in section.target


def test_overrides_are_shown_in_the_readme(port):
    port = port()
    override(port, "norm.eps=0.25")
    (text,) = readme(port, plan_of(port)).values()
    assert "Decisions Taken by Hand" in text
    assert "a person with --set" in text
    override(port, "norm.eps=0.00001")
    assert (
        "0.25" not in next(iter(readme(port, plan_of(port)).values())).split("## Pitfalls")[0].split("eps")[0]
    )


def test_overrides_in_the_file_are_taken_when_confirmed(port):
    port = port()
    run(port, Options(review=True))
    path = port.state_dir / "decisions.yaml"
    document = yaml.safe_load(path.read_text())
    document["overrides"] = {"head.softcap": 30.0}
    path.write_text(yaml.safe_dump(document))
    decisions.record_file(port)
    assert run(port, Options(confirm=True)).status == "done"
    plan = plan_of(port)
    assert plan.architecture.head.softcap == 30.0
    assert "decisions.yaml" in plan.overrides[0].who


def test_an_override_that_is_taken_out_of_the_file_is_withdrawn(port):
    port = port()
    override(port, "head.softcap=30.0", "attention.scale=0.5")
    path = port.state_dir / "decisions.yaml"
    document = yaml.safe_load(path.read_text())
    del document["overrides"]["head.softcap"]
    path.write_text(yaml.safe_dump(document))
    decisions.record(
        port, decisions.parse_overrides(["norm.eps=0.25"], "a person with --set")
    )  # not shown yet
    decisions.record_file(port)
    assert [item.field for item in decisions.load(port)] == ["attention.scale", "norm.eps"]


def test_an_override_with_the_value_that_is_there_changes_nothing(port):
    port = port()
    override(port, "norm.eps=1e-5", "rope.pairing=half")
    assert plan_of(port).overrides == []
    assert "norm_eps" in plan_of(port).architecture.readings
    assert plan_of(port).architecture.readings["norm_eps"] != "1e-05"


def test_a_refused_value_is_not_kept(port):
    port = port()
    override(port, "head.softcap=30.0")
    with pytest.raises(Refusal, match="DEC-VALUE"), decisions.forgotten_if_refused(port):
        override(port, "norm.eps=small")
    assert [item.field for item in decisions.load(port)] == ["head.softcap"]
    assert run(port, Options()).status == "done"


def test_a_pause_ends_with_a_confirmation_only(port):
    port = port()
    assert run_step(port, "analyze", Options(review=True)).status == "waiting"
    assert run_step(port, "analyze", Options(context_length=64)).status == "waiting"
    assert run_step(port, "analyze", Options(context_length=64, confirm=True)).status == "done"
    assert run_step(port, "analyze", Options(context_length=64)).status == "done"


@pytest.mark.parametrize(
    ("text", "rule", "found"),
    [
        ("norm.colour=red", "DEC-SET", "norm.colour"),
        ("norm.eps", "DEC-SET", "no section.field=value"),
        ("norm.eps={", "DEC-SET", "the value cannot be read"),
        ("norm.eps=[0.25]", "DEC-SET", "the value is no plain one"),
        ("norm.kind=batch", "DEC-VALUE", "norm.kind cannot be 'batch'"),
        ("norm.eps=small", "DEC-VALUE", "norm.eps cannot be 'small'"),
        ("parallel.tp_size=3", "DEC-VALUE", "TP 3 is not valid"),
        ("reference.model=bert", "DEC-VALUE", "no reference model 'bert'"),
    ],
)
def test_values_that_cannot_be(port, text, rule, found):
    port = port()
    with pytest.raises(Refusal, match=rule) as caught:
        override(port, text)
    assert found in str(caught.value)


def test_a_damaged_decisions_file_is_refused(port):
    port = port()
    (port.state_dir / "decisions.yaml").write_text("[")
    with pytest.raises(Refusal, match="DEC-FILE"):
        decisions.record_file(port)


@pytest.mark.parametrize(
    ("name", "mend"),
    [
        ("overrides.json", lambda port: (port.state_dir / "overrides.json").unlink()),
        ("confirmed.json", lambda port: run(port, Options(confirm=True))),
    ],
)
def test_a_damaged_record_names_a_way_on_that_works(port, name, mend):
    port = port(foo_multiplier=3.0)
    (port.state_dir / name).write_text('[{"field": 1}]')
    with pytest.raises(Refusal) as caught:
        run(port, Options())
    (problem,) = caught.value.problems
    assert problem.rule == "PORT-STATE"
    assert problem.where == str(port.state_dir / name)
    assert "cannot be read: Expected" in problem.found
    assert ("remove it" if name == "overrides.json" else "--confirm") in problem.next_step
    mend(port)
    run(port, Options())


def test_a_run_resumes_where_the_last_one_stopped(tmp_path, leave_out):
    leave_out("review", "prove")
    source = str(write_checkpoint(tmp_path / "model", small_config(hidden_size=256)))
    workspace = Workspace.create(tmp_path / "ws")
    port = Port(workspace, "tiny", source)
    assert next_step(port, Options()) == "research"
    results = list(run_port(port, Options(review=True), lambda *_: None))
    assert [result.status for result in results] == ["done", "waiting"]
    again = Port(workspace, "tiny")  # the source is known
    assert next_step(again, Options()) == "analyze"
    results = list(run_port(again, Options(confirm=True), lambda *_: None))
    assert {result.step: result.status for result in results}["document"] == "done"
    assert results[0].status == "kept"
    assert next_step(Port(workspace, "tiny"), Options()) == ""
    assert json.loads((port.state_dir / "confirmed.json").read_text())["who"]

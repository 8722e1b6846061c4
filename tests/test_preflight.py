"""What would stop a later step is refused before anything is generated."""

import pytest
from autoport.cli.status import note_lost_row
from autoport.errors import Refusal
from autoport.port import STEPS, run_port
from autoport.port_state import Port
from autoport.step import Options
from autoport.workspace import Workspace
from checkpoints import small_config, write_checkpoint

REGISTRY = """\
from .llama3 import LlamaForCausalLM


def get_models():
    return [("LlamaForCausalLM", LlamaForCausalLM)]
"""


@pytest.fixture
def source(tmp_path):
    return str(write_checkpoint(tmp_path / "checkpoint", small_config(hidden_size=256)))


@pytest.fixture
def stock(tmp_path, leave_out):
    """A workspace whose plugin has llama3 registered, as the real one."""
    leave_out("prove")
    workspace = Workspace.create(tmp_path / "workspace")
    workspace.registry_path.write_text(REGISTRY)
    return workspace


def run(workspace, source, name="tiny", **options):
    port = Port(workspace, name, source)
    return {r.step: r for r in run_port(port, Options(dry_run=True, **options), lambda *_: None)}


def refused(workspace, source, name="tiny", **options):
    with pytest.raises(Refusal) as refusal:
        run(workspace, source, name, **options)
    assert "generate" not in Port(workspace, name).manifest.steps
    return [problem.rule for problem in refusal.value.problems], str(refusal.value)


def test_an_architecture_that_the_plugin_has_is_said_first(stock, source):
    rules, text = refused(stock, source)
    assert rules == ["REG-CONFLICT"]
    assert "registered from .llama3:LlamaForCausalLM" in text
    assert text.index("use that model") < text.index("--no-register") < text.index("--replace-row")
    assert not Port(stock, "tiny").has_state("plan.json")


def test_a_registry_that_cannot_be_edited_is_said_first(stock, source):
    stock.registry_path.write_text("def get_models():\n    return build()\n")
    assert refused(stock, source)[0] == ["REG-LAYOUT"]


def test_going_on_without_a_row(stock, source):
    results = run(stock, source, no_register=True)
    assert [result.status for result in results.values()] == ["done"] * (len(STEPS) - 1)
    assert results["register"].summary.endswith("LlamaForCausalLM stays with .llama3:LlamaForCausalLM")
    assert stock.registry_path.read_text() == REGISTRY
    # Remembered, until the port is registered after all.
    assert {result.status for result in run(stock, source).values()} <= {"kept", "done"}
    run(stock, source, replace_row=True)
    assert "from .tiny import" in stock.registry_path.read_text()
    assert not Port(stock, "tiny").manifest.unregistered


def test_a_port_whose_row_was_replaced_says_so(stock, source):
    run(stock, source, "first", replace_row=True)
    run(stock, source, "second", replace_row=True)
    first, second = Port(stock, "first"), Port(stock, "second")
    note_lost_row(first)
    note_lost_row(second)
    assert first.manifest.steps["register"].status == "lost"
    assert ".second:" in first.manifest.steps["register"].summary
    assert second.manifest.steps["register"].status == "done"


def test_the_name_of_another_model_is_refused_before_research(stock, source):
    rules, text = refused(stock, source, "llama3")
    assert rules == ["PORT-FOREIGN"]
    assert text.index("use another NAME") < text.index("--force")
    assert not Port(stock, "llama3").exists


def test_what_a_model_written_by_hand_has_and_lacks_is_said(stock, source):
    folder = stock.model_dir("by_hand")
    folder.mkdir()
    for name in ("config.py", "model.py"):
        (folder / name).write_text("")
    rules, text = refused(stock, source, "by_hand")
    assert rules == ["PORT-FOREIGN"]
    assert (
        "it has Step 3: config.py, Step 4: model.py; it lacks Step 3: __init__.py, Step 3: factory.py" in text
    )
    assert "Step 5: a row in registry.py" in text
    (folder / "__init__.py").write_text("")
    stock.registry_path.write_text("from .by_hand import X\n" + stock.registry_path.read_text())
    assert "it lacks Step 3: factory.py, Step 6:" in refused(stock, source, "by_hand")[1]


def test_a_size_that_cannot_be_proven_is_refused_before_research(stock, source):
    assert refused(stock, source, tp_sizes=[3, 2, 8])[0] == ["PROOF-TP", "PROOF-TP"]
    assert not Port(stock, "tiny").exists


def test_a_size_that_the_plan_rejects_is_refused_before_generation(stock, tmp_path):
    source = str(write_checkpoint(tmp_path / "odd", small_config(hidden_size=256, intermediate_size=258)))
    rules, text = refused(stock, source, no_register=True, tp_sizes=[4])
    assert rules == ["PROOF-TP"]
    assert "R4" in text

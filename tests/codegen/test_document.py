"""Step 6: what the documents say, and that they say only what was run."""

import ast
import re
from pathlib import Path

import msgspec
import pytest
from autoport.codegen import generate
from autoport.codegen.document import default_tp_size, model_len, record_results, run
from autoport.codegen.features import FEATURES, FeatureResult
from autoport.errors import Refusal
from autoport.port_state import Port
from autoport.step import Options
from plans import LLAMA3, YI, plan

README = "vllm_neuron/model/yi/README.md"
RUN = "examples/vllm_neuron/models/yi/run.py"
RESULTS = "examples/vllm_neuron/models/yi/results/results.md"
LOGITS = "test/vllm_neuron/model/yi/bf16/e2e/test_logits.py"


@pytest.fixture
def documented(port: Port) -> Port:
    port.write_state("plan.json", plan(YI))
    generate.run(port, Options())
    assert sorted(run(port, Options()).files) == sorted([README, RUN, RESULTS, LOGITS])
    return port


def text(port: Port, path: str) -> str:
    return (port.workspace.root / path).read_text()


def table(markdown: str) -> dict[str, list[str]]:
    """Rows of all tables of a document by their first cell."""
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in markdown.splitlines() if line.startswith("|")]
    return {row[0].strip().replace("\\", ""): [cell.strip() for cell in row[1:]] for row in cells}


def defaults(source: str) -> dict[str, object]:
    """Default of each argument of the script."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return {
        ast.literal_eval(call.args[0]): ast.literal_eval(keyword.value)
        for call in calls
        for keyword in call.keywords
        if keyword.arg == "default"
    }


def test_run_script_has_the_ports_defaults(documented: Port) -> None:
    script = text(documented, RUN)
    assert defaults(script) == {
        "--model-checkpoint": "01-ai/Yi-6B",
        "--tensor-parallel-size": 2,
        "--max-model-len": 1024,
        "--max-num-seqs": 4,
        "--max-tokens": 32,
    }
    assert '"The capital of France is"' in script


def test_before_anything_was_run_nothing_is_claimed(documented: Port) -> None:
    assert "✅" not in re.sub(r"✅ was run and passed", "", text(documented, README))
    assert text(documented, RESULTS).count("Not run yet.") == 3
    rows = table(text(documented, README))
    assert [feature for feature in FEATURES if feature in rows] == list(FEATURES)
    assert rows["Segmented prefill"][0] == "not verified"
    assert rows["EP (expert parallel)"][0] == "N/A"


def test_readme_shows_the_architecture(documented: Port) -> None:
    rows = table(text(documented, README))
    assert rows["num_key_value_heads"] == ["4"]
    assert rows["RoPE"] == ["default (theta 5e+06)"]
    assert "**rope**: no scaling. Reference: llama3 scaling. Changed: drop the scaling." in text(
        documented, README
    )
    assert "**mlp**" not in text(documented, README)


def test_recorded_results_reach_the_table(documented: Port) -> None:
    note = "simulator, TP 1 and 2"
    assert record_results(documented, {"Segmented prefill": FeatureResult(True, note)}) == [README]
    record_results(documented, {"TP (head sharding)": FeatureResult(False, "simulator, TP 2: decode")})
    rows = table(text(documented, README))
    assert rows["Segmented prefill"] == ["✅", note]
    assert rows["TP (head sharding)"] == ["❌ failed", "simulator, TP 2: decode"]
    assert rows["SP (sequence parallel)"][0] == "not verified"


def test_a_result_is_void_once_the_model_changes(documented: Port) -> None:
    record_results(documented, {"Segmented prefill": FeatureResult(True, "simulator")})
    model = documented.workspace.model_dir("yi") / "model.py"
    model.write_text(model.read_text() + "\n")
    run(documented, Options())
    assert table(text(documented, README))["Segmented prefill"][0] == "not verified"


def test_an_edited_readme_stays(documented: Port) -> None:
    readme = documented.workspace.root / README
    readme.write_text("mine")
    assert record_results(documented, {"Segmented prefill": FeatureResult(True, "simulator")}) == []
    assert readme.read_text() == "mine"
    with pytest.raises(Refusal, match="PORT-EDITED"):
        run(documented, Options())


def test_an_unknown_feature_is_an_error(documented: Port) -> None:
    with pytest.raises(ValueError, match="Telepathy"):
        record_results(documented, {"Telepathy": FeatureResult(True, "simulator")})


def test_logit_test_is_skipped_without_the_plugins_utilities(documented: Port) -> None:
    code = compile(text(documented, LOGITS), LOGITS, "exec")
    with pytest.raises(pytest.skip.Exception, match="test utilities"):
        exec(code, {})


@pytest.mark.parametrize(
    "source",
    ['"); import os; ("', "a`b|c\nd", "{{ 7 * 7 }}", "it's/mine", "'''", "```\n# owned"],
)
def test_a_hostile_source_stays_text(port: Port, source: str) -> None:
    port.write_state("plan.json", plan(YI, source=source))
    run(port, Options())
    assert defaults(text(port, RUN))["--model-checkpoint"] == source
    assert [node.value.value for node in _assignments(text(port, LOGITS), "MODEL_ID")] == [source]
    for path in (README, RESULTS):
        lines = text(port, path).splitlines()
        assert not [line for line in lines if line.startswith(("# owned", "d`"))]
        assert "49" not in "".join(lines)
    assert table(text(port, RESULTS))["Checkpoint"][0].count("`") == 2


def test_a_folder_of_this_machine_is_in_no_file(port: Port) -> None:
    port.write_state("plan.json", plan(YI, source="/home/ann/models/it's 'yi'"))
    run(port, Options())
    files = {path: text(port, path) for path in port.manifest.files}
    assert not [path for path, content in files.items() if "/home/ann" in content]
    compile(files[RUN], RUN, "exec")
    assert "--model-checkpoint" not in defaults(files[RUN])
    assert "run.py --model-checkpoint FOLDER\n" in files[RUN]
    assert "`it's 'yi'` (a folder)" in files[RESULTS]
    assert "run.py --model-checkpoint FOLDER\n" in files[RESULTS]
    assert "MODEL_CHECKPOINT=FOLDER python -m pytest" in files[RESULTS]
    assert "MODEL_ID = os.environ.get" in files[LOGITS]


def _assignments(source: str, name: str) -> list[ast.Assign]:
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.Assign)]
    return [node for node in nodes if ast.unparse(node.targets[0]) == name]


def test_default_tp_size() -> None:
    yi = plan(YI)
    assert default_tp_size(yi) == 2
    yi.tp.recommended = None
    assert default_tp_size(yi) == 2
    yi.tp.candidates = []
    assert default_tp_size(yi) == 1


@pytest.mark.parametrize(
    ("wanted", "longest", "tp_size", "expected"),
    [
        (1024, 4096, 2, 1024),
        (1024, 4096, 3, 1152),
        (1024, 600, 2, 512),
        (256, 100, 1, 100),
        (256, 300, 3, 300),
    ],
)
def test_model_len(wanted: int, longest: int, tp_size: int, expected: int) -> None:
    assert model_len(wanted, longest, tp_size) == expected


@pytest.mark.parametrize(("planned", "shown"), [(512, 512), (4096, 1024)])
def test_the_plan_is_named_and_the_example_stays_within_it(port: Port, planned: int, shown: int) -> None:
    yi = plan(YI)
    yi.tp.context_length, yi.tp.batch_size = planned, 2
    port.write_state("plan.json", yi)
    run(port, Options())
    assert defaults(text(port, RUN))["--max-model-len"] == shown
    words = f"2 x {planned} tokens of KV cache"
    assert table(text(port, README))["Memory planned for"][0].startswith(words)
    assert words in table(text(port, RESULTS))["Max model length"][0]


def test_tied_models_say_so(port: Port, tmp_path: Path) -> None:
    port.write_state("plan.json", plan(msgspec.structs.replace(LLAMA3)))
    run(port, Options())
    rows = table(text(port, README))
    assert rows["tie_word_embeddings"] == ["True"]
    assert rows["RoPE"][0].startswith("llama3 (theta 500000, factor 32")

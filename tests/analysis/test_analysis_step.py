"""Step 2 as a whole."""

import json
from pathlib import Path

import pytest
from autoport.analysis.estimate import estimate_parallelism
from autoport.analysis.reference import load_table
from autoport.analysis.step import make_plan, run
from autoport.errors import Refusal
from autoport.port_state import Port
from autoport.research.step import research
from autoport.research.step import run as run_research
from autoport.schema.plan import Plan
from autoport.step import Options
from autoport.workspace import Workspace
from checkpoints import llama_keys, real_config, small_config, write_checkpoint


@pytest.fixture
def port(tmp_path):
    (tmp_path / "ws" / "vllm_neuron" / "model").mkdir(parents=True)
    (tmp_path / "ws" / "vllm_neuron" / "__init__.py").touch()

    def start(config, keys=None):
        folder = write_checkpoint(tmp_path / "model", config, keys)
        port = Port(Workspace.find(tmp_path / "ws"), "small", str(folder))
        run_research(port, Options())
        return port

    return start


def plan_of(tmp_path, name, **options):
    return make_plan(
        "small", *research(str(write_checkpoint(tmp_path, real_config(name)))), Options(**options)
    )


def test_the_plan_is_written_and_summed_up(port):
    port = port(small_config())
    outcome = run(port, Options())
    assert outcome.status == "done"
    assert outcome.summary.startswith("reference llama3, TP 2")
    plan = port.read_state("plan.json", Plan, "analyze")
    assert (plan.name, plan.class_prefix, plan.reference_model) == ("small", "Small", "llama3")
    assert plan.tp.recommended == 2
    assert [section.name for section in plan.sections] == list(load_table()["models"]["llama3"]["sections"])
    assert outcome.data["tensor_parallel"] == plan.tp


def test_a_review_waits_until_it_is_confirmed(port):
    port = port(small_config())
    assert run(port, Options(review=True)).status == "waiting"
    assert port.has_state("plan.json")
    assert run(port, Options(review=True, confirm=True)).status == "done"


def test_no_valid_tp_is_red_with_the_reason(port):
    port = port(real_config("smollm2-135m"))
    outcome = run(port, Options())
    assert outcome.status == "red"
    assert "R2: 9 heads / 1 = 9 per rank is odd" in outcome.summary
    relaxed = run(port, Options(relax=["even-heads"]))
    assert relaxed.status == "done"
    rules = {pitfall.rule: pitfall.text for pitfall in relaxed.data["pitfalls"]}
    assert "PIT-ODD-HEADS" in rules
    assert "at TP 3 no prefill in segments" in rules["PIT-SEGMENT"]


def test_a_key_that_nothing_takes_stops_before_anything_is_written(port):
    config = small_config()
    port = port(config, llama_keys(config) | {"model.layers.1.extra.weight": ("BF16", (4,))})
    with pytest.raises(Refusal, match="MAP-UNEXPECTED"):
        run(port, Options())
    assert not port.has_state("plan.json")


def test_sections_and_pitfalls_follow_the_model(tmp_path):
    llama, qwen = plan_of(tmp_path / "l", "llama-3.2-1b"), plan_of(tmp_path / "q", "qwen2-7b")
    text = {section.name: section for section in llama.sections}
    assert "factor 32" in text["rope"].target
    assert "rope_scaling.rope_type" in text["rope"].source
    assert text["head"].target == "tied to the embedding"
    assert "qkv_proj_bias" in next(section.change for section in qwen.sections if section.name == "attention")
    assert {"PIT-ROPE-LONG", "PIT-TIED", "PIT-KV-REPLICAS"} <= {pitfall.rule for pitfall in llama.pitfalls}
    assert {"PIT-BIAS-2D", "PIT-HEAD-DIM"} <= {pitfall.rule for pitfall in qwen.pitfalls}
    assert not {"PIT-TIED", "PIT-SEGMENT"} & {pitfall.rule for pitfall in qwen.pitfalls}


def rules_of(plan):
    return {pitfall.rule: pitfall.text for pitfall in plan.pitfalls}


def test_a_pitfall_is_true_of_the_model(tmp_path):
    own = rules_of(plan_of(tmp_path / "a", "yi-6b"))
    assert "rope_theta is 5000000" in own["PIT-ROPE-THETA"]
    assert "PIT-BLOCK" not in own
    assert "at TP 2: 2 KV heads per rank" in own["PERF-KV-HEADS"]
    config = real_config("yi-6b") | {"rope_theta": 10000.0}
    folder = write_checkpoint(tmp_path / "b", config)
    assert "PIT-ROPE-THETA" not in rules_of(make_plan("small", *research(str(folder)), Options()))


def test_a_plan_is_for_a_context_that_the_model_has(tmp_path):
    assert plan_of(tmp_path / "a", "yi-6b").tp.context_length == 4096
    folder = write_checkpoint(tmp_path / "b", small_config(max_position_embeddings=256))
    assert make_plan("small", *research(str(folder)), Options()).tp.context_length == 256
    with pytest.raises(Refusal, match=r"TP-CONTEXT: a context of 8192 .* 4096 positions .*config.json"):
        plan_of(tmp_path / "c", "yi-6b", context_length=8192)


def test_the_instance_is_part_of_the_plan(tmp_path):
    tp = plan_of(tmp_path, "yi-6b", instance="trn2.3xlarge", lnc=1).tp
    assert (tp.instance, tp.lnc, tp.cores) == ("trn2.3xlarge", 1, 8)
    assert max(candidate.tp_size for candidate in tp.candidates) == 8
    assert any("assumed" in text for text in tp.assumptions)


def test_the_bytes_of_each_parameter_add_up(tmp_path):
    tp = plan_of(tmp_path, "yi-6b").tp
    for candidate in tp.candidates:
        by_part = [part.per_rank(candidate.tp_size, 4) for part in tp.parts.values()]
        assert abs(sum(by_part) - candidate.weight_bytes_per_rank) <= len(by_part)
    assert tp.parts["model.layers.{i}.self_attn.qkv_proj_weight"].kv_heads == 32 * 2 * 512 * 4096 * 2


def test_context_and_batch_reach_the_plan(tmp_path):
    small = plan_of(tmp_path, "yi-6b", context_length=1024, batch_size=1).tp
    large = plan_of(tmp_path, "yi-6b", context_length=2048, batch_size=4).tp
    assert large.candidates[0].kv_bytes_per_rank == 8 * small.candidates[0].kv_bytes_per_rank


def test_the_plan_is_json_that_reads_back(port):
    port = port(real_config("qwen2-7b"))
    run(port, Options())
    assert (
        json.loads((port.state_dir / "plan.json").read_text())["architecture"]["attention"]["qkv_bias"]
        is True
    )


def test_a_config_that_changed_since_research_is_refused(port):
    port = port(small_config())
    config = Path(port.source) / "config.json"
    text = json.loads(config.read_text())
    config.write_text(json.dumps(dict(reversed(text.items())), indent=4))
    assert run(port, Options()).status == "done"
    config.write_text(json.dumps(text | {"rope_theta": 1234.0}))
    with pytest.raises(Refusal, match=r"PORT-STALE: config\.json changed"):
        run(port, Options())
    config.unlink()
    with pytest.raises(Refusal, match=r"PORT-STALE: config\.json is gone"):
        run(port, Options())


def put(path, keys, value):
    """Change one value of a json file; ``...`` removes it."""
    document = part = json.loads(path.read_text())
    *parents, last = keys
    for key in parents:
        part = part[key]
    if value is ...:
        del part[last]
    else:
        part[last] = value
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("keys", "value", "told"),
    [
        (
            ("fields", "hidden_size", "value"),
            "64",
            "Expected `int`, got `str` - at `$.fields.hidden_size.value`",
        ),
        (
            ("fields", "num_layers", "value"),
            10**5,
            "Expected `int` <= 10000 - at `$.fields.num_layers.value`",
        ),
        (("fields", "vocab_size"), ..., "has no vocab_size"),
        (("fields", "rope_parameters", "value"), [], "got `array` - at `$.fields.rope_parameters.value`"),
        (
            ("fields", "layer_windows", "value"),
            [None, "4"],
            "got `str` - at `$.fields.layer_windows.value[1]`",
        ),
        (("fields", "layer_windows", "value"), [None], "1 entries for 2 layers - at `$.fields.layer_windows"),
        (("fields", "made_up"), {"value": 1, "source": ""}, "no such fact - at `$.fields.made_up`"),
        (("architecture", "value"), ["x"], "Expected `str` - at `$.architecture.value`"),
        (("modeling", "findings", 0, "value"), {}, "on norm has no kind - at `$.modeling.findings[0]`"),
        (("config_file",), "", "Expected `str` of length >= 1 - at `$.config_file`"),
        (("config", "rope_theta"), "high", "not the content of config.json at research - at `$.config`"),
    ],
)
def test_damaged_facts_are_refused_with_the_place_in_the_file(port, keys, value, told):
    port = port(small_config())
    put(port.state_dir / "facts.json", keys, value)
    with pytest.raises(Refusal) as caught:
        run(port, Options())
    (problem,) = caught.value.problems
    assert problem.rule == "PORT-STATE"
    assert told in problem.found
    assert problem.next_step == (
        f"run 'autoport research small {port.source} --workspace {port.workspace.root}' again"
    )


@pytest.mark.parametrize(
    ("keys", "value", "place"),
    [
        (("architecture", "attention", "num_heads"), "4", "$.architecture.attention.num_heads"),
        (("architecture", "rope", "kind"), "spiral", "$.architecture.rope.kind"),
        (("weights", "entries", 1, "keys"), [], "$.weights.entries[1].keys"),
        (("tp", "candidates", 0, "violations"), None, "$.tp.candidates[0].violations"),
    ],
)
def test_a_damaged_plan_is_refused_with_the_place_in_the_file(port, keys, value, place):
    port = port(small_config())
    run(port, Options())
    put(port.state_dir / "plan.json", keys, value)
    with pytest.raises(Refusal, match="PORT-STATE") as caught:
        port.read_state("plan.json", Plan, "analyze")
    assert f"at `{place}`" in str(caught.value)
    assert f"Next: run 'autoport analyze small --workspace {port.workspace.root}' again" in str(caught.value)


def test_a_quantised_config_is_sized_as_not_quantised_and_says_so(tmp_path):
    config = small_config(quantization_config={"quant_method": "fp8"})
    (warning,) = estimate_parallelism(str(write_checkpoint(tmp_path, config)), None, 1).facts.warnings
    assert warning == (
        "the checkpoint is quantised (quantization_config in config.json), and the weights are sized as not quantised"
    )


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        ("num_hidden_layers", "the checkpoint has layers 0-1 .*Next: write num_hidden_layers: 2 in config"),
        ("hidden_size", r"embed_tokens.weight \[256, 64\] .*Next: write hidden_size: 64 in config"),
        ("vocab_size", r"embed_tokens.weight \[256, 64\] .*Next: write vocab_size: 256 in config"),
        ("intermediate_size", r"up_proj.weight \[128, 64\] .*Next: write intermediate_size: 128 in config"),
        ("num_attention_heads", "Next: write num_attention_heads, which is missing, in config"),
        ("num_key_value_heads", "Next: write num_key_value_heads: 2 in config"),
    ],
)
def test_a_size_that_is_missing_is_the_one_problem(port, missing, told):
    port = port(small_config(**{missing: ...}), llama_keys(small_config()))
    with pytest.raises(Refusal, match=told) as caught:
        run(port, Options())
    assert len(caught.value.problems) == 1


def test_all_sizes_that_are_missing_are_named_together(port):
    port = port(small_config(num_hidden_layers=..., vocab_size=...), llama_keys(small_config()))
    with pytest.raises(Refusal) as caught:
        run(port, Options(incomplete=True))
    assert [problem.rule for problem in caught.value.problems] == ["CFG-MISSING", "CFG-MISSING"]

"""`autoport compute-tp` and scripts/compute_tp.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from autoport.cli.compute_tp import command
from autoport.errors import Refusal
from checkpoints import DATA, small_config
from published import PUBLISHED
from typer.testing import CliRunner

CONFIGS = DATA / "configs"
SCRIPT = Path(__file__).parents[2] / "scripts" / "compute_tp.py"

app = typer.Typer()
app.command()(command)


def run(*arguments, **options):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **options)


def test_the_table_names_the_recommendation_and_every_reason():
    result = run(CONFIGS / "qwen2-7b.json")
    assert result.exit_code == 0
    assert "TP 2 (valid: 1, 2)" in result.stdout
    assert "R2: 28 heads / 4 = 7 per rank is odd" in " ".join(result.stdout.split())
    assert "estimated from the config" in result.stdout


def test_a_folder_without_a_checkpoint_will_do(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(small_config()))
    assert run(tmp_path).exit_code == 0


def test_no_valid_size_is_exit_code_1_with_a_row_for_each():
    result = run(CONFIGS / "smollm2-135m.json", "--json")
    assert result.exit_code == 1
    plan = json.loads(result.stdout)["plan"]
    assert plan["recommended"] is None
    assert all(candidate["violations"] for candidate in plan["candidates"])


def test_a_prime_and_odd_number_of_heads_has_no_size_at_all(published):
    result = run(published("falcon-7b"))
    assert result.exit_code == 1
    text = " ".join(result.stdout.split())
    assert "71 heads / 1 = 71 per rank is odd" in text
    assert "71 heads are not a multiple of 2" in text
    assert "no valid TP" in text


def test_relaxing_and_sizing():
    result = run(CONFIGS / "smollm2-135m.json", "--relax", "even-heads", "--context-length", 100, "--json")
    assert result.exit_code == 0
    plan = json.loads(result.stdout)["plan"]
    assert plan["context_length"] == 100
    assert plan["candidates"][0]["relaxed"][0]["rule"] == "R2"


@pytest.fixture
def published(tmp_path):
    def write(name, **changes):
        (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name] | changes))
        return tmp_path / "config.json"

    return write


def report(*arguments):
    return json.loads(run(*arguments, "--json").stdout)


def test_a_key_that_the_class_does_not_read_is_pointed_out(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(small_config(embedding_multiplier=8)))
    result = run(tmp_path)
    assert result.exit_code == 0
    assert "embedding_multiplier is 8" in result.stderr


def test_experts_are_checked_at_their_own_size(published):
    document = report(published("qwen2-57b-a14b"))
    broken = {item["tp_size"]: item["violations"] for item in document["plan"]["candidates"]}
    assert {"R1", "R3"} & {item["rule"] for item in broken[8]}
    experts = document["experts"]
    assert experts["world_size"] == 64
    assert experts["num_experts"] == 64


def test_experts_that_are_composed_have_no_slow_kernel(published):
    """800 of 6400 columns per rank are no multiple of 128, and sparsemixer is not in the kernel."""
    eight = report(published("phi-3.5-moe"))["plan"]["candidates"][3]
    assert (eight["tp_size"], eight["slow_paths"]) == (8, [])


def test_60_experts_do_not_divide_among_64_groups(published):
    config = published("qwen2-57b-a14b", num_experts=60, moe_intermediate_size=1408, num_attention_heads=32)
    candidates = {item["ep_degree"]: item for item in report(config)["experts"]["candidates"]}
    text = next(item["text"] for item in candidates[64]["violations"] if item["rule"] == "EP1")
    assert "60 experts do not divide among 64 groups" in text
    assert "1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30, 60" in text


def test_all_broken_rules_of_expert_parallelism_come_at_once(published):
    config = published("qwen2-57b-a14b", num_experts=60, moe_intermediate_size=1407)
    (row,) = [item for item in report(config)["experts"]["candidates"] if item["tp_size"] == 2]
    assert {item["rule"] for item in row["violations"]} >= {"EP1", "EP2"}


def test_a_model_that_no_tp_size_holds_needs_expert_parallelism(published):
    result = run(published("llama-4-scout"))
    assert result.exit_code == 1
    text = " ".join(result.stdout.split())
    assert "Expert parallelism is needed" in text
    assert "│ 4 │ 16 │ yes (recommended) │" in text
    assert "all collectives run on the whole world" in text


def test_a_model_that_the_instance_does_not_hold_is_not_sent_to_expert_parallelism(published):
    text = " ".join(run(published("deepseek-v3")).stdout.split())  # 1.3 TB in bfloat16
    assert "Expert parallelism does not help" in text
    assert "is needed" not in text


def test_latent_attention_caches_the_same_on_every_rank(published):
    candidates = report(published("deepseek-v3"))["plan"]["candidates"]
    assert {item["kv_bytes_per_rank"] for item in candidates} == {61 * (512 + 64) * 4096 * 2}
    assert "│ latent" in run(published("deepseek-v2-lite")).stdout


def test_a_mixture_whose_layers_are_all_dense_has_no_experts_to_divide(published):
    document = report(published("deepseek-v3", num_hidden_layers=2, first_k_dense_replace=3))
    assert document["experts"] is None


def test_a_sparse_indexer_counts(published):
    with_indexer, without = (report(published(name))["plan"] for name in ("deepseek-v3.2", "deepseek-v3"))
    weights = [plan["candidates"][0]["weight_bytes_per_rank"] for plan in (with_indexer, without)]
    assert weights[0] - weights[1] == 61 * 2 * (1536 * 64 * 128 + 7168 * (128 + 64))
    cache = [plan["candidates"][0]["kv_bytes_per_rank"] for plan in (with_indexer, without)]
    assert cache[0] - cache[1] == 61 * 128 * 4096 * 2


def test_the_vision_tower_has_sizes_of_its_own(published):
    assert "without the vision tower" in run(published("gemma-3-4b")).stdout
    vision = report(published("gemma-3-4b"))["vision"]
    assert vision["2"] == []
    assert vision["16"][0]["rule"] == "R2"  # 16 heads / 16
    assert report(published("qwen3-8b"))["vision"] == {}


@pytest.mark.parametrize(
    ("options", "cores", "memory"),
    [
        ([], 64, 24),
        (["--lnc", 1], 128, 12),
        (["--instance", "trn2.3xlarge"], 4, 24),
        (["--instance", "trn2.3xlarge", "--lnc", 1], 8, 12),
        (["--instance", "trn3"], 4, 36),
    ],
)
def test_sizes_are_those_that_the_instance_offers(options, cores, memory):
    plan = report(CONFIGS / "yi-6b.json", *options)["plan"]
    assert (plan["cores"], plan["bytes_per_core"]) == (cores, memory * 10**9)
    assert max(item["tp_size"] for item in plan["candidates"]) <= cores
    assert plan["weight_limit_bytes"] == memory * 10**9 * 20 // 24


LONG = ("--context-length", 4000, "--batch-size", 400)


@pytest.mark.parametrize(
    ("instance", "reserve", "hardware"),
    [
        ("trn2.48xlarge", True, 0),
        ("trn2.48xlarge,reserve-gb=3", False, 0),
        ("trn3", True, 2),
        ("trn3,devices=4", True, 1),
        ("trn3,devices=4,hbm-gb=144", True, 0),
        ("trn2.3xlarge,devices=1,reserve-gb=0", False, 0),
    ],
)
def test_each_number_that_rests_on_an_assumption_says_so(instance, reserve, hardware):
    arguments = [CONFIGS / "yi-6b.json", *LONG, "--instance", instance]
    reason = report(*arguments)["plan"]["candidates"][0]["violations"][0]["text"]
    table = " ".join(run(*arguments).stdout.split())
    one_rank = " ".join(run(*arguments, "--explain", 2).stdout.split())
    assert ("an assumed reserve of 2 GB" in reason) == ("assumed: compiled graphs" in one_rank) == reserve
    assert ("GB (assumed)" in reason) == ("per logical core, assumed" in one_rank) == bool(hardware)
    assert ("GB (assumed), " in table) == bool(hardware)
    assert table.count("Assumption: ") == reserve + bool(hardware)
    assert table.count(": assumed, ") == reserve + hardware


def test_what_is_set_counts():
    plan = report(CONFIGS / "yi-6b.json", "--instance", "trn3,devices=4,hbm-gb=160,reserve-gb=5")["plan"]
    assert (plan["cores"], plan["bytes_per_core"]) == (16, 40 * 10**9)
    assert {item["reserve_bytes"] for item in plan["candidates"]} == {5 * 10**9}


@pytest.mark.parametrize(
    "instance", ["trn9", "trn3,devices=0", "trn3,hbm=9", "trn3,hbm-gb=1e9", "trn3,", "trn3,hbm-gb=-1"]
)
def test_an_instance_that_cannot_be_is_refused(instance):
    result = run(CONFIGS / "yi-6b.json", "--instance", instance)
    assert isinstance(result.exception, Refusal)
    assert [problem.rule for problem in result.exception.problems] == ["TP-INSTANCE"]


def test_cache_and_reserve_count_too():
    plan = report(CONFIGS / "yi-6b.json", *LONG)["plan"]
    two = next(item for item in plan["candidates"] if item["tp_size"] == 2)
    assert two["violations"][0]["rule"] == "MEM"
    assert "KV cache" in two["violations"][0]["text"]


def test_a_context_beyond_the_positions_is_refused():
    with pytest.raises(Refusal, match=r"TP-CONTEXT: a context of 8192 tokens .* model's 4096 positions"):
        run(CONFIGS / "yi-6b.json", "--context-length", 8192, catch_exceptions=False)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--instance", "p5.48xlarge"], "TP-INSTANCE"),
        (["--lnc", "3"], "TP-LNC"),
        (["--explain", "3"], "TP-EXPLAIN: TP 3 is not in the table: R1: the query heads are not a multiple"),
        (["--explain", "128"], "TP-EXPLAIN: TP 128 is not in the table: trn2.48xlarge has 64 logical cores"),
    ],
)
def test_unknown_choices_are_refused(options, told):
    with pytest.raises(Refusal, match=told):
        run(CONFIGS / "yi-6b.json", *options, catch_exceptions=False)


def test_explaining_a_size_shows_what_a_rank_holds():
    text = " ".join(run(CONFIGS / "yi-6b.json", "--explain", 8).stdout.split())
    assert "1 KV heads, 2 ranks share each" in text
    assert "k and v split 4 ways" in text
    assert "reserve" in text


def test_padding_is_spelled_out(published):
    config = published("granite-3.1-8b")
    candidates = {item["tp_size"]: item for item in report(config)["plan"]["candidates"]}
    assert candidates[2]["padded_vocab_size"] == 49156
    assert "vocabulary to 49156" in " ".join(run(config, "--explain", 2).stdout.split())
    cells = [line.split("│") for line in run(config).stdout.splitlines() if "│" in line]
    why = " ".join(" ".join(row[3].split()) for row in cells)
    assert "R5: vocab_size 49155 is filled up with zeros to 49156" in why


def test_the_script_prints_the_same_from_any_folder(tmp_path):
    folder = tmp_path / "with spaces"
    folder.mkdir()
    (folder / "config.json").write_text((CONFIGS / "yi-6b.json").read_text())
    process = subprocess.run(
        [sys.executable, SCRIPT, "config.json", "--json"], cwd=folder, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout == run(CONFIGS / "yi-6b.json", "--json").stdout

"""The weight map, and the check in both directions that it covers the checkpoint."""

import pytest
from autoport.analysis.architecture import describe_architecture
from autoport.analysis.coverage import check_coverage, coverage_problems
from autoport.analysis.keys import CheckpointKeys
from autoport.analysis.weight_map import build_weight_map, expand
from autoport.errors import Refusal
from autoport.research.step import research
from autoport.schema.facts import TensorHeader
from autoport.schema.weights import WeightEntry
from checkpoints import llama_keys, real_config, small_config, write_checkpoint


def map_of(tmp_path, config, keys=None):
    facts, checkpoint = research(str(write_checkpoint(tmp_path, config, keys)))
    architecture = describe_architecture(facts, checkpoint)
    return build_weight_map(architecture, CheckpointKeys(checkpoint.tensors)), checkpoint


@pytest.mark.parametrize("name", ["llama-3.2-1b", "yi-6b", "mistral-7b-v0.3", "qwen2-7b", "smollm2-135m"])
def test_published_models_are_covered(tmp_path, name):
    config = real_config(name)
    weights, checkpoint = map_of(tmp_path, config)
    assert check_coverage(weights, config["num_hidden_layers"], checkpoint).complete


def test_the_parameters_of_a_layer(tmp_path):
    weights, _ = map_of(tmp_path, real_config("qwen2-7b"))
    entries = {entry.parameter: entry for entry in weights.entries}
    layer = "model.layers.{i}."
    qkv = entries[f"{layer}self_attn.qkv_proj_weight"]
    assert qkv.keys == [f"{layer}self_attn.{name}_proj.weight" for name in "qkv"]
    assert qkv.shapes == [(3584, 3584), (512, 3584), (512, 3584)]
    assert entries[f"{layer}self_attn.qkv_proj_bias"].shapes == [(3584,), (512,), (512,)]
    assert {name.removeprefix(layer): entry.transform for name, entry in entries.items()} == {
        "model.embed_tokens.weight": "vocab",
        "input_layernorm.weight": "replicated",
        "self_attn.qkv_proj_weight": "fused_qkv",
        "self_attn.qkv_proj_bias": "fused_qkv_bias",
        "self_attn.o_proj_weight": "row",
        "post_attention_layernorm.weight": "replicated",
        "mlp.gate_proj_weight": "column",
        "mlp.up_proj_weight": "column",
        "mlp.down_proj_weight": "row",
        "model.norm.weight": "replicated",
        "lm_head.weight": "vocab",
    }


def test_keys_without_the_model_prefix_are_renamed(tmp_path):
    config = small_config()
    weights, checkpoint = map_of(tmp_path, config, llama_keys(config, prefix=""))
    assert check_coverage(weights, 2, checkpoint).complete
    entries = {entry.parameter: entry.keys for entry in weights.entries}
    assert entries["model.layers.{i}.self_attn.o_proj_weight"] == ["layers.{i}.self_attn.o_proj.weight"]
    assert entries["model.norm.weight"] == ["norm.weight"]
    assert entries["lm_head.weight"] == ["lm_head.weight"]


def test_a_tied_head_is_loaded_from_the_embedding(tmp_path):
    config = small_config(tie_word_embeddings=True)
    weights, checkpoint = map_of(tmp_path, config)
    assert weights.entries[-1].keys == ["model.embed_tokens.weight"]
    assert weights.ignored == []
    assert check_coverage(weights, 2, checkpoint).complete


def test_a_tied_head_that_was_saved_too_is_left_out_with_a_reason(tmp_path):
    config = small_config(tie_word_embeddings=True)
    keys = llama_keys(config) | {"lm_head.weight": ("BF16", (256, 64))}
    weights, checkpoint = map_of(tmp_path, config, keys)
    assert check_coverage(weights, 2, checkpoint).complete
    (ignored,) = weights.ignored
    assert "tied" in ignored.reason


def test_a_tied_embedding_that_was_saved_as_the_head_only(tmp_path):
    config = small_config(tie_word_embeddings=True)
    keys = llama_keys(config)
    keys["lm_head.weight"] = keys.pop("model.embed_tokens.weight")
    weights, checkpoint = map_of(tmp_path, config, keys)
    assert weights.entries[0].keys == ["lm_head.weight"]
    assert check_coverage(weights, 2, checkpoint).complete


def test_saved_rotary_frequencies_are_left_out_with_a_reason(tmp_path):
    config = small_config()
    keys = llama_keys(config)
    for layer in range(2):
        keys[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = ("F32", (8,))
    weights, checkpoint = map_of(tmp_path, config, keys)
    assert check_coverage(weights, 2, checkpoint).complete
    assert "rope_theta" in weights.ignored[0].reason


def test_the_three_lists_are_separate(tmp_path):
    weights, checkpoint = map_of(tmp_path, small_config())
    o_proj = "model.layers.{i}.self_attn.o_proj.weight"
    weights.entries.append(WeightEntry("model.extra", ["model.extra.weight"], [(64,)], "replicated"))
    weights.entries.append(WeightEntry("model.layers.{i}.copy", [o_proj], [(64, 64)], "row"))
    checkpoint.tensors["model.rotary.weight"] = TensorHeader("F32", (1,), "model.safetensors", 4)
    coverage = check_coverage(weights, 2, checkpoint)
    assert coverage.missing == ["model.extra.weight"]
    assert coverage.unexpected == ["model.rotary.weight"]
    assert coverage.mapped_twice == [o_proj.replace("{i}", "0"), o_proj.replace("{i}", "1")]
    problems = list(coverage_problems(coverage, 2, checkpoint))
    assert [problem.rule for problem in problems] == ["MAP-MISSING", "MAP-UNEXPECTED", "MAP-TWICE"]
    assert "layers 0-1" in problems[2].found


def test_a_map_far_larger_than_any_checkpoint_is_refused_before_it_is_written_out(tmp_path):
    weights, checkpoint = map_of(tmp_path, small_config())
    expert = "model.layers.{i}.mlp.experts.{e}.up_proj.weight"
    weights.entries.append(WeightEntry("model.layers.{i}.up", [expert], [(64, 64)], "column", experts=10_000))
    with pytest.raises(Refusal, match="10000 layers of 10009 keys; the checkpoint has 21 keys in all"):
        check_coverage(weights, 10_000, checkpoint)


def problems_of(tmp_path, config, keys):
    weights, checkpoint = map_of(tmp_path, config, keys)
    num_layers = config["num_hidden_layers"]
    coverage = check_coverage(weights, num_layers, checkpoint)
    return [(item.rule, item.found) for item in coverage_problems(coverage, num_layers, checkpoint)]


def causes(tmp_path, config, keys):
    return dict(problems_of(tmp_path, config, keys))


def test_layers_too_few_are_one_problem(tmp_path):
    keys = llama_keys(small_config())
    found = problems_of(tmp_path, small_config(num_hidden_layers=4), keys)
    assert found == [("MAP-MISSING", "layers 2-3 are not in the checkpoint; num_hidden_layers is 4")]


def test_a_layer_that_lacks_a_part_is_not_taken_for_absent(tmp_path):
    keys = llama_keys(small_config(num_hidden_layers=3))
    for key in [key for key in keys if ".2." in key or key.endswith("1.mlp.up_proj.weight")]:
        del keys[key]
    whole, part = problems_of(tmp_path, small_config(num_hidden_layers=3), keys)
    assert whole[1].startswith("layers 2 are not in the checkpoint")
    assert part[1].startswith("model.layers.{i}.mlp.up_proj.weight (layers 1) is not in the checkpoint")


def test_layers_too_many_are_one_problem(tmp_path):
    ((rule, found),) = problems_of(tmp_path, small_config(), llama_keys(small_config(num_hidden_layers=4)))
    assert rule == "MAP-UNEXPECTED"
    assert found.startswith("nothing takes layers 2-3: num_hidden_layers is 2")


def test_a_layer_for_multi_token_prediction_is_named_so(tmp_path):
    keys = llama_keys(small_config(num_hidden_layers=3)) | {
        "model.layers.2.eh_proj.weight": ("BF16", (64, 128))
    }
    found = problems_of(tmp_path, small_config(), keys)
    assert found == [("MAP-UNEXPECTED", "nothing takes layers 2: a multi-token-prediction head")]


def test_a_key_under_another_name(tmp_path):
    keys = llama_keys(small_config())
    keys["backbone.norm.weight"] = keys.pop("model.norm.weight")
    found = causes(tmp_path, small_config(), keys)
    assert "another prefix, backbone.norm.weight" in found["MAP-MISSING"]


def test_a_shape_that_the_config_does_not_give(tmp_path):
    keys = llama_keys(small_config(intermediate_size=96))
    found = causes(tmp_path, small_config(), keys)
    assert found.keys() == {"MAP-SHAPE"}
    assert "[64, 96]" in found["MAP-SHAPE"] or "[96, 64]" in found["MAP-SHAPE"]


def test_expanding_names_every_layer(tmp_path):
    weights, _ = map_of(tmp_path, small_config())
    keys = [key for _, keys in expand(weights, 2) for key, _ in keys]
    assert sorted(keys) == sorted(llama_keys(small_config()))

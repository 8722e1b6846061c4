"""What is taken for an Eagle3 draft model that can be ported, and what is refused."""

import msgspec
import pytest
from autoport.analysis.draft import plan_draft
from autoport.errors import Refusal
from checkpoints import llama_keys, small_config, write_checkpoint

H, V, DRAFT_V = 64, 256, 32
CONFIG = small_config(
    architectures=["LlamaForCausalLMEagle3"], num_hidden_layers=1, draft_vocab_size=DRAFT_V, head_dim=16
)


def draft_keys(layer="midlayer.", prefix=""):
    keys = {}
    for key, (dtype, shape) in llama_keys(CONFIG).items():
        if key.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            shape = (shape[0], 2 * H)
        keys[key.replace("model.layers.0.", prefix + layer).replace("model.", prefix)] = (dtype, shape)
    keys[f"{prefix}{layer}hidden_norm.weight"] = ("BF16", (H,))
    keys[f"{prefix}fc.weight"] = ("BF16", (H, 3 * H))
    return keys | {
        "lm_head.weight": ("BF16", (DRAFT_V, H)),
        "d2t": ("I64", (DRAFT_V,)),
        "t2d": ("U8", (V,)),
    }


def plan(tmp_path, config=CONFIG, keys=None):
    return plan_draft(str(write_checkpoint(tmp_path, config, draft_keys() if keys is None else keys)))


def refused(tmp_path, config=CONFIG, keys=None):
    with pytest.raises(Refusal) as caught:
        plan(tmp_path, config, keys)
    return [(problem.rule, problem.found) for problem in caught.value.problems]


def test_one_file_of_a_draft_is_not_its_folder(tmp_path):
    folder = write_checkpoint(tmp_path, CONFIG, draft_keys())
    with pytest.raises(Refusal, match=f"SRC-FILE.*pass the folder that holds it: {folder}"):
        plan_draft(str(folder / "config.json"))


def keys_of(found):
    return {entry.parameter: entry.keys for entry in found.weights.entries}


@pytest.mark.parametrize("layer", ["midlayer.", "layers.0."])
def test_weight_map(tmp_path, layer):
    found = plan(tmp_path, keys=draft_keys(layer))
    keys = keys_of(found)
    assert keys["model.layers.0.self_attn.qkv_proj_weight"] == [
        f"{layer}self_attn.{x}_proj.weight" for x in "qkv"
    ]
    assert keys["model.layers.0.hidden_norm.weight"] == [f"{layer}hidden_norm.weight"]
    assert keys["model.embed_tokens.weight"] == ["embed_tokens.weight"]
    assert keys["d2t"] == ["d2t"]
    assert (found.draft_vocab_size, found.architecture.vocab_size) == (DRAFT_V, V)


def test_keys_with_a_prefix(tmp_path):
    keys = keys_of(plan(tmp_path, keys=draft_keys("layers.0.", "model.")))
    assert keys["model.fc.weight"] == ["model.fc.weight"]
    assert keys["model.layers.0.mlp.down_proj_weight"] == ["model.layers.0.mlp.down_proj.weight"]


def test_the_targets_embedding_and_vocabulary(tmp_path):
    keys = draft_keys()
    del keys["embed_tokens.weight"], keys["d2t"], keys["t2d"]
    keys["lm_head.weight"] = ("BF16", (V, H))
    found = plan(tmp_path, {key: value for key, value in CONFIG.items() if key != "draft_vocab_size"}, keys)
    assert not found.own_embedding
    assert not found.maps_vocabulary
    assert "d2t" not in keys_of(found)


def test_both_schemas_of_the_config(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    flat = plan(tmp_path / "flat", {**CONFIG, "rope_scaling": scaling})
    layer = {name: value for name, value in CONFIG.items() if name not in ("rope_theta", "architectures")}
    layer["rope_parameters"] = {**scaling, "rope_theta": 500000.0}
    nested = plan(
        tmp_path / "nested",
        {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": DRAFT_V,
            "norm_before_residual": True,
            "transformer_layer_config": layer,
        },
    )
    assert nested.architecture.rope == flat.architecture.rope
    assert nested.norm_before_residual
    assert not flat.norm_before_residual
    assert msgspec.json.decode(msgspec.json.encode(nested), type=type(nested)) == nested


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"num_aux_hidden_states": 4}, "num_aux_hidden_states 4"),
        ({"logit_scale": 0.5}, "logit_scale 0.5"),
        ({"parallel_drafting": True}, "parallel_drafting True"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config {'quant_method': 'fp8'}"),
        ({"speculators_model_type": "peagle"}, "speculators_model_type 'peagle'"),  # drafts in parallel
        ({"eagle_config": "x"}, "eagle_config 'x'"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is off"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5]}}, "hidden states of layers [1, 5]"),
        ({"model_type": "qwen3"}, "a decoder layer of model_type 'qwen3'"),
        ({"num_hidden_layers": 2}, "num_hidden_layers 2"),
        ({"target_hidden_size": 128}, "target_hidden_size 128, hidden_size 64"),
    ],
)
def test_what_is_not_ported(tmp_path, changes, found):
    assert refused(tmp_path, {**CONFIG, **changes}) == [("DRAFT-SCOPE", found)]


@pytest.mark.parametrize("config", [{"norm_before_fc": True}, {"eagle_config": {"norm_before_fc": True}}])
def test_norms_that_only_some_drafts_have(tmp_path, config):
    keys = draft_keys() | {"input_norm.weight": ("BF16", (3 * H,))}
    found = plan(tmp_path / "a", {**CONFIG, **config}, keys)
    assert (found.norms.before_fc, found.norms.fc) == (True, False)
    assert keys_of(found)["model.input_norm.weight"] == ["input_norm.weight"]
    assert [rule for rule, _ in refused(tmp_path / "b", CONFIG, keys)] == ["MAP-UNEXPECTED"]
    assert [rule for rule, _ in refused(tmp_path / "c", {**CONFIG, **config})] == ["MAP-MISSING"]


def test_all_problems_at_once(tmp_path):
    problems = refused(
        tmp_path, {**CONFIG, "logit_scale": 2.0, "num_hidden_layers": 3, "draft_vocab_size": 300}
    )
    assert [rule for rule, _ in problems] == ["DRAFT-SCOPE", "DRAFT-SCOPE", "DRAFT-VOCAB"]


@pytest.mark.parametrize(("size", "drop"), [(V, ()), (DRAFT_V, ("d2t",)), ("32", ()), (0, ())])
def test_a_draft_vocabulary_that_contradicts_the_tensors(tmp_path, size, drop):
    keys = {key: value for key, value in draft_keys().items() if key not in drop}
    assert [rule for rule, _ in refused(tmp_path, {**CONFIG, "draft_vocab_size": size}, keys)] == [
        "DRAFT-VOCAB"
    ]


def test_keys_are_covered_both_ways(tmp_path):
    keys = draft_keys()
    del keys["midlayer.hidden_norm.weight"]
    keys["fc.bias"] = ("BF16", (H,))
    found = refused(tmp_path, keys=keys)
    assert [rule for rule, _ in found] == ["MAP-MISSING", "MAP-UNEXPECTED"]
    assert "midlayer.hidden_norm.weight" in found[0][1]
    assert "fc.bias" in found[1][1]


def test_a_checkpoint_without_the_layer(tmp_path):
    keys = {key: value for key, value in draft_keys().items() if not key.startswith("midlayer.")}
    assert [rule for rule, _ in refused(tmp_path, keys=keys)] == ["SCOPE-KEYS"]


def test_an_fc_of_another_size(tmp_path):
    assert refused(tmp_path, keys=draft_keys() | {"fc.weight": ("BF16", (H, 4 * H))})[0][0] == "MAP-SHAPE"


def test_other_models_are_refused(tmp_path):
    assert refused(tmp_path / "a", small_config(), llama_keys(small_config()))[0][0] == "DRAFT-NONE"
    eagle1 = draft_keys("layers.0.") | {"fc.weight": ("BF16", (H, 2 * H))}
    del eagle1["d2t"]
    assert "DRAFT-EAGLE1" in [rule for rule, _ in refused(tmp_path / "b", small_config(), eagle1)]

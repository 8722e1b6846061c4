"""Draft models of speculative decoding are told apart, and refused by name."""

import pytest
from autoport.errors import Refusal
from autoport.research.step import research
from checkpoints import small_config, write_checkpoint

H, V = 64, 256
LAYER = {
    "self_attn.q_proj.weight": ("BF16", (64, 2 * H)),
    "self_attn.o_proj.weight": ("BF16", (H, 64)),
    "mlp.down_proj.weight": ("BF16", (H, 128)),
}
EAGLE3_KEYS = {
    "fc.weight": ("BF16", (H, 3 * H)),
    "d2t": ("I64", (32,)),
    "t2d": ("U8", (V,)),
    "lm_head.weight": ("BF16", (32, H)),
    "norm.weight": ("BF16", (H,)),
    **{f"midlayer.{name}": value for name, value in LAYER.items()},
}
EAGLE1_KEYS = {
    "fc.weight": ("BF16", (H, 2 * H)),
    "embed_tokens.weight": ("BF16", (V, H)),
    **{f"layers.0.{name}": value for name, value in LAYER.items()},
}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": 32,
    "norm_before_residual": True,
    "transformer_layer_config": {
        "model_type": "llama",
        "vocab_size": V,
        "hidden_size": H,
        "rope_theta": 500000.0,
    },
}
EAGLE3_CONFIG = small_config(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=32)


def problems(tmp_path, config, keys):
    with pytest.raises(Refusal) as caught:
        research(str(write_checkpoint(tmp_path, config, keys)))
    return {problem.rule: problem.found for problem in caught.value.problems}


@pytest.mark.parametrize(
    "config",
    [
        EAGLE3_CONFIG,
        SPECULATORS,
        small_config(draft_vocab_size=32),  # the architecture is the target's
        small_config(architectures=["Eagle3LlamaForCausalLM"], draft_vocab_size=32),
    ],
)
def test_eagle3_drafts(tmp_path, config):
    found = problems(tmp_path, config, EAGLE3_KEYS)
    assert found.keys() == {"DRAFT-EAGLE3"}
    assert "fc.weight [64, 192], draft vocabulary 32 of 256" in found["DRAFT-EAGLE3"]


def test_eagle3_with_the_whole_vocabulary_and_plain_layer_names(tmp_path):
    keys = {name.replace("midlayer.", "layers.0."): value for name, value in EAGLE3_KEYS.items()}
    del keys["d2t"], keys["t2d"]
    assert problems(tmp_path, small_config(), keys).keys() == {"DRAFT-EAGLE3"}


@pytest.mark.parametrize("names", [{}, {"architectures": ["EagleLlamaForCausalLM"], "model_type": "eagle"}])
def test_eagle_1_is_not_eagle3(tmp_path, names):
    found = problems(tmp_path, small_config(**names), EAGLE1_KEYS)
    assert found.keys() == {"DRAFT-EAGLE1"}


def test_a_config_that_contradicts_the_tensors(tmp_path):
    found = problems(tmp_path, EAGLE3_CONFIG, EAGLE1_KEYS)
    assert found.keys() == {"DRAFT-KIND", "DRAFT-EAGLE1"}
    assert (
        "names an Eagle3 draft, but the tensors are of an EAGLE-1 one (fc.weight [64, 128])"
        in found["DRAFT-KIND"]
    )


def test_a_draft_without_safetensors_is_known_by_its_config(tmp_path):
    folder = write_checkpoint(tmp_path, EAGLE3_CONFIG, EAGLE3_KEYS)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(Refusal) as caught:
        research(str(folder))
    assert [problem.rule for problem in caught.value.problems] == ["DRAFT-EAGLE3"]


def test_other_models_are_none(tmp_path):
    facts, _ = research(str(write_checkpoint(tmp_path / "a", small_config())))
    assert facts.architecture.value == "LlamaForCausalLM"
    vision = small_config(architectures=["Eagle2_5_VLForConditionalGeneration"], model_type="eagle_2_5_vl")
    with pytest.raises(Refusal) as caught:
        research(str(write_checkpoint(tmp_path / "b", vision)))
    assert not any(problem.rule.startswith("DRAFT-") for problem in caught.value.problems)

"""Float32 runs have another eps in the norms than the twin: one that shows."""

import json

import pytest
from autoport.research.config import read_facts
from autoport.research.source import open_source
from autoport.validation.norm_eps import shown_eps, with_eps
from checkpoints import small_config


def of(architecture, model_type, **changes):
    return small_config(architectures=[architecture], model_type=model_type, rms_norm_eps=..., **changes)


@pytest.mark.parametrize(
    ("config", "eps"),
    [
        (small_config(), {"rms_norm_eps": 0.1}),
        (small_config(rms_norm_eps=...), {"rms_norm_eps": 0.1}),  # the class's default
        (small_config(layer_norm_eps=1e-6), {"rms_norm_eps": 0.1, "layer_norm_eps": 0.2}),
        (of("Starcoder2ForCausalLM", "starcoder2"), {"norm_epsilon": 0.1}),
        (
            of("BioGptForCausalLM", "biogpt"),
            {"layer_norm_eps": 0.1},
        ),  # the class ignores it, so must the port
        (of("CTRLLMHeadModel", "ctrl"), {}),  # another one in the last norm only is refused
        (
            of("Cohere2MoeForCausalLM", "cohere2_moe"),
            {"layer_norm_eps": 0.1},
        ),  # null chooses the kind of norm
    ],
)
def test_every_key_of_that_meaning_has_an_eps_of_its_own(tmp_path, config, eps):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert shown_eps(read_facts(open_source(str(tmp_path)))) == pytest.approx(eps)


def test_the_twin_itself_keeps_its_eps(tmp_path):
    twin = tmp_path / "twin"
    twin.mkdir()
    (twin / "config.json").write_text(json.dumps(small_config()))
    (twin / "model.safetensors").write_bytes(b"weights")
    for _ in range(2):  # an earlier one is replaced
        shown = with_eps(twin, {"rms_norm_eps": 0.1})
    assert json.loads((shown / "config.json").read_text()) == small_config(rms_norm_eps=0.1)
    assert (shown / "model.safetensors").read_bytes() == b"weights"
    assert json.loads((twin / "config.json").read_text()) == small_config()

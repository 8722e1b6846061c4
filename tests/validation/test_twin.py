"""The twin keeps the structure of the real model, and a small fault in it is seen."""

import hashlib
import json
import tempfile
from pathlib import Path

import pytest
import torch
from autoport.errors import Refusal
from autoport.research.config import read_facts
from autoport.research.source import open_source
from autoport.validation import reference, scenario
from autoport.validation.metrics import relative_errors
from autoport.validation.reach import beyond_reach
from autoport.validation.shrink import shrink
from autoport.validation.twin import build
from checkpoints import real_config

NAMES = ["llama-3.2-1b", "yi-6b", "mistral-7b-v0.3", "qwen2-7b", "smollm2-135m"]


def shrunk(config: dict) -> dict:
    """The twin's config, by way of a config file and its facts."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        return shrink(read_facts(open_source(str(path))))


def valid_tp_sizes(config: dict) -> list[int]:
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    return [
        tp
        for tp in (1, 2, 4)
        if heads % (2 * tp) == 0
        and (kv % tp == 0 or tp % kv == 0)
        and config["intermediate_size"] % tp == 0
        and config["vocab_size"] % tp == 0
    ]


def facts_of(**config):
    """Facts of a config that is as the twin has it, but for what is given."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(shrunk(real_config("llama-3.2-1b")) | config))
        return read_facts(open_source(str(path)))


def test_the_prompts_reach_beyond_windows_and_original_lengths():
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    llama3 = real_config("llama-3.2-1b")["rope_scaling"]
    assert beyond_reach(facts_of()) == []
    assert beyond_reach(facts_of(**mistral, rope_scaling=None, sliding_window=64)) == []
    assert "the window of 160" in beyond_reach(facts_of(**mistral, rope_scaling=None, sliding_window=160))[0]
    assert "length of 8192" in beyond_reach(facts_of(rope_scaling=llama3))[0]


# --- shrink -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_same_tp_sizes_and_head_ratio(name):
    config = real_config(name)
    twin = shrunk(config)
    assert valid_tp_sizes(twin) == valid_tp_sizes(config)
    assert (
        twin["num_attention_heads"] * config["num_key_value_heads"]
        == config["num_attention_heads"] * twin["num_key_value_heads"]
    )


def test_28_heads_keep_tp_4_invalid():
    assert valid_tp_sizes(shrunk(real_config("qwen2-7b"))) == [1, 2]


@pytest.mark.parametrize("name", NAMES)
def test_everything_that_is_not_a_size_is_untouched(name):
    config = real_config(name)
    twin = shrunk(config)
    changed = {key for key in config if twin[key] != config[key]}
    sizes = {
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "max_position_embeddings",
        "rope_scaling",
    }
    assert changed - sizes <= {key for key in config if key.endswith("token_id")}
    assert set(twin) == set(config)


@pytest.mark.parametrize("name", NAMES)
def test_shrinking_a_twin_changes_nothing(name):
    twin = shrunk(real_config(name))
    assert shrunk(twin) == twin


@pytest.mark.parametrize(("name", "given"), [("llama-3.2-1b", True), ("yi-6b", False)])
def test_head_dim_stays_given_or_derived(name, given):
    twin = shrunk(real_config(name))
    assert ("head_dim" in twin) is given
    head_dim = twin.get("head_dim") or twin["hidden_size"] / twin["num_attention_heads"]
    assert head_dim == int(head_dim)
    assert head_dim % 2 == 0
    assert 16 <= head_dim <= 128
    assert twin["num_attention_heads"] * head_dim == twin["hidden_size"]
    assert twin["hidden_size"] % 256 == 0


@pytest.mark.parametrize(
    ("heads", "hidden", "multiple"),
    [(9, 1152, 128), (14, 896, 128), (12, 1536, 256), (9, 576, 16)],
)
def test_hidden_size_fits_the_kernels_that_the_real_one_fits(heads, hidden, multiple):
    config = real_config("smollm2-135m") | {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
    }
    twin = shrunk(config)
    assert twin["hidden_size"] % multiple == 0
    assert (twin["hidden_size"] % 256 == 0) == (hidden % 256 == 0)
    assert twin["hidden_size"] <= hidden


@pytest.mark.parametrize(("head_dim", "sign"), [(128, 1), (32, -1)])
def test_heads_wider_or_narrower_than_hidden_stay_so(head_dim, sign):
    config = real_config("llama-3.2-1b") | {"head_dim": head_dim}
    twin = shrunk(config)
    assert (twin["num_attention_heads"] * twin["head_dim"] - twin["hidden_size"]) * sign > 0
    assert twin["hidden_size"] % 256 == 0


def test_a_width_that_equals_hidden_size_still_does():
    opt = {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "hidden_size": 768,
        "word_embed_proj_dim": 768,
    }
    twin = shrunk(
        opt | {"num_attention_heads": 12, "num_hidden_layers": 12, "ffn_dim": 3072, "vocab_size": 50272}
    )
    assert twin["word_embed_proj_dim"] == twin["hidden_size"] < 768


def test_all_bands_of_the_scaling_are_used_and_prompts_exceed_the_context():
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    twin = shrunk(real_config("llama-3.2-1b"))
    assert twin["rope_scaling"]["original_max_position_embeddings"] < scenario.SPLIT.prompt_length
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.for_model(**twin), torch.device("cpu"))
    plain = 500000.0 ** -(torch.arange(0, twin["head_dim"], 2) / twin["head_dim"])
    ratio = plain / scaled
    assert ratio.min() == pytest.approx(1.0)
    assert ratio.max() == pytest.approx(32.0)
    assert ((ratio > 1.2) & (ratio < 25)).any()


@pytest.mark.parametrize(("vocab", "expected"), [(50257, 513), (32002, 513), (128256, 512), (300, 300)])
def test_vocabulary_is_odd_where_the_port_pads_it(vocab, expected):
    assert shrunk(real_config("yi-6b") | {"vocab_size": vocab})["vocab_size"] == expected


@pytest.mark.parametrize(("inner", "expected"), [(11008, 768), (11010, 769), (11016, 769)])
def test_an_mlp_that_is_padded_at_some_tp_size_is_odd(inner, expected):
    """32 heads allow TP 16, which does not divide 11016; the proof then pads at TP 2."""
    assert shrunk(real_config("yi-6b") | {"intermediate_size": inner})["intermediate_size"] == expected


def test_token_ids_move_into_the_vocabulary_and_stay_distinct():
    config = real_config("llama-3.2-1b") | {
        "eos_token_id": [128001, 128009],
        "pad_token_id": None,
        "bos_token_id": 1,
    }
    twin = shrunk(config)
    assert twin["bos_token_id"] == 1
    assert twin["pad_token_id"] is None
    assert len(set(twin["eos_token_id"])) == 2
    assert all(1 < token < twin["vocab_size"] for token in twin["eos_token_id"])


def test_every_kind_of_layer_is_kept_and_the_window_is_short():
    pattern = ["sliding_attention", "sliding_attention", "full_attention"] * 9 + ["full_attention"]
    window = {"use_sliding_window": True, "sliding_window": 4096, "layer_types": pattern}
    twin = shrunk(real_config("qwen2-7b") | window)
    assert twin["layer_types"] == pattern[:3]
    assert twin["num_hidden_layers"] == 3
    assert twin["sliding_window"] < scenario.LONG.prompt_length


# --- build --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def twins(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("twins")
    return {name: build(shrunk(real_config(name)), folder / name, seed=0) for name in NAMES}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": None}, "model type"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"bos_token_id": [1, 2]}, "bos_token_id"),
    ],
)
def test_a_config_that_transformers_rejects_is_refused(tmp_path, change, named):
    with pytest.raises(Refusal, match="PROOF-CONFIG") as refusal:
        build(shrunk(real_config("yi-6b")) | change, tmp_path / "twin", seed=0)
    assert named in str(refusal.value)


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def test_the_seed_decides_the_bytes(twins, tmp_path):
    config = shrunk(real_config("smollm2-135m"))
    assert digests(build(config, tmp_path / "same", seed=0)) == digests(twins["smollm2-135m"])
    assert digests(build(config, tmp_path / "other", seed=1)) != digests(twins["smollm2-135m"])


@pytest.mark.parametrize("name", NAMES)
def test_checkpoint_is_sharded_bfloat16_with_the_config_as_given(twins, name):
    folder = twins[name]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) >= 2
    assert json.loads((folder / "config.json").read_text()) == shrunk(real_config(name))
    model = reference.load(folder, torch.float32)
    for parameter in model.parameters():
        assert torch.equal(parameter, parameter.bfloat16().float())


def test_a_class_that_transformers_lacks_is_refused(tmp_path):
    with pytest.raises(Refusal, match="PROOF-CLASS"):
        build(shrunk(real_config("yi-6b") | {"architectures": ["NoSuchForCausalLM"]}), tmp_path, seed=0)


def test_weights_that_cannot_be_written_are_refused(tmp_path):
    (tmp_path / "model-00001-of-00002.safetensors").mkdir()
    with pytest.raises(Refusal, match=r"WS-WRITE: cannot write: .*Is a directory"):
        build(shrunk(real_config("yi-6b")), tmp_path, seed=0)


def test_remote_code_beside_the_config_is_not_imported(tmp_path):
    remote = {"AutoConfig": "remote.RemoteConfig", "AutoModelForCausalLM": "remote.RemoteModel"}
    marker = tmp_path / "imported"
    (tmp_path / "remote.py").write_text(f"open({str(marker)!r}, 'w')")
    build(shrunk(real_config("smollm2-135m") | {"auto_map": remote}), tmp_path, seed=0)
    reference.load(tmp_path, torch.float32)
    assert not marker.exists()


# --- power --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def baseline(twins):
    """For each twin: its longer prompt and the logits there."""
    result = {}
    for name in NAMES:
        model = reference.load(twins[name], torch.float32)
        prompt = scenario.draw_sequences(model.config.vocab_size, seed=0)["long"][
            : scenario.LONG.prompt_length
        ]
        result[name] = prompt, reference.logits(model, prompt)
    return result


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_matters(twins, baseline, name):
    prompt, expected = baseline[name]
    model = reference.load(twins[name], torch.float32)
    start = prompt[:32]  # causal: the logits there do not depend on the rest
    for parameter_name, parameter in model.named_parameters():
        original = parameter.data.clone()
        parameter.data.mul_(1.05)
        error = relative_errors(reference.logits(model, start), expected[:32]).max()
        parameter.data.copy_(original)
        assert error > 1e-3, parameter_name


@pytest.mark.parametrize("name", NAMES)
def test_a_scaled_k_or_a_stretched_rope_changes_tokens(twins, baseline, name):
    prompt, expected = baseline[name]

    def tokens_kept(model) -> float:
        logits = reference.logits(model, prompt)
        return (logits.argmax(-1) == expected.argmax(-1)).float().mean().item()

    scaled = reference.load(twins[name], torch.float32)
    for layer in scaled.model.layers:
        layer.self_attn.k_proj.weight.data.mul_(0.9)
    assert tokens_kept(scaled) < 0.95
    stretched = reference.load(twins[name], torch.float32)
    stretched.model.rotary_emb.inv_freq.mul_(1.01)
    assert tokens_kept(stretched) < 0.8


@pytest.mark.parametrize("name", NAMES)
def test_continuations_do_not_repeat_one_token(twins, baseline, name):
    prompt, expected = baseline[name]
    model = reference.load(twins[name], torch.float32)
    tokens = reference.greedy(model, prompt, scenario.LONG.steps)
    assert tokens[0] == int(expected[-1].argmax())
    assert len(set(tokens)) > scenario.LONG.steps // 2


# --- published sizes ----------------------------------------------------------------------------------------

PARTIAL = {
    "gptj": (dict(n_embd=4096, n_head=16, n_layer=28, n_positions=2048, rotary_dim=64), "n_embd", "n_head"),
    "codegen": (
        dict(n_embd=1024, n_head=16, n_layer=20, n_positions=2048, n_ctx=2048, rotary_dim=32),
        "n_embd",
        "n_head",
    ),
}
CLASSES = {"gptj": "GPTJForCausalLM", "codegen": "CodeGenForCausalLM"}


def config_of(model_type: str, hf_name: str, **sizes) -> dict:
    common = {"model_type": model_type, "architectures": [hf_name], "vocab_size": 50400, "dtype": "bfloat16"}
    return common | sizes


@pytest.mark.parametrize("name", PARTIAL)
def test_a_part_of_the_head_rotates_in_the_twin_too(name, tmp_path):
    """Sizes of GPT-J-6B and CodeGen-350M."""
    sizes, width, heads = PARTIAL[name]
    twin = shrunk(config_of(name, CLASSES[name], **sizes))
    head_dim = twin[width] // twin[heads]
    assert twin["rotary_dim"] * sizes["n_embd"] == head_dim * sizes["rotary_dim"] * sizes["n_head"]
    assert twin["rotary_dim"] % 2 == 0
    build(twin, tmp_path, seed=0)


@pytest.mark.parametrize("factor", [0.25, 0.35, 0.4, 0.5, 0.75])
def test_the_rotated_part_is_pairs(factor, tmp_path):
    sizes = dict(hidden_size=2560, num_attention_heads=32, num_hidden_layers=32, intermediate_size=10240)
    twin = shrunk(config_of("phi", "PhiForCausalLM", partial_rotary_factor=factor, **sizes))
    head_dim = twin["hidden_size"] // twin["num_attention_heads"]
    assert int(head_dim * factor) in range(2, head_dim, 2)
    build(twin, tmp_path, seed=0)


@pytest.mark.parametrize(("heads", "expected"), [(112, 24), (32, 8), (12, 12)])
def test_alibi_slopes_of_both_kinds(heads, expected):
    """112 are the heads of BLOOM-176B; those beyond 64 have slopes of their own."""
    twin = shrunk(config_of("bloom", "BloomForCausalLM", hidden_size=128 * heads, n_head=heads, n_layer=3))
    assert twin["n_head"] == expected


def test_all_spellings_of_a_size_agree():
    twin = shrunk(config_of("codegen", "CodeGenForCausalLM", **PARTIAL["codegen"][0]))
    assert twin["n_ctx"] == twin["n_positions"] != 2048


def test_groups_of_experts_are_whole():
    glm = dict(hidden_size=4096, num_attention_heads=32, num_key_value_heads=4, head_dim=128)
    glm |= dict(num_hidden_layers=4, intermediate_size=10944, moe_intermediate_size=1408, n_shared_experts=1)
    experts = dict(n_routed_experts=12, num_experts_per_tok=2, n_group=3, topk_group=2)
    twin = shrunk(config_of("glm4_moe", "Glm4MoeForCausalLM", **glm, **experts))
    assert (twin["n_routed_experts"], twin["n_group"], twin["topk_group"]) == (9, 3, 1)


def test_patterns_of_layers_follow_the_number_of_layers(tmp_path):
    neo = dict(hidden_size=2048, num_heads=16, num_layers=24, intermediate_size=8192, window_size=256)
    twin = shrunk(
        config_of("gpt_neo", "GPTNeoForCausalLM", attention_types=[[["global", "local"], 12]], **neo)
    )
    assert twin["attention_types"] == [[["global", "local"], 1]]
    build(twin, tmp_path, seed=0)


def test_special_tokens_of_the_class_fit_the_small_vocabulary(tmp_path):
    """GLM's padding token is 151329 where config.json has none."""
    glm = dict(hidden_size=4096, num_attention_heads=32, num_key_value_heads=2, head_dim=128)
    glm |= dict(num_hidden_layers=40, intermediate_size=13696)
    twin = shrunk(config_of("glm", "GlmForCausalLM", **glm))
    assert twin["pad_token_id"] < twin["vocab_size"]
    build(twin, tmp_path, seed=0)


def test_a_class_that_does_not_run_at_the_sizes_is_refused(tmp_path):
    sizes = dict(n_embd=256, n_head=8, n_layer=2, n_positions=512, n_ctx=512, rotary_dim=48)
    with pytest.raises(Refusal, match="TWIN-SHRINK: GPTJForCausalLM does not run at the twin's sizes"):
        build(config_of("gptj", "GPTJForCausalLM", **sizes), tmp_path, seed=0)

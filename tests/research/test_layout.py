"""Layout verdicts from names and shapes; what they cannot tell is said."""

import pytest
from autoport.research.checkpoint import read_checkpoint
from autoport.research.layout import describe_layout
from autoport.research.source import open_source
from checkpoints import llama_keys, small_config, write_safetensors

L = "model.layers.0."


def verdicts(tmp_path, keys, **config):
    table = {key: ("BF16", shape) for key, shape in keys.items()}
    write_safetensors(tmp_path / "model.safetensors", table)
    found = describe_layout(read_checkpoint(open_source(str(tmp_path))), config)
    return {item.part: item.verdict for item in found}


def test_a_llama(tmp_path):
    keys = {key: shape for key, (_, shape) in llama_keys(small_config()).items()}
    found = verdicts(tmp_path, keys)
    assert found == {"prefix": "'model.'", "q, k, v": "separate tensors", "head": "a tensor of its own"}


@pytest.mark.parametrize(
    ("key", "config", "order"),
    [
        ("gpt_neox.layers.0.attention.query_key_value.weight", {"model_type": "gpt_neox"}, "per head"),
        (f"{L}self_attn.qkv_proj.weight", {"model_type": "phi3"}, "all of q"),
        ("transformer.h.0.self_attention.query_key_value.weight", {"model_type": "falcon"}, "all of q"),
        (
            "transformer.h.0.self_attention.query_key_value.weight",
            {"model_type": "falcon", "new_decoder_architecture": True},
            "per group",
        ),
        (
            "transformer.h.0.self_attention.query_key_value.weight",
            {"model_type": "falcon", "multi_query": False},
            "per head",
        ),
        (f"{L}self_attn.qkv_proj.weight", {"model_type": "new"}, "shapes do not tell"),
    ],
)
def test_the_order_of_a_fused_tensor(tmp_path, key, config, order):
    assert order in verdicts(tmp_path, {key: (192, 64)}, **config)["q, k, v"]


@pytest.mark.parametrize(
    ("keys", "config", "text"),
    [
        ({f"{L}mlp.experts.0.gate_proj.weight": (48, 64)}, {}, "for each expert"),
        ({f"{L}block_sparse_moe.experts.0.w1.weight": (48, 64)}, {}, "for each expert"),
        (
            {f"{L}mlp.experts.gate_up_proj": (8, 96, 64), f"{L}mlp.experts.down_proj": (8, 64, 48)},
            {"hidden_size": 64},
            "[E, 2I, H]",
        ),
        (
            {f"{L}mlp.experts.gate_up_proj": (8, 64, 96), f"{L}mlp.experts.down_proj": (8, 48, 64)},
            {"hidden_size": 64, "model_type": "llama4_text"},
            "gate columns, then up columns",
        ),
        (
            {f"{L}mlp.experts.gate_up_proj": (8, 64, 96), f"{L}mlp.experts.down_proj": (8, 48, 64)},
            {"hidden_size": 64, "model_type": "gpt_oss"},
            "alternate",
        ),
        (
            {f"{L}mlp.experts.gate_up_proj": (8, 64, 64), f"{L}mlp.experts.down_proj": (8, 64, 32)},
            {"hidden_size": 64},
            "[E, 2I, H]",
        ),
        (
            {f"{L}mlp.experts.gate_up_proj": (8, 64, 64), f"{L}mlp.experts.down_proj": (8, 32, 64)},
            {"hidden_size": 64},
            "[E, H, 2I]",
        ),
        ({f"{L}mlp.experts.gate_up_proj": (8, 64, 64)}, {"hidden_size": 64}, "not told by the shapes"),
        (
            {"transformer.blocks.0.ffn.experts.mlp.w1": (384, 64)},
            {"model_type": "dbrx"},
            "rows [experts * size]",
        ),
    ],
)
def test_experts(tmp_path, keys, config, text):
    assert text in verdicts(tmp_path, keys, **config)["experts"]


@pytest.mark.parametrize(
    ("keys", "part", "text"),
    [
        ({f"{L}mlp.gate_up_proj.weight": (256, 64)}, "gate, up", "all of gate, then all of up"),
        ({"h.0.attn.c_attn.weight": (64, 192)}, "orientation", "Conv1D"),
        ({"h.0.attn.c_attn.weight": (64, 192)}, "prefix", "''"),
        ({f"{L}self_attn.q_a_proj.weight": (24, 64)}, "q, k, v", "latent"),
        ({"model.embed_tokens.weight": (8, 4)}, "head", "none in the file"),
        ({"lm_head.weight": (8, 4)}, "head", "without an embedding"),
        (
            {"lm_head.weight": (8, 4), "lm_head.bias": (8,), "model.embed_tokens.weight": (8, 4)},
            "head",
            "with a bias",
        ),
        ({"strange.layers.0.x.weight": (8, 4)}, "prefix", "unusual"),
        ({"language_model.model.layers.0.x.weight": (8, 4)}, "prefix", "'language_model.model.'"),
    ],
)
def test_other_parts(tmp_path, keys, part, text):
    assert text in verdicts(tmp_path, keys)[part]


def test_c_attn_as_a_linear_layer_is_no_conv1d(tmp_path):
    assert "orientation" not in verdicts(tmp_path, {"h.0.attn.c_attn.weight": (192, 64)})


@pytest.mark.parametrize(
    "tower", ["model.visual.blocks.{i}.attn.qkv", "model.vision_tower.encoder.layers.{i}.q_proj"]
)
def test_the_layers_of_the_decoder_are_described_not_those_of_another_tower(tmp_path, tower):
    keys = {
        f"{tower.format(i=0)}.weight": (96, 32),
        "model.language_model.embed_tokens.weight": (128, 64),
        "model.language_model.layers.0.self_attn.q_proj.weight": (64, 64),
    }
    found = verdicts(tmp_path, keys)
    assert found["prefix"] == "'model.language_model.'"
    assert found["q, k, v"] == "separate tensors"
    plain = {key.replace("language_model.", ""): shape for key, shape in keys.items()}
    assert verdicts(tmp_path, plain)["prefix"] == "'model.'"

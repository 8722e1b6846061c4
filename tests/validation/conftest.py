"""Ports of published configs and their proofs, made once per session."""

import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from autoport.port import run_step
from autoport.port_state import Port
from autoport.schema.facts import Facts
from autoport.schema.plan import Plan
from autoport.step import Options
from autoport.validation.prove import prepare, prove
from autoport.validation.simulated import Subject
from autoport.validation.tp_sizes import choose_tp_sizes
from autoport.workspace import Workspace
from checkpoints import real_config, write_checkpoint

GENERATE = ("research", "analyze", "generate")


class Proven:
    """A port of a published config, generated and proven at TP 1 and 2."""

    def __init__(self, name: str, folder: Path):
        source = write_checkpoint(folder / "source", real_config(name))
        self.port = Port(Workspace.create(folder / "workspace"), "subject", str(source))
        for step in GENERATE:
            run_step(self.port, step, Options(dry_run=True))
        plan = self.port.read_state("plan.json", Plan, "analyze")
        facts = self.port.read_state("facts.json", Facts, "research")
        self.factory = plan.architecture.hf_name
        self.prepared = prepare(facts, self.port.state_dir)
        sizes, not_run = choose_tp_sizes(plan.tp, [])
        subject = self.subject(self.port.workspace.root)
        self.proof = prove(subject, self.prepared, sizes, not_run, self.port.state_dir)

    def subject(self, workspace: Path) -> Subject:
        return Subject(str(workspace), "vllm_neuron", "subject", self.factory)


@pytest.fixture(scope="session")
def proven(tmp_path_factory) -> Iterator[Callable[[str], Proven]]:
    folder = tmp_path_factory.mktemp("proven")
    yield functools.cache(lambda name: Proven(name, folder / name))
    shutil.rmtree(folder)  # 200 MB

"""Generated packages against the types of the simulator's API, of families that its reference models lack."""

import os
import subprocess
import sys
from pathlib import Path

from autoport.codegen.generate import render_package
from autoport.port import run_step
from autoport.port_state import Port
from autoport.resources import simulator_dir
from autoport.schema.plan import Plan
from autoport.step import Options
from autoport.validation import landscape
from autoport.workspace import Workspace

# Composed attention with a temperature; gates, mixed layers and shared experts; ALiBi and LayerNorm.
NAMES = ("ministral3", "laguna", "mpt")
ROOT = Path(__file__).resolve().parents[2]
LENIENT = ("subclassing-any", "any-generics", "untyped-decorators")  # what torch and vllm leave untyped


def test_the_types_of_generated_code_hold(tmp_path):
    workspace = Workspace.create(tmp_path / "workspace")
    for name in NAMES:
        source = landscape.build_checkpoint(name, tmp_path / "checkpoint" / name)
        port = Port(workspace, name, str(source))
        for step in ("research", "analyze"):
            assert run_step(port, step, Options(dry_run=True, confirm=True)).status == "done"
        plan = port.read_state("plan.json", Plan, "analyze")
        (tmp_path / name).mkdir()
        for file, text in render_package(plan, "vllm_neuron").items():
            (tmp_path / name / file).write_text(text)
    allowed = [f"--allow-{what}" for what in LENIENT]
    settings = [f"--config-file={ROOT / 'pyproject.toml'}", "--cache-dir=/dev/null", "--strict", *allowed]
    # In a process of its own: mypy raises the recursion limit of the process that it runs in.
    mypy = subprocess.run(
        [sys.executable, "-m", "mypy", *settings, "--no-warn-return-any", *NAMES],
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": str(simulator_dir())},
        capture_output=True,
        text=True,
    )
    assert mypy.returncode == 0, mypy.stdout + mypy.stderr

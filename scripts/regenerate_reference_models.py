#!/usr/bin/env python3
"""Render the simulator's reference models from their plans in references/reference-models/.

Usage:
    regenerate_reference_models.py            write the files
    regenerate_reference_models.py --check    write nothing; exit 1 if a file is out of date
"""

import argparse
import sys
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent))

from autoport.codegen.generate import render_package
from autoport.files import write_atomic
from autoport.resources import references_dir, simulator_dir
from autoport.schema.plan import Plan


def rendered() -> dict[Path, str]:
    """Text of every file of every reference model."""
    files = {}
    for plan_file in sorted((references_dir() / "reference-models").glob("*.json")):
        plan = msgspec.json.decode(plan_file.read_bytes(), type=Plan)
        folder = simulator_dir() / "vllm_neuron" / "model" / plan.name
        files |= {folder / name: text for name, text in render_package(plan, "vllm_neuron").items()}
    return files


def main() -> int:
    parser = argparse.ArgumentParser(description="Render the simulator's reference models from their plans.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is out of date")
    check = parser.parse_args().check
    stale = {
        path: text for path, text in rendered().items() if not path.is_file() or path.read_text() != text
    }
    for path, text in stale.items():
        print(f"{'out of date' if check else 'written'}: {path}")
        if not check:
            write_atomic(path, text.encode())
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())

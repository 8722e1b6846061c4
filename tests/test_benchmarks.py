"""The benchmark of inspection: what it times runs, on a checkpoint of a few tensors."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "inspect_checkpoint.py"


@pytest.mark.parametrize("way", ["OURS", "USUAL", "PLAN"])
def test_each_way_counts_the_tensors(tmp_path, monkeypatch, way):
    monkeypatch.setattr(sys, "path", [*sys.path])  # the script puts tests/ first
    spec = importlib.util.spec_from_file_location("inspect_checkpoint_benchmark", SCRIPT)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    benchmark.experts_checkpoint(tmp_path, layers=2, experts=8, shards=2, total_bytes=10**6)
    monkeypatch.setattr(sys, "argv", ["-c", str(tmp_path)])
    names = {}
    exec(compile(benchmark.START + getattr(benchmark, way), way, "exec"), names)
    # of a layer 4 projections, 4 norms, a router and 8 experts; embedding, last norm, head
    assert names["count"] == 2 * (4 + 4 + 1 + 8 * 3) + 3

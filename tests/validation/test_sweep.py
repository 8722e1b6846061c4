"""The sweep keeps what it has found, ends what takes too long, and a sample agrees with the committed report."""

import pytest
from autoport.cli import sweep as command
from autoport.errors import Problem, Refusal
from autoport.resources import references_dir
from autoport.validation import landscape, sweep
from autoport.validation.sweep import Result, code_digest, port_one, read_report, write_report

# One that is ported (a variant: the flag counts), and one that is refused.
SAMPLE = ["granite: multipliers", "deepseek_v4"]


def row(name: str, **values) -> Result:
    entry = landscape.load()[name.partition(": ")[0]]
    return Result(name, entry.hf_name, entry.category, **{"verdict": "ported", **values})


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_agrees_with_the_committed_report(tmp_path, name):
    committed = read_report(references_dir()).get(name)
    found = port_one(name, tmp_path, ())
    assert found.verdict == (committed.verdict if committed else "refused")
    if committed:
        assert (found.composed, found.tp_sizes) == (committed.composed, committed.tp_sizes)
        assert found.reasons == committed.reasons


def test_the_committed_report_is_what_its_results_say(tmp_path):
    results = read_report(references_dir())
    assert set(results) <= set(landscape.names())
    for path in write_report(list(results.values()), tmp_path):
        assert path.read_text() == (references_dir() / path.name).read_text()


def test_results_are_merged_in_the_order_of_the_landscape(tmp_path):
    write_report([row("qwen3", lines=500), row("llama", verdict="red")], tmp_path)
    merged = read_report(tmp_path) | {"llama": row("llama")}
    write_report([*merged.values(), row("bloom")], tmp_path)
    assert list(read_report(tmp_path)) == ["bloom", "llama", "qwen3"]
    assert read_report(tmp_path)["qwen3"].lines == 500
    assert "3 of 3 dense and MoE architectures" in (tmp_path / "coverage.md").read_text()


def test_what_takes_too_long_has_failed_and_does_not_stop_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "TIME_LIMIT", 0.05)
    seen = []
    results = sweep.sweep(["llama", "qwen3"], 2, tmp_path, (), seen.append)
    assert [result.verdict for result in results] == ["failed", "failed"]
    assert "not done after" in results[0].reasons[0]
    assert len(seen) == 2
    assert results[0].code == code_digest()


def test_resume_leaves_out_what_this_code_has_swept(tmp_path, capsys):
    write_report([row("bloom", code=code_digest())], tmp_path)
    command.command(arch=["bloom"], jobs=1, out=tmp_path, tp=None, resume=True)
    assert "1 of 1 dense and MoE architectures" in capsys.readouterr().err


def test_an_unknown_name_is_refused(tmp_path):
    with pytest.raises(Refusal, match="not in the landscape: lama"):
        command.command(arch=["lama"], jobs=1, out=tmp_path, tp=None, resume=False)


def test_a_refusal_is_one_reason_by_rule_and_a_row_stays_readable(tmp_path):
    problems = [
        Problem(rule, text, "", "") for rule, text in [("A", "one"), ("B", "two"), ("A", "word " * 80)]
    ]
    reasons = sweep.reasons_of(problems)
    assert reasons[0].startswith("A: one; word word")
    assert reasons[1] == "B: two"
    write_report([row("bloom", verdict="refused", reasons=reasons)], tmp_path)
    [line] = [line for line in (tmp_path / "coverage.md").read_text().splitlines() if "`Bloom" in line]
    assert "word word ... |" in line
    assert len(line) < 400

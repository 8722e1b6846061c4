"""JSON that is nested too deep, in each of the files that are read as JSON."""

import sys

import pytest
from autoport.errors import Refusal
from autoport.research.checkpoint import INDEX_NAME
from autoport.research.json_text import DEEPEST, UnusableJson, parse_json
from autoport.research.step import research
from checkpoints import small_config, write_checkpoint


def nested(levels):
    return '{"a": ' * (levels - 1) + "[]" + "}" * (levels - 1)


@pytest.fixture(params=[1_000, 100_000])
def recursion_limit(request):
    """The interpreter's own, and one that some libraries raise it to."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(request.param)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.parametrize("levels", [DEEPEST + 1, 900, 5_000])
def test_the_limit_is_not_that_of_the_interpreter(recursion_limit, levels):
    with pytest.raises(UnusableJson, match="nested too deep: more than 64 levels"):
        parse_json(nested(levels))


def test_what_is_below_the_limit_is_read():
    assert parse_json(nested(DEEPEST))["a"]
    assert parse_json("null") is None


def test_an_index_with_a_key_twice_is_damaged(tmp_path):
    write_checkpoint(tmp_path, small_config(), shards=2)
    text = (tmp_path / INDEX_NAME).read_text()
    (tmp_path / INDEX_NAME).write_text(text.replace('"weight_map": {', '"weight_map": {"a": "x", "a": "y",'))
    with pytest.raises(Refusal, match="CKPT-INDEX: damaged index: key 'a' appears twice"):
        research(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("config.json", "CFG-JSON"),
        (INDEX_NAME, "CKPT-INDEX"),
        ("model-00001-of-00002.safetensors", "CKPT-HEADER"),
    ],
)
def test_each_file_is_one_refusal(tmp_path, name, rule):
    write_checkpoint(tmp_path, small_config(), shards=2)
    text = f'{{"deep": {nested(900)}}}'.encode() + b" " * 50_000  # as dense as a header of tensors
    length = len(text).to_bytes(8, "little") if name.endswith(".safetensors") else b""
    (tmp_path / name).write_bytes(length + text)
    with pytest.raises(Refusal) as caught:
        research(str(tmp_path))
    (problem,) = caught.value.problems
    assert problem.rule == rule
    assert "nested too deep" in problem.found

"""Hostile headers are refused in bounded time and memory; whatever the bytes, never a traceback."""

import json
import random
import time
import tracemalloc

import pytest
from autoport.errors import Refusal
from autoport.research.checkpoint import read_checkpoint
from autoport.research.source import open_source
from checkpoints import llama_keys, small_config, write_safetensors
from fuzzing import config_case, header_case, parallel_case, plan_case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


def write(path, header: bytes, data: int = 0):
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with open(path, "r+b") as file:
        file.truncate(8 + len(header) + data)


@pytest.mark.parametrize(
    "header",
    [
        b"{" + b",".join(b'"":{}' for _ in range(1_000_000)) + b"}",
        b'{"a":[' + b"0," * 2_000_000 + b"0]}",
        b'{"a":' + b"[" * 3_000_000,
        b'{"a":' * 500_000,
        b'{"' + b"a" * 5_000_000 + b'":{}}',
        b'{"a":"' + b"\\u0041" * 500_000 + b'"}',
        b"[" + b'"",' * 1_000_000 + b'""]',
        b"\xff" * 1_000_000,
    ],
)
def test_time_and_memory_are_bounded(tmp_path, header):
    write(tmp_path / "model.safetensors", header)
    tracemalloc.start()
    started = time.process_time()
    with pytest.raises(Refusal, match="CKPT-HEADER"):
        read_checkpoint(open_source(str(tmp_path)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert time.process_time() - started < 5
    assert peak < 12 * len(header) + 10_000_000


def test_overlapping_offsets_and_duplicate_keys(tmp_path):
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    write(tmp_path / "model.safetensors", json.dumps({"a": entry, "b": entry}).encode(), 8)
    with pytest.raises(Refusal, match="overlap"):
        read_checkpoint(open_source(str(tmp_path)))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_any_damage_to_a_header_is_a_refusal_or_harmless(tmp_path, seed):
    header_case(tmp_path, random.Random(seed))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_any_damage_to_a_config_is_a_refusal_or_harmless(tmp_path, seed):
    config_case(tmp_path, random.Random(seed))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_any_damage_before_planning_is_a_refusal_or_a_plan(tmp_path, seed):
    plan_case(tmp_path, random.Random(seed))


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_any_damage_before_parallel_sizes_is_a_refusal_or_tables(tmp_path, seed):
    parallel_case(tmp_path, random.Random(seed))


@pytest.mark.parametrize("seed", [0, 3373, 107074])
def test_damage_that_once_got_through(tmp_path, seed):
    plan_case(tmp_path, random.Random(seed))


def test_a_large_header_that_is_sound_is_read(tmp_path):
    keys = llama_keys(small_config(num_hidden_layers=2000))
    write_safetensors(tmp_path / "model.safetensors", keys)
    assert len(read_checkpoint(open_source(str(tmp_path))).tensors) == len(keys)

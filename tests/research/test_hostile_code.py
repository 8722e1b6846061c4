"""Modeling files that come with a checkpoint and are damaged, or made to make reading them take forever."""

import random
import time

import pytest
from autoport.research.step import research
from fuzzing_code import BOMBS, SMALL, code_case, read_code
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


def reading_of(folder, text):
    read_code(folder, text.encode())
    return research(str(folder))[0].modeling


@pytest.mark.parametrize("name", BOMBS)
def test_reading_takes_bounded_time(tmp_path, name):
    started = time.process_time()
    read_code(tmp_path, BOMBS[name](90).encode())
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (BOMBS["attributes"](110), "nested deeper than 100 levels"),
        ("x\n" * 33_334, "more than 100000 nodes"),
        (BOMBS["many layers"](401), "more than 400 classes"),
        (BOMBS["chain of bases"](31), "inherits from 30 classes or more"),
        (f"x = 0x{'f' * 5000}", "an integer of more than 1000 bits"),
        ("#" * 2**20 + "\n", "is 1048577 bytes large"),
        ("class A:\n    x = '\0'", "cannot be parsed"),
    ],
)
def test_a_file_that_is_more_than_a_modeling_file_is_not_read(tmp_path, text, reason):
    reading = reading_of(tmp_path, text)
    assert reason in reading.note
    assert not reading.findings


def test_classes_that_are_their_own_bases_are_read_once(tmp_path):
    text = SMALL.replace("class Norm(nn.Module)", "class Norm(Attention)").replace(
        "class Attention(nn.Module)", "class Attention(Norm)"
    )
    subjects = [item.subject for item in reading_of(tmp_path, text).findings if item.topic == "norm"]
    assert subjects.count("FuzzDecoderLayer.input_norm") == 1


def test_a_layer_whose_sums_double_is_left_out_and_the_rest_is_read(tmp_path):
    topics = {item.topic for item in reading_of(tmp_path, BOMBS["doubled sum"](40)).findings}
    assert "norm" in topics
    assert "block" not in topics
    assert "block" in {item.topic for item in reading_of(tmp_path, SMALL).findings}


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_any_damage_to_a_modeling_file_is_harmless(tmp_path, seed):
    code_case(tmp_path, random.Random(seed))


@pytest.mark.parametrize("body", ["def forward():", "def forward(self):"])
def test_a_forward_without_arguments(tmp_path, body):
    reading_of(tmp_path, SMALL.replace("def forward(self, hidden_states, mask=None):", body))


def test_a_rotation_that_joins_nothing(tmp_path):
    reading_of(tmp_path, SMALL.replace("torch.cat((-second, first), dim=-1)", "torch.cat(), x.chunk(2)"))

"""Indexes, state files, overrides and decisions that are damaged."""

import random

from fuzzing_state import index_case, state_case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_any_damage_to_an_index_is_a_refusal_or_harmless(tmp_path, seed):
    index_case(tmp_path, random.Random(seed))


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_any_damage_to_the_state_of_a_port_is_a_refusal_or_harmless(tmp_path, seed):
    state_case(tmp_path, random.Random(seed))

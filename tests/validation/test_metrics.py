"""What the proof's numbers mean at the edges."""

import math

import pytest
import torch
from autoport.validation.metrics import r_ratio, relative_errors


def noisy(scale: float, seed: int, shape: tuple[int, int] = (40, 512)) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


REFERENCE = noisy(4.0, 0)


def test_relative_error_is_over_the_largest_reference_value_of_the_position():
    reference = torch.tensor([[1.0, -8.0], [0.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    port = torch.tensor([[1.4, -8.0], [0.0, 0.0], [3.0, 0.0], [0.1, 0.0]])
    expected = [0.05, 0.0, 2.0, math.inf]
    assert relative_errors(port, reference).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_port_that_is_not_finite_never_passes(poison):
    port = REFERENCE.clone()
    port[3, 7] = poison
    assert relative_errors(port, REFERENCE).isinf().nonzero().flatten().tolist() == [3]
    assert r_ratio(port, REFERENCE + noisy(0.1, 1), REFERENCE).value is None


def test_r_is_one_for_independent_equal_errors_and_lies_in_its_band():
    r = r_ratio(REFERENCE + noisy(0.1, 1), REFERENCE + noisy(0.1, 2), REFERENCE)
    assert r.value == pytest.approx(1.0, abs=0.02)
    assert 0.9 < r.low < r.value < r.high < 1.1


def test_r_grows_with_the_port_error():
    r = r_ratio(REFERENCE + noisy(0.15, 1), REFERENCE + noisy(0.1, 2), REFERENCE)
    assert r.value == pytest.approx(1.5, abs=0.03)


def test_a_band_is_wider_where_one_position_carries_the_error():
    even = r_ratio(REFERENCE + noisy(0.1, 1), REFERENCE + noisy(0.1, 2), REFERENCE)
    port = REFERENCE + noisy(0.1, 1)
    port[0] += 5.0
    uneven = r_ratio(port, REFERENCE + noisy(0.1, 2), REFERENCE)
    assert uneven.high - uneven.low > 10 * (even.high - even.low)


def test_the_same_seed_gives_the_same_band():
    port, baseline = REFERENCE + noisy(0.1, 1), REFERENCE + noisy(0.1, 2)
    assert r_ratio(port, baseline, REFERENCE, seed=5) == r_ratio(port, baseline, REFERENCE, seed=5)


def test_without_a_baseline_error_the_port_has_to_be_exact():
    exact = r_ratio(REFERENCE, REFERENCE, REFERENCE)
    assert (exact.value, exact.baseline_zero) == (0.0, True)
    off = r_ratio(REFERENCE + noisy(1e-3, 1), REFERENCE, REFERENCE)
    assert (off.value, off.baseline_zero) == (None, True)


def test_bfloat16_tensors_are_accepted():
    assert r_ratio((REFERENCE + noisy(0.1, 1)).bfloat16(), REFERENCE.bfloat16(), REFERENCE).value > 1


def test_different_shapes_are_an_error():
    with pytest.raises(ValueError, match="shapes differ"):
        relative_errors(REFERENCE[:1], REFERENCE)

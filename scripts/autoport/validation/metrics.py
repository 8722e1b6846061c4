"""How far the port's logits are from the Hugging Face class's."""

import math
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import torch

R_EPS = 1e-12  # absolute, as in the published three-tensor comparison
BASELINE_ZERO = 1e-7  # a bf16 reference this close (relative) to the fp32 one has no error of its own
BAND = (0.05, 0.95)
RESAMPLES = 1000


class RRatio(msgspec.Struct, frozen=True):
    """R-ratio with its sampling band (5 % and 95 % quantiles over resampled positions).

    `baseline_zero`: the bf16 reference equals the fp32 one, so R says nothing and the port has to be exact.
    """

    value: float
    low: float
    high: float
    baseline_zero: bool = False


def max_relative_error(port: "torch.Tensor", reference: "torch.Tensor") -> float:
    """Return max|port - reference| / max|reference|; infinite when the port has a NaN or an infinity.

    Raises:
        ValueError: the shapes differ.
    """
    port64, reference64 = _as_float64(port, reference)
    if not bool(port64.isfinite().all()):
        return math.inf
    error, scale = float((port64 - reference64).abs().max()), float(reference64.abs().max())
    if error == 0:
        return 0.0
    return error / scale if scale > 0 else math.inf


def r_ratio(
    port_bf16: "torch.Tensor", reference_bf16: "torch.Tensor", reference_fp32: "torch.Tensor", seed: int = 0
) -> RRatio:
    """R = ||port - ref32||_F / (||ref16 - ref32||_F + eps), in float64.

    The port's error over that of the precision: 1 means that the port rounds as the reference does. The band
    comes from resampling positions with replacement.

    Args:
        port_bf16: Logits [positions, vocab_size] of the port in bfloat16.
        reference_bf16: Logits [positions, vocab_size] of the Hugging Face class in bfloat16.
        reference_fp32: Logits [positions, vocab_size] of the Hugging Face class in float32.
        seed: Seed of the resampling.

    Returns:
        An `RRatio`. Infinite when the port has a NaN or an infinity, or differs where the baseline error is
        zero.

    Raises:
        ValueError: the shapes differ.
    """
    import torch

    port, reference16, reference32 = _as_float64(port_bf16, reference_bf16, reference_fp32)
    if not bool(port.isfinite().all()):
        return RRatio(math.inf, math.inf, math.inf)
    target = (port - reference32).square().flatten(1).sum(1)
    baseline = (reference16 - reference32).square().flatten(1).sum(1)
    if float(baseline.sum().sqrt()) <= BASELINE_ZERO * float(reference32.norm()):
        value = 0.0 if bool((port == reference32).all()) else math.inf
        return RRatio(value, value, value, baseline_zero=True)

    def ratio(numerator: "torch.Tensor", denominator: "torch.Tensor") -> "torch.Tensor":
        return numerator.sqrt() / (denominator.sqrt() + R_EPS)

    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(len(target), (RESAMPLES, len(target)), generator=generator)
    resampled = ratio(target[rows].sum(1), baseline[rows].sum(1))
    low, high = torch.quantile(resampled, torch.tensor(BAND, dtype=torch.float64)).tolist()
    return RRatio(float(ratio(target.sum(), baseline.sum())), low, high)


def _as_float64(*tensors: "torch.Tensor") -> "list[torch.Tensor]":
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) != 1:
        raise ValueError(f"shapes differ: {sorted(shapes)}")
    return [tensor.detach().cpu().double() for tensor in tensors]

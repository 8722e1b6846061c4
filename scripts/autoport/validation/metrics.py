"""How far the port's logits are from the Hugging Face class's."""

import math
from typing import TYPE_CHECKING

from autoport.schema.proof import Ratio

if TYPE_CHECKING:
    import torch

R_EPS = 1e-12  # absolute, as in the published three-tensor comparison
BASELINE_ZERO = 1e-7  # a bf16 reference this close (relative) to the fp32 one has no error of its own
BAND = (0.05, 0.95)
RESAMPLES = 1000


def relative_errors(port: "torch.Tensor", reference: "torch.Tensor") -> "torch.Tensor":
    """Return max|port - reference| / max|reference| at each position.

    Args:
        port: Logits [positions, vocab_size].
        reference: Logits [positions, vocab_size].

    Returns:
        Float64 [positions]; infinite where the port has a NaN or an infinity, 0 where both are equal.

    Raises:
        ValueError: the shapes differ.
    """
    port, reference = _as_float64(port, reference)
    errors = (port - reference).abs().amax(-1)
    ratios = (errors / reference.abs().amax(-1)).where(errors != 0, 0.0)
    return ratios.where(port.isfinite().all(-1), math.inf)


def r_ratio(
    port_bf16: "torch.Tensor",
    reference_bf16: "torch.Tensor",
    reference_fp32: "torch.Tensor",
    seed: int = 0,
    trimmed: float = 0.0,
) -> Ratio:
    """R = ||port - ref32||_F / (||ref16 - ref32||_F + eps), in float64.

    The port's error over that of the precision: 1 means that the port rounds as the reference does. The band
    comes from resampling positions with replacement.

    Args:
        port_bf16: Logits [positions, vocab_size] of the port in bfloat16.
        reference_bf16: Logits [positions, vocab_size] of the Hugging Face class in bfloat16.
        reference_fp32: Logits [positions, vocab_size] of the Hugging Face class in float32.
        seed: Seed of the resampling.
        trimmed: Share of the positions that is left out: those where the port or the reference has the largest
            error, relative to its median.

    Returns:
        None for what is not finite: the port has a NaN or an infinity, or differs where the baseline error is
        zero.

    Raises:
        ValueError: the shapes differ.
    """
    import torch

    port, reference16, reference32 = _as_float64(port_bf16, reference_bf16, reference_fp32)
    if not bool(port.isfinite().all()):
        return Ratio(None, None, None)
    target = (port - reference32).square().flatten(1).sum(1)
    baseline = (reference16 - reference32).square().flatten(1).sum(1)
    if float(baseline.sum().sqrt()) <= BASELINE_ZERO * float(reference32.norm()):
        exact = 0.0 if bool((port == reference32).all()) else None
        return Ratio(exact, exact, exact, baseline_zero=True)

    if trimmed:
        size = torch.maximum(target / target.median(), baseline / baseline.median())
        kept = size.argsort()[: math.ceil(len(size) * (1 - trimmed))]
        target, baseline = target[kept], baseline[kept]

    def ratio(numerator: "torch.Tensor", denominator: "torch.Tensor") -> "torch.Tensor":
        return numerator.sqrt() / (denominator.sqrt() + R_EPS)

    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(len(target), (RESAMPLES, len(target)), generator=generator)
    resampled = ratio(target[rows].sum(1), baseline[rows].sum(1))
    low, high = torch.quantile(resampled, torch.tensor(BAND, dtype=torch.float64)).tolist()
    return Ratio(float(ratio(target.sum(), baseline.sum())), low, high)


def _as_float64(*tensors: "torch.Tensor") -> "list[torch.Tensor]":
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) != 1:
        raise ValueError(f"shapes differ: {sorted(shapes)}")
    return [tensor.detach().cpu().double() for tensor in tensors]

"""`proof.json`: the port on the simulator against the Hugging Face class."""

from typing import Any, Literal

import msgspec


class HardwareRecord(msgspec.Struct, frozen=True):
    """A device rule that the port met on the simulator.

    `kind` is ``"error"`` where the device would fail, ``"fallback"`` where it would take a slow path.
    """

    operator: str
    kind: Literal["error", "fallback"]
    rule: str
    message: str
    count: int


class Ratio(msgspec.Struct, frozen=True):
    """R-ratio with the 5 % and 95 % quantiles of resampled positions. None: not finite.

    `baseline_zero`: the bf16 reference equals the fp32 one, so R says nothing and the port has to be exact.
    """

    value: float | None
    low: float | None
    high: float | None
    baseline_zero: bool = False


class PhaseProof(msgspec.Struct, frozen=True):
    """Port against reference in one phase of the scenario.

    Attributes:
        phase: ``"prefill"``, ``"segmented prefill"``, ``"decode"`` or ``"on-device sampling"``.
        positions: Number of compared positions.
        max_relative_error: Largest over the positions of max|port - ref32| / max|ref32|. None: not finite.
        worst: Where that is.
        tokens: Number of greedy tokens compared.
        tokens_differ: How many of them are not the fp32 reference's.
        r_ratio: Only in bfloat16.
        failure: Why the phase is red; empty when it is green.
    """

    phase: str
    positions: int
    max_relative_error: float | None
    worst: str
    tokens: int
    tokens_differ: int
    r_ratio: Ratio | None = None
    failure: str = ""


class SectionError(msgspec.Struct, frozen=True):
    """One section of the port in one phase, against the same place in the reference.

    Attributes:
        section: ``rope``, ``embedding``, ``norm``, ``attention``, ``mlp``, ``decoder`` (what joins them: residuals,
            scales, the order), ``final norm`` or ``head``.
        module: Path of the module in the port, e.g. ``model.layers.0.self_attn``.
        layer: None for what is not in a layer.
        where: ``model.py:<line> (<Class>.forward)``.
        error: Largest over the positions of max|port - ref32| / max|ref32|. None: not finite.
        r_ratio: Only in bfloat16. None: not finite, or float32.
        worst: Where the largest error is.
    """

    section: str
    module: str
    layer: int | None
    where: str
    error: float | None
    worst: str = ""
    r_ratio: float | None = None


class ProofRun(msgspec.Struct, frozen=True):
    """One TP size and dtype.

    Attributes:
        phases: Empty when the port raised.
        hardware: Device rules that rank 0 met.
        collectives: Calls in one forward of rank 0 by kind, for each step and bucket, e.g. ``"prefill 64"``.
        failure: Why the run is red, its first failing phase first; empty when it is green.
        twins: Twins with weights and prompts of their own that the phases are judged on together; several where
            R of the first was over the limit by no more than its spread.
        log: Output of the rank to look at, relative to the workspace.
        sections: When a phase is red, the sections of the first red one in the order in which the port runs them.
        diverges: The first of them that differs from the reference.
    """

    tp_size: int
    dtype: Literal["float32", "bfloat16"]
    phases: list[PhaseProof]
    hardware: list[HardwareRecord]
    collectives: dict[str, dict[str, int]]
    seconds: float
    failure: str
    log: str
    sections: list[SectionError] = []
    diverges: SectionError | None = None
    twins: int = 1


class RealSize(msgspec.Struct, frozen=True):
    """The port at the sizes of the real config, in shapes alone: no weights and no values.

    Attributes:
        tp_size: The recommended TP size.
        num_layers: One layer of each kind, which all others are like.
        context_length: Tokens of the prompt that was prefilled, and of the sequences that were decoded.
        segment: Tokens of a step of segmented prefill; 0 for a prompt that is too short for two steps, and where
            no segment is a multiple of the TP size.
        batch_size: Sequences that were decoded.
        hardware: Device rules that were met, each once.
        failure: Why the device would not run it; empty if it would.
    """

    tp_size: int
    num_layers: int
    context_length: int
    segment: int
    batch_size: int
    hardware: list[HardwareRecord]
    seconds: float
    failure: str = ""


class Proof(msgspec.Struct, frozen=True):
    """The tiny twin on the simulator against the Hugging Face class.

    Attributes:
        ran_on: What the port ran on.
        reference: Class of the reference.
        twin: The twin's config.
        seed: Seed of the weights and of the prompts.
        not_run: Why a TP size that one would expect was not run.
        versions: Versions of torch, transformers and vLLM.
        too_short: Windows and lengths of the twin that no prompt exceeds; the proof is then not green.
        real_size: The shapes at real size; None when a run is red, or no TP size is recommended.
    """

    passed: bool
    ran_on: Literal["simulator"]
    reference: str
    twin: dict[str, Any]
    seed: int
    max_relative_error_limit: float
    r_ratio_limit: float
    runs: list[ProofRun]
    not_run: dict[int, str]
    versions: dict[str, str]
    too_short: list[str] = []
    real_size: RealSize | None = None

"""`plan.json` of Step 2: everything that code generation needs."""

from typing import Any, Literal

import msgspec

from autoport.schema.architecture import Architecture
from autoport.schema.parallel import EpPlan, TpPlan
from autoport.schema.weights import WeightMap


class Section(msgspec.Struct, frozen=True):
    """Step 2: one section of model.py compared with the reference model.

    Attributes:
        reference, target: What the reference model does there, and what this model does.
        change: What to change in the reference's section.
        source: Where that is known from.
    """

    name: str
    reference: str
    target: str
    change: str
    source: str


class Pitfall(msgspec.Struct, frozen=True):
    """What is known to go wrong with such a model; rules are ``PIT-...``, and ``PERF-...`` for what is slow."""

    rule: str
    text: str


class GapParameter(msgspec.Struct, frozen=True):
    """A tensor of the checkpoint that a section written by hand will use, whole on every rank.

    Attributes:
        name: Name of the parameter, with ``{i}`` for the layer.
        sizes: The shape as expressions over the generated config.
    """

    name: str
    shape: tuple[int, ...]
    sizes: list[str]


class Gap(msgspec.Struct, frozen=True):
    """A section of model.py that is left to be written by hand.

    Attributes:
        found: What no declaration covers.
        where: The class and lines of the modeling file that compute it.
        operators: The nearest operators of the workspace, with their places.
    """

    section: Literal["attention", "mlp", "decoder"]
    found: list[str]
    where: str
    parameters: list[GapParameter] = []
    operators: list[str] = []


class Override(msgspec.Struct, frozen=True):
    """A decision that a person took in place of the program's.

    Attributes:
        field: ``section.field``.
        who: Who decided, and how it was said.
        previous: The value that it replaced.
    """

    field: str
    value: Any
    who: str
    when: str
    previous: Any = None


class Plan(msgspec.Struct):
    """Step 2: everything that code generation needs.

    Attributes:
        overrides: Decisions that a person took.
        gaps: Sections that are left to be written by hand; empty without ``--incomplete``.
        stored_as: Weight format of the checkpoint, whose variant is generated as well; empty for a plain one.
        ep: Expert parallelism; None for a model without experts.
    """

    name: str
    class_prefix: str
    source: str
    reference_model: str
    architecture: Architecture
    weights: WeightMap
    tp: TpPlan
    sections: list[Section]
    pitfalls: list[Pitfall]
    overrides: list[Override] = []
    gaps: list[Gap] = []
    ep: EpPlan | None = None
    stored_as: str = ""

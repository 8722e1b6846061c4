"""The reference model: which registered model a port starts from."""

from typing import Any

import yaml

from autoport.resources import references_dir
from autoport.schema.architecture import Architecture
from autoport.schema.parallel import TpPlan

TABLE = "reference-models.yaml"


def load_table() -> dict[str, Any]:
    """The selection table and the reference models' sections (`references/reference-models.yaml`)."""
    table: dict[str, Any] = yaml.safe_load((references_dir() / TABLE).read_text(encoding="utf-8"))
    return table


def features(architecture: Architecture, tp: TpPlan | None = None) -> set[str]:
    """Names of the traits that the selection table speaks of."""
    found = {"gqa_rope"}
    if architecture.attention.qkv_bias:
        found.add("qkv_bias")
    if architecture.attention.qk_norm is not None:
        found.add("qk_norm_moe" if architecture.moe else "qk_norm")
    if None in architecture.layers.ropes:
        found.add("nope")
    if architecture.moe is not None:
        found.add("moe")
        if architecture.attention.sinks:
            found.add("moe_sinks")
        if tp is not None and tp.recommended is None:
            found.add("moe_ep")
    return found


def choose_reference(architecture: Architecture, tp: TpPlan | None = None) -> str:
    """The reference of the first row of the table whose trait the model has."""
    present = features(architecture, tp)
    return next(row["reference"] for row in load_table()["selection"] if row["trait"] in present)

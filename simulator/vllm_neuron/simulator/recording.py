"""Keeps what the ranks of an engine met in a file, for whoever started it."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from vllm_neuron.simulator import rules
from vllm_neuron.simulator.rules import Record

RECORDS = "VLLM_NEURON_SIM_RECORDS"


class Recorded(NamedTuple):
    """What one rank met.

    Attributes:
        records: Device rules.
        collectives: Calls over more than one rank in one forward by kind, for each step and bucket, e.g.
            ``"prefill 64"``.
    """

    records: list[Record]
    collectives: dict[str, dict[str, int]]


def write_recorded(rank: int, reports: Mapping[tuple[str, int], Any]) -> None:
    """Write this rank's file ``$VLLM_NEURON_SIM_RECORDS.rank<n>`` anew; nothing if that is not set.

    Args:
        reports: By step and bucket, the `ForwardReport`.
    """
    target = os.environ.get(RECORDS)
    if not target:
        return
    content = {
        "records": [asdict(record) for record in rules.records()],
        "collectives": {
            f"{step} {bucket}": dict(report.collectives) for (step, bucket), report in reports.items()
        },
    }
    file = Path(f"{target}.rank{rank}")
    part = file.with_name(f".{file.name}.part")
    part.write_text(json.dumps(content, indent=2))
    part.replace(file)


def read_recorded(target: str | os.PathLike[str]) -> dict[int, Recorded]:
    """Read what the ranks have written by rank, from the path that the variable had."""
    path = Path(target)
    ranks = {}
    for file in path.parent.glob(f"{path.name}.rank*"):
        content = json.loads(file.read_text())
        records = [Record(**record) for record in content["records"]]
        ranks[int(file.name.rsplit("rank", 1)[1])] = Recorded(records, content["collectives"])
    return dict(sorted(ranks.items()))

"""Reading the modeling file: all findings, each with file and line."""

from collections.abc import Mapping
from typing import Any

from autoport.research.modeling.blocks import block_findings
from autoport.research.modeling.classes import Decoder
from autoport.research.modeling.locate import find_modeling_file
from autoport.research.modeling.norms import norm_findings
from autoport.research.modeling.rotary import rotary_findings
from autoport.research.modeling.routers import router_findings
from autoport.research.modeling.traits import trait_findings
from autoport.research.source import Source
from autoport.schema.facts import Facts, ModelingReading


def read_modeling(source: Source, facts: Facts, values: Mapping[str, Any]) -> ModelingReading:
    """Read the modeling file of the model's class as text.

    Args:
        values: Config attributes as the config class has them, for conditions in the code.
    """
    file, reason = find_modeling_file(source, facts.config, facts.architecture.value, facts.model_type.value)
    if file is None:
        return ModelingReading(note=reason)
    decoder = Decoder(file, values)
    findings = [
        *norm_findings(decoder),
        *rotary_findings(decoder),
        *block_findings(decoder),
        *trait_findings(decoder),
        *router_findings(decoder),
    ]
    note = "remote code, read as text and not run" if file.own else ""
    return ModelingReading(file.name, findings, decoder.config_reads(), note)

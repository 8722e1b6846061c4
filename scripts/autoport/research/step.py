"""Step 1: research the architecture; writes facts.json and checkpoint.json."""

import re
from typing import Any

from autoport.errors import Problem, Refusal, refuse
from autoport.families import find_family
from autoport.families.family import names_read
from autoport.port_state import Port
from autoport.research.checkpoint import no_weights, read_checkpoint
from autoport.research.config import config_digest, load_config, read_facts
from autoport.research.config_class import class_attributes
from autoport.research.config_defaults import class_source, config_defaults
from autoport.research.dequantized import dequantized, without_declaration
from autoport.research.draft import draft_problems, find_draft
from autoport.research.modeling.probe import probe
from autoport.research.modeling.reading import read_modeling
from autoport.research.nested import find_text_config
from autoport.research.not_ported import with_features
from autoport.research.quantization import quantization_problems
from autoport.research.source import Source, open_model
from autoport.research.tied_head import compare_head
from autoport.schema.facts import Checkpoint, Fact, Facts
from autoport.step import Options, Outcome
from autoport.units import size_text
from autoport.variants import loaded_by

TOKENIZER_FILES = ("tokenizer", "vocab.", "merges.", "spiece.", "tekken.")
FACTOR = re.compile(r"_(multiplier|scale|scaling|factor|scalar|softcapping)$")


def research(source_name: str) -> tuple[Facts, Checkpoint]:
    """Read what a model's config and headers say; of a config without weights, what can be known of it.

    A checkpoint that is quantised in a format that a variant loads is read as if it were not (`Facts.stored_as`).

    Raises:
        Refusal: with the problems of the config and of the checkpoint together.
    """
    source = open_model(source_name)
    problems: list[Problem] = []
    config: dict[str, Any] = {}
    stored_as = ""
    facts: Facts | None = None
    stored: Checkpoint | None = None  # its tensors as they are in the files
    checkpoint: Checkpoint | None = None
    try:
        config = load_config(source)
        digest = config_digest(config)
        declared = config.get("quantization_config")
        stored_as = loaded_by(declared) or ""
        config = without_declaration(config) if stored_as else config
        facts = read_facts(source, config)
        facts.stored_as, facts.config_digest = stored_as, digest
    except Refusal as refusal:
        problems += with_features(refusal.problems, source, config)
    try:
        stored = checkpoint = no_weights(source) or read_checkpoint(source)
        checkpoint = (
            dequantized(stored, stored_as, declared or {}) if stored_as and stored.tensors else stored
        )
        problems += quantization_problems(config, source.config_file, checkpoint)
    except Refusal as refusal:
        problems += refusal.problems
    draft = find_draft(config, checkpoint)
    if draft:
        raise Refusal(*draft_problems(draft, source.config_file, source_name))
    if problems or facts is None or checkpoint is None or stored is None:
        raise Refusal(*problems)
    if facts.fields["tie_word_embeddings"].value:
        same = compare_head(source, stored)
        if same:
            facts.fields["head_equals_embedding"] = same
    add_modeling(source, facts)
    facts.warnings += checkpoint.notes
    if not any(name.startswith(TOKENIZER_FILES) for name in source.sizes):
        facts.warnings.append("no tokenizer: serving and Steps 8 to 11 need one")
    return facts, checkpoint


def add_modeling(source: Source, facts: Facts) -> None:
    """Add what the modeling file says, and tell the keys that nothing reads from those that no field took."""
    _, text = find_text_config(facts.config)
    computed = class_attributes(facts.model_type.value, text)
    values = {name: fact.value for name, fact in computed.facts.items()}
    facts.modeling = read_modeling(source, facts, values or text)
    _take_declared(facts)
    if not facts.modeling.file or (facts.remote_code and not computed.facts):
        return
    mentioned, defaults = class_source(facts.model_type.value), config_defaults(facts.model_type.value)
    for key in list(facts.unconsumed):
        name, value = key.rpartition(".")[2], facts.unconsumed[key]
        if FACTOR.search(name) and isinstance(value, (int, float)) and value not in (0, 1):
            continue  # a factor that the class ignores may still belong to the model
        is_default = name in defaults and defaults[name].value == value
        known = not is_default and re.search(rf"\b{re.escape(name)}\b", mentioned)
        if name not in facts.modeling.reads and not known:
            facts.inert.append(key)
            del facts.unconsumed[key]


def _take_declared(facts: Facts) -> None:
    """Move what the class's declaration reads out of the keys that nothing took."""
    family = find_family(facts.architecture.value, facts.model_type.value)
    if family is None:
        return
    read = names_read(family)
    for key in list(facts.unconsumed):
        if key.rpartition(".")[2] in read:
            source = f"config.json: {key}, read by the declaration of {family.hf_name}"
            facts.declared[key] = Fact(facts.unconsumed.pop(key), source)


def run(port: Port, options: Options) -> Outcome:
    if not port.source:
        raise refuse(
            "PORT-NONE",
            f"no port named {port.name!r}",
            port.state_dir,
            port.command("research"),
        )
    facts, checkpoint = research(port.source)
    if options.probe:
        facts.warnings += probe(facts)
    port.write_state("facts.json", facts)
    port.write_state("checkpoint.json", checkpoint)
    summary = (
        f"{facts.architecture.value}, {len(facts.fields)} facts, {len(facts.modeling.findings)} findings in "
        f"{facts.modeling.file or 'no modeling file'}, {len(checkpoint.tensors)} tensors, "
        f"{size_text(checkpoint.total_bytes)} ({checkpoint.bytes_read:,} bytes read)"
    )
    if options.probe:
        summary += (
            f"; {sum(finding.confirmed for finding in facts.modeling.findings)} findings confirmed by running"
        )
    if facts.remote_code:
        summary += "; the checkpoint has remote code (auto_map), which was not run"
    for warning in facts.warnings:
        summary += f"; warning: {warning}"
    return Outcome("done", summary, data=facts)

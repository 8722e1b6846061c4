"""An Eagle3 draft model: a Llama layer whose attention takes the embedding and a hidden state side by side.

The meaning of its config and keys is that of vLLM's `llama_eagle3.py`, which serves the published drafts.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from autoport.analysis.architecture import describe_architecture
from autoport.analysis.coverage import check_coverage, coverage_problems
from autoport.analysis.keys import CheckpointKeys
from autoport.analysis.weight_map import build_weight_map
from autoport.errors import Problem, Refusal
from autoport.research.checkpoint import read_checkpoint
from autoport.research.config import load_config, read_facts
from autoport.research.draft import EAGLE3_HIDDEN_STATES, LAYER_CONFIG, draft_problems, find_draft
from autoport.research.source import open_model
from autoport.schema.architecture import Architecture
from autoport.schema.facts import Checkpoint
from autoport.schema.weights import IgnoredKeys, WeightEntry, WeightMap

HF_NAME = "Eagle3LlamaForCausalLM"
LAYER = "model.layers.0."
EMBEDDING = "model.embed_tokens.weight"
STORED_LAYERS = ("midlayer.", "layers.0.")
OWN = ("fc.", "d2t", "t2d", "mask_hidden", "input_norm.", "fc_norm.")  # what a Llama checkpoint has not

# What a draft's config may ask beyond this: name -> the values that ask for nothing.
NOT_PORTED: dict[str, tuple[Any, ...]] = {
    "num_aux_hidden_states": (None, EAGLE3_HIDDEN_STATES),
    "logit_scale": (None, 1, 1.0),
    "parallel_drafting": (None, False),
}
LAYER_NOT_PORTED = {
    "quantization_config": (None,),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
}


class DraftNorms(msgspec.Struct, frozen=True):
    """Norms that only some drafts have.

    Attributes:
        before_fc: One over the three hidden states side by side.
        fc: One for each of the three hidden states.
        output: The next draft takes the hidden state after the last norm, and not before.
    """

    before_fc: bool = False
    fc: bool = False
    output: bool = False


class DraftPlan(msgspec.Struct):
    """What is generated for a draft model.

    Attributes:
        architecture: Its decoder as a Llama of one layer; `vocab_size` is the target's.
        draft_vocab_size: Tokens that it chooses from.
        norm_before_residual: Whether the residual is the hidden state after its norm.
        own_embedding: Whether the checkpoint has an embedding; else the draft takes its target's.
        aux_layer_ids: Layers of the target whose inputs the draft takes, empty where the config names none.
        served_as: Architecture that vLLM serves the checkpoint as; mostly `HF_NAME`.
    """

    source: str
    served_as: str
    architecture: Architecture
    draft_vocab_size: int
    norm_before_residual: bool
    own_embedding: bool
    weights: WeightMap
    aux_layer_ids: list[int] = []
    norms: DraftNorms = DraftNorms()

    @property
    def maps_vocabulary(self) -> bool:
        """Whether ids of the draft vocabulary differ from the target's."""
        return self.draft_vocab_size != self.architecture.vocab_size


def plan_draft(source_name: str) -> DraftPlan:
    """Read an Eagle3 draft's config and headers.

    Args:
        source_name: Folder or hub id.

    Raises:
        Refusal: SRC-FILE for a single file; DRAFT-NONE when it is no draft; what `draft_problems` says of other
            kinds; DRAFT-SCOPE for each thing that is not ported, and every key that is missing or that nothing takes.
    """
    source = open_model(source_name)
    config, checkpoint = load_config(source), read_checkpoint(source)
    where, draft = source.config_file, find_draft(config, checkpoint)
    if draft is None:
        step = f"port it as a model of its own: autoport port NAME {source_name}"
        raise Refusal(
            Problem("DRAFT-NONE", "not a draft model: no Eagle3 name, and no fc.weight", where, step)
        )
    problems = [
        problem for problem in draft_problems(draft, where, source_name) if problem.rule != "DRAFT-EAGLE3"
    ]
    if problems:
        raise Refusal(*problems)
    for name in (LAYER_CONFIG, "eagle_config"):
        if not isinstance(config.get(name) or {}, Mapping):
            step = "write it as an object, or leave it out"
            raise Refusal(Problem("DRAFT-SCOPE", f"{name} {config[name]!r}", where, step))
    layer = {**config, **(config.get(LAYER_CONFIG) or {})}
    problems = [
        *scope_problems(config, layer, where),
        *_vocabulary_problems(config, layer, checkpoint, where),
    ]
    if problems:
        raise Refusal(*problems)

    facts = read_facts(source, as_llama(layer))
    view = Checkpoint(
        checkpoint.source,
        checkpoint.files,
        {name: header for key, header in checkpoint.tensors.items() if (name := _llama_key(key))},
        checkpoint.total_bytes,
        checkpoint.bytes_read,
    )
    architecture = msgspec.structs.replace(describe_architecture(facts, view), hf_name=HF_NAME)
    draft_vocab_size = config.get("draft_vocab_size") or architecture.vocab_size
    switches = {**config, **(config.get("eagle_config") or {})}
    norms = DraftNorms(*(bool(switches.get(name)) for name in ("norm_before_fc", "fc_norm", "norm_output")))
    return DraftPlan(
        source_name,
        served_as(config),
        architecture,
        draft_vocab_size,
        bool(config.get("norm_before_residual", is_speculators(config))),
        EMBEDDING in view.tensors,
        _weight_map(architecture, view, checkpoint, draft_vocab_size, norms),
        aux_layer_ids(config),
        norms,
    )


def aux_layer_ids(config: Mapping[str, Any]) -> list[int]:
    """The target's layers that the config names; `scope_problems` has checked them."""
    return list(_named_layers(config) or [])


def _named_layers(config: Mapping[str, Any]) -> Any:
    """What the config has for the target's layers, at the top or in ``eagle_config``; not checked."""
    nested = config.get("eagle_config") or {}
    return config.get("eagle_aux_hidden_state_layer_ids") or nested.get("eagle_aux_hidden_state_layer_ids")


def _weight_map(
    architecture: Architecture,
    view: Checkpoint,
    checkpoint: Checkpoint,
    draft_vocab_size: int,
    norms: DraftNorms,
) -> WeightMap:
    """The Llama's weight map with the draft's keys, checked against the checkpoint both ways."""
    names = list(checkpoint.tensors)
    stored = next(name for name in STORED_LAYERS if any(name in key for key in names))
    prefix = "model." if any(key.startswith(f"model.{stored}") for key in names) else ""
    entries = [
        _draft_entry(entry, prefix, stored, draft_vocab_size)
        for entry in build_weight_map(architecture, CheckpointKeys(view.tensors)).entries
        if entry.parameter != EMBEDDING or EMBEDDING in view.tensors
    ]
    entries += _own_entries(architecture, prefix, stored, draft_vocab_size)
    entries += _norm_entries(architecture.hidden_size, prefix, norms)
    weights = WeightMap(entries, [IgnoredKeys("t2d", "which tokens of the target d2t names")])
    coverage = check_coverage(weights, 1, checkpoint)
    if not coverage.complete:
        raise Refusal(*coverage_problems(coverage, 1, checkpoint))
    return weights


def scope_problems(config: Mapping[str, Any], layer: Mapping[str, Any], where: str) -> Iterator[Problem]:
    """What the config asks that is not ported."""
    step = "use a draft without it, or write the layer by hand from the port of another draft"
    eagle = config.get("eagle_config") or {}
    asked = {**layer, **eagle}
    for name, plain in (NOT_PORTED | LAYER_NOT_PORTED).items():
        if (value := asked.get(name)) not in plain:
            yield Problem("DRAFT-SCOPE", f"{name} {value!r}", where, step)
    if (kind := config.get("speculators_model_type")) not in (None, "eagle3"):
        yield Problem("DRAFT-SCOPE", f"speculators_model_type {kind!r}", where, step)
    if eagle.get("use_aux_hidden_state", True) is not True:
        yield Problem("DRAFT-SCOPE", "use_aux_hidden_state is off", where, step)
    named = _named_layers(config)
    if named and (
        not isinstance(named, list)
        or len(named) != EAGLE3_HIDDEN_STATES
        or any(type(layer) is not int or layer < 0 for layer in named)
    ):
        yield Problem("DRAFT-SCOPE", f"hidden states of layers {named!r}", where, step)
    if (kind := layer.get("model_type")) != "llama":
        yield Problem("DRAFT-SCOPE", f"a decoder layer of model_type {kind!r}", where, step)
    if (count := layer.get("num_hidden_layers")) != 1:
        yield Problem("DRAFT-SCOPE", f"num_hidden_layers {count!r}", where, step)
    if (size := config.get("target_hidden_size")) not in (None, layer.get("hidden_size")):
        yield Problem(
            "DRAFT-SCOPE",
            f"target_hidden_size {size!r}, hidden_size {layer.get('hidden_size')!r}",
            where,
            step,
        )


def served_as(config: Mapping[str, Any]) -> str:
    """The architecture that vLLM's `EAGLEConfig` and `SpeculatorsConfig` give a draft of method eagle3."""
    names = config.get("architectures")
    if is_speculators(config) or not isinstance(names, list) or not names:
        return HF_NAME
    name = str(names[0])
    return name if name.startswith("Eagle3") or name.endswith("Eagle3") else f"Eagle3{name}"


def is_speculators(config: Mapping[str, Any]) -> bool:
    """Whether the config has the schema of the speculators library, whose defaults are others."""
    return bool(config.get("speculators_model_type"))


def as_llama(layer: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the draft's decoder as that of a Llama with a head of its own."""
    return {
        **layer,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "tie_word_embeddings": False,
    }


def _vocabulary_problems(
    config: Mapping[str, Any], layer: Mapping[str, Any], checkpoint: Checkpoint, where: str
) -> Iterator[Problem]:
    whole, size = layer.get("vocab_size"), config.get("draft_vocab_size")
    if size is None:
        return
    step = "correct draft_vocab_size in config.json, or complete the checkpoint"
    if type(size) is not int or type(whole) is not int or not 0 < size <= whole:
        yield Problem("DRAFT-VOCAB", f"draft_vocab_size {size!r} of vocab_size {whole!r}", where, step)
    elif (size < whole) != ("d2t" in checkpoint.tensors):
        has = "has" if "d2t" in checkpoint.tensors else "has no"
        yield Problem(
            "DRAFT-VOCAB", f"draft_vocab_size {size} of {whole}, and the checkpoint {has} d2t", where, step
        )


def _llama_key(key: str) -> str:
    """The key's name in a Llama checkpoint; empty for what only drafts have."""
    name = key.removeprefix("model.")
    if name.startswith(OWN) or ".hidden_norm." in name:
        return ""
    for stored in STORED_LAYERS:
        if name.startswith(stored):
            return LAYER + name.removeprefix(stored)
    return name if name.startswith("lm_head.") else f"model.{name}"


def _draft_entry(entry: WeightEntry, prefix: str, stored: str, draft_vocab_size: int) -> WeightEntry:
    """An entry of the Llama's weight map with the draft's keys and shapes."""
    layer = "model.layers.{i}."
    keys = [
        key.replace(layer, prefix + stored) if layer in key else key.replace("model.", prefix)
        for key in entry.keys
    ]
    shapes = entry.shapes
    if entry.parameter.endswith("qkv_proj_weight"):
        shapes = [(rows, 2 * columns) for rows, columns in shapes]
    if entry.parameter == "lm_head.weight":
        shapes = [(draft_vocab_size, shapes[0][1])]
    return msgspec.structs.replace(
        entry, parameter=entry.parameter.replace("{i}", "0"), keys=keys, shapes=shapes
    )


def _own_entries(
    architecture: Architecture, prefix: str, stored: str, draft_vocab_size: int
) -> Iterator[WeightEntry]:
    hidden = architecture.hidden_size
    fc = (hidden, EAGLE3_HIDDEN_STATES * hidden)
    yield WeightEntry("model.fc.weight", [f"{prefix}fc.weight"], [fc], "replicated")
    norm = f"{prefix}{stored}hidden_norm.weight"
    yield WeightEntry(f"{LAYER}hidden_norm.weight", [norm], [(hidden,)], "replicated")
    if draft_vocab_size != architecture.vocab_size:
        yield WeightEntry("d2t", ["d2t"], [(draft_vocab_size,)], "replicated")


def _norm_entries(hidden: int, prefix: str, norms: DraftNorms) -> Iterator[WeightEntry]:
    names = [("input_norm", EAGLE3_HIDDEN_STATES * hidden)] if norms.before_fc else []
    names += [(f"fc_norm.{index}", hidden) for index in range(EAGLE3_HIDDEN_STATES)] if norms.fc else []
    for name, size in names:
        yield WeightEntry(f"model.{name}.weight", [f"{prefix}{name}.weight"], [(size,)], "replicated")

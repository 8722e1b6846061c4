"""A class without a declaration: each feature that stops it, its file and line, and what to write by hand."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from autoport.errors import Problem
from autoport.families import find_family
from autoport.families.feature import Feature, Section
from autoport.families.parts import EXPERTS, MLA, PARTS, STATES, TOWERS
from autoport.families.refused import REFUSED
from autoport.research.aliases import ALIASES
from autoport.research.config_defaults import causal_lm_classes
from autoport.research.heterogeneous import BY_HAND
from autoport.research.layers import FULL, NOT_ATTENTION, WINDOWED
from autoport.research.modeling.classes import Decoder
from autoport.research.modeling.locate import ModelingFile, find_modeling_file, transformers_file
from autoport.research.nested import find_text_config, find_vision_config
from autoport.research.source import Source
from autoport.research.values import ConfigValues, UnknownAttribute
from autoport.schema.facts import Facts, Finding

WHOLE_BY_HAND = (
    "references/coverage.md lists the classes that can be ported; this one is written by hand as a whole, from "
    "Step 4 of SKILL.md on: start from the reference model {nearest}/, and 'autoport search-ops' finds the operators"
)
SIZES = "; 'autoport compute-tp' shows its parallel sizes"
# Reference models, the one that is nearest to the most unusual model first.
NEAREST = ("deepseek_v32", "qwen3_vl", "gpt_oss", "qwen3_moe", "qwen3")
# What the file of a Llama says by topic (a tuple: one of these); a finding that agrees stops nothing.
LLAMA: dict[str, dict[str, Any]] = {
    "norm": {"kind": "rms", "weight": "plain"},
    "rope": {"pairing": "half", "sign": 1},
    "block": {"topology": "pre_norm"},
    "activation": {"gated": True},
    "attention_scale": {"expression": ("self.head_dim ** (-0.5)", "1 / math.sqrt(self.head_dim)")},
}
# Section of model.py, and words for the finding's value.
UNLIKE: dict[str, tuple[Section, str]] = {
    "norm": ("norm", "a norm of kind {kind} with weight {weight}"),
    "rope": ("rope", "RoPE over {pairing} pairs with sign {sign}"),
    "block": ("decoder", "a block of {topology}"),
    "activation": ("mlp", "an MLP without gate"),
    "attention_scale": ("attention", "scores times {expression}"),
    "embedding_scale": ("backbone", "embeddings times {expression}"),
    "scale": ("decoder", "it {way} by {config}"),
    "softcap": ("attention", "a softcap {expression}"),
    "sinks": ("attention", "attention sinks"),
    "qk_norm": ("attention", "norms on q and k {place}"),
    "router": ("moe", "a router: {score}, {order}"),
}


class UnportedClass:
    """A model whose class has no declaration.

    Args:
        config: The content of config.json.
        file: The modeling file of its class, where there is one.
        findings: What research read in it.

    Attributes:
        features: What stops it, as far as that is known.
    """

    def __init__(
        self,
        architecture: str,
        model_type: str,
        config: Mapping[str, Any],
        file: ModelingFile | None,
        findings: Sequence[Finding] = (),
    ):
        self.architecture = architecture
        self._model_type = model_type
        self._decoder_class = causal_lm_classes().get(model_type, "")
        self._findings = findings
        self._path, self._config = find_text_config(config)
        self._vision = find_vision_config(config)
        self._decoder = Decoder(_with_text_model(file) if self.is_nested else file) if file else None
        self._lines = file.text.splitlines() if file else []
        values = ConfigValues(self._config, model_type)
        own = REFUSED.get(architecture) or REFUSED.get(self._decoder_class, ())
        parts = [part for part in (TOWERS if own else PARTS) if self._find(part)]
        self.features = [feature for feature in own if _switched_on(feature, values)]
        self.features += [part for part in parts if not self._left_out(part)]
        if self._decoder is None:
            self.features += [part for part in (MLA, EXPERTS) if self._key(part)]

    @property
    def nearest(self) -> str:
        """The reference model to start from."""
        named = {feature.nearest for feature in self.features} | ({"qwen3_vl"} if self._vision else set())
        return next((name for name in NEAREST if name in named), "llama3")

    def place(self, feature: Feature) -> str:
        """File, line and class; the class alone where the file does not show the feature.

        Where there is no file, the key of config.json that tells of it.
        """
        if self._decoder is None and self._key(feature):
            return f"config.json: {self._path}{self._key(feature)}"
        return self._find(feature) or feature.owner

    def problems(self, config_file: str, readable: bool = True) -> list[Problem]:
        """One problem (SCOPE-ARCH) for the class, then one for each feature, or for what reads unlike Llama.

        Args:
            readable: Whether research can read the config.
        """
        found = f"architecture {self.architecture!r} is not supported"
        step = WHOLE_BY_HAND.format(nearest=self.nearest) + (SIZES if readable else "")
        if self.is_nested and find_family(self._decoder_class, self._model_type):
            step += f"; its decoder is that of {self._decoder_class}, which is ported"
        return [Problem("SCOPE-ARCH", found, config_file, step), *self.feature_problems()]

    def feature_problems(self) -> list[Problem]:
        found = [
            Problem("SCOPE-ARCH", item.what, self.place(item), _written(item.sections, item.by_hand))
            for item in self.features
        ]
        found = found or [*self._unlike_llama()]
        if self.is_nested and not set(self.features) & set(TOWERS):
            what = "a vision tower" if self._vision else "a decoder inside a larger model"
            where = self._vision[0] if self._vision else self._path
            inner = "the sizes are in this part of config.json, and its keys have a prefix of their own"
            step = _written(("config", "weights"), TOWERS[0].by_hand if self._vision else inner)
            found.append(Problem("SCOPE-ARCH", what, f"config.json: {where.rstrip('.')}", step))
        return found

    @property
    def is_nested(self) -> bool:
        """Whether the decoder is a part of a larger model."""
        return bool(self._path or self._vision)

    def _unlike_llama(self) -> Iterator[Problem]:
        seen = set()
        for finding in self._findings:
            if finding.topic not in UNLIKE or _agrees(finding.value, LLAMA.get(finding.topic)):
                continue
            section, words = UNLIKE[finding.topic]
            what = words.format_map(defaultdict(str, finding.value))
            if what not in seen:
                seen.add(what)
                step = _written((section,), f"as the place says, from that section of {self.nearest}/")
                yield Problem("SCOPE-ARCH", f"{finding.subject}: {what}", finding.where, step)

    def _find(self, feature: Feature) -> str:
        """The place of a feature, or nothing."""
        if self._decoder is None:
            return ""
        general = feature in PARTS
        owner = feature.owner if general else re.escape(feature.owner)
        text = feature.text if general else re.escape(feature.text)
        for name, node in self._decoder.classes.items():
            if re.fullmatch(owner, name):
                for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                    if re.search(text, self._lines[line - 1]):
                        return f"{self._decoder.file}:{line}, {name}"
        return ""

    def _left_out(self, part: Feature) -> bool:
        """Whether the config leaves out a part that its class can have."""
        if part in STATES:
            kinds = next((self._config[key] for key in ALIASES["layer_types"] if self._config.get(key)), None)
            return isinstance(kinds, list) and all(kind in (*FULL, *WINDOWED) for kind in kinds)
        return part == EXPERTS and not self._key(part)

    def _key(self, part: Feature) -> str:
        """The config's key that says that it has a part."""
        keys = {MLA: ("kv_lora_rank",), EXPERTS: ALIASES["num_experts"]}.get(part, ())
        sizes = {key: self._config.get(key) for key in keys}
        return next((key for key, size in sizes.items() if isinstance(size, int) and size > 1), "")


def _with_text_model(file: ModelingFile) -> ModelingFile:
    """The file of a larger model, read from its text model on, too, which AutoModel makes without its name."""
    names = [node.name for node in file.tree.body if isinstance(node, ast.ClassDef)]
    inner = tuple(name for name in names if name.endswith("TextModel"))
    return msgspec.structs.replace(file, entries=(*file.entries, *inner))


def _switched_on(feature: Feature, values: ConfigValues) -> bool:
    """Whether the config has the feature; what it does not say is taken for yes."""
    try:
        return bool(values.compute(feature.when).value)
    except (UnknownAttribute, ValueError):
        return True


def _agrees(value: Mapping[str, Any], llama: Mapping[str, Any] | None) -> bool:
    return llama is not None and all(
        value.get(name) in (known if isinstance(known, tuple) else (known,)) for name, known in llama.items()
    )


def _written(sections: Sequence[Section], by_hand: str) -> str:
    return f"write {', '.join(sections)} by hand: {by_hand}"


def unported_class(facts: Facts) -> UnportedClass:
    """The model that research found."""
    name, model_type = facts.architecture.value, facts.model_type.value
    return UnportedClass(
        name, model_type, facts.config, transformers_file(name, model_type), facts.modeling.findings
    )


def with_features(problems: Sequence[Problem], source: Source, config: Mapping[str, Any]) -> list[Problem]:
    """What research refuses, after the features of a class without a declaration.

    These say what research finds wrong where it takes the model for one of attention layers that are all alike.
    """
    names, model_type = config.get("architectures"), find_text_config(config)[1].get("model_type")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if not isinstance(name, str) or not isinstance(model_type, str) or find_family(name, model_type):
        return [*problems]
    unported = UnportedClass(
        name, model_type, config, find_modeling_file(source, config, name, model_type)[0]
    )
    if not unported.features and not unported.is_nested:
        return [*problems]
    first, *features = unported.problems(source.config_file, readable=False)
    for problem in problems:
        if problem.rule == "SCOPE-ARCH":
            first = msgspec.structs.replace(first, found=problem.found)
    same = (BY_HAND, NOT_ATTENTION)
    others = [item for item in problems if item.rule != "SCOPE-ARCH" and item.next_step not in same]
    return [first, *features, *others]

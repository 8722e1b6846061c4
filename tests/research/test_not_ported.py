"""Why a class is not ported: features that its modeling file has, at the line that is named, and what to write."""

import ast
import re

import pytest
from autoport.api_generation import exported_names
from autoport.errors import Refusal
from autoport.families import FAMILIES, find_family
from autoport.families.feature import Feature
from autoport.families.parts import PARTS
from autoport.families.refused import REFUSED
from autoport.research.modeling.locate import transformers_file
from autoport.research.not_ported import NEAREST, UNLIKE, UnportedClass
from autoport.research.step import research
from autoport.resources import simulator_dir
from autoport.schema.facts import Finding
from autoport.schema.field_types import FINDINGS
from autoport.validation import landscape
from checkpoints import llama_keys, small_config, write_checkpoint

NOT_PORTED = {
    model_type: entry
    for model_type, entry in landscape.load().items()
    if not find_family(entry.hf_name, model_type)
}
# Beside the landscape, which has decoders of attention layers only: what each class must be refused for.
OTHERS = {
    "mamba": ("MambaForCausalLM", {}, ["state-space"]),
    "jamba": ("JambaForCausalLM", {"num_experts": 4}, ["state-space", "experts"]),
    "falcon_h1": ("FalconH1ForCausalLM", {}, ["state-space"]),
    "qwen3_next": ("Qwen3NextForCausalLM", {"num_experts": 4}, ["linear attention", "experts"]),
    "kimi_linear": ("KimiLinearForCausalLM", {}, ["latent attention", "linear attention"]),
    "lfm2": ("Lfm2ForCausalLM", {}, ["short convolution"]),
    "qwen3_vl_text": (
        "Qwen3VLForConditionalGeneration",
        {"vision_config": {"depth": 2}},
        ["vision tower", "M-RoPE", "DeepStack"],
    ),
    "gemma3_text": ("Gemma3ForConditionalGeneration", {}, ["vision tower"]),
    "gemma4_text": ("Gemma4ForConditionalGeneration", {}, ["vision tower", "head size and KV heads"]),
    "bart": ("BartForCausalLM", {}, ["cross-attention"]),
}
PLACE = re.compile(r"(modeling_\w+\.py):(\d+), (\w+)")


def subject_of(architecture, model_type, config=None, findings=()):
    return UnportedClass(
        architecture, model_type, config or {}, transformers_file(architecture, model_type), findings
    )


def check_problems(subject, architecture, model_type):
    """Each feature stands at the line that is named, in the class that is named."""
    file = transformers_file(architecture, model_type)
    classes = {node.name: node for node in file.tree.body if isinstance(node, ast.ClassDef)}
    first, *problems = subject.problems("config.json")
    assert architecture in first.found
    assert "from Step 4 of SKILL.md on: start from the reference model" in first.next_step
    assert len(problems) == len(subject.features) > 0
    for feature, problem in zip(subject.features, problems, strict=True):
        assert problem.found == feature.what
        name, line, owner = PLACE.fullmatch(problem.where).groups()
        assert name == file.name
        node, text = classes[owner], file.text.splitlines()[int(line) - 1]
        assert node.lineno <= int(line) <= node.end_lineno
        if feature in PARTS:
            assert re.fullmatch(feature.owner, owner)
            assert re.search(feature.text, text)
        else:
            assert owner == feature.owner
            assert feature.text in text
        assert re.match(r"write [\w, ]+ by hand: .{20}", problem.next_step)


@pytest.mark.parametrize("model_type", NOT_PORTED)
def test_every_refused_class_of_the_landscape_names_what_stops_it(model_type):
    entry = NOT_PORTED[model_type]
    check_problems(subject_of(entry.hf_name, model_type, entry.config), entry.hf_name, model_type)
    assert entry.category == "mla" or entry.hf_name in REFUSED


@pytest.mark.parametrize("model_type", OTHERS)
def test_other_kinds_of_models_are_recognised_by_their_classes(model_type):
    architecture, config, parts = OTHERS[model_type]
    subject = subject_of(architecture, model_type, config)
    check_problems(subject, architecture, model_type)
    found = " | ".join(feature.what for feature in subject.features)
    assert all(part in found for part in parts), found


def test_the_file_shows_every_feature_of_the_table():
    model_types = {entry.hf_name: model_type for model_type, entry in NOT_PORTED.items()}
    for name, features in REFUSED.items():
        subject = subject_of(name, model_types[name])
        lost = [feature.what for feature in features if not PLACE.fullmatch(subject.place(feature))]
        assert lost == [], name


def test_what_the_texts_name_exists():
    functional = {*exported_names(simulator_dir() / "vllm_neuron" / "functional" / "__init__.py")}
    features = [*PARTS, *(feature for features in REFUSED.values() for feature in features)]
    for feature in features:
        assert set(re.findall(r"\bNF\.(\w+)", feature.by_hand)) <= functional, feature.what
        assert set(re.findall(r"\w+ForCausalLM", feature.by_hand)) <= FAMILIES.keys(), feature.what
        assert feature.nearest in ("", *NEAREST)


def test_a_feature_that_the_file_does_not_show_is_named_with_its_class():
    subject = subject_of("BitNetForCausalLM", "bitnet")
    feature = Feature("a norm", "BitNetMLP", "self.no_such_norm =", ("mlp",), "...")
    assert subject.place(feature) == "BitNetMLP"


def test_what_the_config_switches_off_is_not_named():
    def features(architecture, model_type, config):
        return " | ".join(item.what for item in subject_of(architecture, model_type, config).features)

    doge = ("DogeForCausalLM", "doge")
    assert "DogeCDMoE" not in features(*doge, {"is_moe": False, "num_experts": 8})
    assert "DogeCDMoE" in features(*doge, {"is_moe": True, "num_experts": 8})
    gemma = ("Gemma4ForCausalLM", "gemma4_text")
    plain = features(*gemma, {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0})
    assert "embeddings for each layer" not in plain
    assert "of an earlier layer" not in plain
    assert "of an earlier layer" in features(*gemma, {"num_kv_shared_layers": 2})
    granite = ("GraniteMoeHybridForCausalLM", "granitemoehybrid")
    assert "state-space" in features(*granite, {"layer_types": ["mamba", "attention"]})
    assert features(*granite, {"layer_types": ["attention", "attention"], "num_local_experts": 0}) == ""


def test_an_unknown_class_lists_what_reads_unlike_llama():
    assert UNLIKE.keys() >= FINDINGS.keys()
    llama = {"kind": "rms", "weight": "plain", "float32": True, "rounding": "once"}
    findings = [
        Finding("norm", "XLayer.norm", llama, "modeling_x.py:7"),
        Finding("norm", "XLayer.other", {**llama, "kind": "layer"}, "modeling_x.py:9"),
        Finding("sinks", "XAttention.sinks", {"sinks": True}, "modeling_x.py:30"),
    ]
    _, *problems = UnportedClass("XForCausalLM", "x", {}, None, findings).problems("config.json")
    assert [problem.where for problem in problems] == ["modeling_x.py:9", "modeling_x.py:30"]
    assert "XLayer.other: a norm of kind layer" in problems[0].found
    assert problems[1].next_step.startswith("write attention by hand: ")
    config = {"kv_lora_rank": 512, "num_experts": 8}
    _, *problems = UnportedClass("XForCausalLM", "x", config, None).problems("config.json")
    assert [problem.where for problem in problems] == [
        "config.json: kv_lora_rank",
        "config.json: num_experts",
    ]


def test_what_research_cannot_read_comes_with_the_features_and_without_what_they_explain(tmp_path):
    config = small_config(
        architectures=["Qwen3NextForCausalLM"],
        model_type="qwen3_next",
        layer_types=["linear_attention", "full_attention"],
        vocab_size="many",
    )
    with pytest.raises(Refusal) as caught:
        research(str(write_checkpoint(tmp_path, config, llama_keys(small_config()))))
    rules = [problem.rule for problem in caught.value.problems]
    assert set(rules) == {"SCOPE-ARCH", "CFG-TYPE"}
    assert "Qwen3NextGatedDeltaNet" in str(caught.value)
    assert "compute-tp" not in str(caught.value)  # which cannot read it, either

"""Declarations of architectures: well-formed, and what they say of tiny configs of their classes."""

import msgspec
import pytest
from autoport import expressions
from autoport.families import FAMILIES
from autoport.families.family import NORM_NAMES
from autoport.research.config_defaults import causal_lm_classes


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_declaration_belongs_to_its_class_and_its_expressions_are_expressions(name):
    family = FAMILIES[name]
    classes = causal_lm_classes()
    owners = [model_type for model_type, hf_name in classes.items() if hf_name == name]
    assert not owners or family.model_type in owners
    fields = (
        "topology",
        "rotary",
        "windows",
        "rope_labels",
        "scale",
        "softcap",
        "logit_scale",
        "logit_softcap",
    )
    fields += ("embedding_scale", "residual_scale", "qkv_clip", "sinks", "alibi", "final_norm", "rotary_dim")
    for field in fields:
        text = getattr(family, field)
        if text:
            expressions.parse(text)
    for condition, rule, what in family.requires:
        expressions.parse(condition)
        assert rule.isupper()
        assert what


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_norm_keys_fit_a_topology(name):
    keys = FAMILIES[name].keys
    given = keys.norms if isinstance(keys.norms, dict) else {"any": keys.norms}
    for topology, norms in given.items():
        lengths = (
            {len(NORM_NAMES[topology])} if topology in NORM_NAMES else {len(n) for n in NORM_NAMES.values()}
        )
        assert not norms or len(norms) in lengths


def test_a_declaration_cannot_be_changed():
    with pytest.raises(AttributeError):
        FAMILIES["LlamaForCausalLM"].norm = "layer"
    assert msgspec.structs.replace(FAMILIES["LlamaForCausalLM"], norm="layer").norm == "layer"

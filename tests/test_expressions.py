"""Expressions over config attributes: one text for the analysis and for the generated code."""

import pytest
from autoport import expressions

WINDOWS = "[window if kind == 'sliding' else None for kind in kinds]"


@pytest.mark.parametrize(
    ("text", "values", "expected"),
    [
        ("hidden ** 0.5", {"hidden": 64}, 8.0),
        ("n_inner or 4 * n_embd", {"n_inner": None, "n_embd": 16}, 64),
        (WINDOWS, {"window": 8, "kinds": ["sliding", "full"]}, [8, None]),
        ("k if isinstance(k, int) else k[0]", {"k": [2, 2]}, 2),
        ("int(size * rope['factor'])", {"size": 16, "rope": {"factor": 0.25}}, 4),
    ],
)
def test_value_and_names(text, values, expected):
    assert expressions.names(text) == list(values)
    assert expressions.evaluate(text, values) == expected


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "open('x')",
        "x.__class__",
        "x._private",
        "x.real()",
        "(lambda: 1)()",
        "f'{x}'",
        "x := 1",
        "max(a, key=b)",
        "__builtins__",
        "a; b",
    ],
)
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match=r"expression|allowed|calls|reads"):
        expressions.evaluate(text, {"x": 1, "a": [1], "b": 2, "config": None})


def test_attributes_are_read_from_the_owner_and_loop_variables_are_not():
    assert (
        expressions.qualify(WINDOWS, "hf")
        == "[hf.window if kind == 'sliding' else None for kind in hf.kinds]"
    )
    assert expressions.qualify("int(a)", "hf") == "int(hf.a)"


def test_an_attribute_of_a_nested_config_is_an_entry_of_its_dict_in_the_analysis():
    text = "attn_config.clip_qkv or None"
    assert expressions.names(text) == ["attn_config"]
    assert expressions.evaluate(text, {"attn_config": {"clip_qkv": 6}}) == 6
    assert expressions.qualify(text, "hf") == "hf.attn_config.clip_qkv or None"
    with pytest.raises(ValueError, match="cannot be computed"):
        expressions.evaluate("a.real", {"a": 1})


def test_a_value_that_cannot_be_computed_says_why():
    with pytest.raises(ValueError, match=r"1 / a.*division by zero"):
        expressions.evaluate("1 / a", {"a": 0})

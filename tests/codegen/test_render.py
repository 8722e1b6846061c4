"""Rendering: what may reach generated text, and in which form."""

import ast
import math

import jinja2
import pytest
from autoport.codegen import render
from autoport.errors import Refusal
from hypothesis import given
from hypothesis import strategies as st

HOSTILE = [
    '"); import os; os.system("touch /tmp/x"); ("',
    "'''\nimport os\n'''",
    "a\nb",
    "{{ 7 * 7 }}",
    "{% for x in y %}",
    "__import__('os')",
    "\\",
    "x; y",
    "ünïcode",
    "class",
    "a.b",
    "",
    None,
    7,
]


@pytest.mark.parametrize("value", HOSTILE)
def test_identifier_refuses_anything_else(value: object) -> None:
    with pytest.raises(Refusal, match="GEN-IDENTIFIER"):
        render.identifier(value)


@pytest.mark.parametrize("value", [text for text in HOSTILE if text not in ("a.b", "class")])
def test_weight_name_refuses_anything_else(value: object) -> None:
    with pytest.raises(Refusal, match="GEN-KEY"):
        render.weight_name(value)


def test_weight_names() -> None:
    assert render.weight_name("lm_head.weight") == '"lm_head.weight"'
    assert render.weight_name("model.layers.{i}.mlp.up-proj.weight") == 'f"{layer}.mlp.up-proj.weight"'
    assert render.weight_name("transformer.h.{i}.ln_1.bias") == 'f"transformer.h.{i}.ln_1.bias"'
    assert render.weight_keys(["a.b"]) == '"a.b"'
    assert render.weight_keys(["a.{i}", "b"]) == '[f"a.{i}", "b"]'


literals = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(literals)
def test_literals_come_back_as_they_were(value: object) -> None:
    text = render.py(value)
    assert ast.literal_eval(text) == value


@pytest.mark.parametrize("value", [math.nan, math.inf, object(), b"x", {"a": [{1, 2}]}])
def test_what_has_no_literal_is_refused(value: object) -> None:
    with pytest.raises(Refusal, match="GEN-LITERAL"):
        render.py(value)


@given(st.text())
def test_text_cannot_leave_a_comment_or_docstring(value: str) -> None:
    line = render.comment(value)
    assert not set(line) & set("\n\r\"'\\")
    tree = ast.parse(f'"""{line}"""\nx = 1  # {line}\n')
    assert [type(node) for node in tree.body] == [ast.Expr, ast.Assign]


@given(st.text())
def test_text_cannot_leave_a_table_cell(value: str) -> None:
    for cell in (render.markdown(value), render.code_span(value)):
        assert len(cell.splitlines()) <= 1
        assert "|" not in cell.replace("\\|", "")


@pytest.mark.parametrize(
    "template",
    [
        "{{ value }}",
        "{{ value ~ 'x' }}",
        "{{ value | upper }}",
        "{{ 'constant' }}",
        "{{ 7 }}",
        "{{ (value | py) ~ '' }}",
    ],
)
def test_a_template_cannot_print_without_a_filter(template: str) -> None:
    with pytest.raises(TypeError, match="without a filter"):
        render.environment().from_string(template).render(value="text")


@pytest.mark.parametrize(
    "name", ["", *(f" | {name}" for name in ("py", "identifier", "markdown", "comment"))]
)
def test_a_missing_value_stops(name: str) -> None:
    with pytest.raises((jinja2.UndefinedError, Refusal)):
        render.environment().from_string("{{ nothing" + name + " }}").render()


def test_templates_are_sandboxed() -> None:
    with pytest.raises(jinja2.exceptions.SecurityError):
        render.environment().from_string("{{ ''.__class__.__mro__ | py }}").render()


def test_a_section_without_a_template_is_refused() -> None:
    with pytest.raises(Refusal, match=r"GEN-TEMPLATE.*model/norm/group"):
        render.render("model/norm/group.py.j2")


@pytest.mark.parametrize("text", ["def f(:\n", "def f(x):\n    return y\n", "x = 1\nreturn x\n"])
def test_text_that_is_not_python_or_has_an_undefined_name_stops(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(render, "render", lambda template, **context: text)
    with pytest.raises(Refusal, match="GEN-SYNTAX"):
        render.render_python("model/model.py.j2")


def test_python_is_formatted_with_sorted_imports_and_none_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "import sys\nimport vllm_neuron\nimport os\nimport torch\nx = ( os,torch,  vllm_neuron )\n"
    monkeypatch.setattr(render, "render", lambda template, **context: text)
    expected = "import os\n\nimport torch\n\nimport vllm_neuron\n\nx = (os, torch, vllm_neuron)\n"
    assert render.render_python("any") == expected


def test_markdown_escapes_markup_and_leaves_names_readable() -> None:
    assert render.markdown("lm_head *b* <i> [x](y) _e_ a|b `c`") == (
        r"lm_head \*b\* \<i\> \[x\](y) \_e\_ a\|b \`c\`"
    )

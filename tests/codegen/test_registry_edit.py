"""The edit of registry.py: layouts found in the wild, idempotence, conflicts, and what must not change."""

import ast

import pytest
from autoport.codegen.registry_edit import Row, add_row
from autoport.errors import Refusal
from hypothesis import given, settings
from hypothesis import strategies as st

YI = Row("LlamaForCausalLM", "yi", "YiLlamaForCausalLM")
QWEN2 = Row("Qwen2ForCausalLM", "qwen2", "Qwen2Qwen2ForCausalLM")

LITERAL = '''\
# SPDX-License-Identifier: Apache-2.0
"""Registry."""

import os

from .gpt_oss import GptOssForCausalLM  # reference
from .llama3 import (
    Eagle3LlamaForCausalLM,
    LlamaForCausalLM,
)


def get_models() -> list[tuple[str, type]]:
    return [
        # dense
        ("LlamaForCausalLM", LlamaForCausalLM),
        ("GptOssForCausalLM", GptOssForCausalLM),  # MoE
        # speculators
        ("Eagle3LlamaForCausalLM", Eagle3LlamaForCausalLM),
        # forks add theirs below
    ]
'''

VARIABLE = """\
import os
from .llama3 import LlamaForCausalLM

def get_models():
    models = [("LlamaForCausalLM", LlamaForCausalLM)]
    if os.environ.get("VLLM_NEURON_SYNTHETIC_MODEL") == "1":
        from .synthetic import SyntheticNeuronModel
        models.append(("SyntheticNeuronModel", SyntheticNeuronModel))
    return models
"""

APPENDS = """\
from .llama3 import LlamaForCausalLM
from .gpt_oss import GptOssForCausalLM


def get_models():
    models: list[tuple[str, type]] = []
    models.append(('LlamaForCausalLM', LlamaForCausalLM))
    models.append(('GptOssForCausalLM', GptOssForCausalLM))  # MoE
    return models
"""

MODULE_LEVEL = """\
from vllm_neuron.model.llama3 import LlamaForCausalLM

MODELS = [
    ("LlamaForCausalLM", LlamaForCausalLM),
]


def get_models():
    return MODELS
"""

EMPTY = '''\
"""Registry."""


def get_models() -> list[tuple[str, type]]:
    return []
'''


def rows(source: str) -> list[tuple[str, str]]:
    """(architecture, class expression) of every row, in order of the text."""
    pairs = [
        (node.elts[0].value, ast.unparse(node.elts[1]))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Tuple) and len(node.elts) == 2 and isinstance(node.elts[0], ast.Constant)
    ]
    return sorted(
        pairs, key=lambda pair: source.index(f"{pair[0]}", source.index("get_models") % len(source))
    )


def added_lines(before: str, after: str) -> list[str]:
    """Lines that the edit added; fails if it took one away or moved one."""
    remaining = iter(before.splitlines())
    expected, added = next(remaining, None), []
    for line in after.splitlines():
        if line == expected:
            expected = next(remaining, None)
        else:
            added.append(line)
    assert expected is None, f"the edit lost or changed {expected!r}"
    return added


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (LITERAL, ["from .qwen2 import Qwen2ForCausalLM", '        ("Qwen2ForCausalLM", Qwen2ForCausalLM),']),
        (
            APPENDS,
            [
                "from .qwen2 import Qwen2ForCausalLM",
                "    models.append(('Qwen2ForCausalLM', Qwen2ForCausalLM))",
            ],
        ),
        (
            MODULE_LEVEL,
            ["from .qwen2 import Qwen2ForCausalLM", "", '    ("Qwen2ForCausalLM", Qwen2ForCausalLM),'],
        ),
    ],
    ids=["literal", "appends", "module level"],
)
def test_adds_the_import_and_the_row_and_nothing_else(source: str, expected: list[str]) -> None:
    assert added_lines(source, add_row(source, QWEN2)) == expected


def test_a_list_on_one_line_stays_on_one_line() -> None:
    after = add_row(VARIABLE, QWEN2)
    assert (
        '    models = [("LlamaForCausalLM", LlamaForCausalLM), ("Qwen2ForCausalLM", Qwen2ForCausalLM)]\n'
        in after
    )
    assert after.index("import os") < after.index("from .llama3") < after.index("from .qwen2")


def test_an_empty_list_gets_a_line_per_row() -> None:
    after = add_row(EMPTY, QWEN2)
    assert '    return [\n        ("Qwen2ForCausalLM", Qwen2ForCausalLM),\n    ]\n' in after
    assert after.startswith('"""Registry."""\n\nfrom .qwen2 import Qwen2ForCausalLM\n')
    both = add_row(after, YI)
    assert '        ("LlamaForCausalLM", LlamaForCausalLM),\n    ]\n' in both


@pytest.mark.parametrize("source", [LITERAL, VARIABLE, APPENDS, MODULE_LEVEL, EMPTY])
def test_a_second_run_changes_nothing(source: str) -> None:
    once = add_row(source, QWEN2)
    assert add_row(once, QWEN2) == once


def test_comments_stay_where_they_are() -> None:
    after = add_row(LITERAL, QWEN2)
    below = after.index("# forks add theirs below")
    assert below < after.index('("Qwen2ForCausalLM"')
    assert after.count("#") == LITERAL.count("#")


@pytest.mark.parametrize("source", [LITERAL, VARIABLE, APPENDS, MODULE_LEVEL])
def test_a_row_of_another_package_stops(source: str) -> None:
    with pytest.raises(Refusal, match="REG-CONFLICT") as caught:
        add_row(source, YI)
    assert ".llama3:LlamaForCausalLM" in caught.value.problems[0].found


def test_replacing_a_row_drops_the_import_that_is_unused_then() -> None:
    after = add_row(LITERAL, YI, replace=True)
    assert "    Eagle3LlamaForCausalLM,\n)\nfrom .yi import LlamaForCausalLM\n" in after
    assert [architecture for architecture, _ in rows(after)] == [
        architecture for architecture, _ in rows(LITERAL)
    ]


def test_replacing_keeps_the_comment_above_an_import() -> None:
    source = MODULE_LEVEL.replace("from vllm", "import os\n# dense models\nfrom vllm")
    after = add_row(source, YI, replace=True)
    assert "# dense models\n" in after
    assert "vllm_neuron.model.llama3" not in after


def test_only_appends_to_the_list_that_is_returned_count() -> None:
    source = APPENDS.replace("    return", "    names = []\n    names.append(('x', 'y'))\n    return")
    lines = add_row(source, QWEN2).splitlines()
    assert lines.index("    models.append(('Qwen2ForCausalLM', Qwen2ForCausalLM))") < lines.index(
        "    names = []"
    )


def test_replacing_keeps_an_import_that_is_used_elsewhere() -> None:
    source = LITERAL + "\n\nDEFAULT = LlamaForCausalLM\n"
    after = add_row(source, YI, replace=True)
    assert "    LlamaForCausalLM,\n)\nfrom .yi import LlamaForCausalLM as YiLlamaForCausalLM\n" in after
    assert '("LlamaForCausalLM", YiLlamaForCausalLM),\n' in after


def test_a_taken_name_is_imported_under_an_alias() -> None:
    source = LITERAL.replace(
        '("LlamaForCausalLM", LlamaForCausalLM)', '("LLaMAForCausalLM", LlamaForCausalLM)'
    )
    after = add_row(source, YI)
    assert "from .yi import LlamaForCausalLM as YiLlamaForCausalLM\n" in after
    assert '("LlamaForCausalLM", YiLlamaForCausalLM),\n' in after
    assert '("LLaMAForCausalLM", LlamaForCausalLM),\n' in after


def test_spelling_of_the_architecture_is_exact() -> None:
    row = Row("PhiMoEForCausalLM", "phimoe", "PhimoePhiMoEForCausalLM")
    source = add_row(EMPTY, Row("PhimoeForCausalLM", "other", "X"))
    assert [architecture for architecture, _ in rows(add_row(source, row))] == [
        "PhimoeForCausalLM",
        "PhiMoEForCausalLM",
    ]


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("def get_models(:\n", "REG-SYNTAX"),
        ("MODELS = []\n", "REG-LAYOUT"),
        ("def get_models():\n    return {}\n", "REG-LAYOUT"),
        ("def get_models():\n    return load()\n", "REG-LAYOUT"),
        ("def get_models():\n    if x:\n        return []\n    return [1]\n", "REG-LAYOUT"),
        ("def get_models(): return []\n", "REG-LAYOUT"),
        ("def get_models():\n    a = []\n    a = [1]\n    return a\n", "REG-LAYOUT"),
        (
            'def get_models():\n    return [("Qwen2ForCausalLM", a.A), ("Qwen2ForCausalLM", b.B)]\n',
            "REG-DUPLICATE",
        ),
    ],
)
def test_what_is_not_understood_is_refused(source: str, rule: str) -> None:
    with pytest.raises(Refusal, match=rule):
        add_row(source, QWEN2)


@settings(max_examples=40)
@given(
    names=st.lists(st.sampled_from("ABCDEFG"), min_size=1, max_size=7, unique=True),
    layout=st.sampled_from(["literal", "one line", "appends"]),
    newline=st.sampled_from(["\n", "\r\n"]),
    indent=st.sampled_from(["    ", "  ", "\t"]),
)
def test_any_order_of_ports_gives_every_row_once(
    names: list[str], layout: str, newline: str, indent: str
) -> None:
    bodies = {
        "literal": [f"{indent}return [", f'{indent}{indent}("Old", Old),', f"{indent}]"],
        "one line": [f'{indent}return [("Old", Old)]'],
        "appends": [f"{indent}m = []", f'{indent}m.append(("Old", Old))', f"{indent}return m"],
    }
    source = newline.join(["from .old import Old", "", "def get_models():", *bodies[layout], ""])
    for name in names:
        source = add_row(source, Row(f"{name}ForCausalLM", name.lower(), f"{name}Alias"))
    namespace = {"Old": "Old"} | {f"{name}ForCausalLM": name for name in names}
    code = [line for line in source.splitlines() if not line.startswith("from")]
    exec("\n".join(code), namespace)
    assert namespace["get_models"]() == [("Old", "Old"), *((f"{name}ForCausalLM", name) for name in names)]
    assert source.count("\r\n") == (source.count("\n") if newline == "\r\n" else 0)

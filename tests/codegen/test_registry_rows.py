"""Rows that are taken out, rows whose class is missing, and other layouts and spellings."""

import multiprocessing
from pathlib import Path

import pytest
from autoport.codegen import register
from autoport.codegen.registry_edit import Row, add_row
from autoport.codegen.registry_rows import broken_rows, remove_rows, unregister
from autoport.errors import Refusal
from autoport.port_state import Port
from autoport.registry import row_list
from autoport.step import Options
from autoport.workspace import Workspace
from test_register import add_port
from test_registry_edit import APPENDS, EMPTY, LITERAL, MODULE_LEVEL, QWEN2, VARIABLE, YI, added_lines

EXTENDS = """\
from .llama3 import LlamaForCausalLM


def get_models():
    models = []
    models.extend([("LlamaForCausalLM", LlamaForCausalLM)])
    models += [
        # forks
    ]
    return models
"""
SUM = """\
from .llama3 import LlamaForCausalLM
from .others import OTHERS


def get_models():
    return OTHERS + [("LlamaForCausalLM", LlamaForCausalLM)]
"""
CONDITIONAL = """\
import os

from .llama3 import LlamaForCausalLM

def get_models():
    models = [("LlamaForCausalLM", LlamaForCausalLM)]
    if os.environ.get("SYNTHETIC"):
        models.append(("SyntheticModel", LlamaForCausalLM))  # for tests
    return models
"""
LAYOUTS = [LITERAL, VARIABLE, APPENDS, MODULE_LEVEL, EMPTY, EXTENDS, SUM, CONDITIONAL]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (EXTENDS, ["from .qwen2 import Qwen2ForCausalLM", '        ("Qwen2ForCausalLM", Qwen2ForCausalLM),']),
        (
            SUM,
            [
                "from .qwen2 import Qwen2ForCausalLM",
                '    return OTHERS + [("LlamaForCausalLM", LlamaForCausalLM), '
                '("Qwen2ForCausalLM", Qwen2ForCausalLM)]',
            ],
        ),
    ],
)
def test_lists_that_are_built_up(source: str, expected: list[str]) -> None:
    after = add_row(source, QWEN2)
    assert [line for line in after.splitlines() if line not in source.splitlines()] == expected
    assert add_row(after, QWEN2) == after


@pytest.mark.parametrize("source", LAYOUTS)
def test_removing_undoes_adding(source: str) -> None:
    spelling = Row("QWen2ForCausalLM", "qwen2", "X", exported="Qwen2ForCausalLM")
    after = remove_rows(add_row(add_row(source, QWEN2), spelling), "qwen2")
    assert row_list(after) == row_list(source)
    assert [line for line in source.splitlines() if line not in after.splitlines()] in (
        [],
        ["    return []"],
    )
    assert "qwen2" not in after.lower()
    assert remove_rows(after, "qwen2") == after


def test_a_row_between_others_takes_nothing_with_it() -> None:
    after = remove_rows(LITERAL, "gpt_oss")
    assert added_lines(after, LITERAL) == [
        "from .gpt_oss import GptOssForCausalLM  # reference",
        '        ("GptOssForCausalLM", GptOssForCausalLM),  # MoE',
    ]
    both = remove_rows(LITERAL, "llama3")
    assert [line for line in LITERAL.splitlines() if "#" in line and line not in both.splitlines()] == []
    assert row_list(both) == [("GptOssForCausalLM", ".gpt_oss:GptOssForCausalLM")]
    one_line = remove_rows(add_row(VARIABLE, QWEN2), "llama3")
    assert '    models = [("Qwen2ForCausalLM", Qwen2ForCausalLM)]\n' in one_line


def test_a_row_that_cannot_be_taken_out_alone() -> None:
    with pytest.raises(Refusal, match="REG-LAYOUT"):
        remove_rows(CONDITIONAL, "llama3")  # would leave an 'if' without a body


def test_another_spelling_is_a_row_of_the_same_class() -> None:
    spelling = Row("YiForCausalLM", "yi", "YiLlamaForCausalLM", exported="LlamaForCausalLM")
    after = add_row(add_row(EMPTY, YI), spelling)
    assert after.count("import") == 1
    assert row_list(after) == [
        ("LlamaForCausalLM", ".yi:LlamaForCausalLM"),
        ("YiForCausalLM", ".yi:LlamaForCausalLM"),
    ]


@pytest.fixture
def yi(port: Port) -> Port:
    return add_port(port, "yi")


def test_register_and_unregister(yi: Port) -> None:
    path = yi.workspace.registry_path
    before = path.read_text()
    register.run(yi, Options(aliases=["YiForCausalLM", "LLaMAForCausalLM"]))
    names = ["LlamaForCausalLM", "YiForCausalLM", "LLaMAForCausalLM"]
    assert [name for name, _ in row_list(path.read_text())] == names
    yi.save()
    assert unregister(yi) == names
    assert path.read_text().replace("[\n    ]", "[]") == before
    assert unregister(yi) == []
    assert register.run(yi, Options()).summary.startswith("not registered")  # until it is asked for
    assert register.run(yi, Options(no_register=False)).files
    with pytest.raises(Refusal) as caught:
        register.run(yi, Options(aliases=['A"), ("B', "class", "YiForCausalLM", ""]))
    assert [problem.rule for problem in caught.value.problems] == ["REG-ALIAS"] * 3
    with pytest.raises(Refusal, match="there is no model 'absent', and no row of it"):
        unregister(Port(yi.workspace, "absent"))


def test_rows_whose_class_is_missing(yi: Port) -> None:
    models = yi.workspace.registry_path.parent
    (models / "yi" / "__init__.py").write_text("from .factory import LlamaForCausalLM\n")
    (models / "lazy.py").write_text("def __getattr__(name):\n    return name\n")
    yi.workspace.registry_path.write_text(
        "from elsewhere import Other\n"
        "from vllm_neuron.model.yi import LlamaForCausalLM, YiForCausalLM\n"
        "from .gone import GoneForCausalLM\nfrom .lazy import LazyForCausalLM\n\n"
        "def get_models():\n    return [\n"
        '        ("LlamaForCausalLM", LlamaForCausalLM),\n        ("LlamaForCausalLM", LlamaForCausalLM),\n'
        '        ("YiForCausalLM", YiForCausalLM),\n        ("Gone", GoneForCausalLM),\n'
        '        ("Lazy", LazyForCausalLM),\n        ("Other", Other),\n    ]\n'
    )
    assert [(row.architecture, row.found) for row in broken_rows(yi.workspace)] == [
        ("LlamaForCausalLM", "another row has this architecture"),
        ("YiForCausalLM", "yi exports no YiForCausalLM"),
        ("Gone", "there is no package gone"),
    ]


def test_a_file_without_the_function_has_no_rows_to_check(yi: Port) -> None:
    yi.workspace.registry_path.write_text("")
    with pytest.raises(Refusal, match="REG-LAYOUT: there is no get_models"):
        broken_rows(yi.workspace)


def _register(root: Path, name: str) -> None:
    register.run(Port(Workspace.find(root), name), Options())


def test_processes_that_register_at_the_same_time_lose_no_row(port: Port) -> None:
    names = [f"m{i}" for i in range(4)]
    for name in names:
        add_port(port, name, f"{name.title()}ForCausalLM")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_register, args=(port.workspace.root, name)) for name in names]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    rows = row_list(port.workspace.registry_path.read_text())
    assert sorted(name for name, _ in rows) == [f"{name.title()}ForCausalLM" for name in names]

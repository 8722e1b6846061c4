"""Variants: their declaration, the factory rendered from it, and the same by editing a factory."""

import difflib
import functools
import multiprocessing
import re
from itertools import accumulate
from pathlib import Path

import pytest
from autoport.codegen import add_variant as add_variant_module
from autoport.codegen.add_variant import declare, run
from autoport.codegen.factory_edit import add_variant
from autoport.codegen.generate import render_package
from autoport.errors import Refusal
from autoport.port_state import Port
from autoport.variants import (
    BASE,
    FORMATS,
    Condition,
    Variant,
    check_variants,
    parse_condition,
    parse_conditions,
    read_variants,
)
from autoport.workspace import Workspace
from plans import YI, plan

MXFP4 = Variant("mxfp4", "model_mxfp4", ("mxfp4",), ("mxfp4",), ("trn3",), ("trn3",))
FP8 = Variant(
    "fp8", "model_fp8", ("fp8",), tuple(FORMATS["fp8"]), require=(Condition("hidden_size", ">=", 64),)
)
THROUGHPUT = Variant(
    "throughput",
    "model_throughput",
    platforms=("trn2", "trn3"),
    when=(Condition("sharding", "==", "throughput"), Condition("neuron_config.max_logprobs", "!=", None)),
)
TRN2 = Variant(
    "trn2",
    "model_trn2",
    default_on=("trn2",),
    require=(Condition("rope_parameters.rope_type", "in", ["default", "llama3"]),),
)
ALL = (BASE, MXFP4, FP8, THROUGHPUT, TRN2)
NAMES = [variant.name for variant in ALL]


@functools.cache
def factory(*names: str) -> str:
    """The rendered factory of a model with these variants of `ALL`."""
    chosen = [variant for variant in ALL if variant.name in names]
    return render_package(plan(YI), "vllm_neuron", chosen)["factory.py"]


def edited(source: str, variant: Variant) -> str:
    return add_variant(source, "LlamaForCausalLM", variant, "factory.py").text


# --- The factory --------------------------------------------------------------------------------------------


def test_an_edit_gives_what_rendering_gives() -> None:
    assert [*accumulate(ALL[1:], edited, initial=factory("bf16"))] == [
        factory(*NAMES[: number + 1]) for number in range(len(ALL))
    ]


def test_an_edit_is_idempotent() -> None:
    for variant in ALL:
        assert edited(factory(*NAMES), variant) == factory(*NAMES)


def test_kinds_of_branches_are_in_the_order_of_selection() -> None:
    body = factory(*NAMES).partition("def _select_implementation")[2].partition("def _validate_config")[0]
    marks = [line.strip() for line in body.splitlines() if line.strip().startswith("#")]
    assert marks == [
        "# What the user asks for",
        "# The checkpoint's format",
        "# The model's own rules",
        "# The platform's default",
        "# Fallback",
    ]
    assert not re.search(r"^from \.model", factory(*NAMES), re.M)  # no implementation is imported at the top


def test_what_a_person_changed_survives() -> None:
    by_hand = factory("bf16")
    changes = {
        "# Fallback": "# Fallback, for now",
        "        # What the user asks for\n": (
            "        if hf_config.model_type == 'mine':  # our own\n"
            "            from .model_mine import MineForCausalLM as Model\n\n"
            "            return   Model.from_configs(hf_config, neuron_config)\n\n"
            "        # What the user asks for\n"
        ),
        'quantizations = ["bf16"]': "quantizations = ( 'bf16', )",
        "        return problems": "        problems += ours(hf_config)\n        return problems",
    }
    for old, new in changes.items():
        assert by_hand.count(old) == 1, old
        by_hand = by_hand.replace(old, new)
    after = [*accumulate(ALL[1:], edited, initial=by_hand)][-1]
    changed = [line for line in difflib.ndiff(by_hand.splitlines(), after.splitlines()) if line[0] == "-"]
    assert [line.split()[1] for line in changed] == ["quantizations", "formats:"]
    assert "quantizations = ( 'bf16', 'mxfp4', 'fp8' )" in after
    compile(after, "factory.py", "exec")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("{'a': ('a',)}", """{'a': ('a',), "mxfp4": ("mxfp4",)}"""),
        (
            "{\n            'a': ('a',),  # first\n            'b': ('b',),  # last\n        }",
            "{\n            'a': ('a',),  # first\n            'b': ('b',),  # last\n"
            """            "mxfp4": ("mxfp4",),\n        }""",
        ),
        (
            f"{{'{'a' * 50}': ()}}",
            f"{{\n            '{'a' * 50}': (),\n"
            """            "mxfp4": ("mxfp4",),\n        }""",
        ),
    ],
    ids=["in one line", "a line each", "too long for one line"],
)
def test_a_format_is_added_as_the_others_are_written(before: str, after: str) -> None:
    start = "tuple[str, ...]] = "
    by_hand = factory("bf16").replace(start + "{}", start + before)
    assert f"{start}{after}\n" in edited(by_hand, MXFP4)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (("class LlamaForCausalLM", "class Renamed"), "VAR-LAYOUT"),
        (("def _select_implementation", "def choose"), "VAR-LAYOUT"),
        (("quantizations = ", "known = "), "VAR-LAYOUT"),
        (("def __init__(", "def __init__("[:-1]), "VAR-SYNTAX"),
    ],
)
def test_a_factory_that_is_not_understood(change: tuple[str, str], rule: str) -> None:
    with pytest.raises(Refusal) as caught:
        edited(factory("bf16").replace(*change), MXFP4)
    assert caught.value.problems[0].rule == rule
    assert caught.value.problems[0].where == "factory.py"


# --- Declarations -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "condition"),
    [
        ("rope_parameters.rope_type == llama3", Condition("rope_parameters.rope_type", "==", "llama3")),
        ("hidden_size>=4096", Condition("hidden_size", ">=", 4096)),
        ("sliding_window != None", Condition("sliding_window", "!=", None)),
        ("model_type not in ['a', 'b']", Condition("model_type", "not in", ["a", "b"])),
        ("sharding=='a b'", Condition("sharding", "==", "a b")),
    ],
)
def test_a_condition_is_read(text: str, condition: Condition) -> None:
    assert parse_condition(text) == condition


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "x",
            "x = 1",
            "x ==",
            "__class__ == 1",
            "f(x) == 1",
            "x.class == 1",
            "x in 3",
            "x == {1}",
            "x in []",
        ),
        *("x < abc", "x >= True", "x > 'a'", "x == 1e999", "x in [1e999]", "x in [[1]]", "x == b'a'"),
    ],
)
def test_what_is_no_condition(text: str) -> None:
    with pytest.raises(Refusal, match="VAR-CONDITION"):
        parse_condition(text)


def test_all_conditions_that_are_wrong_are_named() -> None:
    with pytest.raises(Refusal) as caught:
        parse_conditions(when=["x", "y == 1"], require=["z < a"])
    assert [problem.where for problem in caught.value.problems] == ["option --when", "option --require"]
    assert parse_conditions(when=["y == 1"], require=[]) == {
        "when": (Condition("y", "==", 1),),
        "require": (),
    }


def test_a_condition_on_a_field_that_the_plugin_does_not_have(workspace: Workspace) -> None:
    conditions = parse_conditions(
        when=["neuron_config.nonsense == 1", "neuron_config.max_logprobs == 0"],
        require=["neuron_config.on_device_sampling_config.all_greedy == True", "neuron_config.odd == 1"],
    )
    variant = declare("own", **conditions)
    before = contents(workspace)
    with pytest.raises(Refusal) as caught:
        run(Port(workspace, "llama3"), variant)
    problems = caught.value.problems
    assert [problem.rule for problem in problems] == ["VAR-CONDITION", "VAR-CONDITION"]
    assert [problem.where for problem in problems] == ["option --when", "option --require"]
    assert "has no field 'nonsense'" in problems[0].found
    assert "kv_segment_size_buckets, lm_head_dp_size, max_logprobs" in problems[0].next_step
    assert contents(workspace) == before
    (workspace.root / "vllm_neuron/model/neuron_config.py").write_text("class NeuronConfig(")
    assert run(Port(workspace, "llama3"), variant).files


@pytest.mark.parametrize(
    ("variant", "found"),
    [
        (Variant("own", "model_own"), "nothing selects 'own'"),
        (
            Variant("mxfp4", "other", ("x",)),
            "there is a variant 'mxfp4' already, with quantization mxfp4; formats",
        ),
        (Variant("own", "model_mxfp4", ("x",)), "two variants have the module 'model_mxfp4'"),
        (Variant("class", "model_class", ("x",)), "'class' is no name of a variant"),
        (Variant("a" * 65, "model_a", ("x",)), "is no name of a variant"),
        (Variant("own", "model_own", ("mxfp4",)), "quantization 'mxfp4' would select both 'mxfp4' and 'own'"),
        (Variant("own", "model_own", default_on=("trn3",)), "default_on 'trn3' would select both"),
        (Variant("own", "model_own", platforms=("trn2",), default_on=("trn1",)), "default on trn1, where it"),
        (Variant("own'; x", "model_own", ("x",)), "is no name of a variant"),
        (Variant("own", "model_own", ("x",), platforms=("TRN2",)), "'TRN2' of variant 'own' is no platform"),
        (Variant("own", "model_own", default_on=("tnr3",)), "'tnr3' of variant 'own' is no platform"),
    ],
)
def test_declarations_that_contradict_each_other(variant: Variant, found: str) -> None:
    with pytest.raises(Refusal, match="VAR-DECLARATION") as caught:
        check_variants([BASE, MXFP4, variant], "options")
    assert any(found in problem.found for problem in caught.value.problems)


# --- The command's work -------------------------------------------------------------------------------------


def contents(workspace: Workspace) -> dict[str, str]:
    files = workspace.root.rglob("*.py")
    return {str(path.relative_to(workspace.root)): path.read_text() for path in files}


def test_a_variant_of_a_registered_model(workspace: Workspace) -> None:
    before = contents(workspace)
    added = run(Port(workspace, "gpt_oss"), declare("mxfp4", platforms=("trn3",), default_on=("trn3",)))
    after = contents(workspace)
    folder = "vllm_neuron/model/gpt_oss"
    assert added.files == [path for path in sorted(after) if before.get(path) != after[path]]
    assert added.files == [
        "test/vllm_neuron/model/gpt_oss/test_gpt_oss_mxfp4.py",
        f"{folder}/factory.py",
        f"{folder}/model_mxfp4.py",
        f"{folder}/quantized_weights.py",
    ]
    again = run(Port(workspace, "gpt_oss"), declare("mxfp4", platforms=("trn3",), default_on=("trn3",)))
    assert again.files == []
    assert contents(workspace) == after
    other = run(Port(workspace, "gpt_oss"), declare("trn2", default_on=("trn2",)))
    assert (
        "test/vllm_neuron/model/gpt_oss/test_gpt_oss_mxfp4.py" in other.files
    )  # trn2 had the fallback before
    test = workspace.root / "test/vllm_neuron/model/gpt_oss/test_gpt_oss_mxfp4.py"
    assert "nothing is asked for, on trn2" not in test.read_text()
    with pytest.raises(
        Refusal, match="there is a variant 'mxfp4' already, with platforms trn3; default_on trn3"
    ):
        run(Port(workspace, "gpt_oss"), declare("mxfp4"))


def test_nothing_is_written_when_something_is_wrong(workspace: Workspace) -> None:
    before = contents(workspace)
    with pytest.raises(Refusal, match="VAR-MODEL"):
        run(Port(workspace, "absent"), declare("fp8"))
    (workspace.model_dir("llama3") / "model_own.py").write_text("mine = 1\n")
    with pytest.raises(Refusal, match="PORT-FOREIGN"):
        run(Port(workspace, "llama3"), declare("own", default_on=("trn3",)))
    (workspace.model_dir("llama3") / "model_own.py").unlink()
    (workspace.model_dir("llama3") / "model_own.py").mkdir()
    for force in (False, True):
        with pytest.raises(Refusal, match=r"PORT-FOREIGN|WS-WRITE"):
            run(Port(workspace, "llama3"), declare("own", default_on=("trn3",)), force=force)
    (workspace.model_dir("llama3") / "model_own.py").rmdir()
    assert contents(workspace) == before


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ([("def load_weights", "def load")], ["no method load_weights of its own"]),
        ([("SafetensorsCheckpoint(", "open_checkpoint(")], ["does not read through SafetensorsCheckpoint"]),
        (
            [("SafetensorsCheckpoint(", "open_checkpoint("), ("return cls(", "return LlamaForCausalLM(")],
            ["does not read through SafetensorsCheckpoint", "does not make cls(...)"],
        ),
        ([("class LlamaForCausalLM(", "class Other(LlamaForCausalLM, ")], ["no method load", "not make cls"]),
        ([("import torch\n", "import torch (\n")], ["cannot be read"]),
    ],
)
def test_a_base_whose_loading_cannot_be_changed_is_told_what_to_add(
    workspace: Workspace, changes: list[tuple[str, str]], found: list[str]
) -> None:
    model = workspace.model_dir("llama3") / "model.py"
    text = model.read_text()
    for old, new in [("def weight_mappings", "def mappings"), *changes]:
        assert old in text
        text = text.replace(old, new)
    model.write_text(text)
    before = contents(workspace)
    with pytest.raises(Refusal, match="VAR-BASE") as caught:
        run(Port(workspace, "llama3"), declare("fp8"))
    assert contents(workspace) == before
    problems = caught.value.problems
    assert all(words in problem.found for words, problem in zip(found, problems, strict=True))
    if "cannot be read" not in found:
        assert "e.g. {'lm_head.weight': 'model.embed_tokens.weight'}" in problems[0].next_step


def _add(root: Path, name: str) -> None:
    port = Port(Workspace.find(root), "llama3")
    with port.lock():
        run(port, declare(name))


def test_processes_that_add_variants_at_the_same_time_lose_none(workspace: Workspace) -> None:
    context = multiprocessing.get_context("fork")
    names = ("fp8", "int8")
    processes = [context.Process(target=_add, args=(workspace.root, name)) for name in names]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert {variant.name for variant in read_variants(workspace, "llama3")} == {"bf16", *names}
    text = (workspace.model_dir("llama3") / "factory.py").read_text()
    assert all(f"from .model_{name} import" in text for name in names)


def test_a_factory_that_changes_meanwhile_is_not_overwritten(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, reads = contents(workspace), iter(["", "\n# a person\n"])
    read = add_variant_module.read_factory
    monkeypatch.setattr(add_variant_module, "read_factory", lambda port: read(port) + next(reads))
    with pytest.raises(Refusal, match="VAR-CHANGED"):
        run(Port(workspace, "llama3"), declare("fp8"))
    assert contents(workspace) == before


def test_an_edited_file_of_an_earlier_variant_is_kept_or_overwritten_as_asked(workspace: Workspace) -> None:
    port = Port(workspace, "llama3")
    run(port, declare("fp8"))
    shared = workspace.model_dir("llama3") / "quantized_weights.py"
    shared.write_text(shared.read_text() + "# mine\n")
    model = workspace.model_dir("llama3") / "model_fp8.py"
    model.write_text(model.read_text() + "# mine\n")
    assert not {"model_fp8.py", "quantized_weights.py"} & {
        Path(f).name for f in run(port, declare("int8")).files
    }
    run(port, declare("int8"), force=True)
    assert "# mine" not in shared.read_text()
    assert "# mine" in model.read_text()


def test_a_module_of_another_factory_of_the_file_is_not_taken(workspace: Workspace) -> None:
    port = Port(workspace, "llama3")
    run(port, declare("own", default_on=("trn3",)))
    factory = workspace.model_dir("llama3") / "factory.py"
    text = factory.read_text()
    second = text[text.index("class LlamaForCausalLM") :].replace("LlamaForCausalLM", "DraftForCausalLM")
    factory.write_text(f"{text}\n\n{second}")
    before = contents(workspace)
    with pytest.raises(
        Refusal, match="it is the implementation of LlamaForCausalLM, another factory of the file"
    ):
        run(port, declare("own", default_on=("trn3",)), "DraftForCausalLM")
    assert contents(workspace) == before

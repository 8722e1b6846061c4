"""The tests that `add-variant` writes, run on a generated factory: every path and every refusal."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import pytest
from autoport.codegen.add_variant import declare
from autoport.codegen.add_variant import tests as generated_tests
from autoport.codegen.generate import render_package
from autoport.files import write_atomic
from autoport.port_state import Port
from autoport.variants import BASE, Condition, Variant
from autoport.workspace import Workspace
from plans import YI, plan

NAME = "selected"
AT_LEAST_64 = Condition("hidden_size", ">=", 64)
VARIANTS = [
    declare("mxfp4", platforms=("trn3",), default_on=("trn3",)),
    declare("fp8", require=(AT_LEAST_64, Condition("neuron_config.max_logprobs", "!=", 0))),
    declare("fp8_block"),
    declare("int8", platforms=("trn2",), require=(Condition("model_type", "in", ["llama", "yi"]),)),
    Variant("throughput", "model_throughput", when=(Condition("sharding", "==", "throughput"),)),
    Variant(
        "long",
        "model_long",
        platforms=("trn2", "trn3"),
        when=(Condition("rope_parameters.rope_type", "not in", ["default", "linear"]),),
        require=(AT_LEAST_64,),
    ),
    Variant("trn2", "model_trn2", default_on=("trn2",), require=(AT_LEAST_64,)),
]


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Port]:
    """A port with the variants and the tests of each, importable below the simulator's package."""
    from vllm_neuron.simulator.overlay import overlay, remove_overlay

    root = tmp_path_factory.mktemp("workspace")
    port = Port(Workspace(root, "vllm_neuron"), NAME)
    folder = port.workspace.model_dir(NAME)
    folder.mkdir(parents=True)
    declared = [BASE, *VARIANTS]
    package = render_package(plan(YI, NAME, "Selected"), "vllm_neuron", declared)
    for file, text in package.items():
        (folder / file).write_text(text)
    for variant in VARIANTS:
        for file, text in generated_tests(port, variant, declared, YI.hf_name, package["factory.py"]).items():
            write_atomic(root / file, text.encode())
    overlay(root, "vllm_neuron")
    yield port
    remove_overlay()
    for name in [name for name in sys.modules if name.startswith(f"vllm_neuron.model.{NAME}")]:
        sys.modules.pop(name)


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cases(function: Any) -> list[tuple[Any, ...]]:
    [mark] = function.pytestmark
    return [case.values for case in mark.args[1]]


def run_all(port: Port, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run every generated test of the port; returns how many calls there were."""
    count = 0
    for path in sorted((port.workspace.root / port.workspace.variant_tests(NAME)).glob("test_*.py")):
        module = load(path)
        for name in ("test_selected", "test_refused"):
            function = getattr(module, name, None)
            for case in cases(function) if function else ():
                with monkeypatch.context() as patch:
                    function(patch, *case)
                count += 1
    return count


def lines_of(code: CodeType) -> set[int]:
    """Lines of a function and what is defined in it, without the one of the definition."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    own = {line for _, _, line in code.co_lines() if line}
    return own.union(*map(lines_of, inner)) - {code.co_firstlineno}


def test_the_generated_tests_are_green_and_run_every_line_of_the_selection(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_neuron.model.selected import factory

    cls = factory.LlamaForCausalLM
    functions = [cls._select_implementation.__func__, cls._variant_problems.__func__, factory.platform_target]
    expected = set[int]().union(*(lines_of(function.__code__) for function in functions))
    seen: set[int] = set()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != factory.__file__:
            return None
        seen.add(frame.f_lineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        count = run_all(port, monkeypatch)
    finally:
        sys.settrace(before)
    text = Path(factory.__file__).read_text().splitlines()
    assert [text[line - 1].strip() for line in sorted(expected - seen)] == []
    assert count > 60


def test_a_generated_test_is_red_for_a_branch_that_is_taken_out(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_neuron.model.selected import factory

    path = Path(factory.__file__)
    text = path.read_text()
    old = 'if getattr(hf_config, "sharding", None) == "throughput":'
    assert text.count(old) == 1
    try:
        path.write_text(text.replace(old, "if False:"))
        importlib.reload(factory)
        with pytest.raises(AssertionError):
            run_all(port, monkeypatch)
    finally:
        path.write_text(text)
        importlib.reload(factory)


def test_what_does_not_depend_on_the_platform_does_not_ask_for_it(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plugin's function raises where no device is known."""
    plain = render_package(plan(YI, NAME, "Selected"), "vllm_neuron", [BASE, declare("fp8")])["factory.py"]
    assert "platform_target" not in plain
    module = load(port.workspace.root / port.workspace.variant_tests(NAME) / f"test_{NAME}_mxfp4.py")
    with pytest.raises(
        module.factory.UnsupportedConfigError, match="NEURON_PLATFORM_TARGET_OVERRIDE"
    ) as caught:
        module.select(monkeypatch, None, {"quantization": "mxfp4"}, {})
    assert "the platform is not known, and the implementation depends on it: no platform target" in str(
        caught.value
    )
    assert module.select(monkeypatch, None, {"quantization": "fp8_block"}, {}) == "model_fp8_block"
    assert module.select(monkeypatch, None, None, {"sharding": "throughput"}) == "model_throughput"

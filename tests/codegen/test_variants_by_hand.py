"""Variants of factories that a person wrote: other layouts of the selection, other checks, several in a file."""

import difflib
import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from autoport.codegen.add_variant import declare, run
from autoport.codegen.factory_edit import Edited, add_variant
from autoport.codegen.render import render_python
from autoport.errors import Refusal
from autoport.port_state import Port
from autoport.variants import FORMATS, Condition, Variant
from autoport.workspace import Workspace

HEAD = '''"""A factory that a person wrote."""
from torch import nn
from libtorch_neuronx_lite.compile.platform import get_platform_target


'''
# Branches one after another, the fallback at the end; single quotes and no blank lines: not formatted by ruff.
GPT_OSS = (
    HEAD
    + """class UnsupportedConfigError(ValueError):
    pass

class GptOssForCausalLM(nn.Module):
    def __init__(self, hf_config, neuron_config):
        super().__init__()
        self._model = self._select_implementation(hf_config, neuron_config)

    @classmethod
    def from_configs(cls, hf_config, neuron_config):
        return cls._select_implementation(hf_config, neuron_config)

    @classmethod
    def _select_implementation(cls, hf_config, neuron_config):
        cls._validate_config(hf_config, neuron_config)
        platform = get_platform_target()
        quantization = getattr(neuron_config, 'quantization', None) if neuron_config else None
        # the user comes first
        if quantization == 'mxfp4':
            from .model_mxfp4 import GptOssForCausalLM as Model
            return Model.from_configs(hf_config, neuron_config)
        if quantization == 'bf16':
            from .model_bf16 import GptOssForCausalLM as Model
            return Model.from_configs(hf_config, neuron_config)

        # then the platform
        if platform.startswith('trn3'):
            from .model_mxfp4 import GptOssForCausalLM as Model
            return Model.from_configs(hf_config, neuron_config)

        # otherwise bf16
        from .model_bf16 import GptOssForCausalLM as Model
        return Model.from_configs(hf_config, neuron_config)

    @classmethod
    def _validate_config(cls, hf_config, neuron_config):
        platform = get_platform_target()
        quantization = getattr(neuron_config, 'quantization', None) if neuron_config else None
        valid = {'bf16', 'mxfp4', None}   # all of them
        if quantization not in valid:
            raise UnsupportedConfigError(f'{quantization} is none of {valid - {None}}')
        if quantization == 'mxfp4' and platform not in ('trn2', 'trn3'):
            raise UnsupportedConfigError(f'no mxfp4 on {platform}')
"""
)
# Two factories; the first selects in an if/elif/else of from_configs, the second has one implementation only.
LLAMA = '''from torch import nn


class LlamaForCausalLM(nn.Module):
    KNOWN = (None, "bf16")

    @classmethod
    def from_configs(cls, hf_config, neuron_config=None):
        """Create the model."""
        cls._validate_config(hf_config, neuron_config)
        if neuron_config and neuron_config.quantization == "bf16":
            from .model import LlamaForCausalLM as Model
        elif getattr(hf_config, "rope_kind", None) == "llama3":
            from .model_long import LlamaForCausalLM as Model
        else:
            from .model import LlamaForCausalLM as Model
        return Model.from_configs(hf_config, neuron_config)

    @classmethod
    def _validate_config(cls, hf_config, neuron_config):
        if getattr(neuron_config, "quantization", None) not in cls.KNOWN:
            raise ValueError("unknown quantization")


class Eagle3LlamaForCausalLM(nn.Module):
    @classmethod
    def from_configs(cls, config, start_layer_idx, neuron_config=None):
        cls._validate_config(config)
        from vllm_neuron.model.llama3.eagle3_model import Eagle3LlamaForCausalLM as Model

        return Model.from_configs(config, start_layer_idx, neuron_config)

    @classmethod
    def _validate_config(cls, config):
        pass
'''
# The implementation is imported at the top, and a rule of the model's own has an if within an if.
QWEN3 = (
    HEAD
    + """from .model import Qwen3ForCausalLM as Dense


class Qwen3ForCausalLM(nn.Module):
    @classmethod
    def from_configs(cls, hf_config, neuron_config=None):
        asked = neuron_config.quantization if neuron_config is not None else None
        if asked not in (None, "bf16"):
            raise ValueError(f"{asked}: only bf16 (None or 'bf16') is there")
        if hf_config.runner == "pooling":
            if hf_config.native:
                from .model_embedding import Qwen3ForEmbedding as Model

                return Model.from_configs(hf_config, neuron_config)
        return Dense.from_configs(hf_config, neuron_config)
"""
)
OWN = Variant(
    "own", "model_own", ("int4",), platforms=("trn2", "trn3"), when=(Condition("sharding", "==", "own"),)
)
TRN2 = Variant("trn2", "model_trn2", default_on=("trn2",))
INT8 = declare("int8")
STORED_AS_INT8 = next(iter(FORMATS["int8"].values()))

Factory = Callable[..., str]


@functools.cache
def edited(source: str, architecture: str, *variants: Variant) -> Edited:
    notes = []
    for variant in variants:
        result = add_variant(source, architecture, variant, "factory.py")
        source, notes = result.text, [*notes, *result.notes]
    return Edited(source, notes)


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Factory]:
    """Imports a factory in a package whose implementations tell their module's name."""

    class Finder:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
            if name.startswith(("written.model", "written.eagle3_model", "vllm_neuron.model.llama3.")):
                return importlib.util.spec_from_loader(name, Loader())
            return None

    class Loader:
        def create_module(self, spec: Any) -> ModuleType:
            last = spec.name.rpartition(".")[2]
            module = ModuleType(spec.name)
            implementation = SimpleNamespace(from_configs=lambda *arguments: last)
            module.__getattr__ = lambda name: implementation if name[0].isupper() else None  # type: ignore[method-assign]
            return module

        def exec_module(self, module: ModuleType) -> None:
            pass

    target = SimpleNamespace(platform="trn1")
    platform = ModuleType("libtorch_neuronx_lite.compile.platform")
    platform.get_platform_target = lambda: target.platform  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "libtorch_neuronx_lite.compile.platform", platform)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    (tmp_path / "written").mkdir()
    (tmp_path / "written" / "__init__.py").write_text("")
    (tmp_path / "written" / "config.py").write_text(render_python("variant/checkpoint_format.py.j2"))

    def import_factory(text: str, architecture: str) -> Factory:
        (tmp_path / "written" / "factory.py").write_text(text)
        for name in [name for name in sys.modules if name.partition(".")[0] == "written"]:
            monkeypatch.delitem(sys.modules, name)
        importlib.invalidate_caches()
        cls = getattr(importlib.import_module("written.factory"), architecture)

        def select(on: str = "trn1", asked: str | None = None, *more: object, **hf_config: object) -> str:
            target.platform = on
            settings = SimpleNamespace(quantization=asked)
            return str(cls.from_configs(SimpleNamespace(**hf_config), *more, settings))

        return select

    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    yield import_factory
    sys.dont_write_bytecode = before
    for name in [name for name in sys.modules if name.startswith(("written", "vllm_neuron.model.llama3."))]:
        sys.modules.pop(name)


def changed(before: str, after: str, sign: str) -> list[str]:
    lines = difflib.ndiff(before.splitlines(), after.splitlines())
    return [line[2:].strip() for line in lines if line[0] == sign and line[2:].strip()]


def test_branches_one_after_another(load: Callable[[str, str], Factory]) -> None:
    result = edited(GPT_OSS, "GptOssForCausalLM", INT8, OWN, TRN2)
    select = load(result.text, "GptOssForCausalLM")
    assert select("trn3", "mxfp4") == "model_mxfp4"
    for on in ("trn1", "trn2", "trn3"):
        assert select(on, "int8", sharding="own") == "model_int8"
        assert select(on, "bf16", sharding="own") == "model_bf16"
    assert select("trn2", "int4") == "model_own"
    assert select("trn3", sharding="own", quantization_config=STORED_AS_INT8) == "model_int8"
    assert select("trn3", "bf16", quantization_config=STORED_AS_INT8) == "model_bf16"
    assert [select(on, sharding="own") for on in ("trn1", "trn2", "trn3")] == [
        "model_bf16",
        "model_own",
        "model_own",
    ]
    assert [select(on) for on in ("trn1", "trn2", "trn3")] == ["model_bf16", "model_trn2", "model_mxfp4"]
    with pytest.raises(ValueError, match="fp8 is none of"):
        select(asked="fp8")
    with pytest.raises(ValueError, match="no mxfp4 on trn1"):
        select(asked="mxfp4")
    assert changed(GPT_OSS, result.text, "-") == ["valid = {'bf16', 'mxfp4', None}   # all of them"]
    assert "valid = {'bf16', 'mxfp4', None, 'int8', 'int4'}   # all of them" in changed(
        GPT_OSS, result.text, "+"
    )


def test_an_if_with_else(load: Callable[[str, str], Factory]) -> None:
    result = edited(LLAMA, "LlamaForCausalLM", INT8, OWN, TRN2)
    select = load(result.text, "LlamaForCausalLM")
    assert [select(asked=key, sharding="own") for key in ("bf16", "int8", "int4")] == [
        "model",
        "model_int8",
        "model_own",
    ]
    assert [select(on, sharding="own") for on in ("trn1", "trn2")] == ["model", "model_own"]
    assert select("trn2", rope_kind="llama3", sharding="own") == "model_long"
    assert select("trn2", rope_kind="llama3", quantization_config=STORED_AS_INT8) == "model_int8"
    assert [select(on) for on in ("trn1", "trn2", "trn3")] == ["model", "model_trn2", "model"]
    with pytest.raises(ValueError, match="unknown quantization"):
        select(asked="fp8")
    assert changed(LLAMA, result.text, "-") == ['KNOWN = (None, "bf16")']
    assert 'KNOWN = (None, "bf16", "int8", "int4")' in changed(LLAMA, result.text, "+")
    assert "elif get_platform_target() == 'trn2':" in changed(LLAMA, result.text, "+") or (
        'elif get_platform_target() == "trn2":' in changed(LLAMA, result.text, "+")
    )


def test_the_second_factory_of_a_file(load: Callable[[str, str], Factory]) -> None:
    result = edited(LLAMA, "Eagle3LlamaForCausalLM", INT8, OWN, TRN2)
    select = load(result.text, "Eagle3LlamaForCausalLM")
    assert [select("trn3", key, 0) for key in ("bf16", "int8", "int4")] == [
        "eagle3_model",
        "model_int8",
        "model_own",
    ]
    assert select("trn3", None, 0, sharding="own") == "model_own"
    assert select("trn2", None, 0, sharding="own", quantization_config=STORED_AS_INT8) == "model_int8"
    assert [select(on, None, 0) for on in ("trn2", "trn3")] == ["model_trn2", "eagle3_model"]
    assert changed(LLAMA, result.text, "-") == []
    assert load(result.text, "LlamaForCausalLM")("trn2") == "model"
    with pytest.raises(ValueError, match="unknown quantization"):
        load(result.text, "LlamaForCausalLM")(asked="int8")


def test_an_implementation_that_is_imported_at_the_top(load: Callable[[str, str], Factory]) -> None:
    result = edited(QWEN3, "Qwen3ForCausalLM", INT8, OWN, TRN2)
    select = load(result.text, "Qwen3ForCausalLM")
    plain: dict[str, Any] = {"runner": "generate", "native": True}
    assert select("trn3", None, **plain) == "model"
    assert [select(asked=key, **plain) for key in ("bf16", "int8", "int4")] == [
        "model",
        "model_int8",
        "model_own",
    ]
    assert select("trn2", runner="pooling", native=True, sharding="own") == "model_embedding"
    assert select("trn2", runner="pooling", native=False, sharding="own") == "model_own"
    assert select("trn2", **plain) == "model_trn2"
    assert select("trn2", **plain, quantization_config=STORED_AS_INT8) == "model_int8"
    with pytest.raises(ValueError, match="fp8: only bf16"):
        select(asked="fp8", **plain)
    assert changed(QWEN3, result.text, "-") == ['if asked not in (None, "bf16"):']


@pytest.mark.parametrize(
    ("source", "architecture"),
    [(GPT_OSS, "GptOssForCausalLM"), (LLAMA, "LlamaForCausalLM"), (QWEN3, "Qwen3ForCausalLM")],
)
def test_an_edit_is_idempotent(source: str, architecture: str) -> None:
    once = edited(source, architecture, INT8, OWN, TRN2).text
    assert edited(once, architecture, INT8, OWN, TRN2).text == once
    windows = source.replace("\n", "\r\n")
    assert edited(windows, architecture, INT8, OWN, TRN2).text == once.replace("\n", "\r\n")


def test_what_is_left_to_do_is_said() -> None:
    notes = edited(GPT_OSS, "GptOssForCausalLM", INT8, OWN).notes
    lines = edited(GPT_OSS, "GptOssForCausalLM", INT8, OWN).text.splitlines()
    assert notes[0].endswith("int8 is accepted; see that the message names it: if quantization not in valid")
    [where] = [note for note in notes if "nothing checks where own runs" in note]
    assert "get_platform_target() not in ('trn2', 'trn3')" in where
    assert "def _validate_config" in lines[int(where.split(":")[1]) - 1]
    strict = declare("fp8_block", platforms=("trn3",), require=(Condition("hidden_size", ">=", 64),))
    [_, where, required] = edited(LLAMA, "LlamaForCausalLM", strict).notes
    both = "(quantization in ('fp8_block',) or checkpoint_format(hf_config) in ('fp8 in blocks',))"
    assert where.endswith(f"raise when {both} and get_platform_target() not in ('trn3',)")
    assert f"raise when {both} and not (getattr(hf_config, 'hidden_size', None) is not None" in required
    silent = LLAMA.replace("not in cls.KNOWN", '!= "bf16"')
    [left] = [
        note for note in edited(silent, "LlamaForCausalLM", TRN2, INT8).notes if "left as it is" in note
    ]
    assert left.endswith(
        "see that it lets int8 pass: if getattr(neuron_config, 'quantization', None) != 'bf16'"
    )
    checked = LLAMA.replace(
        "        if getattr", "        QuantSpec.read(hf_config.quantization_config)\n        if getattr", 1
    )
    [_, left] = edited(checked, "LlamaForCausalLM", INT8).notes
    assert left.endswith("lets a checkpoint of int8 pass: QuantSpec.read(hf_config.quantization_config)")


@pytest.mark.parametrize(
    ("variant", "found"),
    [
        (Variant("mx", "model_mx", ("mxfp4",)), "selects model_mxfp4 already: if quantization == 'mxfp4'"),
        (Variant("own", "model_own", default_on=("trn3",)), "already: if platform.startswith('trn3')"),
    ],
)
def test_what_a_person_wrote_is_not_overruled(variant: Variant, found: str) -> None:
    with pytest.raises(Refusal, match="VAR-DECLARATION") as caught:
        edited(GPT_OSS, "GptOssForCausalLM", variant)
    assert found in caught.value.problems[0].found


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("        return Dense.from", "        return {None: Dense}[asked].from"),
        ("Dense.from_configs(hf_config, neuron_config)", "build(hf_config)"),
        ("hf_config, neuron_config=None", "*configs"),
    ],
)
def test_what_is_not_understood(old: str, new: str) -> None:
    with pytest.raises(Refusal, match="VAR-LAYOUT"):
        edited(QWEN3.replace(old, new), "Qwen3ForCausalLM", TRN2)


def test_the_command_on_a_factory_that_a_person_wrote(tmp_path: Path) -> None:
    workspace = Workspace.create(tmp_path / "workspace")
    port, path = Port(workspace, "llama3"), workspace.model_dir("llama3") / "factory.py"
    path.write_text(LLAMA)
    with pytest.raises(Refusal, match="factories LlamaForCausalLM, Eagle3LlamaForCausalLM"):
        run(port, TRN2)
    assert path.read_text() == LLAMA
    with pytest.raises(Refusal, match="none named OtherForCausalLM"):
        run(port, TRN2, "OtherForCausalLM")
    added = run(port, INT8, "LlamaForCausalLM")
    assert path.read_text() == edited(LLAMA, "LlamaForCausalLM", INT8).text
    assert len(added.notes) == 1
    tests = (tmp_path / "workspace" / "test/vllm_neuron/model/llama3/test_llama3_int8.py").read_text()
    assert "def test_selected" in tests
    assert "UnsupportedConfigError" not in tests
    assert "the checkpoint is compressed-tensors int-quantized int8, on trn3" in tests
    compile(tests, "test_llama3_int8.py", "exec")


def test_a_model_without_checkpoint_format_gets_it(tmp_path: Path) -> None:
    workspace = Workspace.create(tmp_path / "workspace")
    folder = workspace.model_dir("llama3")
    (folder / "factory.py").write_text(LLAMA)
    config = folder / "config.py"
    config.write_text(config.read_text().replace("def checkpoint_format", "def format_of"))
    added = run(Port(workspace, "llama3"), INT8, "LlamaForCausalLM")
    own = "vllm_neuron/model/llama3/checkpoint_format.py"
    assert own in added.files
    assert "def checkpoint_format(" in (workspace.root / own).read_text()
    assert "from .checkpoint_format import checkpoint_format\n" in (folder / "factory.py").read_text()
    assert run(Port(workspace, "llama3"), INT8, "LlamaForCausalLM").files == []

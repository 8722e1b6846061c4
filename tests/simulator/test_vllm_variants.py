"""Variants of registered and new models under the real vLLM engine: quantised checkpoints give the tokens of the
Hugging Face class with the same values, chosen by the checkpoint, the user or a rule."""

import importlib
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
from autoport.codegen.add_variant import declare
from autoport.codegen.add_variant import run as add_variant
from autoport.port_state import Port
from autoport.validation import reference
from autoport.validation.quantize import quantize
from autoport.variants import parse_condition
from autoport.workspace import Workspace
from checkpoints import real_config
from engines import generate, prompts, tokens

CONFIGS = {
    "llama3": real_config("llama-3.2-1b"),
    "gpt_oss": "gpt_oss",
    "qwen2": real_config("qwen2-7b") | engines.QWEN2,
}
FORMATS = {"llama3": "fp8", "gpt_oss": "mxfp4", "qwen2": "int8"}
STEPS = 6
TEXTS = prompts([3, 33, 100], vocab_size=128)


@pytest.fixture(scope="module")
def ports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("variants")
    made = engines.Ports(folder, CONFIGS)
    for name, form in FORMATS.items():
        add_variant(Port(Workspace.find(made.workspace), name), declare(form))
        assert quantize(made.checkpoints[name], form, folder / form, folder / f"{form}-plain")
    rule = (parse_condition("sharding == throughput"),)
    add_variant(Port(Workspace.find(made.workspace), "llama3"), declare("throughput", when=rule))
    with engines.simulated(made.workspace):
        yield folder


def selected(llm: Any) -> str:
    [module] = llm.collective_rpc(lambda worker: type(worker.get_model()).__module__)
    return module.rpartition(".model.")[2]


def serve(checkpoint: Path, quantization: str | None = None, **options: Any) -> tuple[str, list[list[int]]]:
    """The implementation that the factory selected, and greedy tokens."""
    with engines.engine(checkpoint, {"quantization": quantization}, **options) as llm:
        return selected(llm), tokens(generate(llm, TEXTS, STEPS))


def test_the_user_asks_for_a_variant(ports: Path) -> None:
    name, form = "llama3", "fp8"
    plain = reference.load(ports / f"{form}-plain", torch.float32)
    expected = [reference.greedy(plain, text, STEPS) for text in TEXTS]
    # vLLM's own check of quantization_config knows no float32; without one, the factory goes by the user's word.
    unnamed = {"quantization_config": {}}
    assert serve(ports / form, form, hf_overrides=unnamed) == (f"{name}.model_{form}", expected)


@pytest.mark.parametrize("name", FORMATS)
def test_the_checkpoint_decides(ports: Path, name: str) -> None:
    form = FORMATS[name]
    options = {"dtype": "bfloat16", "hf_overrides": {"dtype": "bfloat16"}}
    module, found = serve(ports / form, **options)
    assert module == f"{name}.model_{form}"
    assert serve(ports / f"{form}-plain", **options) == (f"{name}.model", found)


def test_a_rule_decides(ports: Path) -> None:
    module, found = serve(ports / "fp8-plain", hf_overrides={"sharding": "throughput"})
    assert module == "llama3.model_throughput"
    assert serve(ports / "fp8-plain") == ("llama3.model", found)


def test_what_no_implementation_does_is_said_by_the_engine(ports: Path) -> None:
    with pytest.raises(Exception, match=r"quantization 'mxfp4' \(possible: 'bf16', 'fp8'\)"):
        serve(ports / "fp8-plain", "mxfp4")


def test_rows_of_the_registry_are_taken_by_vllm(ports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the plugin's worker registers them: classes; and by name, which vLLM inspects in a process of its own."""
    from vllm import ModelRegistry

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(ports / "vllm_cache"))  # it keeps the answers
    ported = importlib.import_module("vllm_neuron.model.qwen2").Qwen2ForCausalLM
    rows = dict(importlib.import_module("vllm_neuron.model.registry").get_models())
    assert {"LlamaForCausalLM", "GptOssForCausalLM"} <= rows.keys()
    by_name = f"{ported.__module__}:{ported.__name__}"
    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    registered = [(name, factory, factory) for name, factory in rows.items()]
    for architecture, factory, given in [*registered, ("Qwen2ForCausalLM", ported, by_name)]:
        ModelRegistry.register_model(architecture, given)
        row = ModelRegistry.models[architecture]
        found = row.inspect_model_cls()
        assert (found.architecture, found.is_text_generation_model) == (architecture, True)
        assert row.load_model_cls() is factory

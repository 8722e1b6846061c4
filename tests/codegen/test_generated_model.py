"""Generated packages on the simulator, in one rank: what the runner relies on, and what must fail loudly.

That the numbers are right is for the proof's tests.
"""

import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from autoport.analysis.weight_map import expand
from autoport.codegen.add_variant import declare
from autoport.codegen.add_variant import run as add_variant
from autoport.codegen.generate import render_package
from autoport.codegen.support import parameters
from autoport.port_state import Port
from autoport.schema.architecture import Architecture
from autoport.variants import FORMATS
from autoport.workspace import Workspace
from plans import LLAMA3, QWEN2, YI, plan
from safetensors.torch import save_file

CHECKED = msgspec.structs.replace(LLAMA3, checks={"hidden_size // num_attention_heads": 64})
PORTS = {"llama_tiny": (CHECKED, "Tiny"), "yi": (YI, "Yi"), "qwen2": (QWEN2, "Qwen2")}


@pytest.fixture(scope="module", autouse=True)
def rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This process as the only rank, with a workspace that has the ports."""
    from vllm_neuron.simulator.activate import activate, deactivate
    from vllm_neuron.simulator.overlay import overlay, remove_overlay

    root = tmp_path_factory.mktemp("workspace")
    for name, (architecture, prefix) in PORTS.items():
        folder = root / "vllm_neuron" / "model" / name
        folder.mkdir(parents=True)
        for file, text in render_package(plan(architecture, name, prefix), "vllm_neuron").items():
            (folder / file).write_text(text)
    port = Port(Workspace(root, "vllm_neuron"), "qwen2")
    for variant in (declare("fp8"), declare("own", default_on=("trn3",))):
        add_variant(port, variant)
    activate(1, 0, root / "init")
    overlay(root, "vllm_neuron")
    yield
    remove_overlay()
    deactivate()


def package(name: str, module: str = "") -> ModuleType:
    return importlib.import_module(f"vllm_neuron.model.{name}" + (f".{module}" if module else ""))


def hf_config(architecture: Architecture = YI, **changes: Any) -> SimpleNamespace:
    """A tiny config with `architecture`'s traits, as the Hugging Face class would have it."""
    fields = {
        "vocab_size": 256,
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": architecture.rope.kind,
            "rope_theta": architecture.rope.theta,
            **architecture.rope.parameters,
        },
        "tie_word_embeddings": architecture.head.tied,
        "dtype": torch.float32,
    }
    return SimpleNamespace(**(fields | changes))


def on_meta(name: str = "yi", neuron_config: Any = None, **changes: Any) -> Any:
    """The port's implementation on the meta device, as the runner creates it."""
    architecture, _ = PORTS[name]
    factory = getattr(package(name), architecture.hf_name)
    with torch.device("meta"):
        return factory.from_configs(hf_config(architecture, **changes), neuron_config)


# --- Construction and config --------------------------------------------------------------------------


@pytest.mark.parametrize("name", PORTS)
def test_parameters_are_the_ones_that_the_weight_map_is_checked_for(name: str) -> None:
    model = on_meta(name)
    expected = {
        parameter.replace("{i}", str(i)) for parameter in parameters(PORTS[name][0]) for i in range(2)
    }
    assert {parameter for parameter, _ in model.named_parameters()} == expected
    assert model.weight_mappings().keys() == expected
    assert all(parameter.is_meta for parameter in model.parameters())
    assert list(model.buffers()) == []


def test_the_implementation_is_imported_only_when_it_is_selected() -> None:
    for module in [module for module in sys.modules if module.startswith("vllm_neuron.model.yi")]:
        del sys.modules[module]
    package("yi")
    assert "vllm_neuron.model.yi.model" not in sys.modules
    assert type(on_meta("yi")).__module__ == "vllm_neuron.model.yi.model"


@pytest.mark.parametrize(
    ("platform", "quantization", "modules"),
    [
        ("trn2", None, {"model"}),
        ("trn2", "fp8", {"model_fp8", "model", "quantized_weights"}),  # a subclass of the one in model.py
        ("trn3", None, {"model_own", "model"}),
        ("trn3", "bf16", {"model"}),
    ],
)
def test_no_implementation_is_imported_but_the_selected_one(
    monkeypatch: pytest.MonkeyPatch, platform: str, quantization: str | None, modules: set[str]
) -> None:
    from vllm_neuron.model.neuron_config import NeuronConfig

    path = "vllm_neuron.model.qwen2"
    for module in [module for module in sys.modules if module.startswith(path)]:
        del sys.modules[module]
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", platform)
    selected = on_meta("qwen2", NeuronConfig(quantization=quantization))
    loaded = {module.rpartition(".")[2] for module in sys.modules if module.startswith(f"{path}.")}
    assert loaded - {"factory", "config", "weight_loaders"} == modules
    assert type(selected).__module__.rpartition(".")[2] in modules


def test_config_reads_what_is_there() -> None:
    read = package("yi", "config").YiConfig.from_configs
    assert read(hf_config()).head_dim == 64
    assert read(hf_config(head_dim=None)).head_dim == 64
    assert read(hf_config(head_dim=32)).head_dim == 32
    assert read(hf_config(dtype="bfloat16")).torch_dtype == torch.bfloat16
    old = hf_config()
    old.torch_dtype = "torch.float16"
    del old.dtype
    assert read(old).torch_dtype == torch.float16


@pytest.mark.parametrize("field", ["rms_norm_eps", "rope_parameters", "num_key_value_heads", "vocab_size"])
def test_config_has_no_defaults(field: str) -> None:
    config = hf_config()
    delattr(config, field)
    with pytest.raises(AttributeError, match=field):
        package("yi", "config").YiConfig.from_configs(config)


@pytest.mark.parametrize("dtype", [None, "nn", "int99"])
def test_a_dtype_that_is_none_is_refused(dtype: Any) -> None:
    with pytest.raises(package("yi").UnsupportedConfigError, match="dtype"):
        package("yi", "config").YiConfig.from_configs(hf_config(dtype=dtype))


# --- Factory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "changes"),
    [
        ("quantization_config", {"quantization_config": {"quant_method": "fp8"}}),
        ("hidden_act", {"hidden_act": "gelu"}),
        ("rope_type", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}),
        ("sliding_window", {"sliding_window": 4096}),
        ("layer_types", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("attention_bias", {"attention_bias": True}),
        ("mlp_bias", {"mlp_bias": True}),
        ("tie_word_embeddings", {"tie_word_embeddings": True}),
    ],
)
def test_the_factory_refuses_what_is_not_implemented(setting: str, changes: dict[str, Any]) -> None:
    with pytest.raises(package("yi").UnsupportedConfigError, match=rf"{setting} .*possible: ") as caught:
        on_meta("yi", **changes)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("quantization", "mxfp4"),
        *((f"{part}_dp_size", 2) for part in ("attention", "embedding", "lm_head", "mlp")),
        ("ep_degree", 2),
    ],
)
def test_the_factory_refuses_runtime_settings(setting: str, value: Any) -> None:
    from vllm_neuron.model.neuron_config import NeuronConfig

    with pytest.raises(package("yi").UnsupportedConfigError, match=setting):
        on_meta("yi", NeuronConfig(**{setting: value}))


def test_a_reading_other_than_the_one_that_was_ported_is_refused() -> None:
    with pytest.raises(
        package("llama_tiny").UnsupportedConfigError, match=r"hidden_size // .* 128 \(possible: 64"
    ):
        on_meta("llama_tiny", hidden_size=512)


def test_the_factory_lists_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package("yi", "factory"), "get_tp_group", lambda: SimpleNamespace(world_size=3))
    with pytest.raises(package("yi").UnsupportedConfigError) as caught:
        on_meta("yi", hidden_act="relu", mlp_bias=True)
    for reason in ("hidden_act", "mlp_bias", "num_attention_heads 4", "vocab_size 256", "2 KV heads"):
        assert reason in str(caught.value)


def test_what_the_model_has_is_accepted() -> None:
    from vllm_neuron.model.neuron_config import NeuronConfig

    on_meta("yi", NeuronConfig(quantization="bf16"), hidden_act="swish", layer_types=["full_attention"] * 2)
    on_meta("llama_tiny", sliding_window=None, quantization_config=None)


# --- Weights ------------------------------------------------------------------------------------------


def saved(folder: Path, *unknown: str, without: Sequence[str] = ()) -> str:
    """A checkpoint for qwen2 with unknown keys and without some of its own."""
    replace = msgspec.structs.replace
    attention = replace(QWEN2.attention, num_heads=4, num_kv_heads=2, head_dim=64)
    mlp = replace(QWEN2.mlp, intermediate_size=256)
    sizes = {"vocab_size": 256, "hidden_size": 256, "num_layers": 2}
    weights = plan(replace(QWEN2, attention=attention, mlp=mlp, **sizes), "qwen2", "Qwen2").weights
    shapes = {key: shape for _, keys in expand(weights, 2) for key, shape in keys}
    shapes |= {key: (1,) for key in unknown}
    tensors = {key: torch.zeros(shape) for key, shape in shapes.items() if key not in without}
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def test_all_missing_weights_and_unknown_keys_are_named_at_once(tmp_path: Path) -> None:
    q_norm, norm = "model.layers.0.self_attn.q_norm.weight", "model.norm.weight"
    source = saved(tmp_path, q_norm, "mtp.fc.weight", without=(norm, "model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(RuntimeError) as raised:
        on_meta("qwen2").load_weights(source, torch.device("cpu"))
    missing = ["model.layers.1.mlp.up_proj_weight", norm]
    assert f"no parameter for {[q_norm, 'mtp.fc.weight']}" in str(raised.value)
    assert all(f"'{name}'" in str(raised.value).partition("no parameter")[0] for name in missing)


def test_keys_that_no_parameter_needs_do_not_stop_the_load(tmp_path: Path) -> None:
    source = saved(tmp_path, "model.layers.0.self_attn.rotary_emb.inv_freq")
    model = on_meta("qwen2")
    model.load_weights(source, torch.device("cpu"))
    assert not any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(
    ("rank", "q", "kv"), [(0, [0, 1], 100), (1, [2, 3], 100), (2, [4, 5], 101), (3, [6, 7], 101)]
)
def test_biases_follow_their_heads(rank: int, q: list[int], kv: int) -> None:
    loader = package("qwen2", "model").fused_qkv_bias_loader(2, 1, num_shards=4, num_kv_replicas=2)
    bias = loader.load([torch.arange(8), torch.arange(100, 102), torch.arange(200, 202)], rank)
    assert bias.tolist() == [*q, kv, kv + 100]


# --- KV cache and forward -----------------------------------------------------------------------------


def test_kv_spec_and_binding() -> None:
    model = on_meta("yi")
    spec = model.get_kv_spec()
    assert [(layer.name, layer.num_kv_heads, layer.head_size) for layer in spec.layers] == [
        ("layers.0.self_attn", 2, 64),
        ("layers.1.self_attn", 2, 64),
    ]
    caches = {layer.name: [torch.zeros(4, 2, 32, 64), torch.ones(4, 2, 32, 64)] for layer in spec.layers}
    model.bind_kv_cache(caches)
    assert model.model.layers[1].self_attn.v_cache is caches["layers.1.self_attn"][1]
    with pytest.raises(KeyError, match=r"layers\.1\.self_attn"):
        model.bind_kv_cache({"layers.0.self_attn": caches["layers.0.self_attn"]})
    with pytest.raises(ValueError, match="bfloat16"):
        model.bind_kv_cache({name: [cache.bfloat16() for cache in pair] for name, pair in caches.items()})


def step(is_prefill: bool, tokens: int, bucket: int) -> dict[str, Any]:
    """Keyword arguments of a forward over fresh sequences: one prompt, or `tokens` decode requests."""
    from vllm_neuron.simulator.metadata import KVGroup, Row, Step, build_attn_metadata, build_tokens

    shape = Step(is_prefill, bucket, block_size=32, max_model_len=128)
    if is_prefill:
        rows = [Row(list(range(tokens)), 0, [[1, 2]])]
    else:
        rows = [Row([7], 40 + i, [[1 + 2 * i, 2 + 2 * i]]) for i in range(tokens)]
    ids, positions, sampling = build_tokens(rows, shape)
    groups = [KVGroup(("layers.0.self_attn", "layers.1.self_attn"))]
    return {
        "input_ids": ids,
        "positions": positions,
        "attn_metadata": build_attn_metadata(rows, groups, shape),
        "sampling_positions": sampling,
        "rank": torch.tensor(0, dtype=torch.int32),
    }


def ready(name: str, neuron_config: Any = None) -> Any:
    """A port with random weights and an empty cache."""
    model = on_meta(name, neuron_config).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1, generator=generator)
    layers = model.get_kv_spec().layers
    model.bind_kv_cache({layer.name: [torch.zeros(8, 2, 32, 64) for _ in range(2)] for layer in layers})
    return model


def test_what_forward_returns() -> None:
    from vllm_neuron.model.neuron_config import NeuronConfig, OnDeviceSamplingConfig

    greedy = OnDeviceSamplingConfig(all_greedy=True)
    prefill = step(is_prefill=True, tokens=40, bucket=64)
    logits = ready("yi", NeuronConfig(on_device_sampling_config=None))(**prefill)
    assert logits.shape == (1, 256)
    sampled, gathered = ready("yi", NeuronConfig(on_device_sampling_config=greedy))(**prefill)
    assert gathered is None
    assert sampled.tolist() == logits.argmax(-1).tolist()
    _, gathered = ready("yi", NeuronConfig(on_device_sampling_config=greedy, max_logprobs=-1))(**prefill)
    assert torch.equal(gathered, logits)


def test_forward_refuses_what_it_cannot_do() -> None:
    model = ready("yi")
    prefill = step(is_prefill=True, tokens=40, bucket=64)
    with pytest.raises(NotImplementedError, match="prompt embeddings"):
        model(**prefill, inputs_embeds=torch.zeros(64, 256))
    model.model.tp_group = SimpleNamespace(world_size=3)
    with pytest.raises(ValueError, match=r"Prompt Length \(64\)"):
        model(**prefill)


@pytest.mark.parametrize("name", PORTS)
def test_forward_is_one_graph(name: str) -> None:
    model = ready(name)
    steps = [step(is_prefill=True, tokens=40, bucket=64), step(is_prefill=False, tokens=2, bucket=4)]
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for arguments in steps:
        torch.testing.assert_close(compiled(**arguments), model(**arguments))


def test_rope_is_transformers_rope() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = hf_config(LLAMA3)
    reference = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        rope_parameters=config.rope_parameters,
        max_position_embeddings=131072,
    )
    expected, factor = ROPE_INIT_FUNCTIONS["llama3"](reference, torch.device("cpu"))
    rotary = on_meta("llama_tiny").model.rotary_emb
    torch.testing.assert_close(rotary.inv_freq(torch.device("cpu")), expected, rtol=1e-6, atol=0)
    assert factor == 1.0
    plain = on_meta("yi", rope_parameters=msgspec.to_builtins({"rope_type": "default", "rope_theta": 5e5}))
    unscaled = plain.model.rotary_emb.inv_freq(torch.device("cpu"))
    assert (unscaled[-1] / expected[-1]).item() == pytest.approx(32, rel=1e-5)


# --- vLLM ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PORTS)
def test_vllm_takes_the_factory_for_a_text_generator(name: str) -> None:
    from vllm.model_executor.models.registry import _ModelInfo

    factory = getattr(package(name, "factory"), PORTS[name][0].hf_name)
    found = _ModelInfo.from_model_cls(factory)
    assert found.architecture == PORTS[name][0].hf_name
    assert found.is_text_generation_model
    assert not any((found.is_pooling_model, found.supports_pp, found.is_hybrid, found.supports_multimodal))


def test_the_factory_stores_the_implementation_and_delegates_to_it() -> None:
    factory = package("yi", "factory").LlamaForCausalLM
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=hf_config()),
        additional_config={"neuron_config": {"on_device_sampling_config": None}},
    )
    with torch.device("meta"):
        model = factory(vllm_config=vllm_config)
    assert type(model._model).__module__ == "vllm_neuron.model.yi.model"
    assert model._model.sampler is None
    model._model.forward = lambda *args, **kwargs: (args, kwargs)
    assert model(1, positions=2) == ((1,), {"positions": 2})


def test_an_odd_number_of_heads_on_a_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package("yi", "factory"), "get_tp_group", lambda: SimpleNamespace(world_size=4))
    with pytest.raises(
        package("yi").UnsupportedConfigError, match="an even number of the 4 heads on each rank"
    ):
        on_meta("yi")


@pytest.mark.parametrize("variant", FORMATS)
def test_a_config_is_named_by_its_checkpoint_format(variant: str) -> None:
    for name, declared in FORMATS[variant].items():
        assert package("yi", "config").checkpoint_format(hf_config(quantization_config=declared)) == name


# --- Hidden states for a drafter ----------------------------------------------------------------------


def test_vllm_takes_it_for_a_target_of_eagle3() -> None:
    from vllm.model_executor.models.interfaces import supports_eagle3

    model = on_meta(num_hidden_layers=8)
    assert supports_eagle3(model)
    assert model.get_eagle3_aux_hidden_state_layers() == (2, 4, 5)
    assert model.get_eagle3_default_aux_hidden_state_layers() == (2, 4, 5)
    model.set_aux_hidden_state_layers((1, 8))
    assert model.get_eagle3_aux_hidden_state_layers() == (1, 8)


@pytest.mark.parametrize(
    ("num_layers", "layers"), [(1, (1, 0, 0)), (2, (2, 1, 0)), (4, (2, 2, 1)), (7, (2, 3, 4))]
)
def test_the_default_layers_of_a_shallow_model_are_three_that_are_there(
    num_layers: int, layers: tuple[int, ...]
) -> None:
    model = on_meta(num_hidden_layers=num_layers)
    assert model.get_eagle3_aux_hidden_state_layers() == layers
    model.set_aux_hidden_state_layers(layers)


@pytest.mark.parametrize("layers", [(-1,), (2, 9)])
def test_a_layer_that_is_not_there_is_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError, match="no such layers"):
        on_meta(num_hidden_layers=8).set_aux_hidden_state_layers(layers)

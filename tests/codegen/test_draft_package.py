"""The package of a draft model: the command that writes it, its row, and the rules of its factory."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from autoport.cli import app
from autoport.workspace import Workspace
from drafts import PUBLISHED, SPECULATORS, V, tensors, write
from transformers import LlamaConfig
from typer.testing import CliRunner

NAME, REVIEWED = "tiny_eagle3", "shared_eagle3"


@pytest.fixture(scope="module", autouse=True)
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    """This process as the only rank, with a workspace that has two drafts, written by the command."""
    from vllm.config import set_current_vllm_config
    from vllm_neuron.simulator.activate import activate, deactivate
    from vllm_neuron.simulator.loading import make_vllm_config
    from vllm_neuron.simulator.overlay import overlay, remove_overlay

    folder = tmp_path_factory.mktemp("drafts")
    workspace = Workspace.create(folder / "workspace")
    own = write(folder / "own", PUBLISHED, tensors())
    shared = write(folder / "shared", SPECULATORS, tensors(own_embedding=False))
    assert draft(workspace, NAME, own).exit_code == 0
    assert draft(workspace, "shared_eagle3", shared, "--replace-row").exit_code == 0
    activate(1, 0, folder / "init")
    overlay(workspace.root, "vllm_neuron")
    with set_current_vllm_config(make_vllm_config(None, "", torch.float16, 32, 128)):
        yield workspace
    remove_overlay()
    deactivate()


def draft(workspace: Workspace, name: str, checkpoint: Any, *options: str) -> Any:
    words = ["draft", name, str(checkpoint), "--workspace", str(workspace.root), *options]
    return CliRunner().invoke(app, words)


def factory(name: str = NAME) -> Any:
    return importlib.import_module(f"vllm_neuron.model.{name}").Eagle3LlamaForCausalLM


def config(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**PUBLISHED, **changes)


def refused(name: str, draft_config: Any, neuron_config: Any = None) -> str:
    with pytest.raises(importlib.import_module(f"vllm_neuron.model.{name}").UnsupportedConfigError) as caught:
        factory(name).from_configs(draft_config, 16, neuron_config)
    return str(caught.value)


def test_the_command_registers_and_runs_twice(workspace: Workspace) -> None:
    assert '("Eagle3LlamaForCausalLM", ' in workspace.registry_path.read_text()
    source = json.loads((workspace.root / ".autoport" / "shared_eagle3" / "port.json").read_text())["source"]
    again = draft(workspace, "shared_eagle3", source, "--json")
    assert again.exit_code == 0
    assert json.loads(again.stdout)["files"] == []
    assert json.loads(again.stdout)["plan"]["own_embedding"] is False
    assert json.loads(again.stdout)["review"]["status"] == "done"


def test_the_review_knows_a_draft(workspace: Workspace) -> None:
    result = draft(workspace, REVIEWED, json.loads(state(workspace, "port.json").read_text())["source"])
    assert result.exit_code == 0
    assert "0 failed" not in result.stdout
    assert "serve it: python examples/vllm_neuron/models/shared_eagle3/run.py" in result.stdout
    rules = {rule["id"]: rule for rule in json.loads(state(workspace, "review.json").read_text())["rules"]}
    assert {rule["status"] for rule in rules.values()} == {"pass", "judge", "not applicable"}
    assert rules["REG-ARCH"]["status"] == rules["NAME-FACTORY"]["status"] == "pass"
    assert "llama_eagle3.py" in rules["ROPE-STYLE"]["reason"]

    file = workspace.model_dir(REVIEWED) / "model.py"
    text = file.read_text()
    file.write_text(text.replace("        self.tp_group.all_reduce(output)\n", "", 1))
    red = CliRunner().invoke(app, ["review", REVIEWED, "--workspace", str(workspace.root)])
    file.write_text(text)
    assert red.exit_code == 1


def test_readme_and_example(workspace: Workspace) -> None:
    readme = (workspace.root / workspace.readme(NAME)).read_text()
    assert "| vocab_size | 512, of which it chooses from 128 |" in readme
    assert '"num_speculative_tokens": 3}' in readme
    assert str(workspace.root.parent) not in readme  # a folder of this machine is no default
    assert '"method": "eagle3"' in (workspace.root / workspace.run_script(NAME)).read_text()


def state(workspace: Workspace, filename: str) -> Path:
    return workspace.root / ".autoport" / REVIEWED / filename


def test_a_row_of_another_draft_stops_it_before_anything_is_written(
    workspace: Workspace, tmp_path: Any
) -> None:
    result = draft(workspace, "third", write(tmp_path / "third", PUBLISHED, tensors()))
    assert result.exit_code != 0
    assert not workspace.model_dir("third").exists()


def test_the_layer_is_numbered_after_the_targets() -> None:
    with torch.device("meta"):
        model = factory().from_configs(config(), 16)
    assert [layer.name for layer in model.get_kv_spec().layers] == ["layers.16.self_attn"]
    assert model.model.fc.weight.dtype == torch.float16  # the target's, and not the checkpoint's float32
    with pytest.raises(RuntimeError, match="no KV cache for layer layers"):
        model.bind_kv_cache({})


def test_a_draft_without_embedding_takes_its_targets() -> None:
    nested = SimpleNamespace(**SPECULATORS)
    with torch.device("meta"):
        model = factory("shared_eagle3").from_configs(nested, 16)
    assert "model.embed_tokens.weight" not in dict(model.named_parameters())
    with pytest.raises(RuntimeError, match="call share_embedding"):
        model.model(None, None, None, {}, None)
    embedding = torch.nn.Embedding(V, 8, device="meta")
    model.share_embedding(embedding)
    assert model.model.embed_tokens is embedding


def test_only_the_selected_implementation_is_imported() -> None:
    sys.modules.pop(f"vllm_neuron.model.{NAME}.model", None)
    refused(NAME, config(fc_norm=True))
    assert f"vllm_neuron.model.{NAME}.model" not in sys.modules
    with torch.device("meta"):
        factory().from_configs(config(), 16)
    assert f"vllm_neuron.model.{NAME}.model" in sys.modules


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("num_hidden_layers", 2),
        ("hidden_act", "gelu"),
        ("sliding_window", 128),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("norm_before_residual", True),
        ("norm_before_fc", True),
        ("fc_norm", True),
        ("norm_output", True),
        ("num_aux_hidden_states", 5),
        ("logit_scale", 0.5),
        ("parallel_drafting", True),
        ("quantization_config", {"quant_method": "fp8"}),
    ],
)
def test_the_factory_refuses_what_is_not_implemented(setting: str, value: Any) -> None:
    draft_config = config()
    setattr(draft_config, setting, value)
    assert f"{setting} " in refused(NAME, draft_config)


def test_the_factory_refuses_another_vocabulary_and_rope() -> None:
    draft_config = config()
    draft_config.draft_vocab_size = V
    draft_config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    message = refused(NAME, draft_config)
    assert "draft_vocab_size below vocab_size False" in message
    assert "rope_type 'default' (possible: 'llama3')" in message


@pytest.mark.parametrize(
    "setting", ["ep_degree", "attention_dp_size", "embedding_dp_size", "lm_head_dp_size", "mlp_dp_size"]
)
def test_the_factory_refuses_other_degrees(setting: str) -> None:
    from vllm_neuron.model.neuron_config import NeuronConfig

    neuron_config = NeuronConfig.from_dict({})
    setattr(neuron_config, setting, 2)
    assert f"{setting} 2" in refused(NAME, config(), neuron_config)
    neuron_config = NeuronConfig.from_dict({})
    neuron_config.quantization = "fp8"
    assert "quantization 'fp8'" in refused(NAME, config(), neuron_config)


def test_the_factory_refuses_ranks_that_do_not_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(f"vllm_neuron.model.{NAME}.factory")
    monkeypatch.setattr(module, "get_tp_group", lambda: SimpleNamespace(world_size=3))
    message = refused(NAME, config())
    for size in ("num_attention_heads 4", "draft_vocab_size 128", "2 KV heads"):
        assert size in message
    monkeypatch.setattr(module, "get_tp_group", lambda: SimpleNamespace(world_size=4))
    assert "an even number of the 4 heads on each rank" in refused(NAME, config())


def test_sampled_tokens_that_the_host_has_not_seen_are_refused() -> None:
    with torch.device("meta"):
        model = factory().from_configs(config(), 16)
    with pytest.raises(NotImplementedError, match="before the host has the sampled tokens"):
        model(None, None, None, {}, None, None, torch.zeros(1))


def test_vllm_takes_the_factory_for_a_text_generator() -> None:
    from vllm.model_executor.models.registry import _ModelInfo

    found = _ModelInfo.from_model_cls(factory())
    assert found.architecture == "Eagle3LlamaForCausalLM"
    assert found.is_text_generation_model

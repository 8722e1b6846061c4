"""Ports out of tree as wheels: built, installed side by side, and served by vLLM on the simulator."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from autoport.package_workspace import PackageWorkspace
from autoport.port import run_step
from autoport.port_state import Port
from autoport.schema.facts import Facts
from autoport.step import Options
from autoport.validation import reference
from autoport.validation.shrink import shrink
from autoport.validation.twin import build
from checkpoints import real_config, write_checkpoint
from vllm_neuron.simulator.process import environment

pytestmark = pytest.mark.slow

PACKAGES = {"qwen2": "qwen2-7b", "mistral": "mistral-7b-v0.3"}
PROMPT = [5, 9, 17, 33, 2, 7]
STEPS = 8
SERVE = """
import json, sys
from vllm import LLM, ModelRegistry, SamplingParams
from vllm.plugins import load_general_plugins

load_general_plugins()
found = {name: getattr(ModelRegistry.models[name], "module_name", "") for name in sys.argv[2].split(",")}
llm = LLM(model=sys.argv[1], dtype="float32", max_model_len=256, max_num_batched_tokens=256, max_num_seqs=2,
          block_size=32, enforce_eager=True, enable_prefix_caching=False, skip_tokenizer_init=True,
          additional_config={"neuron_config": {"on_device_sampling_config": None}})
params = SamplingParams(max_tokens=int(sys.argv[4]), temperature=0.0, ignore_eos=True, detokenize=False)
(answer,) = llm.generate([{"prompt_token_ids": json.loads(sys.argv[3])}], params, use_tqdm=False)
print(json.dumps([found, list(answer.outputs[0].token_ids)]))
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Port]:
    folder = tmp_path_factory.mktemp("packages")
    ports = {}
    for name, config in PACKAGES.items():
        source = write_checkpoint(folder / f"source-{name}", real_config(config))
        ports[name] = Port(PackageWorkspace.open(folder / name, name, None), name, str(source))
        for step in ("research", "analyze", "generate", "register", "document"):
            run_step(ports[name], step, Options(dry_run=True))
    return ports


@pytest.fixture(scope="module")
def site(packages: dict[str, Port], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An installation of both; nothing of it is on the path of this process."""
    target = tmp_path_factory.mktemp("site")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    roots = [str(port.workspace.root) for port in packages.values()]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, *roots], check=True)
    return target


def test_installed_side_by_side_and_served(packages: dict[str, Port], site: Path, tmp_path: Path) -> None:
    facts = packages["qwen2"].read_state("facts.json", Facts, "research")
    checkpoint = build(shrink(facts) | {"torch_dtype": "float32"}, tmp_path / "twin", seed=0)
    variables = environment(plugins=dict.fromkeys(("vllm_neuron_qwen2", "vllm_neuron_mistral"), str(site)))
    # The answer of vLLM's inspection is kept below the cache folder: a new one, so that it inspects.
    variables |= {"VLLM_CACHE_ROOT": str(tmp_path / "cache"), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    architectures = "Qwen2ForCausalLM,MistralForCausalLM"
    done = subprocess.run(
        [sys.executable, "-c", SERVE, str(checkpoint), architectures, json.dumps(PROMPT), str(STEPS)],
        env={**os.environ, **variables},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found, tokens = json.loads(done.stdout.strip().splitlines()[-1])
    assert found == {
        "Qwen2ForCausalLM": "vllm_neuron_qwen2.factory",
        "MistralForCausalLM": "vllm_neuron_mistral.factory",
    }
    model = reference.load(checkpoint, torch.float32)
    assert tokens == reference.greedy(model, PROMPT, STEPS)

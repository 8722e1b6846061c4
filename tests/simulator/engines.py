"""Generated ports with tiny float32 checkpoints, and vLLM engines that serve them on the simulator."""

import contextlib
import gc
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from autoport.port import run_step
from autoport.port_state import Port
from autoport.schema.facts import Facts
from autoport.step import Options
from autoport.validation import landscape, reference
from autoport.validation.shrink import shrink
from autoport.validation.twin import build
from autoport.workspace import Workspace
from checkpoints import real_config, write_checkpoint

# Sizes of Qwen2-1.5B: its twin is smaller than the 7B's.
QWEN2 = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
}
LLAMA_AND_QWEN2 = {"llama": real_config("llama-3.2-1b"), "qwen2": real_config("qwen2-7b") | QWEN2}
CPU_SAMPLING = {"on_device_sampling_config": None}


class Ports:
    """A workspace with ports, and a twin of each.

    Args:
        configs: config.json by name, or the model type of a tiny checkpoint of the landscape. Each has an
            architecture of its own; one that the simulator's own models have is not ported.

    Attributes:
        workspace: Root of the workspace.
        checkpoints: Folder of each twin, by name.
    """

    def __init__(self, folder: Path, configs: Mapping[str, dict[str, Any] | str] = LLAMA_AND_QWEN2):
        workspace = Workspace.create(folder / "workspace")
        self.workspace = workspace.root
        self.checkpoints: dict[str, Path] = {}
        self._references: dict[str, Any] = {}
        for name, config in configs.items():
            source = folder / f"source-{name}"
            if isinstance(config, str):
                landscape.build_checkpoint(config, source)
            else:
                write_checkpoint(source, config)
            port = Port(workspace, name, str(source))
            own = (workspace.model_dir(name) / "model.py").is_file()
            for step in ("research",) if own else ("research", "analyze", "generate", "register"):
                run_step(port, step, Options(dry_run=True))
            facts = port.read_state("facts.json", Facts, "research")
            twin = shrink(facts) | {"torch_dtype": "float32", "dtype": "float32"}
            self.checkpoints[name] = build(twin, folder / f"twin-{name}", seed=0)

    def reference(self, name: str) -> Any:
        """The Hugging Face model of a twin, float32."""
        if name not in self._references:
            self._references[name] = reference.load(self.checkpoints[name], torch.float32)
        return self._references[name]

    def greedy(self, name: str, prompt: list[int], steps: int) -> list[int]:
        return reference.greedy(self.reference(name), prompt, steps)

    def logprobs(self, name: str, ids: list[int]) -> torch.Tensor:
        """[len(ids), vocab]"""
        return reference.logits(self.reference(name), ids).log_softmax(-1)


@contextlib.contextmanager
def engine(checkpoint: Path, neuron_config: dict[str, Any] | None = None, **options: Any) -> Iterator[Any]:
    """A `vllm.LLM` in this process (its workers are forked when there is more than one rank)."""
    from vllm import LLM

    defaults = {
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 8,
        "block_size": 32,
        "num_gpu_blocks_override": 80,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
    }
    llm = LLM(
        str(checkpoint), additional_config={"neuron_config": neuron_config or {}}, **(defaults | options)
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


@contextlib.contextmanager
def simulated(workspace: Path, package: str = "vllm_neuron") -> Iterator[None]:
    """Set this process up for engines, and put its environment back afterwards."""
    from vllm_neuron.simulator import activate_engine
    from vllm_neuron.simulator.overlay import remove_overlay

    before = dict(os.environ)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    activate_engine(workspace, package)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        remove_overlay()


def prompts(lengths: list[int], vocab_size: int = 512) -> list[list[int]]:
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


def generate(llm: Any, token_ids: list[list[int]], max_tokens: int, **params: Any) -> list[Any]:
    """Return vLLM's outputs; greedy and without an end token unless `params` says otherwise."""
    from vllm import SamplingParams

    options = {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens, **params}
    inputs = [{"prompt_token_ids": ids} for ids in token_ids]
    return llm.generate(inputs, SamplingParams(**options), use_tqdm=False)


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def metric(llm: Any, name: str) -> int:
    return sum(m.value for m in llm.get_metrics() if m.name == name)

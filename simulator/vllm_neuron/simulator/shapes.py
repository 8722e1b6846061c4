"""A model at its real sizes without weights, on the meta device: which rules of the device its shapes break.

One process stands for one of any number of ranks; the others do not exist, and collectives give shapes only.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from vllm_neuron.model.neuron_config import NeuronConfig
from vllm_neuron.simulator.activate import quiet, set_platform
from vllm_neuron.simulator.guards import guard_forward
from vllm_neuron.simulator.loading import allocate_kv_caches, kv_groups, make_vllm_config
from vllm_neuron.simulator.metadata import KVGroup, Row, Step, build_attn_metadata, build_tokens

BLOCK_SIZE = 32
PREFILL, SEGMENTED, DECODE = KINDS = ("prefill", "segmented prefill", "decode")
NEURON_CONFIG = {"on_device_sampling_config": {"all_greedy": True}}


def activate_alone(tp_size: int) -> None:
    """Make this process rank 0 of `tp_size` tensor-parallel ranks of which it is the only one.

    Raises:
        RuntimeError: The process is a rank already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    from vllm_neuron.parallel.neuron_parallel_state import initialize_neuron_parallel_state

    if dist.is_initialized():
        raise RuntimeError("this process is a rank already")
    quiet()
    set_platform()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp_size)
    ranks = list(range(tp_size))
    with set_current_vllm_config(VllmConfig()), _fake_groups():
        parallel_state._WORLD = parallel_state.init_world_group(ranks, 0, "fake")
        parallel_state._TP = parallel_state.init_model_parallel_group([ranks], 0, "fake", group_name="tp")
        initialize_neuron_parallel_state()


@contextlib.contextmanager
def _fake_groups() -> Iterator[None]:
    """Let vLLM, which asks for a gloo group beside each group, have groups without partners."""
    new_group = dist.new_group
    dist.new_group = lambda ranks=None, *_, **__: new_group(ranks, backend="fake")
    try:
        yield
    finally:
        dist.new_group = new_group


class ShapeRun:
    """A model on the meta device, in the process that `activate_alone` was called in.

    Rules that its forwards break are raised or recorded as in any forward (`rules`).

    Args:
        hf_config: The Hugging Face config, with the dtype of the model and of its KV cache.
        max_model_len: Tokens of the longest sequence; a prompt of that length is prefilled in one step.
        segment: Tokens of a step of segmented prefill.
        num_seqs: Sequences that decode.
    """

    def __init__(self, factory_class: Any, hf_config: Any, max_model_len: int, segment: int, num_seqs: int):
        from vllm.config import set_current_vllm_config

        num_blocks = -(-max_model_len // BLOCK_SIZE)
        vllm_config = make_vllm_config(hf_config, "", hf_config.dtype, BLOCK_SIZE, max_model_len)
        with set_current_vllm_config(vllm_config), torch.device("meta"):
            self.model = factory_class.from_configs(hf_config, NeuronConfig.from_dict(NEURON_CONFIG))
            spec = self.model.get_kv_spec()
            self.model.bind_kv_cache(allocate_kv_caches(spec, num_blocks + 1, BLOCK_SIZE, hf_config.dtype))
        self.num_layers = len(spec.layers)
        self._groups = kv_groups(spec)
        blocks = [list(range(1, num_blocks + 1))] * len(self._groups)
        whole = Row([0] * max_model_len, 0, blocks)
        part = Row([0] * segment, max_model_len - segment, blocks)
        last = Row([0], max_model_len - 1, blocks)
        self._steps = {
            PREFILL: ([whole], Step(True, max_model_len, BLOCK_SIZE, max_model_len)),
            SEGMENTED: ([part], Step(True, segment, BLOCK_SIZE, max_model_len, segment)),
            DECODE: ([last] * num_seqs, Step(False, num_seqs, BLOCK_SIZE, max_model_len)),
        }

    def forward(self, kind: str) -> Any:
        """Run one of `KINDS` with sampling on the device; returns what the model returns, on the meta device."""
        arguments = _arguments(*self._steps[kind], self._groups)
        with torch.no_grad(), guard_forward():
            return self.model(**arguments)


def _arguments(rows: list[Row], step: Step, groups: list[KVGroup]) -> dict[str, Any]:
    """What the runner passes, without the values."""
    input_ids, positions, sampling_positions = build_tokens(rows, step)
    arguments = {
        "input_ids": input_ids,
        "positions": positions,
        "attn_metadata": build_attn_metadata(rows, groups, step),
        "sampling_positions": sampling_positions,
        "sampling_params": torch.empty(len(sampling_positions), 3),
        "spec_decode_metadata": None,
        "rank": torch.tensor(0, dtype=torch.int32),
        "logit_mask": None,
    }
    return {name: _on_meta(value) for name, value in arguments.items()}


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    return {key: _on_meta(item) for key, item in value.items()} if isinstance(value, dict) else value

"""Process groups of the plugin, on top of vLLM's tensor-parallel and world groups.

All groups are vLLM ``GroupCoordinator`` objects over gloo; groups with the same ranks share one object.
Expert parallelism is simulated. Data parallelism of single components and decode context parallelism are not:
their groups are what they are when the feature is off.
"""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from vllm.distributed import parallel_state as vllm_state
from vllm.distributed.parallel_state import GroupCoordinator, get_tp_group, get_world_group

from vllm_neuron import envs

F = TypeVar("F", bound=Callable[[], object])

_GROUPS: dict[str, GroupCoordinator] = {}
_GETTERS: list[Callable[[], object]] = []


def _getter(function: F) -> F:
    _GETTERS.append(function)
    return function


def _group(name: str) -> GroupCoordinator:
    assert name in _GROUPS, f"neuron {name} group is not initialized"
    return _GROUPS[name]


def is_initialized() -> bool:
    return bool(_GROUPS)


# --- Expert parallelism -----------------------------------------------------------------------------------


@_getter
def get_neuron_ep_group() -> GroupCoordinator:
    """Ranks with the same place in every expert partition.

    Raises:
        AssertionError: Expert parallelism is off; ask `get_neuron_ep_degree` first.
    """
    return _group("expert parallel")


@_getter
def get_neuron_ep_tp_group() -> GroupCoordinator:
    """Ranks of this expert partition.

    Raises:
        AssertionError: Expert parallelism is off; ask `get_neuron_ep_degree` first.
    """
    return _group("expert tensor parallel")


@_getter
def get_neuron_intranode_ep_group() -> GroupCoordinator:
    return _group("intra-node expert parallel")


@_getter
def get_neuron_internode_ep_group() -> GroupCoordinator:
    return _group("inter-node expert parallel")


@_getter
def get_neuron_inter_node_positional_peer_group() -> GroupCoordinator:
    return _group("inter-node positional peer")


@_getter
def get_wide_ep_group() -> GroupCoordinator:
    """The world, when expert parallelism spans data-parallel ranks."""
    return _group("wide expert parallel")


@_getter
def get_neuron_ep_degree() -> int:
    """Number of expert partitions, 1 when expert parallelism is off."""
    group = _GROUPS.get("expert tensor parallel")
    return 1 if group is None else get_world_group().world_size // group.world_size


@_getter
def get_neuron_ep_rank() -> int:
    """This rank's expert partition, 0 when expert parallelism is off."""
    group = _GROUPS.get("expert parallel")
    return 0 if group is None else group.rank_in_group


# --- Components: tensor parallelism times their own data parallelism --------------------------------------


@_getter
def get_neuron_attention_tp_group() -> GroupCoordinator:
    return _group("attention tensor parallel")


@_getter
def get_neuron_embedding_tp_group() -> GroupCoordinator:
    return _group("embedding tensor parallel")


@_getter
def get_neuron_lm_head_tp_group() -> GroupCoordinator:
    return _group("lm_head tensor parallel")


@_getter
def get_neuron_mlp_tp_group() -> GroupCoordinator:
    return _group("mlp tensor parallel")


@_getter
def get_neuron_attention_dp_group() -> GroupCoordinator:
    return _group("attention data parallel")


@_getter
def get_neuron_embedding_dp_group() -> GroupCoordinator:
    return _group("embedding data parallel")


@_getter
def get_neuron_lm_head_dp_group() -> GroupCoordinator:
    return _group("lm_head data parallel")


@_getter
def get_neuron_mlp_dp_group() -> GroupCoordinator:
    return _group("mlp data parallel")


@_getter
def get_neuron_attention_dp_size() -> int:
    return _size("attention data parallel")


@_getter
def get_neuron_attention_dp_rank() -> int:
    return _rank("attention data parallel")


@_getter
def get_neuron_mlp_dp_size() -> int:
    return _size("mlp data parallel")


@_getter
def get_neuron_mlp_dp_rank() -> int:
    return _rank("mlp data parallel")


# --- Context parallelism, sampling, vision, nodes ---------------------------------------------------------


@_getter
def get_neuron_dcp_kv_group() -> GroupCoordinator:
    return _group("decode context parallel kv")


@_getter
def get_neuron_dcp_tp_group() -> GroupCoordinator:
    return _group("decode context parallel tensor parallel")


@_getter
def get_neuron_sampling_all2all_group() -> GroupCoordinator:
    return _group("sampling all-to-all")


@_getter
def get_neuron_sampling_gather_group() -> GroupCoordinator:
    return _group("sampling gather")


@_getter
def get_neuron_sampling_dp_degree() -> int:
    return _size("sampling all-to-all")


@_getter
def get_neuron_vision_tp_group() -> GroupCoordinator:
    return get_tp_group()


@_getter
def get_neuron_vision_dp_group() -> GroupCoordinator | None:
    return None


@_getter
def get_node_group() -> GroupCoordinator:
    return _group("node")


# --- Barriers ---------------------------------------------------------------------------------------------


def world_barrier() -> None:
    dist.barrier(group=get_world_group().cpu_group)


def tp_barrier() -> None:
    dist.barrier(group=get_tp_group().cpu_group)


# --- Set-up -----------------------------------------------------------------------------------------------


def uses_noncontiguous_mesh(world_size: int, row_size: int) -> bool:
    """Whether rows of 8 ranks follow Trainium2's topology instead of being consecutive."""
    return not envs.VLLM_NEURON_SWITCH_CC and world_size == 64 and row_size == 8


def expert_mesh(world_size: int, ep_degree: int) -> list[list[int]]:
    """Return the rank mesh: `ep_degree` rows (expert partitions) of ``world_size / ep_degree`` ranks.

    Raises:
        ValueError: The world does not divide by `ep_degree`.
    """
    if world_size % ep_degree:
        raise ValueError(f"world size {world_size} is not divisible by ep_degree {ep_degree}")
    row_size = world_size // ep_degree
    if not uses_noncontiguous_mesh(world_size, row_size):
        return [list(range(start, start + row_size)) for start in range(0, world_size, row_size)]
    rows = []
    for base in range(0, world_size, 16):
        outer = [*range(base, base + 4), *range(base + 12, base + 16)]
        rows += [outer, list(range(base + 4, base + 12))]
    return rows


def initialize_neuron_parallel_state(ep_degree: int = 1) -> None:
    """Create the plugin's groups on top of vLLM's, which must exist. A second call does nothing.

    Every getter is also set on ``vllm.distributed.parallel_state``, where models may import it from.

    Raises:
        ValueError: The world does not divide by `ep_degree`.
    """
    if is_initialized():
        return
    world, tp = get_world_group(), get_tp_group()
    world_size, tp_size = world.world_size, tp.world_size
    tp_ranks = [list(range(start, start + tp_size)) for start in range(0, world_size, tp_size)]
    single_ranks = [[rank] for rank in range(world_size)]
    made = {_key(tp_ranks): tp}

    def group(ranks: list[list[int]], name: str) -> GroupCoordinator:
        if _key(ranks) not in made:
            made[_key(ranks)] = vllm_state.init_model_parallel_group(
                ranks, world.local_rank, "gloo", group_name=name.replace(" ", "_")
            )
        return made[_key(ranks)]

    for component in ("attention", "embedding", "lm_head", "mlp"):
        _GROUPS[f"{component} tensor parallel"] = tp
        _GROUPS[f"{component} data parallel"] = group(single_ranks, "neuron single")
    _GROUPS["decode context parallel kv"] = group(single_ranks, "neuron single")
    _GROUPS["decode context parallel tensor parallel"] = tp
    _GROUPS["node"] = group([list(range(world_size))], "neuron node")
    if ep_degree > 1:
        rows = expert_mesh(world_size, ep_degree)
        columns = [list(column) for column in zip(*rows, strict=True)]
        _GROUPS["expert tensor parallel"] = group(rows, "neuron ep tp")
        _GROUPS["expert parallel"] = group(columns, "neuron ep")
        _GROUPS["intra-node expert parallel"] = group(columns, "neuron ep")
        if world_size > tp_size:
            _GROUPS["wide expert parallel"] = _GROUPS["node"]

    for function in _GETTERS:
        setattr(vllm_state, function.__name__, function)


def destroy_neuron_parallel_state() -> None:
    """Drop the groups; call it before vLLM destroys its own."""
    tp = get_tp_group() if vllm_state.model_parallel_is_initialized() else None
    for group in {id(g): g for g in _GROUPS.values() if g is not tp}.values():
        group.destroy()
    _GROUPS.clear()


def _key(ranks: list[list[int]]) -> str:
    return repr(ranks)


def _size(name: str) -> int:
    return _GROUPS[name].world_size if name in _GROUPS else 1


def _rank(name: str) -> int:
    return _GROUPS[name].rank_in_group if name in _GROUPS else 0

"""Ranks as threads of the test's process, for operators that communicate."""

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)


class Coordinator:
    """The part of vLLM's GroupCoordinator that operators use, over the world."""

    def __init__(self, rank: int, world_size: int):
        self.rank_in_group, self.world_size = rank, world_size
        self.device_group = dist.group.WORLD

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(self.world_size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=dim)


def on_ranks(world_size: int, function: Callable[[int], Any]) -> list[Any]:
    """Results of `function(rank)` on threads that form a process group."""
    isolate = torch._C._distributed_c10d._set_thread_isolation_mode
    store, results, errors = dist.HashStore(), {}, []

    def run(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
            results[rank] = function(rank)
            dist.destroy_process_group()
        except BaseException as error:
            errors.append(error)
            ProcessLocalGroup.exception_handle(error)  # wakes the ranks that wait for this one

    _install_threaded_pg()
    isolate(True)
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        isolate(False)
        _uninstall_threaded_pg()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(world_size)]

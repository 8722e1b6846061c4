"""Ports that engines serve, made once per session; process groups that do nothing."""

import shutil
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from engines import Ports
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture(scope="session")
def ports(tmp_path_factory) -> Iterator[Ports]:
    folder = tmp_path_factory.mktemp("ports")
    yield Ports(folder)
    shutil.rmtree(folder)


@pytest.fixture
def groups():
    """Groups of 1, 2, 2 and 4 ranks (collectives over them do nothing)."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield [dist.new_group(ranks) for ranks in ([0], [0, 1], [0, 2], [0, 1, 2, 3])]
    dist.destroy_process_group()

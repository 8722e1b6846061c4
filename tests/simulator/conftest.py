"""Ports that engines serve, made once per session."""

import shutil
from collections.abc import Iterator

import pytest
from engines import Ports


@pytest.fixture(scope="session")
def ports(tmp_path_factory) -> Iterator[Ports]:
    folder = tmp_path_factory.mktemp("ports")
    yield Ports(folder)
    shutil.rmtree(folder)

"""Tests of the backend, one pytest per rank, reported as those of `tests/mpi` are."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location(
    "rung", Path(__file__).parents[3] / "mpi" / "conftest.py"
)
_rung = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_rung)
pytest_addoption, pytest_configure = _rung.pytest_addoption, _rung.pytest_configure


@pytest.fixture(scope="session", autouse=True)
def group():
    """The group of all ranks, by the door that needs no address; what it makes is its own."""
    import torch.distributed as dist

    import mpistrat.torch as mt

    mt.init_process_group()
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def rank(group):
    return group.rank()


@pytest.fixture
def size(group):
    return group.size()

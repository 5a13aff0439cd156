"""Ranks that are threads get a core each: threads of PyTorch that wait for one take all time."""

from importlib.util import find_spec

import pytest


@pytest.fixture(scope="session", autouse=True)
def _one_thread_for_each_rank():
    if find_spec("torch") is None:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

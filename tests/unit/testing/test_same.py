"""`same` fails on every rank or on none."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.testing import run_ranks, same


@pytest.mark.parametrize(
    "value",
    [1.0, np.arange(3), {"a": np.zeros((0, 2)), "b": [np.float32(2)]}, [], np.array(np.nan)]
    + [np.full(2, np.nan, kind) for kind in ("f2", "c8", ml_dtypes.bfloat16)],
)
def test_equal_values_pass(value):
    run_ranks(lambda comm: same(comm, value), 3)
    run_ranks(lambda comm: same(comm, value, value), 3)


DIFFERENT = {
    "value": lambda r: {"w": np.arange(3) + (r == 1)},
    "dtype": lambda r: {"w": np.zeros(3, ["f4", "f4", "i4"][r])},
    "shape": lambda r: {"w": np.zeros([(2, 3), (3, 2), (2, 3)][r])},
    "sign of zero": lambda r: {"w": np.array([0.0, -0.0, 0.0][r])},
    "structure": lambda r: {"w": 1.0} if r else [1.0],
    "bad leaf": lambda r: {"w": "text" if r == 1 else 1.0},
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_a_difference_fails_on_every_rank_and_the_next_check_works(case):
    def rank(comm):
        with pytest.raises((AssertionError, ms.LockstepError, TypeError)) as caught:
            same(comm, DIFFERENT[case](comm.rank))
        same(comm, 1.0)
        return str(caught.value)

    for text in run_ranks(rank, 3):
        assert "structure" in text or "'w'" in text


@pytest.mark.parametrize("wanted", [{"w": 2.0}, {"w": np.ones(2)}, {"v": 1.0}, [1.0, 2.0]], ids=str)
@pytest.mark.parametrize("everywhere", [True, False])
def test_a_wrong_value_fails_on_every_rank(wanted, everywhere):
    def rank(comm):
        goal = wanted if everywhere or comm.rank == 1 else {"w": 1.0}
        with pytest.raises((AssertionError, ValueError)):
            same(comm, {"w": 1.0}, goal)
        same(comm, 1.0)

    run_ranks(rank, 3)


def test_distributed_values_and_padding_count_as_their_values():
    def rank(comm):
        same(comm, ms.PerReplica(1.0), 1.0)
        x = np.array([1, 2], np.longdouble)
        if x.itemsize == 16:
            x.view(np.uint8).reshape(2, 16)[:, 10:] = comm.rank
        same(comm, x)

    run_ranks(rank, 2)

"""Arrays that are reduced in place: what a program does to them is noticed each time."""

from __future__ import annotations

import contextlib
import warnings

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.testing import run_ranks

CHANGES = {
    "shape": lambda a: setattr(a, "shape", (4, 6)),
    "flat": lambda a: setattr(a, "shape", (24,)),
    "dtype": lambda a: setattr(a, "dtype", np.dtype("i4")),
    "strides": lambda a: setattr(a, "strides", (4, 24)),
    "read-only": lambda a: setattr(a.flags, "writeable", False),
}


def changed(array, how):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy wants to end this
        CHANGES[how](array)


@pytest.mark.parametrize("count", [3, 400])
@pytest.mark.parametrize("how", CHANGES)
def test_a_buffer_that_was_changed_is_noticed(how, count):
    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        buffers = strategy.buffers([np.empty((6, 4), "f4")] * count)

        def fold():
            strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", buffers, out=buffers))

        for number in range(3):
            for b in buffers:
                b[...] = comm.rank + number
            fold()
            assert all((b == 1 + 2 * number).all() for b in buffers)
        if comm.rank or how == "read-only":
            changed(buffers[2], how)
        if how == "strides":  # another array of the same shape: what it shows is what is summed
            rows = np.arange(24, dtype="f4").reshape(6, 4)
            wanted = rows + 1
            with np.errstate(all="ignore"):
                buffers[2][...] = 1 if comm.rank else rows
            with contextlib.suppress(ms.LockstepError):  # it is in no buffer any more
                fold()
                assert (buffers[2] == wanted).all()
            return
        with pytest.raises(ValueError if how == "read-only" else ms.LockstepError):
            fold()

    run_ranks(rank, 2)


@pytest.mark.parametrize("count", [40, 400])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_two_sets_of_hundreds_of_buffers_take_turns(size, count):
    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        sets = [strategy.buffers([np.empty(3, "f4")] * count) for _ in range(2)]
        for number in range(8):
            if number == 4:  # others, which may have the ids of those that are dropped here
                sets[0][5:9] = [None] * 4
                sets[0][5:9] = strategy.buffers([np.empty(3, "f4")] * 4)
            for index, (a, b) in enumerate(zip(*sets, strict=True)):
                a[...] = b[...] = comm.rank + number * index
            buffers, others = sets[:: 1 - number % 2 * 2]
            fold = lambda: ms.get_replica_context().all_reduce("SUM", buffers, out=buffers)  # noqa: E731, B023
            strategy.run(fold)
            for index, (folded, other) in enumerate(zip(buffers, others, strict=True)):
                assert (folded == sum(range(size)) + size * number * index).all()
                assert (other == comm.rank + number * index).all()

    run_ranks(rank, size)


def test_one_rank_folds_nothing_but_a_mean_of_no_examples():
    strategy = ms.MirroredStrategy()
    buffers = strategy.buffers([np.empty(1, "f4")] * 40)  # would fit the handshake as well
    fold = lambda: ms.get_replica_context().all_reduce("MEAN", buffers, weight=weight, out=buffers)  # noqa: E731
    for weight in (3, 2.5, 3, 0, 3, 1):
        for b in buffers:
            b[...] = weight
        strategy.run(fold)
        assert all(np.isnan(b).all() if weight == 0 else (b == weight).all() for b in buffers)


@pytest.mark.parametrize("n", [1, 2])
def test_buffers_that_were_first_seen_read_only_are_refused_each_time(n):
    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        known, other = (strategy.buffers([np.zeros(10_000, np.float32)]) for _ in range(2))

        def fold(arrays):
            return strategy.run(
                lambda: ms.get_replica_context().all_reduce("sum", arrays, out=arrays) is None
            )

        fold(known), fold(known)
        other[0].flags.writeable = False
        for _ in range(3):
            with pytest.raises(ValueError):
                fold(other)
        assert (other[0] == 0).all()
        other[0].flags.writeable = True
        fold(other)

    run_ranks(rank, n)

"""What a program does to arrays is seen in their headers, and nothing else is taken for it."""

from __future__ import annotations

import contextlib
import gc
import sys
import warnings
import weakref

import ml_dtypes
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.arena import headers as module
from mpistrat.arena.headers import Headers
from mpistrat.collectives import calls
from mpistrat.collectives.paths import in_place
from mpistrat.testing import run_ranks

pytestmark = pytest.mark.skipif(
    sys.implementation.name != "cpython", reason="headers are read in CPython only"
)

SHAPES = [(6, 4), (), (0, 3), (24,), (2, 3, 4), (1, 1)]
CHANGES = {
    "shape": lambda a: setattr(a, "shape", (4, 6)),
    "flat": lambda a: setattr(a, "shape", (24,)),
    "dtype": lambda a: setattr(a, "dtype", np.dtype("i4")),
    "strides": lambda a: setattr(a, "strides", (4, 24)),
    "read-only": lambda a: setattr(a.flags, "writeable", False),
}


def made():
    leaves = [np.zeros(shape, dtype) for shape in SHAPES for dtype in ("f4", "f8", "c16", "?")]
    return [*leaves, np.zeros(3, ml_dtypes.bfloat16)]


def changed(array, how):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy wants to end this
        CHANGES[how](array)


def test_the_same_arrays_are_the_same_whatever_is_in_them():
    leaves = made()
    headers = Headers(leaves)
    assert headers.known
    for leaf in leaves:
        leaf.fill(1)
    looked_at = [memoryview(leaves[0]), leaves[0][1:], weakref.ref(leaves[0])]
    assert headers.same(list(leaves)) and looked_at


@pytest.mark.parametrize("how", CHANGES)
def test_what_was_changed_where_it_is_is_not_the_same(how):
    leaves = made()
    headers = Headers(leaves)
    changed(leaves[0], how)
    assert not headers.same(list(leaves))
    assert Headers(leaves).same(list(leaves))  # as they are now


def test_others_are_not_the_same():
    leaves = made()
    headers = Headers(leaves)
    for other in (leaves[0].copy(), leaves[0][:], "text", None, leaves[1]):
        assert not headers.same([other, *leaves[1:]])
    assert not headers.same([leaves[1], leaves[0], *leaves[2:]])


def test_arrays_do_not_live_on():
    leaves = made()
    headers, gone = Headers(leaves), weakref.ref(leaves[0])
    leaves[0] = np.zeros(SHAPES[0], "f4")
    gc.collect()
    assert gone() is None
    assert not headers.same(list(leaves))


@pytest.mark.parametrize(
    ("name", "value"), [("_usual", lambda: False), ("_said", lambda leaves: [])]
)
def test_where_objects_look_different_nothing_is_known(monkeypatch, name, value):
    monkeypatch.setattr(module, name, value)
    assert not Headers(made()).known


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("how", CHANGES)
def test_a_buffer_that_was_changed_is_noticed(how, quick, monkeypatch):
    if not quick:
        monkeypatch.setattr(module, "_usual", lambda: False)

    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        buffers = strategy.buffers([np.empty((6, 4), "f4")] * 400)

        def fold():
            strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", buffers, out=buffers))

        for number in range(3):
            for b in buffers:
                b[...] = comm.rank + number
            fold()
            assert all((b == 1 + 2 * number).all() for b in buffers)
        if comm.rank or how == "read-only":
            changed(buffers[7], how)
        if how == "strides":  # another array of the same shape: what it shows is what is summed
            rows = np.arange(24, dtype="f4").reshape(6, 4)
            wanted = rows + 1
            with np.errstate(all="ignore"):
                buffers[7][...] = 1 if comm.rank else rows
            with contextlib.suppress(ms.LockstepError):  # it is in no buffer any more
                fold()
                assert (buffers[7] == wanted).all()
            return
        with pytest.raises(ValueError if how == "read-only" else ms.LockstepError):
            fold()

    run_ranks(rank, 2)


@pytest.mark.parametrize("count", [40, 400])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_hundreds_of_buffers_are_not_asked_one_by_one(size, count, monkeypatch):
    asked, real = [], calls.specs_of

    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        buffers = strategy.buffers([np.empty(3, "f4")] * count)
        fold = lambda: ms.get_replica_context().all_reduce("SUM", buffers, out=buffers)  # noqa: E731
        for number in range(6):
            if number == 3:
                asked.clear()
                comm.barrier()
            for b in buffers:
                b[...] = comm.rank + number
            strategy.run(fold)
            total = sum(rank + number for rank in range(size))
            assert all((b == total).all() for b in buffers)

    def counted(leaves):
        asked.append(len(leaves))
        return real(leaves)

    for one in (calls, in_place):
        monkeypatch.setattr(one, "specs_of", counted)
    run_ranks(rank, size)
    assert not asked


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

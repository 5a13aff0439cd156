"""Gathers: uneven, empty, along any axis, of any dtype."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat import pytree
from mpistrat.testing import run_ranks

DTYPES = [np.dtype(c) for c in "?bhilBHILefdgFDG"] + [np.dtype(ml_dtypes.bfloat16)]


def part(rank, length, axis, dtype, width=2):
    shape = [width, 3, width]
    shape[axis] = length
    return (np.arange(np.prod(shape)) + 7 * rank).reshape(shape).astype(dtype)


@every("axis", [0, 1, 2, -1, -3])
@every("lengths", [[3, 0, 5], [0, 0, 0], [1, 1, 1], [0, 40, 2]])
@every("size", [1, 2, 3])
def test_uneven_and_empty_parts(strategy_on, axis, lengths, size):
    def rank(comm):
        strategy = strategy_on(comm)
        mine = part(comm.rank, lengths[comm.rank], axis, np.float64)
        if comm.rank == 1:
            mine = np.asfortranarray(mine)
        inside = strategy.run(lambda: ms.get_replica_context().all_gather(mine, axis)).local
        return inside, strategy.gather(ms.PerReplica(mine), axis)

    want = np.concatenate([part(r, lengths[r], axis, np.float64) for r in range(size)], axis=axis)
    for inside, outside in run_ranks(rank, size):
        for got in (inside, outside):
            assert got.shape == want.shape
            assert np.array_equal(got, want)
            assert got.flags.writeable


@pytest.mark.parametrize("width", [1, 30], ids=["frame", "native"])
def test_every_dtype(strategy_on, width):
    def rank(comm):
        tree = [part(comm.rank, comm.rank + 1, 0, dtype, width) for dtype in DTYPES]
        got = strategy_on(comm).run(lambda: ms.get_replica_context().all_gather(tree, axis=0))
        return [leaf.local for leaf in got]

    for got in run_ranks(rank, 3):
        for leaf, dtype in zip(got, DTYPES, strict=True):
            want = np.concatenate([part(r, r + 1, 0, dtype, width) for r in range(3)])
            assert leaf.dtype == dtype
            assert np.array_equal(leaf, want)


def test_layouts_and_byte_orders_differ_between_ranks():
    def rank(comm):
        mine = np.arange(400, dtype=">i4" if comm.rank else "<i4").reshape(20, 20) + comm.rank
        mine = mine[::-1].T if comm.rank else np.ascontiguousarray(mine[::-1].T)
        return ms.MirroredStrategy().gather(ms.PerReplica(mine), 1)

    base = np.arange(400, dtype="i4").reshape(20, 20)
    want = np.concatenate([(base + r)[::-1].T for r in range(2)], axis=1)
    for got in run_ranks(rank, 2):
        assert np.array_equal(got, want)
        assert got.dtype == np.int32
        assert got.dtype.isnative


def test_zero_sized_rows_keep_their_count():
    def rank(comm):
        return ms.MirroredStrategy().gather(ms.PerReplica(np.zeros((comm.rank + 1, 0))), 0).shape

    assert run_ranks(rank, 3) == [(6, 0)] * 3


@pytest.mark.parametrize(
    ("make", "axis", "error"),
    [
        (lambda r: np.zeros(3), np.array([0, 1]), TypeError),
        (lambda r: np.zeros(3), 1, ms.AxisError),
        (lambda r: np.zeros(3), -2, ms.AxisError),
        (lambda r: np.array(1.0), 0, ms.AxisError),
        (lambda r: 5, 0, ms.AxisError),
        (lambda r: np.zeros(3), 0.0, TypeError),
        (lambda r: np.zeros(3), None, TypeError),
        (lambda r: np.zeros(3), True, TypeError),
        (lambda r: np.zeros((2, 2 + r)), 0, ms.LockstepError),
        (lambda r: np.zeros((2,) * (1 + r)), 0, ms.LockstepError),
        (lambda r: np.zeros(2, "f4" if r else "f8"), 0, ms.LockstepError),
        (lambda r: [np.zeros(2)] * (1 + r), 0, ms.LockstepError),
    ],
)
def test_what_does_not_fit_raises_on_every_rank(strategy_on, make, axis, error):
    def rank(comm):
        strategy = strategy_on(comm)
        mine = make(comm.rank)
        words = "axis must be an integer" if error is TypeError else None
        with pytest.raises(error, match=words):
            strategy.run(lambda: ms.get_replica_context().all_gather(mine, axis))
        with pytest.raises(error, match=words):
            strategy.gather(pytree.map(ms.PerReplica, mine), axis)
        return strategy.gather(ms.PerReplica(np.full(1, comm.rank)), 0).tolist()

    assert run_ranks(rank, 2) == [[0, 1]] * 2


def test_an_axis_may_be_a_numpy_integer():
    def rank(comm):
        return ms.MirroredStrategy().gather(ms.PerReplica(np.ones(1)), np.int64(0)).tolist()

    assert run_ranks(rank, 2) == [[1, 1]] * 2


def test_axes_that_differ_between_ranks_are_a_difference():
    def rank(comm):
        with pytest.raises(ms.LockstepError):
            ms.MirroredStrategy().gather(ms.PerReplica(np.zeros((2, 2))), comm.rank)

    run_ranks(rank, 2)


def test_many_leaves_do_not_fit_the_frame():
    def rank(comm):
        tree = [np.full(1 + (i + comm.rank) % 3, i) for i in range(50)]
        got = ms.MirroredStrategy().run(lambda: ms.get_replica_context().all_gather(tree, 0))
        return [len(leaf.local) for leaf in got]

    want = [sum(1 + (i + r) % 3 for r in range(2)) for i in range(50)]
    assert run_ranks(rank, 2) == [want, want]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_plain_leaves_come_back_as_they_are_wherever_they_stand(size):
    def rank(comm):
        for s in (ms.MirroredStrategy(), ms.OneDeviceStrategy("cpu"), ms.get_strategy()):
            plain = np.ones(2)
            assert s.gather(plain, 0) is plain
            assert s.gather([plain], 0)[0] is plain
            assert s.gather({"a": plain, "b": 5, "c": None}, 0) == {"a": plain, "b": 5, "c": None}
            copies = s.gather([ms.Mirrored(plain, comm.size)], 0)[0]  # as of a variable
            assert copies.tolist() == [1.0] * 2 * s.num_replicas_in_sync
        s = ms.MirroredStrategy()
        per = s.run(lambda: np.full(1, comm.rank))
        mixed = s.gather({"per": [per, ms.PerReplica(np.ones(2))], "plain": plain}, 0)
        assert mixed["plain"] is plain
        assert mixed["per"][1].tolist() == [1.0] * 2 * comm.size
        local = ms.MultiWorkerMirroredStrategy()
        assert local.gather([np.full(1, comm.rank)], 0)[0].tolist() == list(range(comm.size))
        return mixed["per"][0].tolist()

    assert run_ranks(rank, size) == [list(range(size))] * size


def test_ranks_that_gather_other_leaves_of_a_tree_are_told():
    def rank(comm):
        s, per, plain = ms.MirroredStrategy(), ms.PerReplica(np.ones(2)), np.ones(2)
        with pytest.raises(ms.LockstepError):
            s.gather([plain, per] if comm.rank else [per, plain], 0)
        return s.gather(per, 0).tolist()

    assert run_ranks(rank, 2) == [[1.0] * 4] * 2

"""Means of values that are finite are finite, on every path, with the same bits on all ranks."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.arrays import as_bytes as bits_of
from mpistrat.testing import run_ranks

WAYS = ("usual", "messages")
TOPS = {
    "f4": np.finfo("f4").max,
    "f8": np.finfo("f8").max,
    "g": np.finfo("g").max,
    "c8": np.complex64(3e38 - 3.2e38j),
    "c16": 1.7e308 * (1 - 1j),
    "bfloat16": ml_dtypes.finfo(ml_dtypes.bfloat16).max,
    "f2": np.finfo("f2").max,
}


def made(way):
    strategy = ms.MirroredStrategy()
    strategy._replicas.reducer.node.arena.refused = way == "messages"  # memory cannot be shared
    return strategy


def mean(strategy, *args, **kwargs):
    found = strategy.run(lambda: ms.get_replica_context().all_reduce("mean", *args, **kwargs))
    return np.array(ms.pytree.map(lambda x: getattr(x, "local", x), found))


def given(rank, size, code):
    """Return values that overflow, one that is infinite on the last rank, and small ones."""
    x = np.full(size, TOPS[code]).astype(code)
    x[1::7] = -x[1::7]
    x[2::7] = np.finfo("f4").smallest_subnormal if code != "f2" else 1
    if size > 3:
        x[3] = np.inf if rank == 0 else x[3]
    return x


def check(found, size, code):
    want = given(1, size, code)
    if size > 3:
        assert np.isinf(np.real(found[3])), (size, code)
        found[3] = want[3]
    if np.dtype(code).kind == "c":
        found, want = found.view(found.real.dtype), want.view(want.real.dtype)
    assert np.isfinite(found).all(), (size, code)
    near = 4 * (ml_dtypes.finfo if code == "bfloat16" else np.finfo)(found.dtype).eps
    off = found != want  # few; to make long doubles of all takes longer than the means
    found, want = found[off].astype(np.longdouble), want[off].astype(np.longdouble)
    assert (abs(found - want) <= near * abs(want)).all()


@pytest.mark.filterwarnings("ignore:buffers. the ranks of a node cannot share")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n", [1, 3, *(pytest.param(n, marks=pytest.mark.nightly) for n in (2, 4))])
def test_no_mean_overflows_whose_values_do_not(n, way):
    def rank(comm):
        strategy, bits = made(way), []
        for code in TOPS:
            for size in (1, 9, 900, 300_000) if (code, way) == ("f4", "usual") else (1, 9, 900):
                x = given(comm.rank, size, code)
                found = [mean(strategy, x) for _ in range(3)]
                found += [
                    mean(strategy, x, weight=2),
                    mean(strategy, [x], out=[np.empty_like(x)])[0],
                ]
                # Weights that differ leave less than nothing of the smallest numbers.
                plain = np.where(np.abs(x) < 1, x.dtype.type(1), x)
                heavy = mean(strategy, plain, weight=1.25 + comm.rank)
                bits.append(bits_of(heavy).tobytes())
                heavy[2::7] = x[2::7]
                check(heavy, size, code)
                (room,) = strategy.buffers([x])
                for _ in range(2):
                    room[:] = x
                    found.append(mean(strategy, room, out=room))
                for one in found:
                    bits.append(bits_of(one).tobytes())
                    check(one, size, code)
        number = float(np.finfo("f8").max)
        assert [mean(strategy, number) == number for _ in range(3)] == [True] * 3
        assert mean(strategy, np.inf if comm.rank else 1.0) == (np.inf if n > 1 else 1)
        return bits

    found = run_ranks(rank, n)
    assert found[1:] == found[:1] * (n - 1)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_sums_do(n):
    def rank(comm):
        with np.errstate(all="ignore"):
            top = np.full(900, 1.7e308)
            found = made("usual").run(lambda: ms.get_replica_context().all_reduce("sum", top))
        return bool(np.isinf(found.local).all())

    assert run_ranks(rank, n) == [n > 1] * n


@pytest.mark.parametrize(("n", "size"), [(2, 9000), (3, 9000), (4, 9), (4, 9000), (4, 140_000)])
def test_nor_between_nodes(n, size, monkeypatch):
    """On three ranks nodes are uneven: who has folded a slice is not who sends it."""
    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", "1" if n == 2 else "2")

    def rank(comm):
        strategy = ms.MirroredStrategy()
        bits = []
        for code in ("f4",) if size > 9000 else TOPS:
            x = given(comm.rank, size, code)
            plain = np.where(np.abs(x) < 1, x.dtype.type(1), x)
            (room,) = strategy.buffers([x])
            for value, weight in ((x, None), (x, 2), (plain, 1.25 + comm.rank)):
                found = [mean(strategy, value, weight=weight)]
                for _ in range(2):
                    room[:] = value
                    found.append(mean(strategy, room, out=room, weight=weight))
                for one in found:
                    bits.append(bits_of(one).tobytes())
                    if value is plain:
                        one[2::7] = x[2::7]
                    check(one, size, code)
        return bits

    found = run_ranks(rank, n)
    assert found[1:] == found[:1] * (n - 1)


@pytest.mark.parametrize("code", ["f4", "f8", "g", "c8"])
def test_nor_where_nodes_differ(code, monkeypatch):
    """One node's sum is infinite, or only the sum of both; what was given as such stays."""
    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", "2")
    kind = np.dtype(code).type(0).real.dtype.type
    top, tiny = np.finfo(kind).max, np.finfo(kind).smallest_subnormal
    near = 4 * np.finfo(kind).eps
    columns = [  # of four ranks, and their mean
        ((top, top, -top, -top), 0),
        ((top, top, 0, 0), top / 2),
        ((0, 0, -top, -top), -top / 2),
        ((top, 0, top, 0), top / 2),
        ((top / 2, top / 4, top / 2, top / 4), top / 8 * 3),
        ((np.inf, 1, 1, 1), np.inf),
        ((1, -np.inf, top, top), -np.inf),
        ((np.inf, 1, -np.inf, 1), np.nan),
        ((np.nan, top, top, top), np.nan),
        ((4 * tiny, 0, 0, 0), tiny),
        ((tiny, tiny, tiny, tiny), tiny),
    ]
    values = np.tile(np.array([c for c, _ in columns], kind).T, (1, 900)).astype(code)
    want = np.tile(np.array([m for _, m in columns], kind), 900)
    if np.dtype(code).kind == "c":  # the parts of a number are means of their own
        values.imag = values.real[:, ::-1]

    def rank(comm):
        strategy, bits = ms.MirroredStrategy(), []
        (room,) = strategy.buffers([values[comm.rank]])
        room[:] = values[comm.rank]
        for one in (mean(strategy, values[comm.rank]), mean(strategy, room, out=room)):
            bits.append(bits_of(one).tobytes())
            np.testing.assert_allclose(one.real, want, rtol=near)
            if np.dtype(code).kind == "c":
                np.testing.assert_allclose(one.imag, want[::-1], rtol=near)
        return bits

    found = run_ranks(rank, 4)
    assert found[1:] == found[:1] * 3


@pytest.mark.parametrize("way", ["usual", "native"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_nor_along_an_axis(n, way):
    def rank(comm):
        strategy = made(way)
        for code, top in TOPS.items():
            x = np.full((5 + comm.rank, 6), top).astype(code)
            x[:, 1] = 1
            x[0, 2] = np.inf if comm.rank == 0 else x[0, 2]
            found = strategy.reduce("mean", ms.PerReplica(x), axis=0)
            assert np.isinf(np.real(found[2]))
            assert found[1] == 1
            near = 4 * (ml_dtypes.finfo if code == "bfloat16" else np.finfo)(found.dtype).eps
            assert np.isfinite(found[[0, 3, 4, 5]]).all()
            wide = np.clongdouble
            got, want = found[[0, 3]].astype(wide), x[0, [0, 3]].astype(wide)
            assert (abs(got / want - 1) <= near).all(), code
        assert np.isnan(strategy.reduce("mean", ms.PerReplica(np.zeros((0, 2))), axis=0)).all()
        return True

    assert all(run_ranks(rank, n))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(("odd", "calls"), [(1.0, 1), (np.nan, 1), (np.inf, 2)])
def test_a_nan_along_an_axis_takes_no_second_collective(n, odd, calls):
    def rank(comm):
        strategy = made("usual")
        x = np.ones((5, 6), np.float32)
        x[2, 3] = odd
        before = strategy._replicas.lockstep.session.calls
        found = strategy.reduce("mean", ms.PerReplica(x), axis=0)
        np.testing.assert_array_equal(found, [1, 1, 1, odd, 1, 1])
        return strategy._replicas.lockstep.session.calls - before

    assert run_ranks(rank, n) == [calls] * n


@pytest.mark.parametrize("way", ["usual", "native"])
@pytest.mark.parametrize("size", [1, 900])
def test_weighted_means_of_longdouble_are_exact_to_it(size, way):
    weights = [0.1, 1 / 3, 0.7]
    wide = [np.longdouble(w) for w in weights]
    values = [np.longdouble(r + 1) / 7 for r in range(3)]

    def rank(comm):
        x = np.full(size, values[comm.rank])
        strategy = made(way)
        rows = ms.IndexedSlices(x, np.arange(size), (size,))
        sliced = strategy.run(
            lambda: ms.get_replica_context().all_reduce("mean", rows, weight=weights[comm.rank])
        )
        return mean(strategy, x, weight=weights[comm.rank]), np.asarray(sliced.local)

    want = sum(v * w for v, w in zip(values, wide, strict=True)) / sum(wide)
    for dense, sliced in run_ranks(rank, 3):
        assert (abs(dense / want - 1) <= 4 * np.finfo("g").eps).all()
        assert (abs(sliced / want - 1) <= 6 * np.finfo("g").eps).all()

"""All-reduce of every dtype, in every layout, by every operation and path, against NumPy."""

from __future__ import annotations

import copy
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat.testing import run_ranks

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(code) for code in "bhilqBHILQefdgFDG"] + [BF16]
OPS = ["SUM", "MEAN", "MIN", "MAX", "PROD"]
ORDER = {"SUM": np.add, "PROD": np.multiply, "MIN": np.minimum, "MAX": np.maximum}


def reduces(op, dtype):
    return not (dtype.kind == "c" and op in ("MIN", "MAX"))


def swapped(array):
    if array.dtype == BF16:
        return array
    return array.astype(array.dtype.newbyteorder("S"))


def fixed(array):
    array = array.copy()
    array.flags.writeable = False
    return array


class Sub(np.ndarray):
    pass


# Every row gives the same values in another layout.
LAYOUTS = [
    lambda a: a,
    np.asfortranarray,
    lambda a: a[::-1, ::-1].copy()[::-1, ::-1],
    lambda a: np.repeat(a, 2, axis=1)[:, ::2],
    swapped,
    fixed,
    lambda a: a.T.copy().T,
    lambda a: a.copy().view(Sub),
]


def value(dtype, rank, shape):
    """Small whole numbers, other ones on each rank: every fold of them is exact in any order."""
    count = int(np.prod(shape))
    return ((np.arange(count) * (rank + 3) + rank) % 5 + 1).reshape(shape).astype(dtype)


def oracle(op, values, weights):
    dtype = values[0].dtype
    small = dtype in (np.float16, BF16)
    if op != "MEAN":
        wide = [v.astype(np.float32) for v in values] if small else values
        return ORDER[op].reduce(np.stack(wide), axis=0, dtype=wide[0].dtype).astype(dtype)
    wide = np.dtype("f4") if small else np.dtype("f8") if dtype.kind in "iu" else dtype
    total = sum(v.astype(wide) * wide.type(w) for v, w in zip(values, weights, strict=True))
    result = dtype if dtype.kind not in "iu" else np.dtype("f8" if dtype.itemsize > 2 else "f4")
    if dtype.kind == "c":  # by a real number, which NumPy's complex division rounds once more
        total.real /= sum(weights)
        total.imag /= sum(weights)
        return total
    return (total / wide.type(sum(weights))).astype(result)


@every("op", OPS)
@every("shape", [(3, 4), (40, 30)])
@every("size", [1, 2, 3])
def test_every_dtype_and_layout(strategy_on, op, shape, size):
    """The ranks use different layouts at the same time."""

    def rank(comm):
        def fn():
            out = []
            for dtype in DTYPES:
                if not reduces(op, dtype):
                    continue
                layouts = LAYOUTS if shape == (3, 4) else LAYOUTS[:5]
                for shift in range(len(layouts)):
                    given = layouts[(shift + comm.rank) % len(layouts)](
                        value(dtype, comm.rank, shape)
                    )
                    before = given.tobytes()
                    got = ms.get_replica_context().all_reduce(op, given)
                    assert given.tobytes() == before
                    assert got.flags.writeable
                    assert not np.shares_memory(got, given)
                    out.append(got)
            return out

        return [leaf.local for leaf in strategy_on(comm).run(fn)]

    everyones = run_ranks(rank, size)
    wanted = []
    for dtype in DTYPES:
        if reduces(op, dtype):
            inputs = [value(dtype, r, shape) for r in range(size)]
            repeats = 8 if shape == (3, 4) else 5
            wanted += [oracle(op, inputs, [1] * size)] * repeats
    for results in everyones:
        for got, want in zip(results, wanted, strict=True):
            assert got.dtype == want.dtype
            assert np.array_equal(got, want), (op, got.dtype)


SPECIAL = [
    [np.nan, 1.0, np.inf, -0.0, 0.0, -np.inf, 3.0, -np.inf],
    [2.0, np.nan, 1.0, -0.0, -0.0, -np.inf, -3.0, np.inf],
    [5.0, 4.0, np.nan, -0.0, 1e-45, -1.0, np.nan, 0.0],
]


@every("op", ["SUM", "MIN", "MAX", "PROD"])
@every("copies", [1, 40])
@every("code", ["e", "f", "d", "g", "bfloat16"])
@every("size", [1, 2, 3])
def test_nan_infinity_and_minus_zero(op, copies, code, size):
    dtype = BF16 if code == "bfloat16" else np.dtype(code)

    def rank(comm):
        given = np.tile(np.array(SPECIAL[comm.rank]), copies).astype(dtype)
        strategy = ms.MirroredStrategy()
        return strategy.run(lambda: ms.get_replica_context().all_reduce(op, given)).local

    inputs = [np.tile(np.array(SPECIAL[r]), copies).astype(dtype) for r in range(size)]
    with np.errstate(all="ignore"):
        want = oracle(op, inputs, [1] * size).astype(np.float64)
    for got in run_ranks(rank, size):
        assert got.dtype == dtype
        assert np.array_equal(got.astype(np.float64), want, equal_nan=True)
    if op == "SUM":
        assert np.signbit(got.astype(np.float64))[3]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sums_of_integers_wrap_and_means_do_not(size):
    def rank(comm):
        top = {code: np.full(3, np.iinfo(code).max, code) for code in "bBhHiIlL"}

        def fn():
            ctx = ms.get_replica_context()
            return ctx.all_reduce("SUM", top), ctx.all_reduce("MEAN", top)

        return ms.MirroredStrategy().run(fn)

    for sums, means in run_ranks(rank, size):
        for code in "bBhHiIlL":
            info = np.iinfo(code)
            span = int(info.max) - int(info.min) + 1
            wrapped = (int(info.max) * size - int(info.min)) % span + int(info.min)
            assert sums[code].local.tolist() == [wrapped] * 3
            mean = means[code].local
            assert mean.dtype == (np.float64 if np.dtype(code).itemsize > 2 else np.float32)
            assert mean.tolist() == [float(info.max)] * 3


def test_large_leaves_travel_alone_and_small_ones_together(strategy_on):
    """Above 64 KiB alone, below in packs by dtype, empty ones not at all."""
    specs = {
        "large": ((130, 130), "f8"), "small": ((50,), "f8"), "none": ((0, 3), "f8"),
        "scalar": ((), "f4"), "int": ((3, 3), "i8"), "large_max": ((40000,), "f4"),
    }  # fmt: skip

    def rank(comm):
        tree = {k: value(np.dtype(code), comm.rank, shape) for k, (shape, code) in specs.items()}
        strategy = strategy_on(comm)
        ops = ("SUM", "MAX", "MEAN")
        got = strategy.run(lambda: [ms.get_replica_context().all_reduce(op, tree) for op in ops])
        return [{k: v.local for k, v in one.items()} for one in got]

    for results in run_ranks(rank, 3):
        for op, result in zip(("SUM", "MAX", "MEAN"), results, strict=True):
            for name, (shape, code) in specs.items():
                want = oracle(op, [value(np.dtype(code), r, shape) for r in range(3)], [1] * 3)
                assert result[name].shape == shape
                assert result[name].dtype == want.dtype
                assert np.array_equal(result[name], want)


def test_same_array_twice_in_a_tree_and_stride_zero():
    def rank(comm):
        row = np.arange(4.0) + comm.rank
        wide = np.broadcast_to(row, (1000, 4))
        tree = [row, row, wide, row[::-1]]
        got = ms.MirroredStrategy().run(lambda: ms.get_replica_context().all_reduce("SUM", tree))
        return [leaf.local for leaf in got]

    total = 3 * np.arange(4.0) + 3
    for one, two, wide, back in run_ranks(rank, 3):
        assert np.array_equal(one, total)
        assert np.array_equal(two, total)
        assert not np.shares_memory(one, two)
        assert np.array_equal(wide, np.broadcast_to(total, (1000, 4)))
        assert np.array_equal(back, total[::-1])


def test_numbers_come_back_as_numbers():
    def rank(comm):
        tree = (1, 2.5, 1j, np.float32(2), np.array(3.0))
        got = ms.MirroredStrategy().run(lambda: ms.get_replica_context().all_reduce("SUM", tree))
        return [leaf.local for leaf in got]

    for got in run_ranks(rank, 2):
        assert [type(x) for x in got] == [
            np.int64, np.float64, np.complex128, np.float32, np.ndarray,
        ]  # fmt: skip
        assert got == [2, 5, 2j, 4, 6]


@pytest.mark.parametrize("tree", [[], {}, ([], {})])
def test_nothing_gives_nothing(tree):
    def rank(comm):
        strategy, out = ms.MirroredStrategy(), copy.deepcopy(tree)
        assert strategy.all_reduce("SUM", tree, out=out) is out
        assert strategy.all_reduce_start("SUM", tree, out=out).wait() is out
        return strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", tree))

    assert run_ranks(rank, 2) == [tree, tree]


@pytest.mark.parametrize("kind", [ms.MirroredStrategy, ms.OneDeviceStrategy])
@pytest.mark.parametrize(
    ("op", "given"),
    [("mean", {}), ("mean", {"weight": 0.3}), ("sum", {}), ("max", {})],
)
def test_one_rank_has_nothing_to_reduce(kind, op, given):
    """In place and into other arrays no memory is made; fresh results are one copy."""
    strategy = kind("/cpu:0") if kind is ms.OneDeviceStrategy else kind()
    x = [np.random.default_rng(size).standard_normal(size) for size in (200_000, 50_000, 3)]
    wanted = [array.copy() for array in x]
    nbytes = sum(array.nbytes for array in x)

    def peak(*args, **kwargs):
        tracemalloc.start()
        found = ms.get_replica_context().all_reduce(op, *args, **kwargs, **given)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        np.testing.assert_equal(found, wanted)
        return most / nbytes, found

    def fn():
        for _ in range(3):  # found out, then remembered
            outs = [np.zeros_like(array) for array in x]
            assert peak(x, out=x)[0] < 0.1
            assert peak(x, out=outs)[0] < 0.1
            most, fresh = peak(x)
            assert most < 1.1
            assert all(f.flags.writeable for f in fresh)
            assert not any(np.shares_memory(f, v) for f in fresh for v in x)

    strategy.run(fn)


@pytest.mark.parametrize("kind", [ms.MirroredStrategy, ms.OneDeviceStrategy])
def test_one_rank_reads_all_before_it_writes_over_it(kind):
    strategy = kind("/cpu:0") if kind is ms.OneDeviceStrategy else kind()
    line = np.arange(30_000.0)
    one, two, rest = line[:20_000], line[10_000:30_000], np.arange(20_000.0)
    outs = [two, rest]
    strategy.run(lambda: ms.get_replica_context().all_reduce("sum", [one, two], out=outs))
    np.testing.assert_array_equal(two, np.arange(20_000.0))
    np.testing.assert_array_equal(rest, np.arange(10_000.0, 30_000.0))


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (
            np.float64(3),
            r"is np.float64\(3.0\) \(float64\); expected an array to write to, float64\[\]",
        ),
        (None, r"is None \(NoneType\); expected an array to write to, float64\[\]"),
    ],
)
def test_a_number_has_no_place_for_a_result(place, words):
    with pytest.raises(ms.LeafTypeError, match=words):
        ms.OneDeviceStrategy("cpu").all_reduce("SUM", [1.0], out=[place])

"""Class C: arrays of any kind are reduced and gathered rightly, or refused on every rank.

Each test is what one rank does. What is right is said by NumPy, from plain copies of all parts.
"""

from __future__ import annotations

import array
import functools
import importlib
import importlib.util
import sys
import threading
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.testing import same

sys.path.insert(0, str(Path(__file__).parent))
rows = importlib.import_module("rows")
arrays = rows.Class(__file__)
ctx = ms.get_replica_context
FOLDS = {"SUM": np.add, "MEAN": np.add, "MAX": np.maximum}


def reduce_all(comm, op, value):
    strategy = ms.MirroredStrategy(comm=comm)
    found = []
    strategy.run(lambda: found.append(ctx().all_reduce(op, value)))
    return found[0]


def gather_all(comm, value, axis=0):
    strategy = ms.MirroredStrategy(comm=comm)
    return strategy.gather(ms.PerReplica(value), axis)


def check(comm, make, ops=("SUM", "MEAN", "MAX")):
    """Check reductions of ``make(rank)`` against NumPy's of plain copies."""
    mine = make(comm.rank)
    before = np.array(mine, copy=True)
    parts = [np.array(make(rank), order="C") for rank in range(comm.size)]
    parts = [part.astype(part.dtype.newbyteorder("=")) for part in parts]
    for op in ops:
        got = reduce_all(comm, op, mine)
        want = functools.reduce(FOLDS[op], parts)  # not np.sum: NumPy has no 65th dimension
        want = want / comm.size if op == "MEAN" else want
        assert got.shape == before.shape
        assert got.dtype.isnative
        np.testing.assert_allclose(got, want, rtol=1e-6)
        same(comm, got)
    assert np.array_equal(np.asarray(mine), before)


def refused(comm, value, *words, ranks=None, op="SUM"):
    """Check that the value is refused on all ranks where some have it, and that they continue."""
    bad = ranks is None or comm.rank in ranks
    with pytest.raises(TypeError) as caught:
        reduce_all(comm, op, {"leaf": value if bad else np.ones(2)})
    assert "leaf" in str(caught.value)
    for word in words:
        assert word in str(caught.value)
    assert float(reduce_all(comm, "SUM", 1.0)) == comm.size


def steps(shape, rank, dtype="f8"):
    return (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 7 + rank + 1).astype(dtype)


@arrays.row
def test_c1_strides_of_all_kinds(comm):
    for n in (4, 3000):
        check(comm, lambda r: steps((2 * n,), r)[::2])  # noqa: B023
        check(comm, lambda r: steps((n,), r)[::-1])  # noqa: B023
        check(comm, lambda r: np.broadcast_to(steps((3,), r), (n, 3)))  # noqa: B023
        check(comm, lambda r: steps((n, 4), r)[1:, 1:3])  # noqa: B023
        whole = gather_all(comm, steps((2 * n,), comm.rank)[::-2])
        want = np.concatenate([steps((2 * n,), r)[::-2] for r in range(comm.size)])
        assert np.array_equal(whole, want)


@arrays.row
def test_c2_fortran_order_on_some_ranks(comm):
    for shape in ((2, 3), (50, 70)):
        check(comm, lambda r: np.array(steps(shape, r), order="F" if r % 2 else "C"))  # noqa: B023
        mine = np.array(steps(shape, comm.rank), order="F" if comm.rank % 2 else "C")
        want = np.concatenate([steps(shape, r) for r in range(comm.size)], axis=1)
        assert np.array_equal(gather_all(comm, mine, 1), want)


@arrays.row
def test_c3_no_dimension_no_element_many_dimensions(comm):
    for shape in ((), (0,), (0, 3), (3, 0, 2), (1,) * 32, (1,) * 62 + (2, 2)):
        check(comm, lambda r: steps(shape, r))  # noqa: B023
    got = reduce_all(comm, "SUM", {"array": np.array(1.5), "number": 1.5})
    assert isinstance(got["array"], np.ndarray)
    assert isinstance(got["number"], np.float64)


@arrays.row
def test_c4_bool(comm):
    for op in ("SUM", "PROD", "MEAN"):
        refused(comm, np.ones(2, bool), "bool", "Cast it", op=op)
    assert reduce_all(comm, "MAX", np.array([False, comm.rank == 0])).tolist() == [False, True]
    refused(comm, True, "bool", ranks=[1])
    whole = gather_all(comm, np.array([True, comm.rank == 0]))
    assert whole.dtype == bool
    assert whole.tolist() == [True, True] + [True, False] * (comm.size - 1)


@arrays.row
def test_c5_complex_and_longdouble(comm):
    for n in (3, 3000):
        check(comm, lambda r: steps((n,), r, np.longdouble))  # noqa: B023
        for dtype in ("c8", "c16", np.clongdouble):
            turn = np.dtype(dtype).type(1 + 2j)
            check(comm, lambda r: steps((n,), r, dtype) * turn, ops=("SUM", "MEAN"))  # noqa: B023
    for dtype in ("c8", "c16", np.clongdouble):
        refused(comm, np.ones(2, dtype), "complex", op="MAX")


@arrays.row
def test_c6_float16(comm):
    big = np.full(3, 40000, np.float16)
    total = reduce_all(comm, "SUM", big)
    assert total.dtype == np.float16
    assert np.isinf(total).all()
    assert reduce_all(comm, "MEAN", big).tolist() == [40000.0] * 3  # added up in float32
    check(comm, lambda r: steps((1000,), r, "f2"))


@arrays.row
def test_c7_bfloat16_and_float8(comm):
    value = np.array([1.5, 2.0, -3.0], ml_dtypes.bfloat16)
    for n in (1, 2000):
        got = reduce_all(comm, "SUM", np.tile(value, n))
        assert got.dtype == ml_dtypes.bfloat16
        assert got.astype("f4").tolist() == [1.5 * comm.size, 2.0 * comm.size, -3.0 * comm.size] * n
    for name in ("float8_e5m2", "float8_e4m3fn", "int4"):
        refused(comm, np.ones(3, getattr(ml_dtypes, name)), name)
        refused(comm, np.ones(3000, getattr(ml_dtypes, name)), name, ranks=[0])


@arrays.row
def test_c8_what_is_no_number(comm):
    bad = {
        "object": np.array([1, None]),
        "U1": np.array(["a", "b"]),
        "S1": np.array([b"a", b"b"]),
        "V4": np.zeros(2, "V4"),
        "datetime64": np.array(["2020"], "M8[D]"),
        "timedelta64": np.array([1], "m8[s]"),
        "'x'": np.zeros(2, [("x", "f8")]),
        "NoneType": None,
    }
    for word, value in bad.items():
        refused(comm, value, word)
        refused(comm, value, word, f"replica {comm.size - 1}" if comm.rank == 0 else "",
                ranks=[comm.size - 1])  # fmt: skip


@arrays.row
def test_c9_byte_orders(comm):
    for n in (3, 3000):
        for code in ("f8", "i4", "c16"):
            ops = ["SUM"] if code == "c16" else ["SUM", "MAX"]
            check(comm, lambda r: steps((n,), r, (">" if r % 2 else "<") + code), ops)  # noqa: B023
    whole = gather_all(comm, steps((2,), comm.rank, ">i4" if comm.rank else "<i4"))
    assert whole.dtype.isnative
    assert whole.tolist() == [x for r in range(comm.size) for x in (r + 1, r + 2)]


@arrays.row
def test_c10_read_only(comm):
    def frozen(rank):
        value = steps((1000,), rank)
        value.flags.writeable = False
        return value

    check(comm, frozen)
    with ms.MirroredStrategy(comm=comm).scope():
        v = ms.Variable(frozen(0))
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(v)[0] = 9.0
    with pytest.raises(TypeError, match="assign"):
        np.add(v, 1, out=v)
    assert float(v.assign(frozen(3))[0]) == 4.0


@arrays.row
def test_c11_overlapping_memory(comm):
    base = steps((5,), comm.rank)
    before = base.copy()
    first, second, back = reduce_all(comm, "SUM", [base, base, base[::-1]])
    want = sum(steps((5,), r) for r in range(comm.size))
    assert first.tolist() == second.tolist() == back[::-1].tolist() == want.tolist()
    first[:] = 0
    assert second.tolist() == want.tolist()
    assert np.array_equal(base, before)
    with ms.MirroredStrategy(comm=comm).scope():
        v = ms.Variable(np.arange(4.0))
    assert v.assign(np.asarray(v)[::-1]).numpy().tolist() == [3, 2, 1, 0]
    assert v.assign_sub(v).numpy().tolist() == [0] * 4


class Exchanged:
    """An array of another package, as far as DLPack goes."""

    def __init__(self, data):
        self.data = data

    def __dlpack__(self, **named):
        return self.data.__dlpack__(**named)

    def __dlpack_device__(self):
        return self.data.__dlpack_device__()


class Sub(np.ndarray):
    """A subclass."""


def series(values):
    """Return a pandas Series, or an array of that content where there is no pandas."""
    found = importlib.util.find_spec("pandas")
    return importlib.import_module("pandas").Series(values) if found else np.array(values)


@arrays.row
def test_c12_what_other_packages_call_arrays(comm):
    one = [1.0, 2.0, 3.0]
    kinds = [
        series(one),
        array.array("d", one),
        memoryview(np.array(one)),
        Exchanged(np.array(one)),
        np.array(one).view(Sub),
        np.array(one),
    ]
    for kind in kinds:
        got = reduce_all(comm, "SUM", kind if comm.rank == 0 else np.array(one))
        assert type(got) is np.ndarray
        assert got.tolist() == [comm.size * x for x in one]
    assert reduce_all(comm, "SUM", [1, 2.0, np.float32(3)]) == [comm.size * x for x in one]
    refused(comm, np.ma.array(one, mask=[1, 0, 0]), "masked", "filled", ranks=[1])
    refused(comm, series(["a", "b"]), ranks=[1])


@arrays.row
def test_c15_objects_that_cannot_be_packed(comm):
    strategy = ms.MirroredStrategy(comm=comm)
    odd = threading.Lock() if comm.rank == 1 else {"fine": 1}
    held = strategy.run(lambda: [odd] if comm.rank == 1 else ["fine"])
    with pytest.raises(TypeError):
        strategy.experimental_local_results(held)
    assert strategy.reduce("SUM", ms.PerReplica(1), None) == comm.size


@arrays.row
def test_c16_many_tiny_leaves_and_a_large_one(comm):
    """No leaf by itself, and no copy of what is large."""
    tiny = {i: np.float32(i % 3) for i in range(20_000)}
    got = reduce_all(comm, "SUM", tiny)
    assert [float(x) for x in got.values()] == [comm.size * (i % 3) for i in range(20_000)]
    if comm.size > 2 or type(comm).__name__ == "LoopbackComm":  # threads share one memory
        return
    large = np.ones(4 * 1024 * 1024)
    reduce_all(comm, "SUM", large)  # shared memory, and a compiler, are there from the first time
    tracemalloc.start()
    total = reduce_all(comm, "SUM", large)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total[-1] == comm.size
    assert peak < 1.1 * large.nbytes  # the result, and nothing else


@rows.starts_jobs
@rows.JOB_SIZES
def test_the_class_on_mpi(size, tmp_path):
    arrays.on_mpi(size, tmp_path)


if __name__ == "__main__":
    arrays.main()

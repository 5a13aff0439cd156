"""Class A: the ranks do not make the same call. Every rank is told, at once, in words that help.

Each test is what one rank does. The last rank is the odd one out.
"""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.testing import RanksFailed, run_ranks

sys.path.insert(0, str(Path(__file__).parent))
rows = importlib.import_module("rows")
mismatch = rows.Class(__file__)

SYNC, AGG = ms.VariableSynchronization, ms.VariableAggregation
ctx = ms.get_replica_context


def ones(*shape, dtype=np.float64):
    return np.ones(shape, dtype)


class Odd:
    """A strategy, and whether this rank is the odd one."""

    def __init__(self, comm):
        self.strategy = ms.MirroredStrategy(comm=comm)
        self.rank, self.last = comm.rank, comm.size - 1
        self.here = comm.rank == self.last

    def all_reduce(self, op, value, **named):
        def fn():
            ctx().all_reduce(op, value, **named)

        self.strategy.run(fn)

    def pick(self, usual, odd):
        return odd if self.here else usual

    def twins(self, **kind):
        with self.strategy.scope():
            return [ms.Variable(1.0 + i, name="twin", **kind) for i in range(2)]

    def differ(self, call, *words):
        """Check that the call is refused here, with these words, and that all continue."""
        with pytest.raises(ms.LockstepError) as caught:
            call()
        text = str(caught.value)
        for word in (f"rank {self.last}", f"this is rank {self.rank} of {self.last + 1}", *words):
            assert word in text
        assert float(self.strategy.reduce("SUM", ms.PerReplica(1.0), None)) == self.last + 1
        return text


def line_of(marker):
    lines = Path(__file__).read_text().splitlines()
    return f"test_mismatch.py:{next(n for n, text in enumerate(lines, 1) if text.endswith(marker))}"


@mismatch.row
def test_a1_two_calls_swapped(comm):
    odd = Odd(comm)

    def usual():
        odd.strategy.reduce("SUM", ms.PerReplica(ones(3)), None)  # usual first
        odd.strategy.gather(ms.PerReplica(ones(3)), 0)

    def swapped():
        odd.strategy.gather(ms.PerReplica(ones(3)), 0)  # swapped first
        odd.strategy.reduce("SUM", ms.PerReplica(ones(3)), None)

    text = odd.differ(odd.pick(usual, swapped), line_of("# usual first"), "reduce(SUM")
    assert line_of("# swapped first") in text
    assert "gather(axis=0" in text


@mismatch.row
def test_a2_another_reduce_op(comm):
    odd = Odd(comm)
    for usual, other in itertools.combinations(("SUM", "MEAN", "MAX", "MIN", "PROD"), 2):
        op, per = odd.pick(usual, other), ms.PerReplica(ones(3))
        odd.differ(lambda: odd.all_reduce(op, ones(3)), usual, other)  # noqa: B023
        odd.differ(lambda: odd.strategy.reduce(op, per, 0), usual, other)  # noqa: B023
        odd.differ(lambda: odd.strategy.reduce(op, per, None), usual, other)  # noqa: B023


@mismatch.row
def test_a3_another_destination(comm):
    odd = Odd(comm)
    a, b = odd.twins()
    for usual, other in ((a, b), (a, "cpu:0"), ("cpu:0", "cpu:1")):
        to, finer = odd.pick(usual, other), odd.strategy.extended
        odd.differ(lambda: finer.reduce_to("SUM", ms.PerReplica(1.0), to))  # noqa: B023
        odd.differ(lambda: finer.batch_reduce_to("SUM", [(ms.PerReplica(1.0), to)]))  # noqa: B023
        odd.differ(lambda: finer.broadcast_to(ones(3), to))  # noqa: B023


@mismatch.row
def test_a4_another_shape(comm):
    odd = Odd(comm)
    shapes = [((3,), (4,)), ((3000,), (3001,)), ((2, 3), (3, 2)), ((6,), (2, 3)), ((), (1,))]
    for usual, other in shapes:
        value = ones(*odd.pick(usual, other))
        odd.differ(lambda: odd.all_reduce("SUM", value))  # noqa: B023
    tree = {"layers": [{"kernel": ones(2, 2), "bias": ones(2)} for _ in range(500)]}
    if odd.here:
        tree["layers"][3]["kernel"] = ones(2, 3)
    odd.differ(lambda: odd.all_reduce("SUM", tree), "layers/3/kernel: float64[2,2]", "[2,3]")


@mismatch.row
def test_a5_another_dtype(comm):
    odd = Odd(comm)
    pairs = [("i8", "f8"), ("f4", "f8"), ("i4", "u4"), ("f2", "f4"), ("i4", "f8"), ("c8", "f8")]
    for usual, other in pairs:
        names = np.dtype(usual).name, np.dtype(other).name
        value = ones(2, 2, dtype=odd.pick(usual, other))
        per = ms.PerReplica(value)
        odd.differ(lambda: odd.all_reduce("MEAN", value), *names)  # noqa: B023
        odd.differ(lambda: odd.strategy.reduce("MEAN", per, None), *names)  # noqa: B023
        odd.differ(lambda: odd.strategy.reduce("MEAN", per, 0), *names)  # noqa: B023
        odd.differ(lambda: odd.strategy.gather(per, 0), *names)  # noqa: B023


@mismatch.row
def test_a6_another_structure(comm):
    odd = Odd(comm)
    one = ones(1)
    trees = [
        ({"a": one}, {"b": one}),
        ({"a": one}, {"a": one, "b": one}),
        ([one], (one,)),
        ({"a": {"b": [one, one]}}, {"a": {"b": [one]}}),
        ({"a": one}, OrderedDict(a=one)),
    ]
    for usual, other in trees:
        tree = odd.pick(usual, other)
        odd.differ(lambda: odd.all_reduce("SUM", tree))  # noqa: B023
        odd.differ(lambda: odd.strategy.run(lambda: tree))  # noqa: B023
        odd.differ(lambda: odd.strategy.run(lambda: ctx().merge_call(print, (tree,))))  # noqa: B023
    tree = {"layers": [one, None if odd.here else one]}
    with pytest.raises(TypeError, match="layers/1"):
        odd.all_reduce("SUM", tree)


@mismatch.row
def test_a7_another_insertion_order_is_the_same(comm):
    odd = Odd(comm)
    tree = {key: np.full(2, float(ord(key))) for key in odd.pick("abcdef", "fedcba")}
    got = odd.strategy.run(lambda: ctx().all_reduce("SUM", tree))
    assert {key: value.local.tolist() for key, value in got.items()} == {
        key: [comm.size * ord(key)] * 2 for key in tree
    }


@mismatch.row
def test_a8_another_axis_and_uneven_parts(comm):
    odd = Odd(comm)
    axis = odd.pick(0, 1)
    odd.differ(lambda: odd.strategy.gather(ms.PerReplica(ones(2, 2)), axis), "axis=0", "axis=1")
    odd.differ(lambda: odd.strategy.reduce("SUM", ms.PerReplica(ones(2, 2)), axis))
    odd.differ(lambda: odd.strategy.run(lambda: ctx().all_gather(ones(2, 2), axis)))
    length = (3, 0, 5)[comm.rank]
    whole = odd.strategy.gather(ms.PerReplica(np.full((length, 2), comm.rank)), 0)
    assert whole[:, 0].tolist() == [0, 0, 0, 2, 2, 2, 2, 2][: 3 if comm.size == 2 else 8]


@mismatch.row
def test_a9_another_variable_of_the_same_name(comm):
    odd = Odd(comm)
    a, b = odd.twins()
    summed = odd.pick(*odd.twins(aggregation=AGG.SUM))
    c, d = odd.twins(synchronization=SYNC.ON_READ, aggregation=AGG.SUM)
    mine, own, strategy = odd.pick(a, b), odd.pick(c, d), odd.strategy
    calls = [
        lambda: mine.assign(5.0),
        lambda: strategy.run(lambda: [mine.assign(5.0)][:0]),
        lambda: strategy.run(lambda: [summed.assign(5.0)][:0]),
        lambda: strategy.extended.update(mine, lambda v: v.assign(5.0)),
        lambda: own.assign(5.0),
        lambda: own.read_value(),
        lambda: strategy.reduce("SUM", own, None),
        lambda: strategy.reduce("MEAN", mine, None),
        lambda: strategy.experimental_local_results(own),
        lambda: odd.all_reduce("SUM", own),
        lambda: strategy.run(lambda: ctx().merge_call(lambda s, v: None, (mine,))),
    ]
    for call in calls:
        odd.differ(call)
    assert [float(v._component()) for v in (a, b, c, d)] == [1.0, 2.0, 1.0, 2.0]


@mismatch.row
def test_a10_a_variable_on_some_ranks_or_with_another_value(comm):
    odd = Odd(comm)
    with odd.strategy.scope():
        odd.differ(odd.pick(lambda: ms.Variable(1.0), lambda: odd.strategy.run(lambda: None)))
        odd.differ(lambda: ms.Variable(1.0, name=odd.pick("a", "b")), "'a:0'", "'b:0'")
        odd.differ(lambda: ms.Variable(1.0, trainable=odd.here))
        made = ms.Variable(np.full(1000, 7.0 + comm.rank), name="made")
    assert set(made.numpy()) == {7.0}


@mismatch.row
def test_a11_a_call_on_one_rank_only_meets_the_next(comm):
    odd = Odd(comm)

    def step():
        if odd.here:
            ctx().all_reduce("SUM", 1.0)  # one rank

    odd.differ(lambda: odd.strategy.run(step), "all_reduce(SUM", line_of("# one rank"))


def test_a11_a_call_on_one_rank_only_meets_the_end():
    def rank(comm):
        strategy = ms.MirroredStrategy()
        if comm.rank == 0:
            strategy.reduce("SUM", ms.PerReplica(1.0), None)

    with pytest.raises(RanksFailed) as caught:
        run_ranks(rank, 3)
    assert set(caught.value.errors) == {0}
    assert "ranks 1, 2 have left the program" in str(caught.value)


@mismatch.row
def test_a13_a_mismatch_caught_a_thousand_times(comm):
    odd = Odd(comm)
    rng = np.random.default_rng(0)
    with odd.strategy.scope():
        count = ms.Variable(0, name="count")
    good = 0
    for which in rng.integers(0, 4, 1000):
        value = ones(3 + odd.here) if which == 0 else ones(3)
        op = odd.pick("SUM", "MAX") if which == 1 else "SUM"
        try:
            odd.all_reduce(op, value)
            count.assign_add(1)
            good += 1
        except ms.LockstepError:
            assert which < 2
    assert int(count.numpy()) == good > 400


@rows.starts_jobs
@rows.JOB_SIZES
def test_a14_ranks_with_other_options(size, tmp_path):
    """Found before the first call; the other ranks hear it too, and the job ends with a code."""
    assert mismatch.on_mpi(size, tmp_path, "options").count("refused") == size


def options():
    from mpi4py import MPI

    last = MPI.COMM_WORLD.size - 1
    if MPI.COMM_WORLD.rank == last:
        os.environ["MPISTRAT_TIMEOUT"] = "17"
    with pytest.raises(ms.PreflightError) as caught:
        ms.MirroredStrategy()
    assert f"MPISTRAT_TIMEOUT: 1800.0 on rank{'s' if last > 1 else ''} 0" in str(caught.value)
    assert f"17.0 on rank {last}" in str(caught.value)
    print("refused", flush=True)


@mismatch.row
def test_a15_functions_that_differ_are_known_by_their_calls(comm):
    """Names of functions are not compared: wrappers and lambdas on one rank are fine."""
    odd = Odd(comm)
    same = odd.pick(lambda s: s.reduce("SUM", ms.PerReplica(1.0), None), lambda s: inner(s))

    def inner(strategy):
        return strategy.reduce("SUM", ms.PerReplica(1.0), None)

    assert float(odd.strategy.run(lambda: ctx().merge_call(same)).local) == comm.size
    other = odd.pick(inner, lambda s: s.gather(ms.PerReplica(ones(1)), 0)[0])
    odd.differ(lambda: odd.strategy.run(lambda: ctx().merge_call(other)), "reduce", "gather")


@rows.starts_jobs
@rows.JOB_SIZES
def test_the_class_on_mpi(size, tmp_path, monkeypatch):
    monkeypatch.setenv("MPISTRAT_NUMBA", "0")  # no numbers are compared; the threads above have it
    mismatch.on_mpi(size, tmp_path)


if __name__ == "__main__":
    options() if sys.argv[1:] else mismatch.main()

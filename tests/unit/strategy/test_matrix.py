"""The matrix of variables, cell by cell: every kind, every place, everything that can be done.

A row says what is done and where, and has a cell for each kind of variable: how what the replicas
have or write becomes what is read or written. Expected numbers are plain arithmetic on lists.
"""

from __future__ import annotations

import functools
import operator
from typing import NamedTuple

import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat.shm.storage import NodeStorage
from mpistrat.testing import run_ranks

Agg, Sync = ms.VariableAggregation, ms.VariableSynchronization
ctx = ms.get_replica_context
VIEWS = {"global": ms.MirroredStrategy, "local": ms.MultiWorkerMirroredStrategy}
KINDS = [(sync, agg) for sync in (Sync.ON_WRITE, Sync.ON_READ) for agg in Agg]
SIZE, AT, START, SIX = 3, 1, 3.0, 6.0
REFUSED, DIFFER, UNKNOWN = "ValueError", "LockstepError", "NotImplementedError"

# What is done to a copy with one operand.
DEEDS = {
    "assign": lambda copy, x: x,
    "assign_add": operator.add,
    "assign_sub": operator.sub,
    "scatter_add": operator.add,
    "scatter_sub": operator.sub,
    "scatter_mul": operator.mul,
    "scatter_div": operator.truediv,
    "scatter_min": min,
    "scatter_max": max,
    "scatter_update": lambda copy, x: x,
}

# Cells of writes: from what each replica writes to the operands of each replica's copy.
CELLS = {
    "own": lambda xs: [[x] for x in xs],
    "sum": lambda xs: [[sum(xs)]] * len(xs),
    "mean": lambda xs: [[sum(xs) / len(xs)]] * len(xs),
    "first": lambda xs: [[xs[0]]] * len(xs),
    "share": lambda xs: [[x / len(xs)] for x in xs],
    "shared": lambda xs: CELLS["share"](xs) if len(set(xs)) == 1 else DIFFER,
    "all": lambda xs: [xs] * len(xs),
    "means": lambda xs: [[x / len(xs) for x in xs]] * len(xs),
    "alike": lambda xs: [[x] for x in xs] if len(set(xs)) == 1 else DIFFER,
    "no": lambda xs: REFUSED,
    "never": lambda xs: UNKNOWN,
}


class Row(NamedTuple):
    """One row: a write.

    Attributes:
      where: Who writes: ``"replica"``, ``"cross"``, ``"merge"``, ``"default"``, ``"update"``.
      deed: The method.
      what: ``"own"``: replica i writes 2 * i + 2. ``"same"``: all write 6. ``"per replica"``: all
        replicas' values are given at once, in cross-replica code.
      cells: A key of `CELLS` for each of `KINDS`.
    """

    where: str
    deed: str
    what: str
    cells: str

    def __str__(self) -> str:
        return f"{self.where}-{self.deed}-{self.what}".replace(" ", "_")


def rows():
    for deed in ("assign", "assign_add", "assign_sub"):
        #                           ON_WRITE: NONE SUM MEAN FIRST   ON_READ: NONE SUM MEAN FIRST
        yield Row("replica", deed, "own", "alike sum mean first     own own own own")
        yield Row("replica", deed, "same", "own sum own own         own own own own")
        owned = "own share own own" if deed == "assign" else "own no own own"
        proved = "alike shared alike alike" if deed == "assign" else "alike no alike alike"
        for where in ("cross", "merge", "default"):
            yield Row(where, deed, "same", f"own own own own {owned}")
            yield Row(where, deed, "own", f"alike alike alike alike {proved}")
            yield Row(where, deed, "per replica", "no no no no      no no no no")
        yield Row("update", deed, "same", "own own own own          own own own own")
        yield Row("update", deed, "own", "alike alike alike alike   own own own own")
    for deed in [deed for deed in DEEDS if deed.startswith("scatter")]:
        folds = deed[8:] in ("add", "sub", "mul", "div")
        replica = "alike all means first" if folds else "alike never never first"
        same = "own all means own" if folds else "own never never own"
        cross = "own own own own" if folds else "own never never own"
        none = "  never never never never"
        yield Row("replica", deed, "own", replica + none)
        yield Row("replica", deed, "same", same + none)
        for where in ("cross", "merge", "default"):
            yield Row(where, deed, "same", cross + none)
            yield Row(where, deed, "own", cross.replace("own", "alike") + none)
            per = cross.replace("own", "no")
            yield Row(where, deed, "per replica", per + none)
        yield Row("update", deed, "same", "own own own own          own own own own")
        yield Row("update", deed, "own", "alike alike alike alike   own own own own")


ROWS = list(rows())


def attempt(do):
    """Return the name of the kind of error, or nothing; never a stray one."""
    try:
        do()
    except ms.LockstepError:
        return DIFFER
    except NotImplementedError:
        return UNKNOWN
    except ValueError:
        return REFUSED
    return ""


def write(strategy, comm, row, v):
    """Do what a row says."""
    x = {"same": SIX, "own": 2.0 * comm.rank + 2.0, "per replica": None}[row.what]
    value = (
        np.full(SIZE, x) if x is not None else ms.PerReplica(np.full(SIZE, 2.0 * comm.rank + 2.0))
    )
    if row.deed.startswith("scatter"):
        made = ms.IndexedSlices([2.0 * comm.rank + 2.0 if x is None else x], [AT])
        value = ms.PerReplica(made) if x is None else made

    def deed(variable=v, value=value):
        got = getattr(variable, row.deed)(value)
        assert got is variable  # writes give the variable back

    if row.where == "default":
        deed()
    elif row.where == "cross":
        with strategy.scope():
            deed()
    elif row.where == "replica":
        strategy.run(deed)
    elif row.where == "merge":
        strategy.run(lambda: ctx().merge_call(lambda s: deed()))
    else:
        strategy.extended.update(v, lambda var: deed(var))


def copies(comm, v):
    """Every rank's own copy, all of its elements."""
    mine = np.array(v._component())
    meeting = v.strategy.gather(ms.PerReplica(mine[np.newaxis]), 0)
    return meeting.tolist()


def variable(strategy, kind, value, kept):
    """Make a variable, and see that it is kept as the matrix says."""
    with strategy.scope():
        v = ms.Variable(np.full(SIZE, value), synchronization=kind[0], aggregation=kind[1])
    several = strategy.num_replicas_in_sync > 1 and not v._is_on_read
    assert isinstance(v._storage, NodeStorage) == (several and kept == "common")
    return v


@functools.cache
def written(view, n, kept):
    """What every rank found, by row and kind: the error, and all copies then."""

    def rank(comm):
        strategy, found = VIEWS[view](), {}
        for row in ROWS:
            for kind in KINDS:
                v = variable(strategy, kind, START, kept)
                error = attempt(lambda row=row, v=v: write(strategy, comm, row, v))
                found[row, kind] = error, copies(comm, v)
        return found

    return run_ranks(rank, n)


def wanted(row, cell, n):
    xs = [SIX] * n if row.what == "same" else [2.0 * i + 2.0 for i in range(n)]
    operands = CELLS[cell](xs)
    start = [[START] * SIZE for _ in range(n)]
    if isinstance(operands, str):
        return operands, start
    touched = [AT] if row.deed.startswith("scatter") else range(SIZE)
    for copy, mine in zip(start, operands, strict=True):
        for i in touched:
            copy[i] = functools.reduce(DEEDS[row.deed], mine, copy[i])
    return "", start


# Two replicas go the ways of three.
SIZES = pytest.mark.parametrize(
    "sizes", [(1, 3), pytest.param((2,), marks=pytest.mark.nightly)], ids=["1 and 3", "2"]
)


@SIZES
@every("view", VIEWS)
@every("row", ROWS)
def test_writes(row, view, sizes, kept):
    for n in sizes:
        for found in written(view, n, kept):
            for kind, cell in zip(KINDS, row.cells.split(), strict=True):
                error, held = found[row, kind]
                want_error, want = wanted(row, cell, n)
                assert (n, kind, error) == (n, kind, want_error)
                assert np.allclose(held, want, rtol=1e-15, atol=0), (n, kind, held, want)


READS = {
    "read_value": lambda s, v: v.read_value(),
    "value": lambda s, v: v.value(),
    "numpy": lambda s, v: v.numpy(),
    "convert": lambda s, v: np.asarray(v),
    "plus": lambda s, v: v + 0.0,
    "minus from the right": lambda s, v: 0.0 - (0.0 - v),
    "function": lambda s, v: np.concatenate([v])[:],
    "index": lambda s, v: v[:],
    "iterate": lambda s, v: list(v),
}


def at(strategy, where, v, do):
    """Return what `do` gives in a place, on this replica."""
    if where == "default":
        return do()
    if where == "cross":
        with strategy.scope():
            return do()
    if where == "replica":
        got = strategy.run(do)
        return got.local if isinstance(got, ms.PerReplica) else got
    if where == "merge":
        got = strategy.run(lambda: ctx().merge_call(lambda s: do()))
        return got.local if isinstance(got, ms.PerReplica) else got
    kept = []
    strategy.extended.update(v, lambda var: kept.append(do()))
    return kept[0]


PLACES = ("replica", "cross", "merge", "default", "update")
OTHERS = ("reduce SUM", "reduce MEAN", "local_results", "all_reduce", "read_var", "returned")


def other(strategy, v, what):
    if what.startswith("reduce"):
        return strategy.reduce(what[7:], v, None)
    if what == "local_results":
        return [np.array(copy) for copy in strategy.experimental_local_results(v)]
    if what == "all_reduce":
        got = strategy.run(lambda: ctx().all_reduce("SUM", v))
        return got.local if isinstance(got, ms.PerReplica) else got
    if what == "read_var":
        return strategy.extended.read_var(v)
    assert strategy.run(lambda: v) is v
    return v._component()


@functools.cache
def read(view, n, kept):
    """What every rank found, by place or deed, and kind; copy i of ON_READ variables is i + 1."""

    def rank(comm):
        strategy, found = VIEWS[view](), {}
        for kind in KINDS:
            v = variable(strategy, kind, 1.0, kept)
            if v._is_on_read:
                strategy.run(lambda v=v: v.assign(np.full(SIZE, comm.rank + 1.0)))
            for place in PLACES:
                for name, reading in READS.items():
                    got = []
                    error = attempt(
                        lambda g=got, p=place, r=reading, v=v: g.append(
                            at(strategy, p, v, lambda: np.array(r(strategy, v)))
                        )
                    )
                    found[place, name, kind] = error or np.array(got[0]).tolist()
            for name in OTHERS:
                got = []
                error = attempt(lambda g=got, w=name, v=v: g.append(other(strategy, v, w)))
                found[name, kind] = error or np.array(got[0]).tolist()
        return found

    return run_ranks(rank, n)


FOLD = {
    Agg.SUM: sum,
    Agg.MEAN: lambda xs: sum(xs) / len(xs),
    Agg.ONLY_FIRST_REPLICA: lambda xs: xs[0],
    Agg.NONE: lambda xs: REFUSED,
}


def vector(x):
    return x if isinstance(x, str) else [x] * SIZE


@SIZES
@every("view", VIEWS)
@every("name", READS)
@every("place", PLACES)
def test_reads(place, name, view, sizes, kept):
    for n in sizes:
        own = [i + 1.0 for i in range(n)]
        for rank, found in enumerate(read(view, n, kept)):
            for sync, agg in KINDS:
                want = 1.0
                if sync is Sync.ON_READ:
                    want = own[rank] if place in ("replica", "update") else FOLD[agg](own)
                assert (sync, agg, found[place, name, (sync, agg)]) == (sync, agg, vector(want)), n


@SIZES
@every("view", VIEWS)
@every("name", OTHERS)
def test_what_else_takes_a_variable(name, view, sizes, kept):
    for n in sizes:
        for rank, found in enumerate(read(view, n, kept)):
            for sync, agg in KINDS:
                on_read = sync is Sync.ON_READ
                own = [i + 1.0 if on_read else 1.0 for i in range(n)]
                want = {
                    "reduce SUM": vector(sum(own) if on_read else REFUSED),
                    "reduce MEAN": vector(sum(own) / n),
                    "local_results": [
                        vector(x) for x in (own if view == "global" else own[rank:][:1])
                    ],
                    "all_reduce": vector(sum(own)),
                    "read_var": vector(FOLD[agg](own) if on_read else 1.0),
                    "returned": vector(own[rank]),
                }[name]
                assert (sync, agg, found[name, (sync, agg)]) == (sync, agg, want)

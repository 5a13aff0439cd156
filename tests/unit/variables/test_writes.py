"""The matrix of writes: who writes, where, to which kind, and what every copy holds then."""

from __future__ import annotations

import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat.testing import run_ranks

# On copies of each rank, and on copies that a node has in common.
pytestmark = pytest.mark.usefixtures("kept")

Agg, Sync = ms.VariableAggregation, ms.VariableSynchronization
START = 1.0
SIGN = {"assign": (0.0, 1.0), "assign_add": (START, 1.0), "assign_sub": (START, -1.0)}


def after(kind, value):
    base, sign = SIGN[kind]
    return base + sign * value


def copies(strategy, variable):
    """Every rank's own copy, gathered by hand."""
    return [float(x) for x in strategy.gather(ms.PerReplica(np.array([variable._component()])), 0)]


def cross(n, sync, agg, kind):
    """What all copies hold after writing 6 in cross-replica code; None for ValueError."""
    if sync is Sync.ON_READ and agg is Agg.SUM:
        return [6.0 / n] * n if kind == "assign" else None
    return [after(kind, 6.0)] * n


def replica(n, sync, agg, kind, values):
    """What the copies hold after replica i has written ``values[i]``; None for LockstepError."""
    if sync is Sync.ON_READ:
        return [after(kind, v) for v in values]
    if agg is Agg.NONE:
        return [after(kind, values[0])] * n if len(set(values)) == 1 else None
    one = {Agg.SUM: sum(values), Agg.MEAN: sum(values) / n, Agg.ONLY_FIRST_REPLICA: values[0]}[agg]
    return [after(kind, one)] * n


@every("make", [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy])
@every("n", [1, 2, 3, 4])
@every("agg", list(Agg))
@every("sync", [Sync.AUTO, Sync.ON_WRITE, Sync.ON_READ])
def test_every_write(make, n, agg, sync):
    def rank(comm):
        strategy = make()
        found = {}
        for kind in SIGN:
            for who in ("cross", "literal", "tensor"):
                with strategy.scope():
                    v = ms.Variable(START, synchronization=sync, aggregation=agg)
                write = getattr(v, kind)
                try:
                    if who == "cross":
                        assert write(6.0) is v
                    elif who == "literal":
                        strategy.run(lambda w=write: w(6.0))
                    else:
                        strategy.run(lambda w=write: w(np.array(comm.rank + 2.0)))
                except ms.LockstepError:
                    found[kind, who] = "differ"
                except ValueError:
                    found[kind, who] = "refused"
                else:
                    found[kind, who] = copies(strategy, v)
                    continue
                assert copies(strategy, v) == [START] * n
        return found

    kept = Sync.ON_READ if sync is Sync.ON_READ else Sync.ON_WRITE
    want = {}
    for kind in SIGN:
        want[kind, "cross"] = cross(n, kept, agg, kind) or "refused"
        want[kind, "literal"] = replica(n, kept, agg, kind, [6.0] * n)
        want[kind, "tensor"] = replica(n, kept, agg, kind, [r + 2.0 for r in range(n)]) or "differ"
    for found in run_ranks(rank, n):
        assert found == want


READS = {
    Agg.SUM: sum,
    Agg.MEAN: lambda xs: sum(xs) / len(xs),
    Agg.ONLY_FIRST_REPLICA: lambda xs: xs[0],
}


@every("make", [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy])
@every("n", [1, 2, 3])
@every("agg", list(Agg))
def test_reading_what_each_replica_owns(make, n, agg):
    def rank(comm):
        strategy = make()
        with strategy.scope():
            v = ms.Variable(START, synchronization=Sync.ON_READ, aggregation=agg)
        own = strategy.run(lambda: float(v.assign(comm.rank + 2.0).read_value()))
        own = own.local if isinstance(own, ms.PerReplica) else own
        assert own == comm.rank + 2.0
        total = strategy.reduce("SUM", v, None), strategy.reduce("MEAN", v, None)
        inside = strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", v))
        inside = inside.local if isinstance(inside, ms.PerReplica) else inside
        reads = []
        for read in (v.read_value, v.numpy, v.value, lambda: v + 0, lambda: np.asarray(v)):
            try:
                reads.append(float(read()))
            except ValueError:
                reads.append("refused")
        return [float(t) for t in total], float(inside), reads

    values = [r + 2.0 for r in range(n)]
    one = READS[agg](values) if agg in READS else "refused"
    want = [sum(values), sum(values) / n], sum(values), [one] * 5
    assert run_ranks(rank, n) == [want] * n


def test_copies_of_both_kinds_as_local_results():
    def rank(comm):
        s = ms.MirroredStrategy()
        with s.scope():
            w = ms.Variable(1.0)
            r = ms.Variable(1.0, synchronization=Sync.ON_READ, aggregation=Agg.SUM)
        s.run(lambda: r.assign(comm.rank + 5.0))
        with pytest.raises(ValueError, match="experimental_local_results"):
            r.values  # noqa: B018
        return (
            [float(x) for x in s.experimental_local_results(w)],
            [float(x) for x in s.experimental_local_results(r)],
            [float(x) for x in w.values],
        )

    assert run_ranks(rank, 2) == [([1, 1], [5, 6], [1, 1])] * 2


def test_integers_owned_by_replicas_divide_as_integers():
    """Seven over two replicas is three each, and reads six, as the reference has it."""

    def rank(comm):
        s = ms.MirroredStrategy()
        with s.scope():
            v = ms.Variable(0, synchronization=Sync.ON_READ, aggregation=Agg.SUM)
        v.assign(7)
        return copies(s, v), int(v.numpy())

    assert run_ranks(rank, 2) == [([3, 3], 6)] * 2


@pytest.mark.parametrize("op", ["SUM", "PROD"])
def test_a_sum_of_a_mirrored_variable_is_refused(op):
    def rank(comm):
        s = ms.MirroredStrategy()
        with s.scope():
            v = ms.Variable(np.ones(2))
        with pytest.raises(ValueError, match="same on all replicas"):
            s.reduce(op, v, None)
        inside = s.run(lambda: ms.get_replica_context().all_reduce("SUM", v)).local
        return s.reduce("MEAN", v, None).tolist(), inside.tolist()

    assert run_ranks(rank, 2) == [([1, 1], [2, 2])] * 2


def test_large_variables_take_the_native_path():
    def rank(comm):
        s = ms.MirroredStrategy()
        with s.scope():
            vs = [ms.Variable(np.zeros((200, 70)), aggregation=agg) for agg in Agg]
        mine = np.full((200, 70), comm.rank + 1.0)

        def fn():
            for v in vs[1:]:
                v.assign(mine)
            vs[0].assign(np.ones((200, 70)))

        s.run(fn)
        with pytest.raises(ms.LockstepError):
            s.run(lambda: vs[0].assign(mine))
        return [(float(np.asarray(v).min()), float(np.asarray(v).max())) for v in vs]

    assert run_ranks(rank, 3) == [[(1, 1), (6, 6), (2, 2), (1, 1)]] * 3


@every("dtype", ["f8", "f4", "u1", "i8", "c16", "?"])
@every("cross", [True, False])
def test_the_same_values_lie_differently_on_each_rank(dtype, cross):
    values = (np.arange(24).reshape(2, 3, 4) % 5).astype(dtype)
    twice = np.repeat(values, 2, axis=0)
    lies = [
        values,
        np.asfortranarray(values),
        twice[::2],
        np.ascontiguousarray(values[::-1, :, ::-1])[::-1, :, ::-1],
        values.astype(values.dtype.newbyteorder(">")),
    ]

    def rank(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            v = ms.Variable(np.zeros_like(values))
        mine = lies[comm.rank]
        if cross:
            v.assign(mine)
        else:
            strategy.run(lambda: v.assign(mine))
        return np.array_equal(v, values)

    assert all(run_ranks(rank, len(lies)))

"""Arrays with unaligned elements, in all calls and algorithms.

The ranks here refuse, as MPI does, what is not aligned.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat.testing import run_ranks


class Mine(ms.CrossDeviceOps):
    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        values = ms.get_strategy().experimental_local_results(per_replica_value)
        if isinstance(values[0], ms.IndexedSlices):
            rows = unaligned(np.concatenate([one.values for one in values]))
            where = unaligned(np.concatenate([one.indices for one in values]))
            mean = unaligned(rows / len(values)) if "MEAN" in str(reduce_op) else rows
            return ms.IndexedSlices(mean, where, values[0].dense_shape)
        total = functools.reduce(np.maximum if "MAX" in str(reduce_op) else np.add, values)
        return unaligned(total / len(values) if "MEAN" in str(reduce_op) else total)

    def broadcast_implementation(self, tensor, destinations):
        return unaligned(np.asarray(super().broadcast_implementation(tensor, destinations)))


def first(values):
    return unaligned(functools.reduce(np.add, values))


WAYS = {
    "usual": lambda: ms.MirroredStrategy(),
    "local": lambda: ms.MultiWorkerMirroredStrategy(),
    "native": lambda: ms.MirroredStrategy(cross_device_ops=ms.NcclAllReduce()),
    "function": lambda: ms.MirroredStrategy(
        cross_device_ops=ms.ReductionToOneDevice(accumulation_fn=first)
    ),
    "class": lambda: ms.MirroredStrategy(cross_device_ops=Mine()),
}


def unaligned(x):
    x = np.asarray(x)
    out = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    out[...] = x
    assert not out.flags.aligned or x.itemsize == 1
    return out


def ctx():
    return ms.get_replica_context()


def each(strategy, fn):
    """Return what `fn` gives on this replica."""
    found = strategy.run(fn)
    return found.local if isinstance(found, ms.PerReplica) else found


@every("way", WAYS)
@every("n", [1, 2, 3])
def test_what_is_not_aligned_is_reduced_as_what_is(n, way):
    def rank(comm):
        strategy = WAYS[way]()
        for size in (3, 3000, 70_000):
            base = np.arange(size) % 50.0 + comm.rank
            want = sum(np.arange(size) % 50.0 + r for r in range(n))
            for code in ("f8", "f4", "i4", "g", "c16", "f2"):
                given = unaligned(base.astype(code))
                for _ in range(3):  # on the general path, with what is known of the call, by plan
                    got = each(strategy, lambda g=given: ctx().all_reduce("sum", g))
                    assert np.array_equal(got, want.astype(code)), (size, code)
                mean = each(
                    strategy, lambda g=given: ctx().all_reduce("mean", [g, 1.0], weight=2)[0]
                )
                assert np.allclose(mean.astype("c16"), want / n, rtol=1e-3)
                for _ in range(2):
                    out = unaligned(np.zeros_like(given))
                    each(strategy, lambda g=given, o=out: ctx().all_reduce("sum", [g], out=[o]))
                    assert np.array_equal(out, want.astype(code)), (size, code)
                    itself = unaligned(given)
                    each(strategy, lambda o=itself: ctx().all_reduce("sum", o, out=o))
                    assert np.array_equal(itself, want.astype(code)), (size, code)
        return True

    assert all(run_ranks(rank, n))


@pytest.mark.parametrize("way", ["usual", "local", "native", "function", "class"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_other_doors_take_it_too(n, way, tmp_path):
    def rank(comm):
        strategy = WAYS[way]()
        rows = unaligned(np.full((600, 2), 1.0 + comm.rank))
        total = n * (n + 1) / 2
        mine = rows if way == "local" else ms.PerReplica(rows)
        assert strategy.reduce("sum", mine, axis=0).tolist() == [600 * total] * 2
        assert strategy.reduce("max", mine, axis=0).tolist() == [n] * 2
        assert strategy.reduce("sum", mine, axis=None)[0].tolist() == [total] * 2
        assert len(strategy.gather(mine, 0)) == 600 * n
        sent = strategy.extended.broadcast_to(rows, "cpu:0")
        assert np.asarray(sent)[0, 0] == (1 + comm.rank if way == "local" else 1)
        # Integers wrap, as aligned ones do.
        big = unaligned(np.full(3, 2**30, np.int32))
        big = big if way == "local" else ms.PerReplica(big)
        assert strategy.reduce("sum", big, axis=0) == np.array(3 * n << 30).astype(np.int32)

        same = unaligned(np.arange(20_000.0))
        with strategy.scope():
            v = ms.Variable(unaligned(np.zeros(20_000)), name="v")
            w = ms.Variable(np.zeros((4, 2)), name="w", aggregation=ms.VariableAggregation.SUM)
        v.assign(same)
        v.assign_add(same)
        assert np.array_equal(v.numpy(), same * 2)
        slices = ms.IndexedSlices(rows[:2], unaligned(np.array([1, 3])))
        strategy.run(lambda: w.scatter_add(slices))
        assert w.numpy()[:, 0].tolist() == [0, total, 0, total]
        folded = each(strategy, lambda: ctx().all_reduce("mean", slices))
        assert folded.indices.tolist() == [1, 3] * n
        saved = ms.Checkpoint(v=v, w=w)
        path = saved.save(str(tmp_path / "c"))
        v.assign(same)
        saved.restore(path)
        assert np.array_equal(v.numpy(), same * 2)

        batches = ms.Dataset.from_tensor_slices(unaligned(np.arange(8 * n * 500.0))).batch(n * 500)
        seen = 0.0
        for batch in strategy.experimental_distribute_dataset(batches):
            seen += float(strategy.reduce("sum", batch, axis=0))
        assert seen == np.arange(8 * n * 500.0).sum()
        (room,) = strategy.buffers([np.zeros(5000)])
        room[:] = 1
        shifted = room.view(np.uint8)[1:-7].view(np.float64)
        each(strategy, lambda: ctx().all_reduce("sum", shifted, out=shifted))
        assert shifted[5] == n * np.frombuffer(np.ones(2).tobytes()[1:9])[0]
        return True

    assert all(run_ranks(rank, n))

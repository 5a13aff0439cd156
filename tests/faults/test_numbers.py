"""Class D: numbers that go wrong are named, or have a meaning that is the same on every rank.

Each test is what one rank does. Bits are compared as bytes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from pathlib import Path

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.testing import same

sys.path.insert(0, str(Path(__file__).parent))
rows = importlib.import_module("rows")
numbers = rows.Class(__file__)
ctx = ms.get_replica_context


@contextlib.contextmanager
def strategy_with(comm, **options):
    """Make a strategy whose ranks were started with these options."""
    names = {f"MPISTRAT_{name.upper()}": text for name, text in options.items()}
    # Not taken back here: thread ranks share one environment, and all want the same.
    os.environ.update(names)
    strategy = ms.MirroredStrategy(comm=comm)
    strategy.reduce("SUM", ms.PerReplica(0.0), None)  # all ranks have read them now
    for name in names:
        os.environ.pop(name, None)
    yield strategy


def reduced(strategy, op, value, **named):
    found = []
    strategy.run(lambda: found.append(ctx().all_reduce(op, value, **named)))
    return found[0]


def bits_of_all(strategy, value):
    """Return the bytes of every rank's value."""
    whole = strategy.gather(ms.PerReplica(np.frombuffer(value.tobytes(), np.uint8)), 0)
    size = strategy.num_replicas_in_sync
    return [part.tobytes() for part in whole.reshape(size, -1)]


@numbers.row
def test_d1_a_bad_number_is_named_before_it_spreads(comm):
    with strategy_with(comm, nan="raise") as strategy:
        with strategy.scope():
            w = ms.Variable(np.zeros((300, 4)), name="w")
        for bad, born in ((np.nan, 2), (np.inf, 4)):
            for step in range(6):
                grads = {"layer": [np.ones(2), np.ones((300, 4))]}
                if step == born and comm.rank == comm.size - 1:
                    grads["layer"][1][7, 3] = bad

                def train(grads=grads):
                    total = ctx().all_reduce("SUM", grads)["layer"][1]
                    w.assign_add(total)

                if step != born:
                    strategy.run(train)
                    continue
                before = w.numpy()
                with pytest.raises(ms.NonFiniteError) as caught:
                    strategy.run(train)
                for word in (f"rank {comm.size - 1}:", "layer/1", f"is {bad}", "(7, 3)", "step"):
                    assert word in str(caught.value)
                assert np.array_equal(w.numpy(), before)
        assert np.isfinite(w.numpy()).all()
        same(comm, w.numpy(), np.full((300, 4), 10.0 * comm.size))


@numbers.row
def test_d2_least_and_greatest_keep_a_nan(comm):
    strategy = ms.MirroredStrategy(comm=comm)
    for op, fold in (("MAX", np.maximum), ("MIN", np.minimum)):
        for holder in range(comm.size):
            for n in (2, 3000):
                for code in ("f4", "f8", "f2", np.longdouble):
                    parts = [np.arange(n, dtype=code) - r for r in range(comm.size)]
                    parts[holder][1] = np.nan
                    got = reduced(strategy, op, parts[comm.rank])
                    np.testing.assert_array_equal(got, functools.reduce(fold, parts))
                    assert np.isnan(got).tolist() == [False, True] + [False] * (n - 2)


@numbers.row
def test_d3_sums_of_integers_wrap_as_numpy_and_means_do_not(comm):
    strategy = ms.MirroredStrategy(comm=comm)
    for code, value in (("u1", 200), ("i1", 100), ("i4", 2**31 - 1), ("i8", 2**62), ("u8", 2**63)):
        mine = np.full(3, value, code)
        for _ in range(2):
            want = functools.reduce(np.add, [mine] * comm.size)
            got = reduced(strategy, "SUM", mine)
            assert got.dtype == want.dtype
            assert got.tolist() == want.tolist()
            mean = reduced(strategy, "MEAN", mine)
            assert mean.dtype == (np.float32 if mine.itemsize < 4 else np.float64)
            np.testing.assert_allclose(mean, value, rtol=1e-15)
            mine = np.full(3000, value, code)  # once more, too large for the frame


@numbers.row
def test_d4_a_mean_of_nothing_is_nan_everywhere(comm):
    strategy = ms.MirroredStrategy(comm=comm)
    for n in (2, 3000):
        got = reduced(strategy, "MEAN", np.ones(n), weight=0)
        assert np.isnan(got).all()
        same(comm, got)
    none = strategy.reduce("MEAN", ms.PerReplica(np.ones((0, 2))), 0)
    assert np.isnan(none).tolist() == [True, True]
    some = np.ones((3, 2)) if comm.rank == 0 else np.ones((0, 2))
    assert strategy.reduce("MEAN", ms.PerReplica(some), 0).tolist() == [1.0, 1.0]


@numbers.row
def test_d5_the_same_bits_on_every_rank_in_every_run(comm):
    """Small values are folded in rank order, so with any MPI; large ones as this MPI does it."""
    strategy = ms.MirroredStrategy(comm=comm)
    for n in (20, 5000):
        parts = [np.random.default_rng(r).normal(0, 10.0 ** (3 * r), n) for r in range(comm.size)]
        runs = {reduced(strategy, "SUM", parts[comm.rank]).tobytes() for _ in range(20)}
        assert len(runs) == 1
        total = np.frombuffer(next(iter(runs)))
        assert set(bits_of_all(strategy, total)) == runs
        if n == 20:
            assert runs == {functools.reduce(np.add, parts).tobytes()}
        np.testing.assert_allclose(total, sum(parts), rtol=1e-12)


@numbers.row
def test_d7_a_step_is_skipped_by_all_or_by_none(comm):
    strategy = ms.MirroredStrategy(comm=comm)
    with strategy.scope():
        w, scale = ms.Variable(np.zeros(3), name="w"), ms.Variable(1024.0, name="scale")

    def train(grads):
        overflow = not np.isfinite(grads).all()
        skip = bool(ctx().all_reduce("MAX", int(overflow)))
        scale.assign(scale / 2 if skip else scale * 1.0)
        total = ctx().all_reduce("SUM", np.zeros(3) if skip else grads)
        if not skip:
            w.assign_sub(total / float(scale))

    for step in range(9):
        grads = np.full(3, np.inf if step % 3 == 1 and comm.rank == step % comm.size else 1.0)
        strategy.run(train, (grads,))
    want, factor = 0.0, 1024.0
    for step in range(9):
        factor, want = (factor / 2, want) if step % 3 == 1 else (factor, want - comm.size / factor)
    assert float(scale.numpy()) == factor == 128.0
    same(comm, w.numpy(), np.full(3, want))


@numbers.row
def test_d8_a_copy_that_has_drifted_is_found_and_named(comm):
    every, count, odd = 2, 3, comm.size - 1
    with strategy_with(comm, check_every=str(every)) as strategy:
        with strategy.scope():
            held = [ms.Variable(np.arange(50.0), name=f"v{i}") for i in range(count)]
        for _ in range(2 * every * count):
            strategy.run(lambda: None)
        if comm.rank == odd:  # one bit, behind the library's back
            held[1]._storage.array.view(np.uint8)[77] ^= 4
        ran = 0
        with pytest.raises(ms.DivergenceError) as caught:
            for ran in range(every * count):  # noqa: B007
                strategy.run(lambda: None)
        assert ran < every * count
        text = str(caught.value)
        assert "'v1:0'" in text
        assert (f"rank {odd} differs" if comm.size > 2 else "ranks 0, 1 differ") in text
        assert "at step" in text


@numbers.row
def test_d10_streams_of_random_numbers(comm):
    """Streams made of seed, replica and step are those of any machine; one in common is shared."""
    strategy = ms.MirroredStrategy(comm=comm)
    for step in range(3):

        def draw(step=step):
            own = np.random.default_rng((7, ctx().replica_id_in_sync_group, step)).random(3)
            common = np.random.default_rng((7, step)).permutation(20)
            return ctx().all_gather(own[None], 0), common

        own, common = strategy.run(draw)
        want = [np.random.default_rng((7, r, step)).random(3) for r in range(comm.size)]
        assert np.array_equal(own.local, want)
        same(comm, common.local)
    with pytest.raises(AssertionError, match="differs from rank 0's"):
        same(comm, np.random.default_rng(comm.rank).random(3))
    data = ms.Dataset(np.arange(24)).shuffle(seed=3).batch(2 * comm.size)
    parts = [batch.local for batch in strategy.experimental_distribute_dataset(data)]
    seen = strategy.gather(ms.PerReplica(np.concatenate(parts)), 0)
    assert sorted(seen.tolist()) == list(range(24))


@rows.starts_jobs
@rows.JOB_SIZES
def test_the_class_on_mpi(size, tmp_path):
    numbers.on_mpi(size, tmp_path)


if __name__ == "__main__":
    numbers.main()

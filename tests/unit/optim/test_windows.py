"""Windows of accumulation: ended early, dropped, and with calls that have no rows."""

from __future__ import annotations

import contextlib
import functools

import numpy as np
import pytest

import mpistrat as ms
from mpistrat import optim
from mpistrat.shm import storage
from mpistrat.testing import run_ranks

SIZES = (1, 2, 3, 4)
SHAPES = ((130, 140), (5,), (), (0, 3))
MORE = {
    "plain": {},
    "norm": {"clip": optim.ClipByGlobalNorm(0.5)},
    "value": {"clip": optim.ClipByValue(0.5)},
    "ema": {"ema": 0.5},
    "scale": {"nonfinite": "skip", "loss_scale": optim.LossScale(start=4.0)},
}


@pytest.fixture(params=["own", "node", "two nodes"])
def memory(request, monkeypatch):
    if request.param == "own":
        monkeypatch.setattr(storage, "MIN_SHARED_NBYTES", 1 << 40)
    if request.param == "two nodes":
        monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", "2")
    return request.param


@functools.cache
def gradient(call, rank, number):
    return np.random.default_rng([call, rank, number]).standard_normal(SHAPES[number])


def rows_of(call, rank):
    """Return how many rows a rank has in a call: uneven, and none on some ranks but the first."""
    return (call + rank) % 3 if rank else 1 + call % 3


class Job:
    """Variables of one rank, and an optimizer that accumulates."""

    def __init__(self, optimizer, scale=1.0):
        self.strategy, self.optimizer, self.scale = ms.MirroredStrategy(), optimizer, scale
        with self.strategy.scope():
            self.variables = [
                ms.Variable(np.ones(shape), name=f"v{i}") for i, shape in enumerate(SHAPES)
            ]

    def call(self, call, weight=None):
        """Give the gradients of a call, of which those without rows are NaN."""
        rank = self.strategy.rank
        weight = rows_of(call, rank) if weight is None else weight
        given = [gradient(call, rank, i) * self.scale for i in range(len(SHAPES))]
        given = given if weight else [np.full_like(one, np.nan) for one in given]
        pairs = list(zip(given, self.variables, strict=True))
        self.strategy.run(lambda: self.optimizer.apply_gradients(pairs, weight=weight) and None)

    def contents(self):
        return [v.numpy() for v in (*self.variables, *self.optimizer.variables)]


def means(calls, size):
    """Return the mean gradients of some calls over the rows of all ranks, by NumPy."""
    pairs = [(call, rank) for call in calls for rank in range(size) if rows_of(call, rank)]
    total = sum(rows_of(*pair) for pair in pairs)
    return [
        sum(rows_of(*pair) * gradient(*pair, number) for pair in pairs) / total
        for number in range(len(SHAPES))
    ]


def updated(more, updates, size):
    """Return what an optimizer that does not accumulate makes of so many means, on one rank."""

    def rank(comm):
        job = Job(optim.Adam(0.1, **{k: v for k, v in more.items() if k in ("clip", "ema")}))
        for calls in updates:
            pairs = list(zip(means(calls, size), job.variables, strict=True))
            job.strategy.run(lambda: job.optimizer.apply_gradients(pairs) and None)  # noqa: B023
        slots = ("m", "v", "ema") if "ema" in more else ("m", "v")
        return [v.numpy() for v in job.variables], [
            job.optimizer.slot(v, slot).numpy() for v in job.variables for slot in slots
        ]

    return run_ranks(rank, 1)[0]


def assert_is(job, wanted, names=("m", "v")):
    weights, slots = wanted
    names = (*names, "ema") if job.optimizer.ema else names
    found = [job.optimizer.slot(v, name).numpy() for v in job.variables for name in names]
    for x, y in zip([v.numpy() for v in job.variables], weights, strict=True):
        np.testing.assert_allclose(x, y, 1e-9, 1e-12)
    for x, y in zip(found, slots, strict=True):
        np.testing.assert_allclose(x, y, 1e-9, 1e-12)
    for v in job.variables:
        assert not job.optimizer.slot(v, "pending").numpy().any()


def everywhere(results):
    for result in results[1:]:
        for x, y in zip(results[0], result, strict=True):
            np.testing.assert_array_equal(x, y)


class TestFlush:
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("more", MORE)
    def test_what_waits_is_an_update(self, more, size, memory):
        """Seven calls are updates of four and of three; then a window begins anew."""
        wanted = updated(MORE[more], [(0, 1, 2, 3), (4, 5, 6), (7, 8, 9, 10)], size)

        def rank(comm):
            job = Job(optim.Adam(0.1, accumulate=4, **MORE[more]), 4.0 if more == "scale" else 1.0)
            for call in range(7):
                job.call(call)
            job.strategy.run(job.optimizer.flush)
            assert int(job.optimizer.iterations) == 2
            assert job.optimizer.progress.calls == job.optimizer.progress.weight == 0
            for call in range(7, 11):
                job.call(call)
            assert_is(job, wanted)
            return job.contents()

        everywhere(run_ranks(rank, size))

    @pytest.mark.parametrize("per_node", [1, 2])
    def test_of_slots_that_are_on_all_nodes(self, per_node, monkeypatch):
        monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", str(per_node))
        wanted = updated({}, [(0, 1)], 4)

        def rank(comm):
            job = Job(optim.Adam(0.1, accumulate=3, shard="all"))
            job.call(0)
            job.call(1)
            with job.strategy.scope():  # cross-replica code does as well
                job.optimizer.flush()
                assert_is(job, wanted)
                return job.contents()

        everywhere(run_ranks(rank, 4))

    @pytest.mark.parametrize("size", (1, 2))
    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_nothing_waits(self, accumulate, size):
        def rank(comm):
            job = Job(optim.Adam(0.1, accumulate=accumulate))
            job.optimizer.flush()  # there is no state
            job.optimizer.discard()
            for call in range(2):
                job.call(call)
            before = job.contents()
            for end in (job.optimizer.flush, job.optimizer.discard):
                job.strategy.run(end)
                end()
                everywhere([before, job.contents()])

        run_ranks(rank, size)

    @pytest.mark.parametrize("size", (1, 2))
    @pytest.mark.parametrize("nonfinite", ["raise", "skip"])
    def test_what_is_not_finite(self, nonfinite, size):
        def rank(comm):
            job = Job(optim.SGD(0.1, accumulate=3, nonfinite=nonfinite))
            with job.strategy.scope():
                pairs = [(np.full(v.shape, np.inf), v) for v in job.variables]
                job.optimizer.apply_gradients(pairs)
                if nonfinite == "raise":
                    with pytest.raises(ms.NonFiniteError, match=r"flush.*(\n.*)*accumulate=3"):
                        job.optimizer.flush()
                else:
                    with (
                        pytest.warns(RuntimeWarning) if not comm.rank else contextlib.nullcontext()
                    ):
                        job.optimizer.flush()
            assert job.optimizer.progress.skipped == (nonfinite == "skip")
            assert job.optimizer.progress.calls == 0
            for v in job.variables:
                assert np.isfinite(v.numpy()).all()
                assert not job.optimizer.slot(v, "pending").numpy().any()

        run_ranks(rank, size)

    def test_rates_are_compared(self):
        def rank(comm):
            job = Job(optim.SGD(lambda step: 0.1 + comm.rank * job.late, accumulate=2))
            job.late = 0.0
            job.call(1)
            job.late = 0.5
            with pytest.raises(ms.LockstepError, match=r"0\.6"):
                job.optimizer.flush()

        run_ranks(rank, 2)


class TestDiscard:
    @pytest.mark.parametrize("size", SIZES)
    def test_the_next_window_begins_anew(self, size, memory):
        wanted = updated({}, [(0, 1, 2), (5, 6, 7)], size)

        def rank(comm):
            job = Job(optim.Adam(0.1, accumulate=3))
            for call in range(5):
                job.call(call)
            job.strategy.run(job.optimizer.discard)
            assert job.optimizer.progress.calls == job.optimizer.progress.weight == 0
            assert int(job.optimizer.iterations) == 1
            assert not any(job.optimizer.slot(v, "pending").numpy().any() for v in job.variables)
            for call in (5, 6, 7):
                job.call(call)
            assert_is(job, wanted)
            return job.contents()

        everywhere(run_ranks(rank, size))

    def test_all_ranks_end_a_window_alike(self):
        def rank(comm):
            job = Job(optim.Adam(0.1, accumulate=3))
            job.call(1)
            with pytest.raises(ms.LockstepError, match=r"(?s)flush of 1 calls.*discard of 1 calls"):
                (job.optimizer.discard if comm.rank else job.optimizer.flush)()
            with pytest.raises(ms.LockstepError, match=r"flush of 1 calls"):
                job.optimizer.flush() if comm.rank else job.strategy.all_reduce("sum", 1)

        run_ranks(rank, 2)

    def test_another_strategy_is_in_scope(self):
        def rank(comm):
            job, other = Job(optim.Adam(0.1, accumulate=3)), ms.MirroredStrategy()
            job.call(1)
            for end in (job.optimizer.flush, job.optimizer.discard):
                with other.scope(), pytest.raises(ms.StrategyError, match="Mixing different"):
                    end()

        run_ranks(rank, 2)


class TestCallsWithoutRows:
    @pytest.mark.parametrize("size", SIZES)
    def test_they_count_and_add_nothing(self, size, memory):
        empties = [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)]
        fulls = [[call for call in range(3) if call not in empty] for empty in empties]
        wanted = [updated({}, [full, (3, 4, 5)], size) for full in fulls]

        def rank(comm):
            jobs = [Job(optim.Adam(0.1, accumulate=3)) for _ in empties]
            for job, empty, result in zip(jobs, empties, wanted, strict=True):
                for call in range(3):
                    assert int(job.optimizer.progress.step) == 0
                    job.call(call, 0 if call in empty else None)
                assert int(job.optimizer.iterations) == 1
                for call in range(3, 6):
                    job.call(call)
                assert_is(job, result)
            return [one for job in jobs for one in job.contents()]

        everywhere(run_ranks(rank, size))

    @pytest.mark.parametrize("size", SIZES)
    def test_an_update_without_any_is_an_error(self, size, memory):
        wanted = updated({}, [(3,)], size)

        def rank(comm):
            job = Job(optim.Adam(0.1, accumulate=3))
            for call in range(2):
                job.call(call, 0)
            with pytest.raises(ValueError, match="are 0 in all 3 calls of the update"):
                job.call(2, 0)
            job.call(3)  # goes on where the program can
            assert_is(job, wanted)

        run_ranks(rank, size)

    def test_a_window_of_them_is_no_update(self):
        def rank(comm):
            job = Job(optim.Adam(0.1, accumulate=3))
            job.call(0, 0)
            job.strategy.run(job.optimizer.flush)
            assert job.optimizer.progress == optim.base.Progress()

        run_ranks(rank, 2)

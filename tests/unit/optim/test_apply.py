"""`apply_gradients` beside recorded values and plain loops, at any number of ranks, in all ways."""

from __future__ import annotations

import copy
import functools
import json
import math
import pickle
from pathlib import Path

import ml_dtypes
import numpy as np
import optim_cases as cases
import pytest

import mpistrat as ms
from mpistrat import optim
from mpistrat.collectives import inter_node
from mpistrat.optim import apply
from mpistrat.shm import storage
from mpistrat.shm.storage import NodeStorage
from mpistrat.testing import run_ranks
from mpistrat.testing.ranks import RanksFailed

RECORDED = json.loads((Path(__file__).parent / "recorded.json").read_text())
SIZES = (1, 2, 3, 4)
LARGE = (130, 140)  # of float32 a little more than 64 KiB: five blocks, the last one short
WAYS = ("arrays", "buffers")


def weights_of(size):
    """Return rows of each replica: uneven, and none on the second of more than two."""
    return [3.0, 5.0] if size == 2 else [3.0, 0.0, 1.0, 7.0][:size]


def replica_gradient(mean, size, rank):
    """Return the gradient of a replica; all of them have this weighted mean; of no rows, NaN."""
    weights = weights_of(size)
    shift = np.cos(np.arange(mean.size)).reshape(mean.shape).astype(mean.dtype)
    given = mean + shift * (rank - sum(w * i for i, w in enumerate(weights)) / sum(weights))
    return given if weights[rank] else np.full_like(given, np.nan)


class Job:
    """What one rank of a test does: variables, an optimizer, and steps in one way."""

    def __init__(self, optimizer, values, way="arrays"):
        self.strategy = ms.MirroredStrategy()
        self.size = self.strategy.num_replicas_in_sync
        self.optimizer = optimizer
        with self.strategy.scope():
            self.variables = [ms.Variable(v, name=f"v{i}") for i, v in enumerate(values)]
        self.buffers = None
        if way == "buffers":
            self.buffers = self.strategy.gradient_buffers(self.variables)

    def step(self, means):
        """Update by gradients of the replicas whose weighted means these are."""

        def fn():
            rank = ms.get_replica_context().replica_id_in_sync_group
            given = [replica_gradient(mean, self.size, rank) for mean in means]
            if self.buffers is not None:
                for place, value in zip(self.buffers, given, strict=True):
                    place[...] = value
                given = self.buffers
            pairs = zip(given, self.variables, strict=True)
            self.optimizer.apply_gradients(pairs, weight=weights_of(self.size)[rank])

        self.strategy.run(fn)

    def give(self, *gradients):
        """Update by these gradients of this replica."""
        pairs = list(zip(gradients, self.variables, strict=True))
        self.strategy.run(lambda: self.optimizer.apply_gradients(pairs) and None)

    def contents(self):
        state = [*self.variables, *self.optimizer.variables]
        return [one.numpy().tobytes() for one in state]


def random(shape, dtype, seed):
    return _made(shape, dtype, seed).copy()


@functools.cache  # a generator costs more than what is done to its numbers
def _made(shape, dtype, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def first(dtype="f4"):
    return [random(shape, dtype, i) for i, shape in enumerate([LARGE, (5,), (), (0, 3), LARGE])]


def means(step, dtype="f4"):
    return [random(value.shape, dtype, 10 * step + i + 100) for i, value in enumerate(first(dtype))]


def plain(optimizer, steps=3, dtype="f4", factor=1.0):
    """Return the weights after so many steps, by loops over whole arrays."""
    ones = [cases.Trained(optimizer, w, False) for w in first(dtype)]
    for step in range(steps):
        for one, g in zip(ones, means(step, dtype), strict=True):
            one.step(step, g.reshape(1, -1) * np.dtype(dtype).type(factor))
    return ones


@pytest.fixture(params=["own", "node", "two nodes"])
def memory(request, monkeypatch):
    """Have each rank its own memory; large variables once per node; and two ranks per node."""
    if request.param == "own":
        monkeypatch.setattr(storage, "MIN_SHARED_NBYTES", 1 << 40)
    if request.param == "two nodes":
        monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", "2")
    return request.param


def everywhere(results):
    """Return what all ranks have, which is the same."""
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.parametrize(
    ("title", "size", "steps"),
    [*[("adam", size, 100) for size in SIZES], *[(title, 3, 10) for title in cases.CASES]],
)
def test_weighted_means_are_trained_on_as_torch_and_optax_do(title, size, steps):
    name, given = cases.CASES[title]
    shown = {step: w for step, w in RECORDED[f"{title} float64"].items() if int(step) <= steps}

    def rank(comm):
        job = Job(optim.OPTIMIZERS[name](**given), cases.weights(np.dtype("f8")), "arrays")
        for step in range(max(map(int, shown))):
            job.step([cases.gradient(step, k, v.numpy()) for k, v in enumerate(job.variables)])
            if str(step + 1) in shown:
                for v, wanted in zip(job.variables, shown[str(step + 1)], strict=True):
                    wanted = np.array([float.fromhex(x) for x in wanted]).reshape(v.shape)
                    np.testing.assert_allclose(v.numpy(), wanted, 1e-12)
        return job.contents()

    everywhere(run_ranks(rank, size))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", (1, 3, 4))
@pytest.mark.parametrize("name", ["adam", "lamb", "lars"])
def test_however_memory_is_shared_it_is_the_same_update(name, size, way, memory):
    wanted = plain(optim.OPTIMIZERS[name](0.05))

    def rank(comm):
        job = Job(optim.OPTIMIZERS[name](0.05), first(), way)
        seen = [v._component() for v in job.variables]
        for step in range(3):
            job.step(means(step))
        shared = isinstance(job.variables[0]._storage, NodeStorage)
        assert shared == (size > 1 and memory != "own")
        for v, view, one in zip(job.variables, seen, wanted, strict=True):
            np.testing.assert_allclose(v.numpy().reshape(-1), one.w, 2e-4, 2e-5)
            assert view.tobytes() == v.numpy().tobytes()
            for slot in job.optimizer.slots():
                found = job.optimizer.slot(v, slot).numpy().reshape(-1)
                np.testing.assert_allclose(found, one.slots[slot], 2e-4, 2e-5)
        assert job.optimizer.iterations.numpy() == 3
        return job.contents()

    everywhere(run_ranks(rank, size))


def test_loops_are_compiled_where_it_is_worth_it(monkeypatch):
    monkeypatch.setattr(optim.passes, "_COMPILE", 0)
    wanted = plain(optim.Adam(0.05, ema=0.5))

    def rank(comm):
        job = Job(optim.Adam(0.05, ema=0.5), first(), "buffers")
        for step in range(3):
            job.step(means(step))
        for v, one in zip(job.variables, wanted, strict=True):
            np.testing.assert_allclose(v.numpy().reshape(-1), one.w, 2e-4, 2e-5)
            np.testing.assert_allclose(
                job.optimizer.average(v).numpy().reshape(-1), one.slots["ema"], 2e-4, 2e-5
            )
        return job.contents()

    everywhere(run_ranks(rank, 2))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", (1, 3, 4))
def test_clipping_by_global_norm(size, way, memory):
    norms = [math.sqrt(sum(float((g.astype("f8") ** 2).sum()) for g in means(s))) for s in (0, 1)]
    ones = [cases.Trained(optim.SGD(1.0), w, False) for w in first("f4")]
    for step, norm in enumerate(norms):
        for one, g in zip(ones, means(step), strict=True):
            one.step(step, (g * np.float32(2.0 / norm)).reshape(1, -1))

    def rank(comm):
        job = Job(optim.SGD(1.0, clip=optim.ClipByGlobalNorm(2.0)), first(), way)
        job.step(means(0))
        job.step(means(1))
        for v, one in zip(job.variables, ones, strict=True):
            np.testing.assert_allclose(v.numpy().reshape(-1), one.w, 1e-5, 1e-6)
        return job.contents()

    everywhere(run_ranks(rank, size))


@pytest.mark.parametrize("pieces", [1 << 20, 8192])
def test_parts_of_several_nodes_are_exchanged_and_updated_without_a_barrier(pieces, monkeypatch):
    """Two nodes of two: parts go in as few messages as there are pieces; one barrier ends it."""
    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", "2")
    monkeypatch.setattr(inter_node, "MAX_EXCHANGE_ELEMENTS", pieces)
    wanted = plain(optim.Adam(0.05))
    large = [value for value in first() if value.nbytes >= storage.MIN_SHARED_NBYTES]

    def rank(comm):
        job = Job(optim.Adam(0.05, nonfinite="ignore"), large, "buffers")
        given = [[g for g in means(step) if g.shape == LARGE] for step in range(3)]
        job.step(given[0])
        nodes = job.strategy._replicas.reducer.node.arena.nodes()
        calls = []
        for comm, name in ((nodes.node, "barrier"), (nodes.peers, "allreduce")):
            called = getattr(comm, name)
            count = lambda *args, call=called, name=name: (calls.append(name), call(*args))  # noqa: E731
            monkeypatch.setattr(comm, name, count)
        job.step(given[1])
        mine = sum(v._storage.part(4096)[1].size for v in job.variables)
        assert sorted(calls) == ["allreduce"] * math.ceil(mine / pieces) + ["barrier"]
        job.step(given[2])
        ones = [one for one in wanted if one.w.size == math.prod(LARGE)]
        for v, one in zip(job.variables, ones, strict=True):
            np.testing.assert_allclose(v.numpy().reshape(-1), one.w, 2e-4, 2e-5)
        return job.contents()

    everywhere(run_ranks(rank, 4))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size, per_node", [(2, 1), (4, 2), (5, 2), (3, 1)])
def test_gradients_go_between_nodes_in_bfloat16_and_weights_do_not(
    size, per_node, way, monkeypatch
):
    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", str(per_node))
    wire = ms.CommunicationOptions(wire="bfloat16")
    rows = weights_of(4)[:size] + [2.0] * (size - 4)
    shapes = [LARGE, (999,), LARGE]
    given = [
        [random(shape, "f4", 9 * r + i) for i, shape in enumerate(shapes)] for r in range(size)
    ]

    def rounded(value):
        return value.astype(ml_dtypes.bfloat16).astype("f4")

    def mean(i):
        parts = [np.float32(n) * mine[i] for n, mine in zip(rows, given, strict=True)]
        nodes = [sum(parts[at + 1 : at + per_node], parts[at]) for at in range(0, size, per_node)]
        return rounded(sum(map(rounded, nodes[1:]), rounded(nodes[0])) / np.float32(sum(rows)))

    def rank(comm):
        strategy = ms.MultiWorkerMirroredStrategy(communication_options=wire)
        optimizer = optim.SGD(1.0)
        with strategy.scope():
            variables = [ms.Variable(random(shape, "f4", 99)) for shape in shapes]
        mine = given[comm.rank]
        if way == "buffers":
            mine = strategy.gradient_buffers(variables)
            for place, value in zip(mine, given[comm.rank], strict=True):
                place[...] = value
        pairs = list(zip(mine, variables, strict=True))
        strategy.run(lambda: optimizer.apply_gradients(pairs, weight=rows[comm.rank]) and None)
        return [v.numpy() for v in variables]

    for found in run_ranks(rank, size):
        for i, value in enumerate(found):
            wanted = random(shapes[i], "f4", 99) - mean(i)
            np.testing.assert_array_equal(value, wanted, strict=True)


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
@pytest.mark.parametrize("per_node", [1, 2])
def test_sums_of_nodes_may_overflow_where_means_do_not(per_node, wire, monkeypatch):
    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", str(per_node))
    large = np.float32(3e38)

    def rank(comm):
        options = ms.CommunicationOptions(wire=wire)
        strategy = ms.MultiWorkerMirroredStrategy(communication_options=options)
        optimizer = optim.SGD(1e-38)
        with strategy.scope():
            variables = [ms.Variable(np.ones(LARGE, "f4")) for _ in range(2)]
        gradients = strategy.gradient_buffers(variables)
        for g in gradients:
            g[...], g[0, :9] = large, 1e38
        pairs = list(zip(gradients, variables, strict=True))
        strategy.run(lambda: optimizer.apply_gradients(pairs) and None)
        for v in variables:
            np.testing.assert_allclose(v.numpy()[0, :9], 0.0, atol=0.01)
            np.testing.assert_allclose(v.numpy()[1:], -2.0, 0.01)

    run_ranks(rank, 4)


def test_norms_have_the_same_bits_on_any_number_of_ranks(memory):
    """Where the gradient of all ranks is one and the same, so that folding rounds nothing."""

    def rank(comm):
        found = []
        for kind, more in (
            (optim.LAMB, {}),
            (optim.LARS, {}),
            (optim.Adam, {"clip": optim.ClipByGlobalNorm(1.0)}),
        ):
            job = Job(kind(0.1, **more), first())
            pairs = list(zip(means(0), job.variables, strict=True))
            job.strategy.run(lambda job=job, pairs=pairs: job.optimizer.apply_gradients(pairs))
            found += job.contents()
        return found

    one, two, four = (everywhere(run_ranks(rank, size)) for size in (1, 2, 4))
    assert one == two == four


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", (1, 3))
@pytest.mark.parametrize("more", [{}, {"clip": optim.ClipByGlobalNorm(1e9)}], ids=["", "clipped"])
def test_accumulated_calls_are_one_update(size, way, more, memory):
    wanted = [cases.Trained(optim.Adam(0.1), w, False) for w in first()]
    for i, one in enumerate(wanted):
        for update in (0, 1):
            one.step(update, ((means(2 * update)[i] + means(2 * update + 1)[i]) / 2).reshape(1, -1))

    def rank(comm):
        job = Job(optim.Adam(0.1, accumulate=2, **more), first(), way)
        for step in range(4):
            before = job.variables[0].numpy()
            job.step(means(step))
            assert np.array_equal(before, job.variables[0].numpy()) == (step % 2 == 0)
        for v, one in zip(job.variables, wanted, strict=True):
            np.testing.assert_allclose(v.numpy().reshape(-1), one.w, 1e-3, 1e-4)
            assert not job.optimizer.slot(v, "pending").numpy().any()
        assert job.optimizer.progress == optim.base.Progress(step=2, good=2)
        return job.contents()

    everywhere(run_ranks(rank, size))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", (1, 3))
@pytest.mark.parametrize("leaf", [0, 1], ids=["large", "small"])
class TestNotFinite:
    def bad(self, leaf, number=np.inf):
        found = means(1)
        found[leaf].reshape(-1)[-1] = number
        return found

    def test_it_is_an_error_on_all_ranks(self, size, way, leaf, memory):
        def rank(comm):
            job = Job(optim.Adam(0.1), first(), way)
            job.step(means(0))
            with pytest.raises(ms.NonFiniteError, match=rf"rank 0: the gradient of .*'v{leaf}:0'"):
                job.step(self.bad(leaf))
            assert all(np.isfinite(v.numpy()).all() for v in job.variables)
            assert job.optimizer.iterations.numpy() == 1
            job.step(means(1))
            return job.contents()

        everywhere(run_ranks(rank, size))

    # Times the weights, and added up, the finite ones are more than float32 has.
    @pytest.mark.parametrize("number", [{1: np.inf, 3: np.inf}, {1: 1.2e38, 3: 1e38}])
    def test_of_calls_that_accumulate_it_may_be_one_before(self, size, way, leaf, number, memory):
        words = rf"of this call are finite.*of calls before .accumulate=2.*'v{leaf}:0'"

        def rank(comm):
            job = Job(optim.SGD(0.1, accumulate=2), first(), way)
            job.step(self.bad(leaf, number[size]))
            with pytest.raises(ms.NonFiniteError, match=words):
                job.step(means(1))
            return job.contents()

        everywhere(run_ranks(rank, size))

    def test_a_step_is_skipped_on_all_ranks(self, size, way, leaf, memory):
        def rank(comm):
            scale = optim.LossScale(start=8.0)
            job = Job(optim.Adam(0.1, nonfinite="skip", loss_scale=scale), first(), way)
            job.step(means(0))
            before = [v.numpy().tobytes() for v in job.variables]
            job.step(self.bad(leaf))
            assert before == [v.numpy().tobytes() for v in job.variables]
            progress = job.optimizer.progress
            assert (progress.step, progress.skipped, progress.scale) == (1, 1, 4.0)
            return job.contents()

        everywhere(run_ranks(rank, size))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("shape", [(5,), LARGE, "rows"])
@pytest.mark.parametrize("nonfinite", ["raise", "skip", "ignore"])
def test_an_infinity_is_not_clipped_before_anybody_looks(nonfinite, shape, size):
    """What overflows in float16 is an infinity; a loss scale finds its way by them."""

    def rank(comm):
        scale = optim.LossScale(start=8.0) if nonfinite == "skip" else None
        kind = {"nonfinite": nonfinite, "loss_scale": scale}
        of = LARGE if shape == "rows" else shape
        job = Job(optim.SGD(1.0, clip=optim.ClipByValue(0.5), **kind), [np.zeros(of), np.zeros(2)])
        bad = np.full(of, -np.inf)
        given = ms.IndexedSlices(bad[3:5], [3, 4], of) if shape == "rows" else bad
        pairs = list(zip([given, np.ones(2)], job.variables, strict=True))
        update = lambda: job.optimizer.apply_gradients(pairs) and None  # noqa: E731
        if nonfinite == "raise":
            with pytest.raises(ms.NonFiniteError, match="is -inf at index"):
                job.strategy.run(update)
        else:
            job.strategy.run(update)
        progress, wanted = job.optimizer.progress, 0.5 if nonfinite == "ignore" else 0.0
        assert job.variables[0].numpy()[4].max() == wanted
        if scale:
            assert (progress.step, progress.skipped, progress.scale) == (0, 1, 4.0)
        return job.contents()

    everywhere(run_ranks(rank, size))


def test_a_step_that_is_skipped_is_told():
    def rank(comm):
        job = Job(optim.Adam(0.1, nonfinite="skip"), first())
        job.step(TestNotFinite().bad(0))
        return job.optimizer.progress.skipped

    with pytest.warns(RuntimeWarning, match="left out on all ranks") as caught:
        assert run_ranks(rank, 2) == [1, 1]
    assert caught[0].filename == __file__


@pytest.mark.parametrize("size", SIZES)
def test_cross_replica_code_wants_the_same_gradients_and_folds_nothing(size, memory):
    wanted = plain(optim.Adam(0.05), 1)

    def rank(comm):
        job = Job(optim.Adam(0.05), first())
        pairs = list(zip(means(0), job.variables, strict=True))
        with job.strategy.scope():
            job.optimizer.apply_gradients(pairs)
        for v, one in zip(job.variables, wanted, strict=True):
            np.testing.assert_allclose(v.numpy().reshape(-1), one.w, 1e-5, 1e-6)
        before = job.contents()
        if size > 1:
            with pytest.raises(ms.LockstepError, match=r"'v1:0'.* differs"):
                job.optimizer.apply_gradients(
                    [(g + comm.rank * (v is job.variables[1]), v) for g, v in pairs]
                )
            assert job.contents() == before
        seen = job.strategy.run(lambda: np.float32(comm.rank) + means(0)[1])
        mean = job.strategy.reduce("MEAN", seen, axis=None)
        with job.strategy.scope():
            job.optimizer.apply_gradients([(mean, job.variables[1])])
        if size > 1:
            with pytest.raises(ms.StructureError, match="per replica"):
                job.optimizer.apply_gradients([(seen, job.variables[1])])
        return job.contents()

    everywhere(run_ranks(rank, size))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", [(6, 3), (600, 50)], ids=["small", "large"])
def test_rows_of_embeddings(size, shape, memory):
    """Rows of all replicas; one appears twice, and one on all; those of weight 0 stay."""
    rows = [np.array([1, 5, 1]), np.array([2, 1]), np.array([3]), np.array([4])]
    share = [1.0, 3.0, 0.0, 4.0][:size]
    dense = np.zeros(shape)
    for r in range(size):
        np.add.at(
            dense, rows[r], share[r] / sum(share) * (1.0 + r) * np.ones((len(rows[r]), shape[1]))
        )
    start = random(shape, "f8", 0)
    touched = sorted({int(i) for r in range(size) for i in rows[r] if share[r]})
    wanted = start.copy()
    one = cases.Trained(optim.Adam(0.1), start[touched], False)
    one.step(0, dense[touched].reshape(1, -1))
    one.step(1, dense[touched].reshape(1, -1))
    wanted[touched] = one.w.reshape(len(touched), -1)

    def rank(comm):
        job = Job(optim.Adam(0.1), [start, np.ones(3)])

        def fn():
            r = comm.rank
            slices = ms.IndexedSlices(np.full((len(rows[r]), shape[1]), 1.0 + r), rows[r], shape)
            pairs = zip([slices, np.ones(3)], job.variables, strict=True)
            job.optimizer.apply_gradients(pairs, weight=share[r])

        job.strategy.run(fn)
        job.strategy.run(fn)
        np.testing.assert_allclose(job.variables[0].numpy(), wanted, 1e-12)
        return job.contents()

    everywhere(run_ranks(rank, size))


@pytest.mark.parametrize("per_node", [1, 3])
def test_indices_may_be_narrower_than_a_place_in_the_variable(per_node, monkeypatch):
    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", str(per_node))
    rows = np.array([100, 3, 100], np.int8)
    wanted = np.zeros((240, 100))
    np.add.at(wanted, rows, -1.0)

    def rank(comm):
        job = Job(optim.SGD(1.0, momentum=0.5, shard="all"), [np.zeros((240, 100))])
        slices = ms.IndexedSlices(np.ones((3, 100)), rows)
        job.give(slices)
        np.testing.assert_allclose(job.variables[0].numpy(), wanted, 1e-12)
        return job.contents()

    everywhere(run_ranks(rank, 3))


@pytest.mark.parametrize("rows", [False, True])
def test_complex_gradients_are_refused_as_rows_too(rows):
    def rank(comm):
        job = Job(optim.SGD(1.0), [np.zeros((4, 2))])
        given = np.ones((4, 2), complex)
        given = ms.IndexedSlices(given, np.arange(4)) if rows else given
        with pytest.raises(ms.LeafTypeError, match=r"complex128\[4,2\], which does not convert"):
            job.give(given)
        return job.contents()

    everywhere(run_ranks(rank, 2))


@pytest.mark.parametrize("rows", [False, True])
def test_a_gradient_too_large_for_the_variable_is_infinite(rows):
    """And not an error of the conversion, however a program wants NumPy to tell of overflows."""

    def rank(comm):
        job = Job(optim.SGD(1.0, nonfinite="skip"), [np.zeros((4, 2), "f4")])
        given = np.full((4, 2), 1e300)
        given = ms.IndexedSlices(given, np.arange(4)) if rows else given
        with np.errstate(all="raise"), pytest.warns(RuntimeWarning, match="left out"):
            job.give(given)
        assert job.optimizer.progress.skipped == 1
        return job.contents()

    run_ranks(rank, 1)


@pytest.mark.parametrize("size", SIZES)
def test_rows_without_elements(size):
    def rank(comm):
        job = Job(optim.Adam(0.1), [np.ones((2, 0, 3)), np.ones(2)])
        slices = ms.IndexedSlices(np.ones((1, 0, 3)), [comm.rank % 2], (2, 0, 3))
        pairs = [(slices, job.variables[0]), (np.ones(2), job.variables[1])]
        job.strategy.run(lambda: job.optimizer.apply_gradients(pairs) and None)
        return job.contents()

    everywhere(run_ranks(rank, size))


@pytest.mark.parametrize("sizes", [(1, 3), (3, 2), (2, 1)])
def test_state_is_saved_and_restored_at_another_number_of_ranks(sizes, tmp_path):
    def make():
        return optim.Adam(optim.WarmUp(0.1, 3), ema=0.9, groups=[optim.Group("v1", beta_1=0.5)])

    def saved(comm):
        job = Job(make(), first())
        job.step(means(0))
        ms.Checkpoint(model=job.variables, optimizer=job.optimizer).write(tmp_path / "c")
        return [one.numpy() for one in (*job.variables, *job.optimizer.variables)]

    def restored(comm):
        job = Job(make(), means(7))
        checkpoint = ms.Checkpoint(model=job.variables, optimizer=job.optimizer)
        with pytest.raises(ms.StructureError, match=r"no state yet.*optimizer.build"):
            checkpoint.read(tmp_path / "c")
        job.optimizer.build(job.variables)
        job.optimizer.build(job.variables[1:])
        checkpoint.read(tmp_path / "c").assert_consumed()
        state = [one.numpy() for one in (*job.variables, *job.optimizer.variables)]
        job.step(means(1))
        return state, job.optimizer.iterations.numpy()

    wanted = run_ranks(saved, sizes[0])[0]
    for state, steps in run_ranks(restored, sizes[1]):
        assert steps == 2
        for one, two in zip(state, wanted, strict=True):
            np.testing.assert_array_equal(one, two)


def test_state_is_named_and_shared_as_the_variables_are():
    def rank(comm):
        job = Job(optim.Adam(0.1, accumulate=2), [np.zeros(LARGE, "f4"), np.zeros(3, "f4")])
        assert job.optimizer.variables == ()
        job.optimizer.build(job.variables)
        names = [one.name for one in job.optimizer.variables]
        assert names[:1] == ["Adam/iterations:0"]
        assert names[-6:] == [
            f"{v}/Adam/{slot}:0" for v in ("v0", "v1") for slot in ("m", "v", "pending")
        ]
        assert isinstance(job.optimizer.slot(job.variables[0], "m")._storage, NodeStorage)

    run_ranks(rank, 2)


def failing(size, program, error, words, **options):
    """Run a program in replica code whose call is an error on all ranks, and changes nothing."""

    def rank(comm):
        job = Job(optim.Adam(0.1, **options), first())
        before = [v.numpy().tobytes() for v in job.variables]
        with pytest.raises(error, match=words):
            job.strategy.run(lambda: program(job, comm.rank))
        assert before == [v.numpy().tobytes() for v in job.variables]
        job.strategy.run(lambda: None)  # nothing is out of step

    run_ranks(rank, size)


@pytest.mark.parametrize("size", (1, 2))
class TestErrors:
    def test_another_variable(self, size):
        def program(job, rank):
            job.optimizer.build(job.variables[:1])
            job.optimizer.apply_gradients(zip(means(0), job.variables, strict=True))

        failing(size, program, ValueError, r"'v1:0'.* is not among .* built for: v0")

    @pytest.mark.parametrize(
        ("given", "error", "words"),
        [
            (
                {1: np.zeros(4, "f4")},
                ms.StructureError,
                r"'v1:0' has shape \(4,\); expected .*\(5,\)",
            ),
            ({1: np.zeros(5, "c8")}, ms.LeafTypeError, "does not convert to float32"),
            ({1: ms.IndexedSlices([1.0], [5])}, ms.StructureError, "indices from 5 to 5"),
            (dict.fromkeys(range(5)), ValueError, "no gradient for any"),
        ],
        ids=["shape", "dtype", "rows", "none"],
    )
    def test_gradients_that_do_not_fit(self, size, given, error, words):
        def program(job, rank):
            gradients = [given.get(i, g) for i, g in enumerate(means(0))]
            job.optimizer.apply_gradients(zip(gradients, job.variables, strict=True))

        failing(size, program, error, words)

    def test_an_iterator_that_was_used_before(self, size):
        def program(job, rank):
            pairs = zip(means(0), job.variables, strict=True)
            assert list(pairs)
            job.optimizer.apply_gradients(pairs)

        failing(size, program, ValueError, "was a zip used twice")

    @pytest.mark.parametrize("weight", [-1, math.nan, "8"])
    def test_weights_that_are_none(self, size, weight):
        def program(job, rank):
            pairs = zip(means(0), job.variables, strict=True)
            job.optimizer.apply_gradients(pairs, weight=weight)

        failing(size, program, ValueError, "weight must be a number of examples")

    @pytest.mark.parametrize("kind", ["dense", "slices"])
    def test_no_rows_on_any_replica(self, size, kind):
        def program(job, rank):
            pairs = list(zip(means(0), job.variables, strict=True))
            if kind == "slices":
                pairs = [(ms.IndexedSlices(np.ones((1, 140), "f4"), [0], LARGE), pairs[0][1])]
            job.optimizer.apply_gradients(pairs, weight=0)

        failing(size, program, ValueError, "weights of all replicas are 0")

    def test_what_is_no_variable(self, size):
        def program(job, rank):
            job.optimizer.apply_gradients([(1.0, job.variables[2].numpy())])

        failing(size, program, TypeError, r"is not a Variable; expected \(gradient, variable\)")

    @pytest.mark.parametrize(
        "given", [lambda v: v[1], lambda v: [np.ones(5), v[1]], lambda v: None], ids=["v", "l", "N"]
    )
    def test_what_are_no_pairs(self, size, given):
        def program(job, rank):
            job.optimizer.apply_gradients(given(job.variables))

        failing(size, program, TypeError, r"expected pairs, such as zip\(gradients, variables\)")

    def test_a_variable_twice(self, size):
        def program(job, rank):
            job.optimizer.apply_gradients([(1.0, job.variables[2])] * 2)

        failing(size, program, ValueError, "given twice")

    def test_accumulation_of_some_variables(self, size):
        def program(job, rank):
            job.optimizer.build(job.variables)
            job.optimizer.apply_gradients([(1.0, job.variables[2])])

        failing(size, program, ValueError, "all 5 variables, but 1", accumulate=2)


def test_variables_of_another_strategy_are_refused():
    def rank(comm):
        one, two = ms.MirroredStrategy(), ms.MirroredStrategy()
        variables = []
        for strategy in (one, two):
            with strategy.scope():
                variables.append(ms.Variable(1.0))
        optimizer = optim.SGD(0.1)
        with pytest.raises(ms.StrategyError, match="Mixing different"):
            one.run(lambda: optimizer.apply_gradients([(1.0, variables[1])]))
        with pytest.raises(ms.StrategyError, match="belongs to"):
            one.run(lambda: optimizer.apply_gradients([(1.0, v) for v in variables]))

    run_ranks(rank, 2)


@pytest.mark.parametrize("built", [False, True], ids=["first", "later"])
@pytest.mark.parametrize(
    "differ",
    [
        lambda rank: (0.1 + rank, [0, 1], False),
        lambda rank: (lambda step: 0.1 + rank, [0, 1], False),
        lambda rank: (0.1, [rank, 1 - rank], False),
        lambda rank: (0.1, [0, 1][: rank + 1], False),
        lambda rank: (0.1, [0, 1], rank == 0),
    ],
    ids=["options", "schedules", "orders", "variables", "None"],
)
def test_ranks_that_differ_are_told(differ, built):
    def rank(comm):
        job = Job(None, first())
        rate, order, none = differ(comm.rank)
        optimizer = optim.SGD(rate)

        def fn():
            if built:
                optimizer.build(job.variables)
            pairs = [(None if none and i else means(0)[i], job.variables[i]) for i in order]
            optimizer.apply_gradients(pairs)

        with pytest.raises(ms.LockstepError, match=r"SGD\("):
            job.strategy.run(fn)
        for v, before in zip(job.variables, first(), strict=True):
            np.testing.assert_array_equal(v.numpy(), before)

    run_ranks(rank, 2)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("rates", "others"),
    [
        # No rate is missing on a rank: they are those of other variables.
        ((0.1, 0.2, 0.1), (0.2, 0.1, 0.2)),
        ((0.1, 0.2, 0.2), (0.1, 0.1, 0.2)),
        ((0.1, 0.1, 0.2), (0.2, 0.1, 0.1)),
    ],
)
@pytest.mark.parametrize("names", [("a", "b", "c"), ("v", "v", "v")], ids=["names", "one name"])
@pytest.mark.parametrize("shape", [(4,), (20_000,)])
def test_rates_of_groups_are_compared_by_variable(shape, names, rates, others, size):
    def rank(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            variables = [ms.Variable(np.zeros(shape), name=name) for name in names]
        own, last = (others if comm.rank == size - 1 else rates), {"step": 0}
        groups = [
            optim.Group(n, learning_rate=lambda step, i=i: own[i] if step else 0.5)
            for i, n in enumerate(names if len(set(names)) > 1 else ("v", "v_1", "v_2"))
        ]
        optimizer = optim.SGD(1.0, groups=groups)

        def step():
            optimizer.apply_gradients([(np.ones(shape), v) for v in variables])
            last["step"] += 1

        strategy.run(step)
        with pytest.raises(ms.LockstepError) as caught:
            strategy.run(step)
        assert "0.1 from no." in str(caught.value)
        assert "0.2 from no." in str(caught.value)
        assert last["step"] == 1
        assert [v.numpy().reshape(-1)[0] for v in variables] == [-0.5] * 3

    run_ranks(rank, size)


def test_equal_rates_of_groups_are_equal_however_they_are_made():
    def rank(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            a, b = (ms.Variable(np.zeros(2), name=name) for name in "ab")
        shared = lambda step: 0.5  # noqa: E731
        rates = (shared, shared) if comm.rank else (lambda step: 0.5, lambda step: 0.5)
        groups = [optim.Group(n, learning_rate=r) for n, r in zip("ab", rates, strict=True)]
        optimizer = optim.SGD(1.0, groups=groups)
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(2), a), (np.ones(2), b)]) and None)
        return a.numpy().tolist() + b.numpy().tolist()

    assert run_ranks(rank, 2) == [[-0.5] * 4] * 2


def test_groups_that_choose_other_variables_on_a_rank_are_told():
    def rank(comm):
        group = optim.Group(lambda name, shape: comm.rank == 1 or not shape, weight_decay=0.1)
        job = Job(optim.SGD(0.1, groups=[group]), first())
        with pytest.raises(ms.LockstepError, match=r"\[5\] by SGD\(learning_rate=0.1\)"):
            job.optimizer.build(job.variables)

    run_ranks(rank, 2)


def test_variables_without_a_gradient_stay():
    def rank(comm):
        job = Job(optim.Adam(0.1, weight_decay=0.1), first())
        before = job.variables[0].numpy()
        pairs = [(None, job.variables[0]), (means(0)[1], job.variables[1])]
        job.strategy.run(lambda: job.optimizer.apply_gradients(pairs))
        np.testing.assert_array_equal(job.variables[0].numpy(), before)
        assert not job.optimizer.slot(job.variables[0], "v").numpy().any()
        assert (job.variables[1].numpy() != first()[1]).all()

    run_ranks(rank, 2)


@pytest.mark.parametrize("function", [None, sum])
def test_values_that_a_function_adds_give_the_same(function):
    wanted = plain(optim.Adam(0.05), 2)

    def rank(comm):
        ops = ms.ReductionToOneDevice(accumulation_fn=function)
        strategy = ms.MirroredStrategy(cross_device_ops=ops)
        with strategy.scope():
            variables = [ms.Variable(v) for v in first()]
        optimizer = optim.Adam(0.05)
        for step in range(2):
            given = [replica_gradient(mean, 3, comm.rank) for mean in means(step)]
            pairs = list(zip(given, variables, strict=True))
            strategy.run(
                lambda p=pairs: optimizer.apply_gradients(p, weight=weights_of(3)[comm.rank])
            )
        for v, one in zip(variables, wanted, strict=True):
            np.testing.assert_allclose(v.numpy().reshape(-1), one.w, 2e-4, 2e-5)

    run_ranks(rank, 3)


@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_one_handshake_and_one_meeting(way, monkeypatch):
    """After the first call, which creates state and memory."""

    def rank(comm):
        job = Job(optim.Adam(0.1), first(), way)
        job.step(means(0))
        session = job.strategy._replicas.lockstep.session
        before = session.calls
        job.step(means(1))
        return session.calls - before

    assert run_ranks(rank, 2) == [2, 2]  # and the end of the run


def test_a_job_without_a_strategy_is_refused():
    def rank(comm):
        w = ms.Variable(1.0)
        told = r"no strategy is in scope.* Create the variables in strategy.scope\(\), and call it"
        with pytest.raises(ms.ContextError, match=told):
            optim.SGD(0.1).apply_gradients([(1.0, w)])

    def chosen(comm):
        strategy = ms.MirroredStrategy()
        rank(comm)
        w = ms.Variable(1.0)
        told = "belongs to DefaultStrategy.* an optimizer to that of its variables"
        with pytest.raises(ms.StrategyError, match=told):
            strategy.run(lambda: optim.SGD(0.1).apply_gradients([(1.0, w)]))

    run_ranks(chosen, 2)


def test_gradients_of_other_dtypes_are_converted():
    def rank(comm):
        job = Job(optim.SGD(1.0), [np.zeros(LARGE, "f4"), np.zeros(3, "f4")])
        given = [np.full(LARGE, 0.5, "f2"), np.full(3, 1.5, ml_dtypes.bfloat16)]
        pairs = list(zip(given, job.variables, strict=True))
        job.strategy.run(lambda: job.optimizer.apply_gradients(pairs))
        return [float(v.numpy().reshape(-1)[-1]) for v in job.variables]

    assert run_ranks(rank, 2) == [[-0.5, -1.5]] * 2


def test_without_a_strategy_it_is_an_ordinary_optimizer():
    w, optimizer = ms.Variable(np.ones(3), name="w"), optim.SGD(0.5, momentum=0.9)
    assert optimizer.apply_gradients([(np.ones(3), w)]).numpy() == 1
    np.testing.assert_array_equal(w.numpy(), np.full(3, 0.5))
    assert [v.name for v in optimizer.variables][-1] == "w/SGD/momentum:0"
    for other in (
        copy.copy(optimizer),
        copy.deepcopy(optimizer),
        pickle.loads(pickle.dumps(optimizer)),
    ):
        assert other == optimizer and other.variables == ()
        with pytest.raises(ms.ContextError, match="no iterations yet"):
            _ = other.iterations
    with pytest.raises(ValueError, match=r"no slot 'ema' of .*momentum.* give it ema=0.99"):
        optimizer.average(w)
    with pytest.raises(ValueError, match=r"does not update .*other.*build\(variables\)"):
        optimizer.slot(ms.Variable(0.0, name="other"), "momentum")


def test_a_rank_that_fails_is_told_to_all():
    def rank(comm):
        job = Job(optim.Adam(0.1), first())

        def fn():
            shape = (5,) if comm.rank else (4,)
            job.optimizer.apply_gradients([(np.zeros(shape, "f4"), job.variables[1])])

        job.strategy.run(fn)

    with pytest.raises(RanksFailed) as found:
        run_ranks(rank, 2)
    assert isinstance(found.value.errors[0], ms.StructureError)
    assert isinstance(found.value.errors[1], ms.RemoteError)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("more", [{}, {"accumulate": 2}, {"shard": "all"}], ids=str)
def test_averages_begin_with_the_weights_before_the_first_update(more, size, memory, tmp_path):
    """The state is built before weights are assigned, or restored without it."""
    first_values = first()

    def save(comm):
        return ms.Checkpoint(v=Job(None, first_values).variables).save(tmp_path / "c")

    path = run_ranks(save, 1)[0]

    def rank(comm):
        found = []
        for restores in (False, True):
            job = Job(optim.SGD(0.5, ema=0.75, **more), [v + 100 for v in first_values])
            job.optimizer.build(job.variables)
            with job.strategy.scope():
                if restores:
                    ms.Checkpoint(v=job.variables).restore(path)
                else:
                    for v, value in zip(job.variables, first_values, strict=True):
                        v.assign(value)
            for step in range(2 * job.optimizer.accumulate):
                job.step(means(step // job.optimizer.accumulate))
            with job.strategy.scope():
                found.append([job.optimizer.average(v).numpy() for v in job.variables])
        return found

    averages = [one.slots["ema"] for one in plain(optim.SGD(0.5, ema=0.75), 2)]
    for found in run_ranks(rank, size):
        for one in found:
            for average, wanted in zip(one, averages, strict=True):
                np.testing.assert_allclose(average.reshape(-1), wanted, 1e-4, 1e-5)


# Gradients of two variables `a` and `b` of one shape, and an optimizer with averages.
VIEWS = {
    "one another": lambda a, b, average: (np.asarray(b), np.asarray(a)),
    "variables": lambda a, b, average: (b, a),
    "reversed": lambda a, b, average: (np.asarray(b)[::-1], np.asarray(a)[::-1]),
    "averages": lambda a, b, average: (np.asarray(average(b)), average(a)),
    "through a buffer": lambda a, b, average: tuple(
        np.frombuffer(memoryview(np.asarray(v)).toreadonly(), v.dtype) for v in (b, a)
    ),
    "by strides": lambda a, b, average: tuple(
        np.lib.stride_tricks.as_strided(np.asarray(v), writeable=False) for v in (b, a)
    ),
    "a single element": lambda a, b, average: (
        np.broadcast_to(np.asarray(b)[-1:], b.shape),
        np.broadcast_to(np.asarray(a)[-1:], a.shape),
    ),
}


class TestGradientsThatAreViewsOfVariables:
    """They count as they are when the call begins, whatever the call has updated before."""

    def weights(self, name, more, shape, given, cross, copied):
        strategy = ms.MirroredStrategy()
        values = np.linspace(0.1, 1.0, np.prod(shape)).reshape(shape)
        with strategy.scope():
            a, b = ms.Variable(values, name="a"), ms.Variable(2 - values, name="b")
        optimizer = optim.OPTIMIZERS[name](0.25, ema=0.5, **more)
        optimizer.build([a, b])

        def step():
            gradients = given(a, b, optimizer.average)
            if copied:
                gradients = [np.array(one) for one in gradients]
            optimizer.apply_gradients(zip(gradients, (a, b), strict=True))

        for _ in range(4):
            if cross:
                with strategy.scope():
                    step()
            else:
                strategy.run(step)
        return [v.numpy().tolist() for v in (a, b, *optimizer.variables)]

    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("cross", [False, True], ids=["replica", "cross-replica"])
    @pytest.mark.parametrize("shape", [(6,), (10_000,)])
    def test_they_count_as_copies_do(self, shape, cross, size):
        def rank(comm):
            hows = [("sgd", {"momentum": 0.5}, shape, one, cross) for one in VIEWS.values()]
            pairs = [[self.weights(*how, copied) for copied in (False, True)] for how in hows]
            return [name for name, (one, other) in zip(VIEWS, pairs, strict=True) if one != other]

        assert run_ranks(rank, size) == [[]] * size

    @pytest.mark.parametrize("name", ["adam", "lars", "lamb", "lion"])
    @pytest.mark.parametrize(
        "more", [{}, {"accumulate": 2}, {"nonfinite": "skip"}], ids=["plain", "accumulate", "skip"]
    )
    def test_of_every_optimizer(self, more, name):
        def rank(comm):
            how = (name, more, (20_000,), VIEWS["one another"])
            return [
                self.weights(*how, cross, False) == self.weights(*how, cross, True)
                for cross in (False, True)
            ]

        assert all(map(all, run_ranks(rank, 2)))
        assert all(map(all, run_ranks(rank, 1)))

    def test_other_gradients_are_not_copied(self, monkeypatch):
        strategy, seen = ms.MirroredStrategy(), []
        with strategy.scope():
            a, b, other = (ms.Variable(np.ones(9), name=name) for name in ("a", "b", "c"))
        monkeypatch.setattr(apply, "_update", lambda *args: seen.extend(args[2].dense_gradients))
        optimizer = optim.SGD(0.1)
        array, view = np.ones(9), np.ones(18)[::2]
        for given in ((array, view), (np.asarray(other), np.asarray(b))):
            strategy.run(optimizer.apply_gradients, args=(zip(given, (a, b), strict=True),))
        assert seen[0] is array
        assert seen[1] is view
        assert np.shares_memory(seen[2], np.asarray(other))  # the call does not change it
        assert not np.shares_memory(seen[3], np.asarray(b))

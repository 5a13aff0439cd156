"""``shard="all"``: slots once for all nodes; weights, and what programs see, as with ``"node"``."""

from __future__ import annotations

import contextlib
import copy
import itertools

import numpy as np
import pytest
from test_apply import LARGE, Job, everywhere, first, means, random

import mpistrat as ms
from mpistrat import optim
from mpistrat.collectives import inter_node
from mpistrat.shm.storage import SpreadStorage
from mpistrat.testing import RanksFailed, run_ranks

LAYOUTS = [(2, 1), (4, 2), (3, 1), (4, 1)]  # ranks, and how many of them are a node
CLIPPED = {"clip": optim.ClipByGlobalNorm(0.5), "ema": 0.9}
OPTIMIZERS = {
    "adam": lambda shard: optim.Adam(0.05, shard=shard),
    "momentum": lambda shard: optim.SGD(0.05, momentum=0.9, shard=shard),
    "lamb": lambda shard: optim.LAMB(0.05, weight_decay=0.1, shard=shard),
    "lars": lambda shard: optim.LARS(0.05, momentum=0.9, shard=shard),
    "clipped": lambda shard: optim.AdamW(0.05, **CLIPPED, shard=shard),
    "accumulated": lambda shard: optim.Adam(0.05, accumulate=2, nonfinite="skip", shard=shard),
}


def nodes_of(monkeypatch, per_node):
    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", str(per_node))


def spread(job, i=0):
    """Tell for each slot of a variable whether all ranks have it once."""
    slots = job.optimizer.slots()
    found = [job.optimizer.slot(job.variables[i], slot)._storage for slot in slots]
    return [isinstance(one, SpreadStorage) for one in found]


def trained(name, shard, way, steps=4):
    """Return all contents after some steps, those of weights here, and which slots are spread."""
    job = Job(OPTIMIZERS[name](shard), [*first(), random((100, 99), "f8", 5)], way)
    for step in range(steps):
        job.step([*means(step), random((100, 99), "f8", step)])
    last = zip([*means(9), random((100, 99), "f8", 9)], job.variables, strict=True)
    job.optimizer.apply_gradients(last)  # in cross-replica code
    return job.contents(), [v._component().tobytes() for v in job.variables], spread(job)


# Each layout, each way with one and with several ranks of a node; the others go the same ways.
BY_DEFAULT = [(2, 1, "arrays"), (4, 2, "arrays"), (3, 1, "buffers"), (4, 2, "buffers")]
NIGHTLY = [(2, 1, "buffers"), (3, 1, "arrays"), (4, 1, "arrays"), (4, 1, "buffers")]


@pytest.mark.parametrize(
    ("size", "per_node", "way"),
    [*BY_DEFAULT, *(pytest.param(*one, marks=pytest.mark.nightly) for one in NIGHTLY)],
)
def test_weights_and_state_have_the_bits_of_node(size, per_node, way, monkeypatch):
    nodes_of(monkeypatch, per_node)
    monkeypatch.setattr(inter_node, "MAX_EXCHANGE_ELEMENTS", 8192)  # several pieces

    def rank(comm):
        results = []
        for name in OPTIMIZERS:
            whole, copies, _ = trained(name, "node", way)
            found, mine, are_spread = trained(name, "all", way)
            assert all(are_spread), name
            # Nodes of one rank may have ordinary means, which "node" adds up; four nodes in pairs.
            if name == "accumulated" and per_node == 1 and (way == "arrays" or size > 3):
                one, other = (np.frombuffer(each[0], "f4") for each in (found, whole))
                np.testing.assert_allclose(one, other, 1e-4, 1e-5)
            else:
                assert found == whole, name
                assert mine == copies, name
            results += found + mine
        return results

    everywhere(run_ranks(rank, size))


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
@pytest.mark.parametrize(("size", "per_node"), [(4, 2), (3, 1)])
def test_sums_may_overflow_and_the_wire_may_be_bfloat16(size, per_node, wire, monkeypatch):
    nodes_of(monkeypatch, per_node)

    def rank(comm):
        options = ms.CommunicationOptions(wire=wire)
        strategy = ms.MultiWorkerMirroredStrategy(communication_options=options)
        found = []
        for shard in ("node", "all"):
            optimizer = optim.SGD(1e-38, momentum=0.5, shard=shard)
            with strategy.scope():
                variables = [ms.Variable(np.ones(LARGE, "f4")) for _ in range(2)]
            gradients = strategy.gradient_buffers(variables)
            for i, g in enumerate(gradients):
                g[...] = random(LARGE, "f4", 9 * comm.rank + i) * np.float32(1e37)
                g[1:60] = 3e38  # already the sum of a node may be infinite
            pairs = list(zip(gradients, variables, strict=True))
            strategy.run(lambda o=optimizer, p=pairs: o.apply_gradients(p) and None)
            np.testing.assert_allclose(variables[0].numpy()[1:60], -2.0, 0.01)
            found.append([v.numpy().tobytes() for v in (*variables, *optimizer.variables)])
        assert found[0] == found[1]
        return found

    everywhere(run_ranks(rank, size))


@pytest.mark.parametrize(("size", "per_node"), LAYOUTS)
def test_each_element_of_a_slot_is_on_one_rank_of_all(size, per_node, monkeypatch):
    nodes_of(monkeypatch, per_node)

    def rank(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            w = ms.Variable(np.ones((64, 4096), "f4"), name="w")
        optimizer = optim.Adam(shard="all")
        optimizer.build([w])
        held = []
        for one in (optimizer.slot(w, "m"), optimizer.slot(w, "v")):
            assert (one.shape, one.dtype, one.name[:7]) == (w.shape, w.dtype, "w/Adam/")
            low, mine = one._storage.part(1)
            assert mine.base is None and mine.flags.owndata  # no more memory than that
            held.append((low, low + mine.size))
        assert held[0] == held[1]
        return held[0]

    found = run_ranks(rank, size)
    edges = sorted(found)
    assert edges[0][0] == 0 and edges[-1][1] == 64 * 4096
    assert all(one[1] == two[0] for one, two in itertools.pairwise(edges))
    nodes = [found[at : at + per_node] for at in range(0, size, per_node)]
    for node in nodes:
        held = sum(high - low for low, high in node)
        assert abs(held - 64 * 4096 / len(nodes)) <= 4096 * per_node


@pytest.mark.parametrize(
    ("size", "per_node", "more"),
    [
        (2, 2, {}),  # one node
        (3, 2, {}),  # no twin for each rank
        (4, 2, {"optimizer": optim.SGD(0.1, shard="all")}),  # no state
        (4, 2, {"shape": (5,)}),
        (1, 1, {}),
    ],
)
def test_where_it_does_not_apply_it_is_as_node(size, per_node, more, monkeypatch):
    nodes_of(monkeypatch, per_node)
    shape = more.get("shape", LARGE)

    def rank(comm):
        found = []
        for shard in ("node", "all"):
            optimizer = more.get("optimizer", optim.Adam(0.1, shard=shard))
            job = Job(optimizer, [random(shape, "f4", 1)], "buffers")
            job.step([random(shape, "f4", 2)])
            assert not any(spread(job))
            found.append(job.contents()[:1])
        return found

    everywhere(run_ranks(rank, size))


@pytest.mark.parametrize(("size", "per_node"), [(4, 2), (3, 1)])
@pytest.mark.parametrize("shape", [(3000, 7), (20000,)])  # rows over two slices; and numbers
def test_rows_are_updated_where_they_are(size, per_node, shape, monkeypatch):
    nodes_of(monkeypatch, per_node)

    def rank(comm):
        found = []
        for shard in ("node", "all"):
            job = Job(optim.Adam(0.1, shard=shard), [random(shape, "f4", 1)])
            w = job.variables[0]
            for step in range(3):
                rows = np.random.default_rng([step, comm.rank]).integers(0, shape[0], 300)
                values = random((300, *shape[1:]), "f4", comm.rank)
                slices = ms.IndexedSlices(values, rows, shape)
                job.strategy.run(
                    lambda job=job, w=w, g=slices: job.optimizer.apply_gradients([(g, w)]) and None
                )
            assert spread(job) == [shard == "all"] * 2
            found.append([*job.contents(), w._component().tobytes()])
        assert found[0] == found[1]
        return found

    everywhere(run_ranks(rank, size))


def test_a_checkpoint_fits_any_number_of_ranks_and_either_way(tmp_path, monkeypatch):
    nodes_of(monkeypatch, 2)

    def rank(comm, shard, load, save):
        job = Job(optim.Adam(0.1, ema=0.5, shard=shard), first())
        job.optimizer.build(job.variables)
        tree = ms.Checkpoint(model=job.variables, optimizer=job.optimizer)
        if load is None:
            for step in range(2):
                job.step(means(step))
        else:
            tree.read(str(tmp_path / load)).assert_consumed()
        assert spread(job) == [shard == "all" and comm.size > 3] * 3
        tree.write(str(tmp_path / save))
        return job.contents()

    wanted = everywhere(run_ranks(rank, 4, "all", None, "a"))
    for size, shard, load, save in [
        (1, "node", "a", "b"),
        (3, "node", "b", "c"),
        (4, "all", "c", "d"),
        (4, "node", "d", "e"),
        (6, "all", "e", "f"),
    ]:
        assert everywhere(run_ranks(rank, size, shard, load, save)) == wanted
    written = [np.load(tmp_path / f"{name}.npz") for name in "af"]
    for name in written[0].files:
        np.testing.assert_array_equal(written[0][name], written[1][name])


@pytest.mark.parametrize(("size", "per_node"), [(4, 2), (3, 1)])
def test_a_slot_is_a_variable_that_is_read_by_all(size, per_node, monkeypatch):
    nodes_of(monkeypatch, per_node)
    value = random(LARGE, "f4", 3)

    def rank(comm):
        job = Job(optim.Adam(0.1, ema=0.9, shard="all"), first())
        job.optimizer.build(job.variables)
        m, ema = (job.optimizer.slot(job.variables[0], name) for name in ("m", "ema"))
        if comm.rank == 0:  # nobody else comes to it
            assert "sharded over all ranks" in repr(m) and "sharded" in f"{m}"
            assert len(m) == LARGE[0] and m.size == value.size
        for look in (lambda: m.values, lambda: m._component(), lambda: m.handle):
            with pytest.raises(ms.StructureError, match=r"sharded over all ranks.*on every rank"):
                look()
        np.testing.assert_array_equal(ema, first()[0], strict=True)
        m.assign(value).assign_add(value)
        np.testing.assert_array_equal(m.numpy(), 2 * value, strict=True)
        m.scatter_update(ms.IndexedSlices(value[:2] * 0, np.array([129, 30]), LARGE))
        want = 2 * value
        want[[129, 30]] = 0
        np.testing.assert_array_equal(m + 0, want)
        other = copy.deepcopy(m)
        np.testing.assert_array_equal(other._component(), want)

        def fails(v):
            v.assign(value)
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            job.strategy.extended.update(m, fails)
        np.testing.assert_array_equal(m[30:], want[30:])
        assert not np.asarray(m).flags.writeable
        with pytest.raises(ms.LockstepError):
            m.assign(value + comm.rank)
        np.testing.assert_array_equal(job.strategy.run(lambda: m[:9]).local, want[:9])

    run_ranks(rank, size)


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_what_one_rank_finds_is_known_to_all_nodes(nonfinite, monkeypatch):
    nodes_of(monkeypatch, 2)

    def rank(comm):
        job = Job(optim.Adam(0.1, nonfinite=nonfinite, shard="all"), first(), "buffers")
        bad = means(0)
        bad[0][-1, -1] = np.inf
        if nonfinite == "raise":
            with pytest.raises(ms.NonFiniteError, match="v0"):
                job.step(bad)
        else:
            with contextlib.suppress(RuntimeWarning, ms.RemoteError):  # warnings are errors here
                job.step(bad)
            assert job.optimizer.progress.skipped == 1
        job.step(means(1))
        assert all(np.isfinite(v.numpy()).all() for v in job.variables)
        return [*job.contents(), *[v._component().tobytes() for v in job.variables]]

    everywhere(run_ranks(rank, 4))


def test_a_step_has_one_message_to_each_twin_and_no_all_reduce_of_parts(monkeypatch):
    nodes_of(monkeypatch, 2)

    def rank(comm):
        job = Job(optim.Adam(0.1, shard="all"), [first()[0], first()[-1]], "buffers")
        given = [means(0)[0], means(0)[-1]]
        job.step(given)
        nodes, calls = job.strategy._replicas.reducer.node.arena.nodes(), []
        for group in (nodes.node, nodes.peers):
            for name in ("barrier", "allreduce", "allgatherv", "sendrecv"):
                called = getattr(group, name)
                count = lambda *args, call=called, name=name: (calls.append(name), call(*args))  # noqa: E731
                monkeypatch.setattr(group, name, count)
        job.step(given)
        assert sorted(calls) == ["allgatherv", "allgatherv", "sendrecv"]

    run_ranks(rank, 4)


def test_all_ranks_have_to_mean_the_same():
    def rank(comm):
        job = Job(optim.Adam(0.1, shard="all" if comm.rank else "node"), first())
        job.optimizer.build(job.variables)

    with pytest.raises(RanksFailed, match="shard='all'"):
        run_ranks(rank, 2)
    with pytest.raises(ValueError, match=r"Adam\(shard='nodes'\).*'node' or 'all'"):
        optim.Adam(shard="nodes")
    with pytest.raises(ValueError, match="shard"):
        optim.Adam(groups=[optim.Group("*", shard="all")])

"""Ways to divide a dataset: against plain lists, at every number of ranks, in both views."""

from __future__ import annotations

import math

import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat.testing import run_ranks

NUMBERS = [1, 2, 3, 4]
PLANS = [(10, 4), (14, 8), (6, 8), (10, 5), (3, 1), (0, 4), (13, 7), (12, 4)]


def with_policy(dataset, name):
    options = ms.DatasetOptions()
    options.experimental_distribute.auto_shard_policy = ms.AutoShardPolicy[name]
    return dataset.with_options(options)


def lists(distributed, limit=99):
    return [e.local.tolist() for e, _ in zip(distributed, range(limit), strict=False)]


def dealt(make, dataset):
    """What every rank gets of ``dataset(comm)``."""
    return lambda comm: lists(make(comm=comm).experimental_distribute_dataset(dataset(comm)))


def even(batch, n):
    return [batch // n + (i < batch % n) for i in range(n)]


def chunks(rows, sizes):
    """Rows dealt out in turns of these sizes, while any are left."""
    found, turn = [], 0
    while rows:
        size = sizes[turn % len(sizes)]
        found.append(rows[:size])
        rows, turn = rows[size:], turn + 1
    return found


@every("n", NUMBERS)
@every(("rows", "batch"), PLANS)
@every("policy", ["AUTO", "DATA", "HINT"])
@every("make", [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy])
def test_each_batch_is_cut(make, policy, rows, batch, n):
    found = run_ranks(
        dealt(make, lambda c: with_policy(ms.Dataset.range(rows).batch(batch), policy)), n
    )
    batches = chunks(list(range(rows)), [batch])
    for rank, got in enumerate(found):
        k = [math.ceil(len(whole) / n) for whole in batches]
        assert got == [w[rank * k[i] : (rank + 1) * k[i]] for i, w in enumerate(batches)]


@every("n", NUMBERS)
@every(("rows", "batch"), PLANS)
@every("policy", ["OFF", "FILE"])
def test_off_in_the_global_view_deals_the_rows_out(policy, rows, batch, n):
    found = run_ranks(
        dealt(
            ms.MirroredStrategy,
            lambda c: with_policy(ms.Dataset.range(rows).batch(batch), policy),
        ),
        n,
    )
    each = chunks(list(range(rows)), even(batch, n))
    steps = math.ceil(rows / batch)
    each += [[]] * (steps * n - len(each))
    for rank, got in enumerate(found):
        assert got == each[rank::n]


@every("n", NUMBERS)
@every(("rows", "batch"), PLANS)
def test_off_in_the_local_view_shows_every_rank_everything(rows, batch, n):
    found = run_ranks(
        dealt(
            ms.MultiWorkerMirroredStrategy,
            lambda c: with_policy(ms.Dataset.range(rows).batch(batch), "OFF"),
        ),
        n,
    )
    sizes = even(batch, n)
    own = [chunks(list(range(rows)), sizes[r:] + sizes[:r]) for r in range(n)]
    longest = max(map(len, own))
    for rank, got in enumerate(found):
        assert got == own[rank] + [[]] * (longest - len(own[rank]))


def test_off_goes_on_across_short_batches_and_epochs():
    def dataset(comm):
        return with_policy(ms.Dataset.range(5).batch(4).repeat(2), "OFF")

    found = run_ranks(dealt(ms.MirroredStrategy, dataset), 2)
    assert found == [[[0, 1], [4, 0], [3, 4]], [[2, 3], [1, 2], []]]


@pytest.mark.parametrize("make", [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy])
def test_off_without_a_batch_size_cuts_each_batch(make):
    def dataset(comm):
        return with_policy(ms.Dataset.from_batches([np.arange(3), np.arange(3, 5)]), "OFF")

    found = run_ranks(dealt(make, dataset), 2)
    if make is ms.MirroredStrategy:
        assert found == [[[0, 1], [3]], [[2], [4]]]
    else:
        assert found == [[[0, 1], [2], [3], [4]]] * 2


def test_a_rank_reads_no_row_of_another_in_any_deal_of_the_global_view(recorder):
    def rank(comm):
        got = {}
        for policy in ("DATA", "OFF"):
            source = recorder(np.arange(14))
            data = with_policy(ms.Dataset(source).shuffle(seed=3).batch(8).prefetch(2), policy)
            distributed = ms.MirroredStrategy(comm=comm).experimental_distribute_dataset(data)
            rows = [row for part in lists(distributed) for row in part]
            assert sorted(source.touched) == sorted(rows)
            got[policy] = rows
        return got

    for policy in ("DATA", "OFF"):
        for n in (2, 3, 4):
            found = [rows for each in run_ranks(rank, n) for rows in each[policy]]
            assert sorted(found) == list(range(14))


FILES = {f"part-{i}": np.arange(10 * i, 10 * i + 2 + i) for i in range(5)}


@pytest.mark.parametrize("make", [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy])
@pytest.mark.parametrize("n", NUMBERS)
@pytest.mark.parametrize("policy", ["FILE", "AUTO"])
def test_files(make, n, policy):
    """Each row once; with FILE, each file is opened by one rank only, with AUTO by all."""

    def rank(comm):
        opened = []

        def read(path):
            opened.append(path.rpartition("/")[2])
            return {"x": FILES[opened[-1]]}

        paths = [f"/node{comm.rank}/{name}" for name in FILES]
        data = with_policy(ms.Dataset.from_files(paths, read).rebatch(6), policy)
        steps = list(make(comm=comm).experimental_distribute_dataset(data))
        return opened, [e["x"].local.tolist() for e in steps]

    found = run_ranks(rank, n)
    assert len({len(steps) for _, steps in found}) == 1
    rows = [row for _, steps in found for part in steps for row in part]
    assert sorted(rows) == sorted(np.concatenate(list(FILES.values())).tolist())
    for at, (opened, steps) in enumerate(found):
        assert opened == list(FILES)[at::n] if policy == "FILE" else list(FILES)
        assert all(len(part) <= math.ceil(6 / n) for part in steps)


def test_files_that_cannot_be_divided():
    def rank(comm):
        data = with_policy(ms.Dataset.from_files(["a"], lambda path: np.arange(3)), "FILE")
        for make in (ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy):
            with pytest.raises(ms.DataError, match="1 files cannot be divided between 2"):
                make(comm=comm).experimental_distribute_dataset(data)
        none = with_policy(ms.Dataset.range(4).batch(2), "FILE")
        with pytest.raises(ms.DataError, match="from_files"):
            ms.MultiWorkerMirroredStrategy(comm=comm).experimental_distribute_dataset(none)

    run_ranks(rank, 2)


def test_names_of_files_in_another_order_are_told():
    def rank(comm):
        names = ["a", "b"] if comm.rank else ["b", "a"]
        data = ms.Dataset.from_files(names, lambda path: np.arange(3))
        with pytest.raises(ms.LockstepError, match="files"):
            ms.MirroredStrategy(comm=comm).experimental_distribute_dataset(data)

    run_ranks(rank, 2)


MADE = {
    "seed": lambda k: ms.Dataset.range(8).shuffle(seed=k).batch(2),
    "no seed": lambda k: ms.Dataset.range(8).shuffle(seed=None if k else 1).batch(2),
    "batch size": lambda k: ms.Dataset.range(8).batch(2 + k),
    "remainder": lambda k: ms.Dataset.range(8).batch(2, drop_remainder=bool(k)),
    "order of steps": lambda k: [
        ms.Dataset.range(8).shuffle(seed=0).repeat(2).batch(2),
        ms.Dataset.range(8).shuffle(seed=0).batch(2).repeat(2),
    ][k],
    "number of rows": lambda k: ms.Dataset.range(8 + k).batch(2),
    "dtype": lambda k: ms.Dataset(np.zeros(8, ["f4", "f8"][k])).batch(2),
    "shape of a row": lambda k: ms.Dataset(np.zeros((8, 1 + k))).batch(2),
    "structure": lambda k: ms.Dataset([{"x": np.zeros(8)}, {"y": np.zeros(8)}][k]).batch(2),
    "take": lambda k: ms.Dataset.range(8).take(6 + k).batch(2),
    "shard": lambda k: ms.Dataset.range(8).shard(2, k).batch(2),
    "map": lambda k: ms.Dataset.range(8).map([abs, np.negative][k]).batch(2),
    "map of batches": lambda k: ms.Dataset.range(8).batch(2).map(abs, rowwise=bool(k)),
    "policy": lambda k: with_policy(ms.Dataset.range(8).batch(2), ["OFF", "DATA"][k]),
    "kind of source": lambda k: ms.Dataset.from_batches([[np.ones(2)], lambda: [np.ones(2)]][k]),
}


@every("what", MADE)
@every("name", ["experimental_distribute_dataset", "make_dataset_iterator"])
def test_datasets_that_are_made_differently_are_told_at_once(what, name):
    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        with pytest.raises(ms.LockstepError, match="distribute"):
            getattr(strategy, name)(MADE[what](int(comm.rank == 1)))
        return lists(strategy.experimental_distribute_dataset(ms.Dataset.range(3).batch(3)))

    assert run_ranks(rank, 3) == [[[0]], [[1]], [[2]]]


@pytest.mark.parametrize("what", MADE)
def test_datasets_that_are_made_alike_are_not(what):
    for k in (0, 1):
        one, other = (MADE[what](k) for _ in range(2))
        assert one._describe() == other._describe()
        run_ranks(
            lambda comm, k=k: ms.MirroredStrategy(comm=comm).experimental_distribute_dataset(
                MADE[what](k)
            ),
            2,
        )


def test_contents_are_not_described():
    assert ms.Dataset(np.zeros(3))._describe() == ms.Dataset(np.ones(3))._describe()


def test_streams_of_other_sizes_are_told_at_the_step():
    def rank(comm):
        sizes = [2, 2 + comm.rank]
        data = ms.Dataset.from_batches(lambda: (np.ones(size) for size in sizes))
        iterator = iter(ms.MirroredStrategy(comm=comm).experimental_distribute_dataset(data))
        next(iterator)
        with pytest.raises(ms.LockstepError, match="different sizes"):
            next(iterator)
        with pytest.raises(ms.DataError, match="has failed"):
            next(iterator)
        return True

    assert run_ranks(rank, 2) == [True, True]

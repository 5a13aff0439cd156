"""Rows that a predicate keeps: judged once, in shares; then exact at every number of ranks."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.errors import RemoteError
from mpistrat.testing import RanksFailed, run_ranks

SIZES = (1, 2, 3, 5)
ROWS = 23


def is_odd(x):
    return x % 2 == 1


def is_small(x):
    return x < 15


# By name: what makes a dataset of examples, and the kept rows in their order; None if shuffled.
DATASETS = {
    "odd": (lambda d: d.filter(is_odd), [*range(1, ROWS, 2)]),
    "twice": (lambda d: d.filter(is_odd).filter(is_small), [*range(1, 15, 2)]),
    "mapped": (lambda d: d.map(lambda x: x + 1).filter(is_odd), [*range(1, ROWS + 1, 2)]),
    "before map": (lambda d: d.filter(is_odd).map(lambda x: 2 * x), [*range(2, 2 * ROWS, 4)]),
    "between maps": (
        lambda d: d.map(lambda x: x + 1).filter(is_odd).map(lambda x: 2 * x),
        [*range(2, 2 * ROWS + 1, 4)],
    ),
    "taken": (lambda d: d.take(10).filter(is_odd).skip(1), [3, 5, 7, 9]),
    "sharded": (lambda d: d.filter(is_odd).shard(3, 1), [3, 9, 15, 21]),
    "repeated": (lambda d: d.filter(is_odd).repeat(2).skip(9), [19, 21, *range(1, ROWS, 2)]),
    "after repeat": (lambda d: d.repeat(2).filter(is_odd), 2 * [*range(1, ROWS, 2)]),
    "shuffled": (lambda d: d.shuffle(seed=1).filter(is_odd).shuffle(seed=2), None),
    "all": (lambda d: d.filter(lambda x: True), [*range(ROWS)]),
    "none": (lambda d: d.filter(lambda x: False), []),
    "none, repeated": (lambda d: d.filter(lambda x: False).repeat(3).shuffle(seed=1), []),
}
names = pytest.mark.parametrize("name", DATASETS)


def kept(name, dataset):
    """Return the dataset, and the elements that it should have, sorted if they are shuffled."""
    make, rows = DATASETS[name]
    return make(dataset), [*range(1, ROWS, 2)] if rows is None else rows


@names
@pytest.mark.parametrize("asked", ["before", "after"])
def test_elements_and_their_number(name, asked):
    dataset, rows = kept(name, ms.Dataset(np.arange(ROWS)))
    if asked == "before":
        assert dataset.cardinality() == len(rows)
        assert dataset.batch(4).cardinality() == -(-len(rows) // 4)
    elements = [int(x) for x in dataset]
    assert (sorted(elements) if name == "shuffled" else elements) == rows
    assert dataset.cardinality() == len(rows)
    batches = [*dataset.batch(4)]
    assert sum(map(len, batches)) == len(rows)
    assert len(batches) == dataset.batch(4).cardinality()


@names
@pytest.mark.parametrize("size", SIZES)
def test_each_rank_judges_its_share_and_all_have_the_same(name, size):
    dataset, _ = kept(name, ms.Dataset(np.arange(ROWS)))
    wanted = [batch.tolist() for batch in dataset.batch(6)]

    def program(comm):
        judged = []

        def watch(x):
            judged.append(int(x))
            return is_odd(x)

        dataset, _ = kept(name, ms.Dataset(np.arange(ROWS)))
        strategy = ms.MirroredStrategy()
        batches = strategy.experimental_distribute_dataset(dataset.batch(6))
        assert batches.cardinality == len(wanted)
        parts = []
        for batch in batches:
            local = strategy.experimental_local_results(batch)
            parts.append([x for part in local for x in part.tolist()])
        watched = ms.Dataset(np.arange(ROWS)).filter(watch).batch(6)
        for _ in range(2):
            strategy.experimental_distribute_dataset(watched)
        return parts, judged

    results = run_ranks(program, size)
    for parts, _ in results:
        assert parts == wanted
    assert sorted(x for _, judged in results for x in judged) == [*range(ROWS)]  # once
    assert max(len(judged) for _, judged in results) <= -(-ROWS // size)


def test_a_predicate_sees_only_what_reaches_it(recorder):
    seen = []

    def watch(x):
        seen.append(int(x))
        return True

    source = recorder(np.arange(20))
    dataset = ms.Dataset(source).shard(2, 0).filter(lambda x: x < 12).filter(watch)
    assert dataset.shuffle(seed=1).batch(2).element_spec is not None and not source.touched
    assert "a filter has not been run" in repr(dataset) and not source.touched
    assert dataset.cardinality() == 6 and seen == [0, 2, 4, 6, 8, 10]
    assert set(source.touched) == {*range(0, 20, 2)}
    assert "cardinality 6" in repr(dataset)
    assert len([*dataset]) == 6 and len(seen) == 6


@pytest.mark.parametrize("policy", ms.AutoShardPolicy)
@pytest.mark.parametrize("kind", [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy])
def test_every_policy_gives_each_kept_row(policy, kind):
    options = ms.DatasetOptions()
    options.experimental_distribute.auto_shard_policy = policy
    is_alone = kind is ms.MultiWorkerMirroredStrategy
    if is_alone and policy is ms.AutoShardPolicy.FILE:
        pytest.skip("there are no files")

    def program(comm):
        dataset = ms.Dataset(np.arange(ROWS)).filter(is_odd).shuffle(seed=1).batch(4)
        strategy = kind()
        distributed = strategy.experimental_distribute_dataset(dataset.with_options(options))
        return [x for batch in distributed for part in
                strategy.experimental_local_results(batch) for x in part.tolist()]  # fmt: skip

    results = run_ranks(program, 3)
    rows = [x for result in (results if is_alone else results[:1]) for x in result]
    copies = 3 if is_alone and policy is ms.AutoShardPolicy.OFF else 1
    assert sorted(rows) == sorted(copies * [*range(1, ROWS, 2)])


def test_single_examples_go_in_turns():
    def program(comm):
        strategy = ms.MirroredStrategy()
        dataset = ms.Dataset(np.arange(9)).filter(is_odd)
        steps = strategy.experimental_distribute_dataset(dataset, unbatched=True)
        return [[np.ravel(x).tolist() for x in strategy.experimental_local_results(step)]
                for step in steps]  # fmt: skip

    assert run_ranks(program, 2) == [[[[1], [3]], [[5], [7]]]] * 2


def test_datasets_of_each_rank_are_judged_by_it():
    def program(comm):
        strategy = ms.MirroredStrategy()

        def make(context):
            index = context.input_pipeline_id
            return ms.Dataset(np.arange(10) + 100 * index).filter(lambda x: x % 100 > 7).batch(5)

        batches = strategy.distribute_datasets_from_function(make)
        return [[part.tolist() for part in strategy.experimental_local_results(batch)]
                for batch in batches]  # fmt: skip

    assert run_ranks(program, 2) == [[[[8, 9], [108, 109]]]] * 2


def test_what_was_judged_before_is_not_judged_again():
    """By one rank only, as where rank 0 has printed the cardinality."""

    def program(comm):
        judged = []

        def watch(x):
            judged.append(int(x))
            return is_odd(x)

        dataset = ms.Dataset(np.arange(8)).filter(watch)
        if comm.rank == 0:
            assert dataset.cardinality() == 4
        batches = ms.MirroredStrategy().experimental_distribute_dataset(dataset.batch(2))
        return len(judged), batches.cardinality

    assert run_ranks(program, 2) == [(8, 2), (4, 2)]


class Ended(Exception):
    """As if the process were killed."""


def train(comm, directory, end=None, keep=is_odd, shuffle=True):
    """Return the batches of two epochs, with the step before which each came."""
    strategy = ms.MirroredStrategy()
    with strategy.scope():
        total = ms.Variable(np.zeros(ROWS))
    dataset = ms.Dataset(np.arange(ROWS)).filter(keep)
    dataset = (dataset.shuffle(seed=5) if shuffle else dataset).batch(3)
    checkpoint = ms.Checkpoint(total=total, data=dataset, step=0)
    manager = ms.CheckpointManager(checkpoint, directory, 2, every="1 steps")

    def step(rows):
        counts = np.bincount(rows, minlength=ROWS).astype(float)
        total.assign_add(ms.get_replica_context().all_reduce("sum", counts))

    for batch in manager.resume(strategy.experimental_distribute_dataset(dataset), epochs=2):
        strategy.run(step, args=(batch,))
        checkpoint.step += 1
        if checkpoint.step == end:
            raise Ended
    return checkpoint.step, total.numpy()


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 3), (3, 1), (5, 2), (2, 5)])
def test_resuming_in_mid_epoch_is_exact(first, second, tmp_path):
    for end in (2, 6):
        directory = tmp_path / str(end)
        with pytest.raises((RanksFailed, Ended)):
            run_ranks(lambda comm, directory=directory, end=end: train(comm, directory, end), first)
        for steps, total in run_ranks(lambda comm, d=directory: train(comm, d), second):
            assert steps == 8
            np.testing.assert_array_equal(total, 2.0 * (np.arange(ROWS) % 2))


def test_resuming_with_another_predicate_is_an_error(tmp_path):
    with pytest.raises((RanksFailed, Ended)):
        run_ranks(lambda comm: train(comm, tmp_path, 2, keep=lambda x: x > 3), 1)
    with pytest.raises((RanksFailed, ms.DataError), match=r"keeping 19 of 23 rows .* keeping 18"):
        run_ranks(lambda comm: train(comm, tmp_path, keep=lambda x: x > 4), 1)


class TestBatches:
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("source", ["arrays", "generator", "list"])
    def test_whole_batches_are_kept(self, source, size):
        batches = [np.arange(lo, min(lo + 4, ROWS)) for lo in range(0, ROWS, 4)]
        sources = {
            "arrays": lambda: ms.Dataset(np.arange(ROWS)).batch(4),
            "generator": lambda: ms.Dataset(lambda: iter(batches)),
            "list": lambda: ms.Dataset(batches),
        }

        def program(comm):
            dataset = sources[source]().filter(lambda batch: batch.sum() % 4 == 2)
            assert dataset.cardinality() == ms.Dataset.UNKNOWN
            strategy = ms.MirroredStrategy()
            for _ in range(2):
                rows = [x for batch in strategy.experimental_distribute_dataset(dataset)
                        for part in strategy.experimental_local_results(batch)
                        for x in part.tolist()]  # fmt: skip
                assert rows == [x for b in batches if b.sum() % 4 == 2 for x in b.tolist()]

        run_ranks(program, size)

    def test_files_and_rows_that_are_joined_again(self):
        rows = {"a": np.arange(3), "b": np.arange(3, 5), "c": np.arange(5, 9)}
        dataset = ms.Dataset.from_files(rows, rows.get).filter(lambda x: len(x) > 2).rebatch(5)
        assert [x.tolist() for x in dataset] == [[0, 1, 2, 5, 6], [7, 8]]

    def test_they_have_no_permutation(self):
        with pytest.raises(ms.DataError, match="not known before they are read"):
            ms.Dataset(np.arange(4)).batch(2).filter(lambda x: True).shuffle(seed=1)


def test_tuples_are_unpacked_and_dicts_are_not():
    x, y = np.arange(6.0).reshape(3, 2), np.array([0, 1, 1])
    assert ms.Dataset((x, y)).filter(lambda x, y: y == 1 and x[0] > 2).cardinality() == 1
    assert ms.Dataset({"x": x, "y": y}).filter(lambda row: row["y"] == 1).cardinality() == 2


def test_copies_and_pickles_keep_what_is_known():
    dataset = ms.Dataset(np.arange(9)).filter(is_odd).shuffle(seed=1)
    for other in (copy.deepcopy(dataset), pickle.loads(pickle.dumps(dataset))):
        assert sorted(int(x) for x in other) == [1, 3, 5, 7]
    assert dataset.cardinality() == 4
    assert "cardinality 4" in repr(copy.deepcopy(dataset))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda d: d.filter(None), TypeError, r"filter\(predicate\) must get a function"),
        (lambda d: d.repeat().filter(is_odd), ms.DataError, "call filter before repeat"),
        (lambda d: d.shuffle(seed=1).take(3).filter(is_odd), ms.DataError, "before shuffle"),
        (lambda d: [*d.filter(lambda x: 1)], ms.DataError, "returned 1; expected True or False"),
        (lambda d: [*d.filter(lambda x: None)], ms.DataError, "returned None; expected True"),
        (lambda d: [*d.batch(2).filter(is_odd)], ms.DataError, r"expected .*\(x > 0\).all\(\)"),
        (lambda d: [*d.filter(lambda x: next(iter(())))], ms.DataError, "StopIteration"),
    ],
)
def test_what_cannot_be_is_an_error(make, error, words):
    with pytest.raises(error, match=words):
        make(ms.Dataset(np.arange(4)))


def test_a_predicate_that_fails_on_one_rank_fails_on_all():
    def program(comm):
        dataset = ms.Dataset(np.arange(9)).filter(lambda x: 1 / (x - 7) > 0).batch(2)
        with np.errstate(divide="raise"), pytest.raises((RemoteError, FloatingPointError)) as error:
            ms.MirroredStrategy().experimental_distribute_dataset(dataset)
        return type(error.value) is FloatingPointError

    assert run_ranks(program, 3) == [False, False, True]


def test_ranks_with_rows_of_their_own_are_refused():
    def program(comm):
        dataset = ms.Dataset(np.arange(9) + comm.rank).filter(is_odd).batch(2)
        with pytest.raises(ms.DataError, match="filter wants the same rows on all ranks"):
            ms.MirroredStrategy().experimental_distribute_dataset(dataset, rows_may_differ=True)

    run_ranks(program, 2)


def test_ranks_with_other_predicates_are_told():
    def program(comm):
        dataset = ms.Dataset(np.arange(9)).filter(is_odd if comm.rank else is_small).batch(2)
        with pytest.raises(ms.LockstepError, match="Filter"):
            ms.MirroredStrategy().experimental_distribute_dataset(dataset)

    run_ranks(program, 2)

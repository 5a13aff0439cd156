"""Iterators asked in other words, what a step looks like, folds, and input functions."""

from __future__ import annotations

import copy
import itertools
import pickle

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.compat import tf
from mpistrat.data.iterators import Optional
from mpistrat.data.sources import Spec
from mpistrat.testing import run_ranks

NUMBERS = [1, 2, 3, 4]
VIEWS = [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy]


def test_optional():
    held = Optional.from_value([3])
    assert held.has_value()
    assert held.get_value() == [3]
    assert repr(held) == "Optional([3])"
    assert not Optional.empty().has_value()
    with pytest.raises(ms.DataError, match="has_value"):
        Optional.empty().get_value()
    assert tf.experimental.Optional is Optional


@pytest.mark.parametrize("do", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("size", [1, 2])
def test_what_all_ranks_step_through_is_neither_copied_nor_pickled(do, size):
    def rank(comm):
        strategy, dataset = ms.MirroredStrategy(), ms.Dataset(np.arange(8.0)).batch(4)
        distributed = strategy.experimental_distribute_dataset(dataset)
        older = strategy.make_dataset_iterator(dataset)
        with pytest.raises(
            TypeError, match=r"dataset no\. 1 cannot be copied.*distribute it again"
        ):
            do(distributed)
        for iterator in (iter(distributed), older, iter(dataset), iter(tf.data.Dataset.range(3))):
            next(iterator)
            with pytest.raises(TypeError, match=r"Iterator cannot be copied.*another iter\(\)"):
                do([iterator] if do is not copy.copy else iterator)
        do(dataset)
        return len(list(distributed))

    assert run_ranks(rank, size) == [2] * size


def test_an_undivided_dataset_is_asked_in_the_same_words():
    iterator = iter(ms.Dataset.range(3).batch(2))
    assert iterator.element_spec == Spec((None,), np.dtype("i8"))
    assert iterator.get_next(name=None).tolist() == [0, 1]
    assert iterator.get_next_as_optional().get_value().tolist() == [2]
    assert not iterator.get_next_as_optional().has_value()
    with pytest.raises(tf.errors.OutOfRangeError):
        iterator.get_next()
    with pytest.raises(StopIteration):
        iterator.next()
    assert ms.Dataset.range(5).reduce(1, lambda a, b: a + int(b)) == 11


@pytest.mark.parametrize("make", VIEWS)
@pytest.mark.parametrize("n", NUMBERS)
def test_a_distributed_iterator(make, n):
    def rank(comm):
        data = make(comm=comm).experimental_distribute_dataset(ms.Dataset.range(n + 1).batch(n))
        iterator = iter(data)
        first = iterator.get_next(name="first").local.tolist()
        second = iterator.get_next_as_optional().get_value().local.tolist()
        assert not iterator.get_next_as_optional().has_value()
        for _ in range(2):
            with pytest.raises(ms.OutOfRangeError, match="End of sequence"):
                iterator.get_next()
        assert list(iterator) == []
        return first, second, data.cardinality

    found = run_ranks(rank, n)
    assert found == [([r], [n] if r == 0 else [], 2) for r in range(n)]


@pytest.mark.parametrize("n", NUMBERS)
def test_an_endless_dataset(n):
    def rank(comm):
        data = ms.Dataset.range(3).repeat().batch(n)
        distributed = ms.MirroredStrategy(comm=comm).experimental_distribute_dataset(data)
        assert distributed.cardinality == ms.Dataset.INFINITE
        iterator = iter(distributed)
        found = [iterator.get_next_as_optional() for _ in range(7)]
        assert all(one.has_value() for one in found)
        return [int(one.get_value().local[0]) for one in found]

    steps = zip(*run_ranks(rank, n), strict=True)
    want = itertools.cycle([0, 1, 2])
    assert [row for step in steps for row in step] == list(itertools.islice(want, 7 * n))


@pytest.mark.parametrize("n", NUMBERS)
def test_a_fold_over_a_distributed_dataset(n):
    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        data = strategy.experimental_distribute_dataset(ms.Dataset.range(11).batch(4))

        def add(total, x):
            return total + strategy.reduce("SUM", x, axis=0)

        return [int(data.reduce(np.int64(5), add)) for _ in range(2)]

    assert run_ranks(rank, n) == [[60, 60]] * n


def test_a_fold_that_fails_on_one_rank_is_an_error_on_all():
    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        data = strategy.experimental_distribute_dataset(ms.Dataset.range(4).batch(2))

        def fold(total, x):
            strategy.run(lambda: 1 // (1 - comm.rank))
            return total

        with pytest.raises(ZeroDivisionError):
            data.reduce(0, fold)
        return float(strategy.reduce("SUM", ms.PerReplica(1.0), None))

    assert run_ranks(rank, 2) == [2.0, 2.0]


@pytest.mark.parametrize(
    ("make", "drop", "rows", "shown"),
    [
        (ms.MirroredStrategy, False, None, 2),
        (ms.MirroredStrategy, True, 2, 2),
        (ms.MultiWorkerMirroredStrategy, True, None, 1),
    ],
)
def test_what_a_step_looks_like(make, drop, rows, shown):
    def rank(comm):
        data = ms.Dataset({"x": np.zeros((8, 3), "f4")}).batch(4, drop_remainder=drop)
        distributed = make(comm=comm).experimental_distribute_dataset(data)
        spec = distributed.element_spec["x"]
        assert iter(distributed).element_spec == {"x": spec}
        assert spec.specs == (Spec((rows, 3), np.dtype("f4")),) * shown
        mapped = make(comm=comm).experimental_distribute_dataset(data.map(lambda b: b))
        assert mapped.element_spec is None
        assert mapped.cardinality == 2

    run_ranks(rank, 2)


def test_batches_that_are_not_divided_evenly_have_no_fixed_number_of_rows():
    def rank(comm):
        data = ms.Dataset.range(10).batch(5, drop_remainder=True)
        distributed = ms.MirroredStrategy(comm=comm).experimental_distribute_dataset(data)
        return distributed.element_spec.specs[0].shape

    assert run_ranks(rank, 2) == [(None,)] * 2


def test_auto_shard_takes_every_so_manyth_batch():
    def rank(comm):
        data = ms.Dataset.range(12).batch(2)
        distributed = ms.MirroredStrategy(comm=comm).experimental_distribute_dataset(data)
        return [e.local.tolist() for e in distributed.auto_shard(3, 1)]

    assert run_ranks(rank, 2) == [[[2], [8]], [[3], [9]]]


@pytest.mark.parametrize("n", NUMBERS)
def test_an_iterator_of_the_older_kind_begins_anew_when_told(n):
    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        iterator = strategy.make_dataset_iterator(ms.Dataset.range(2 * n).batch(n))
        assert iterator.output_types == np.dtype("i8")
        assert iterator.output_shapes == (None,)
        assert iterator.output_classes is np.ndarray
        found = [iterator.get_next().local.tolist()]
        assert iterator.initialize() == []
        found += [e.local.tolist() for e in iterator]
        with pytest.raises(ms.OutOfRangeError):
            iterator.get_next()
        assert iterator.initializer == []
        out = strategy.experimental_run(lambda x: x * 2, iterator)
        found.append(strategy.experimental_local_results(out)[comm.rank].tolist())
        return found

    for r, found in enumerate(run_ranks(rank, n)):
        assert found == [[r], [r], [n + r], [2 * r]]


def test_an_iterator_that_begins_anew_on_one_rank_only_is_an_error():
    def rank(comm):
        iterator = ms.MirroredStrategy(comm=comm).make_dataset_iterator(
            ms.Dataset.range(8).batch(2)
        )
        iterator.get_next()
        if comm.rank == 1:
            iterator.initialize()
        with pytest.raises(ms.LockstepError, match="iter"):
            iterator.get_next()
        for _ in range(2):  # on all ranks, where some would begin and others continue
            with pytest.raises(ms.DataError, match=r"has failed|could not begin"):
                iterator.get_next()
        iterator.initialize()
        return len([e.local for e in iterator])

    assert run_ranks(rank, 2) == [4, 4]


@pytest.mark.parametrize("n", [1, 2])
def test_shapes_of_examples_that_are_not_batched(n):
    def rank(comm):
        strategy = ms.MultiWorkerMirroredStrategy(comm=comm)

        def shape(data, old):
            if old:
                return strategy.make_input_fn_iterator(lambda c: data).output_shapes
            found = strategy.distribute_datasets_from_function(lambda c: data)
            return found.element_spec.specs[0].shape

        rows = ms.Dataset(np.zeros((4, 3)))
        # Who has ended earlier is given no rows; but nobody ends earlier where the first ends all,
        # and nobody ends at all where there is no end.
        return shape(rows, False), shape(rows, True), shape(rows.repeat(), False)

    assert run_ranks(rank, n) == [((None,), (3,), (3,))] * n


@pytest.mark.parametrize("n", NUMBERS)
def test_cardinality_is_that_of_the_dataset_that_was_given(n, tmp_path):
    for name in "abcde":
        np.save(tmp_path / f"{name}.npy", np.arange(4))
    paths = sorted(map(str, tmp_path.iterdir()))

    def rank(comm):
        distribute = ms.MirroredStrategy(comm=comm).experimental_distribute_dataset
        options = ms.DatasetOptions()
        options.experimental_distribute.auto_shard_policy = ms.AutoShardPolicy.FILE
        files = ms.Dataset.from_files(paths, np.load).with_options(options)
        plain = distribute(ms.Dataset.range(10), unbatched=True)
        batched = distribute(ms.Dataset.range(10).batch(4))
        return plain.cardinality, batched.cardinality, distribute(files).cardinality

    assert run_ranks(rank, n) == [(10, 3, 5)] * n


@pytest.mark.parametrize("n", NUMBERS)
def test_batches_of_an_input_function_go_to_the_replicas_in_turns(n, recorder):
    """A last round that does not reach all replicas is left out, and nobody reads another's."""

    def rank(comm):
        source = recorder(np.arange(4 * n + 2))

        def input_fn(context):
            assert (context.num_input_pipelines, context.input_pipeline_id) == (1, 0)
            assert context.num_replicas_in_sync == n
            return ms.Dataset(source).batch(2)

        iterator = ms.MirroredStrategy(comm=comm).make_input_fn_iterator(input_fn)
        found = [e.local.tolist() for e in iterator]
        return found, source.touched

    for r, (found, touched) in enumerate(run_ranks(rank, n)):
        rounds = 3 if n == 1 else 2
        want = [[2 * (i * n + r), 2 * (i * n + r) + 1] for i in range(rounds)]
        assert found == want
        assert set(touched) - set(range(4 * n, 4 * n + 2)) == {
            row for part in want for row in part if row < 4 * n
        }


@pytest.mark.parametrize("n", NUMBERS)
@pytest.mark.parametrize("mapped", [False, True])
def test_single_examples_of_an_input_function_go_to_the_replicas_in_turns(n, mapped, recorder):
    """Each replica gets the rows that it gets of batches of one row, without that axis."""

    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)

        def steps(data):
            iterator = strategy.make_input_fn_iterator(lambda context: data)
            return iterator, [(e["x"].local, e["y"].local) for e in iterator]

        source = recorder(np.arange(8 * n + 4).reshape(-1, 4))
        data = ms.Dataset({"x": source, "y": np.arange(2 * n + 1.0)}).repeat(1)
        if mapped:
            data = data.map(lambda e: {"x": e["x"] * 2, "y": e["y"]})
        iterator, found = steps(data)
        assert [np.shape(leaf) for leaf in found[0]] == [(4,), ()]
        if not mapped:
            assert iterator.output_shapes == {"x": (4,), "y": ()}
            rows = {i * n + comm.rank for i in range(2 + (n == 1))}
            assert set(source.touched) | {2 * n} == rows | {2 * n}
        batches = steps(data.batch(1))[1]
        assert all(
            np.array_equal(a[None], b)
            for one, other in zip(found, batches, strict=True)
            for a, b in zip(one, other, strict=True)
        )
        return [float(y) for _, y in found]

    rounds = 3 if n == 1 else 2
    assert run_ranks(rank, n) == [[float(i * n + r) for i in range(rounds)] for r in range(n)]


def test_single_examples_in_turns_with_one_that_cannot_be_read():
    def rank(comm):
        def odd(x):
            if x == 2:
                raise KeyError("row 2")
            return x

        data = ms.Dataset.range(6).map(odd)
        iterator = ms.MirroredStrategy(comm=comm).make_input_fn_iterator(lambda context: data)
        first = int(next(iterator).local)
        with pytest.raises(KeyError, match="row 2"):
            next(iterator)
        return first, int(next(iterator).local)

    assert run_ranks(rank, 2) == [(0, 4), (1, 5)]


@pytest.mark.parametrize("n", NUMBERS)
def test_an_input_function_of_each_worker(n):
    def rank(comm):
        def input_fn(context):
            pipelines, number = context.num_input_pipelines, context.input_pipeline_id
            assert (pipelines, number) == (n, comm.rank)
            return ms.Dataset.range(3 * n).shard(pipelines, number).batch(2)

        strategy = ms.MultiWorkerMirroredStrategy(comm=comm)
        return [e.local.tolist() for e in strategy.make_input_fn_iterator(input_fn)]

    assert run_ranks(rank, n) == [[[r, r + n], [r + 2 * n]] for r in range(n)]


def test_a_function_that_is_called_for_each_element_ends_when_one_replica_has_no_more():
    def rank(comm):
        numbers = iter(range(2 + comm.rank))
        iterator = ms.MirroredStrategy(comm=comm).make_input_fn_iterator(
            lambda c: lambda: np.float32(next(numbers))
        )
        found = [e.local for e in iterator]
        assert iterator.element_spec is iterator.output_types is None
        return found

    assert run_ranks(rank, 2) == [[0.0, 1.0], [0.0, 1.0]]


def test_an_input_function_that_fails_on_one_rank_is_an_error_on_all():
    def rank(comm):
        def input_fn(context):
            if comm.rank == 1:
                raise KeyError("no input")
            return ms.Dataset.range(4).batch(2)

        with pytest.raises(KeyError, match="no input"):
            ms.MirroredStrategy(comm=comm).make_input_fn_iterator(input_fn)

    run_ranks(rank, 3)


def test_one_device():
    strategy = ms.OneDeviceStrategy("cpu")
    iterator = strategy.make_dataset_iterator(ms.Dataset.range(3).batch(2))
    assert iterator.get_next().tolist() == [0, 1]
    assert strategy.experimental_run(lambda x: x + 1, iterator).tolist() == [3]
    own = strategy.make_input_fn_iterator(lambda c: ms.Dataset.range(2).batch(2))
    assert [x.tolist() for x in own] == [[0, 1]]


def test_what_a_fold_raises_on_one_rank_is_an_error_on_all():
    def program(comm):
        strategy = ms.MirroredStrategy()
        data = strategy.experimental_distribute_dataset(ms.Dataset(np.arange(8.0)).batch(4))

        def fold(state, element):
            if comm.rank == 1:
                raise KeyError("mine")
            return state

        with pytest.raises(KeyError, match="mine") as found:
            data.reduce(0, fold)
        assert isinstance(found.value, ms.RemoteError) == (comm.rank != 1)
        return float(strategy.all_reduce("sum", 1.0))

    assert run_ranks(program, 3) == [3.0] * 3

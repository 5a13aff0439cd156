"""Batches of a dataset that is not distributed, given to replica code."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat.compat import tf
from mpistrat.testing import run_ranks

X, Y = np.arange(24.0).reshape(8, 3), np.arange(8.0)
MAKE = [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy]


def step(*args, **kwargs):
    return None


def by_arguments(strategy):
    for batch in ms.Dataset((X, Y)).batch(4):
        strategy.run(step, args=batch)


def as_one_argument(strategy):
    for batch in ms.Dataset((X, Y)).batch(4):
        strategy.run(step, args=(batch,))


def by_name(strategy):
    for features, target in ms.Dataset((X, Y)).batch(4):
        strategy.run(step, args=(1.0,), kwargs={"y": [target], "x": {"a": 0 * features}})


def by_closure(strategy):
    for x, _ in ms.Dataset((X, Y)).batch(4):
        strategy.run(lambda: x.sum())  # noqa: B023


def single_examples(strategy):
    for x in ms.Dataset(Y):
        strategy.run(step, args=(x,))


def in_the_scope(strategy):
    with strategy.scope():
        by_arguments(strategy)


def read_ahead(strategy):
    for batch in ms.Dataset({"x": X}).shuffle(seed=1).batch(4).prefetch(2):
        strategy.run(step, args=(batch,))


def of_the_other_library(strategy):
    for i, x in enumerate(tf.data.Dataset.from_tensor_slices(X).batch(4).as_numpy_iterator()):
        strategy.run(step, args=(i, x))


def side_by_side(strategy):
    one, other = ms.Dataset(X).batch(4), ms.Dataset(Y).batch(4)
    for x, y in zip(one, other, strict=True):
        strategy.run(step, args=(x, y))


def by_the_older_call(strategy):
    for batch in ms.Dataset(X).batch(4):
        strategy.extended.call_for_each_replica(step, (batch,))


def after_other_runs(strategy):
    for _ in range(3):
        strategy.run(step, args=(1.0,))
    by_arguments(strategy)


SAME = [by_arguments, as_one_argument, by_name, by_closure, single_examples, in_the_scope]
SAME += [read_ahead, of_the_other_library, side_by_side, by_the_older_call, after_other_runs]


def warned(program, size):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(lambda comm: program(MAKE[size % 2]()), size)
    return caught


@every("size", [2, 3, 4])
@every("program", SAME)
def test_the_same_batch_on_all_replicas_warns_once(program, size):
    (warning,) = warned(lambda strategy: [program(strategy) for _ in range(3)], size)
    text = str(warning.message)
    assert f"all {size} replicas were given the same batch" in text
    assert "strategy.experimental_distribute_dataset(dataset)" in text
    if program is not by_the_older_call:
        assert warning.filename == __file__


@every("size", [2, 3])
def test_the_same_rows_in_orders_without_a_seed_warn(size):
    def program(strategy):
        for batch in ms.Dataset(np.arange(64.0)).shuffle().batch(32).prefetch(1):
            strategy.run(step, args=(batch,))

    (warning,) = warned(program, size)
    assert f"all {size} replicas were given batches of the same rows" in str(warning.message)


def test_of_more_ranks_than_exchange_frames():
    assert len(warned(by_arguments, 66)) == 1


def of_its_own(strategy):
    for batch in ms.Dataset(X[:6]).shard(strategy.num_replicas_in_sync, strategy.rank).batch(2):
        strategy.run(step, args=(batch,))


def of_its_own_rows(strategy):
    rows = np.array_split(Y[:6], strategy.num_replicas_in_sync)[strategy.rank]
    for batch in ms.Dataset(rows).batch(1):
        strategy.run(step, args=(batch,))


def of_other_orders(strategy):
    for batch in ms.Dataset(X[:6]).shuffle(seed=strategy.rank).batch(2):
        strategy.run(step, args=(batch,))


def of_its_own_by_a_map(strategy):
    size, rank = strategy.num_replicas_in_sync, strategy.rank
    for batch in ms.Dataset(X[:6]).batch(6).map(lambda rows: rows[rank::size]):
        strategy.run(step, args=(batch,))


def of_its_own_by_a_filter(strategy):
    size, rank = strategy.num_replicas_in_sync, strategy.rank
    for batch in ms.Dataset(Y[:6]).filter(lambda y: y % size == rank).batch(1):
        strategy.run(step, args=(batch,))


def distributed(strategy):
    for batch in strategy.experimental_distribute_dataset(ms.Dataset(X).batch(4)):
        strategy.run(step, args=(batch,))


def on_one_rank_only(strategy):
    for batch in ms.Dataset(X).batch(4):
        strategy.run(step, args=(batch if strategy.rank == 0 else np.zeros((4, 3)),))


def not_given_to_run(strategy):
    for epoch in ms.Dataset.range(2):
        for batch in ms.Dataset(X).batch(4):
            total = batch.sum()
            strategy.run(step, args=(total * epoch,))


def without_rows(strategy):
    for batch in ms.Dataset.from_batches([np.ones((0, 3))]):
        strategy.run(step, args=(batch,))


def of_one_device(strategy):
    by_arguments(ms.OneDeviceStrategy("cpu"))


OTHERS = [of_its_own, of_its_own_rows, distributed, on_one_rank_only, not_given_to_run]
OTHERS += [without_rows, of_one_device, of_other_orders]
OTHERS += [of_its_own_by_a_map, of_its_own_by_a_filter]


@every("size", [2, 3])
@every("program", OTHERS)
def test_other_batches_do_not(program, size):
    assert not warned(program, size)


@every("program", [*SAME, *OTHERS])
def test_one_rank_does_not_warn(program):
    assert not warned(program, 1)


@pytest.mark.parametrize("n", [2, 3])
def test_it_costs_one_handshake_in_a_session(n):
    def program(comm):
        strategy, count = ms.MirroredStrategy(), []
        inner = comm.allgather
        comm.allgather = lambda *args: (count.append(1), inner(*args))[1]
        own = ms.Dataset(X[:6]).shard(n, comm.rank).repeat(8).batch(1)
        for batch in own:
            strategy.run(step, args=(batch,))
        return len(count) - own.cardinality()

    assert run_ranks(program, n) == [1] * n


def test_a_warning_that_is_an_error_is_one_on_all_ranks():
    def program(comm):
        strategy = ms.MirroredStrategy()
        with pytest.raises((UserWarning, ms.RemoteError), match="not distributed"):
            by_arguments(strategy)
        by_arguments(strategy)
        return float(strategy.all_reduce("sum", 1.0))

    assert run_ranks(program, 2) == [2.0, 2.0]


def test_a_run_that_fails_is_an_error_as_ever():
    def program(comm):
        strategy = ms.MirroredStrategy()

        def fails(x):
            return 1 // comm.rank

        for batch in ms.Dataset(X).batch(8):
            with pytest.raises(ZeroDivisionError):
                strategy.run(fails, args=(batch,))
        return float(strategy.all_reduce("sum", 1.0))

    assert run_ranks(program, 2) == [2.0, 2.0]

"""What every rank reads or makes whole is shown to be alike; what it reads for itself is not."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat.arrays import digest
from mpistrat.testing import run_ranks

NUMBERS = [2, 3, 4]


def off(dataset):
    options = ms.DatasetOptions()
    options.experimental_distribute.auto_shard_policy = ms.AutoShardPolicy.OFF
    return dataset.with_options(options)


def one(odd, fn):
    """A function of one name on all ranks, which does something else on one of them."""
    return lambda x: fn(x) if odd else x


def base():
    return ms.Dataset.range(24).batch(8)


def batches(odd, fn):
    """Three batches of a generator, of which one rank makes others."""
    return ms.Dataset.from_batches(
        lambda: (fn(x) if odd else x for x in np.arange(24).reshape(3, 8))
    )


def fewer(x):
    return x[:-1]


def twice(x):
    return np.concatenate([x, x[-1:]])


def other(x):
    return x[::-1].copy()


# What differs on the last rank, and how it is made: each of these is read or made whole everywhere.
COUNTS = {
    "a map": lambda odd, fn: base().map(one(odd, fn)),
    "a map, then a map of rows": lambda odd, fn: (
        base().map(one(odd, fn)).map(np.negative, rowwise=True)
    ),
    "a map of rows, then a map": lambda odd, fn: (
        base().map(np.negative, rowwise=True).map(one(odd, fn))
    ),
    "a map read ahead": lambda odd, fn: base().map(one(odd, fn)).prefetch(2),
    "a generator": batches,
    "files": lambda odd, fn: ms.Dataset.from_files(
        ["0", "8", "16"], lambda name: one(odd, fn)(np.arange(8) + int(name))
    ),
}
CONTENTS = COUNTS | {
    "a map, dealt out": lambda odd, fn: off(base().map(one(odd, fn)).rebatch(6)),
    "a generator, rebatched": lambda odd, fn: batches(odd, fn).rebatch(6),
    "a generator, grouped": lambda odd, fn: batches(odd, fn).batch(3),
    "padded to the longest": lambda odd, fn: (
        ms.Dataset.range(1, 9).map(lambda i: np.full(i, i + odd)).padded_batch(8)
    ),
    "texts": lambda odd, fn: (
        ms.Dataset.range(8).batch(8).map(lambda x: (fn(x) if odd else x).astype("U3"))
    ),
    "a structure with padding": lambda odd, fn: (
        ms.Dataset.range(8)
        .batch(8)
        .map(
            lambda x: np.rec.fromarrays(
                [x.astype("i1"), (fn(x) if odd else x).astype("f8")],
                dtype=np.dtype("i1,f8", align=True),
            ).view(np.ndarray)
        )
    ),
}


def first(dataset, make=ms.MirroredStrategy):
    """A program whose first step is an error: its text, and that the ranks can continue."""

    def rank(comm):
        strategy = make()
        iterator = iter(
            strategy.experimental_distribute_dataset(dataset(comm.rank == comm.size - 1))
        )
        with pytest.raises(ms.LockstepError) as found:
            next(iterator)
        with pytest.raises(ms.DataError, match="make a new one"):
            next(iterator)
        return str(found.value), float(strategy.reduce("SUM", ms.PerReplica(1.0), None))

    return rank


@every("n", NUMBERS)
@every(("fn", "count"), [(fewer, 7), (twice, 9)])
@every("what", COUNTS)
def test_another_number_of_rows_on_one_rank_is_found_at_its_step(what, fn, count, n, monkeypatch):
    monkeypatch.setenv("MPISTRAT_CHECK_EVERY", "0")  # rows are counted at every step
    make = [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy][n % 2]
    for text, total in run_ranks(first(lambda odd: COUNTS[what](odd, fn), make), n):
        assert f"rank {n - 1}: {count} rows" in text
        assert ("ranks 0" if n > 2 else "rank 0") in text
        assert ": 8 rows" in text
        assert "rowwise=True" in text
        assert "step 0" in text
        assert total == n


@every("n", NUMBERS)
@every("what", CONTENTS)
def test_other_contents_of_equal_size_are_found_at_the_first_step(what, n):
    for text, total in run_ranks(first(lambda odd: CONTENTS[what](odd, other)), n):
        assert "contents of a batch" in text
        assert "rowwise=True, or MPISTRAT_CHECK_EVERY=0" in text
        groups = re.findall(r"\n  (ranks? [^:]*): contents", text)
        assert groups == [
            "rank 0" if n == 2 else f"ranks 0{'-' if n > 3 else ', '}{n - 2}",
            f"rank {n - 1}",
        ]
        assert total == n


def test_batches_in_turns_of_one_random_generator():
    def rank(comm):
        def input_fn(context):
            return batches(comm.rank == 1, other)

        iterator = ms.MirroredStrategy().make_input_fn_iterator(input_fn)
        iterator.initialize()
        with pytest.raises(ms.LockstepError, match="contents of a batch"):
            next(iterator)
        return True

    assert run_ranks(rank, 2) == [True, True]


@pytest.mark.parametrize(("every", "found"), [(1, 2), (3, 3), (100, None), (0, None)])
def test_contents_are_looked_at_every_so_many_batches(every, found, monkeypatch):
    monkeypatch.setenv("MPISTRAT_CHECK_EVERY", str(every))

    def rank(comm):
        steps = itertools.count()

        def fn(x):  # from the third batch on
            return x + comm.rank * (next(steps) >= 2)

        data = ms.Dataset.range(40).batch(4).map(fn)
        iterator = iter(ms.MirroredStrategy().experimental_distribute_dataset(data))
        for step in range(10):
            try:
                next(iterator)
            except ms.LockstepError as error:
                assert f"step {step}:" in str(error)
                return step
        return None

    assert run_ranks(rank, 2) == [found] * 2


def noisy(rank):
    draw = np.random.default_rng(rank)
    return lambda x: x + draw.normal(size=np.shape(x))


OWN = {
    "a map of rows": lambda rank: base().map(noisy(rank), rowwise=True),
    "a map before batch": lambda rank: ms.Dataset.range(24).map(noisy(rank)).batch(8),
    "a map of batches, grouped": lambda rank: base().map(noisy(rank)).batch(3),
    "padded to a given shape": lambda rank: (
        ms.Dataset.range(8).map(lambda i: noisy(rank)(np.zeros(3))).padded_batch(8, [3])
    ),
}
ONE_STEP = ("a map of batches, grouped", "padded to a given shape")


@pytest.mark.parametrize("what", OWN)
def test_what_a_rank_reads_for_itself_may_differ(what, monkeypatch):
    monkeypatch.setenv("MPISTRAT_CHECK_EVERY", "1")

    def rank(comm):
        data = OWN[what](comm.rank)
        return len(list(ms.MirroredStrategy().experimental_distribute_dataset(data)))

    assert set(run_ranks(rank, 3)) == {1 if what in ONE_STEP else 3}


@pytest.mark.parametrize("n", [1, 2, 4])
def test_it_costs_no_exchange_and_no_second_call_of_a_map(n, monkeypatch):
    monkeypatch.setenv("MPISTRAT_CHECK_EVERY", "2")

    def rank(comm):
        count, calls = [], []
        inner = comm.allgather
        comm.allgather = lambda *args: (count.append(1), inner(*args))[1]
        data = base().map(lambda x: (calls.append(1), x[:4] if x[0] == 8 else x)[1])
        iterator = iter(ms.MirroredStrategy().experimental_distribute_dataset(data))
        count.clear()
        sizes = [len(element.local) for element in iterator]
        return sizes, len(count), len(calls)

    for sizes, exchanges, calls in run_ranks(rank, n):
        assert sizes == [8 // n, 4 // n, 8 // n]
        assert (exchanges, calls) == (4 if n > 1 else 0, 3)


def test_two_iterators_taken_in_another_order():
    def rank(comm):
        strategy = ms.MirroredStrategy()
        data = strategy.experimental_distribute_dataset(base())
        one, two = iter(data), iter(data)
        next(one)
        order = (one, two) if comm.rank == 0 else (two, one)
        with pytest.raises(ms.LockstepError) as found:
            next(order[0])
        return str(found.value)

    for text in run_ranks(rank, 3):
        assert re.search(r"rank 0: .*next of iterator 1 of dataset no\. 1, epoch 0, step 1", text)
        assert re.search(r"1, 2: .*next of iterator 2 of dataset no\. 1, epoch 1, step 0", text)


@pytest.mark.parametrize("way", ["from a function", "the older kind"])
def test_iterators_that_stand_at_one_step_of_other_data(way):
    """Each rank's own data are of different epochs: the first rank's number names them."""

    def rank(comm):
        strategy = ms.MultiWorkerMirroredStrategy()
        own = ms.Dataset.range(comm.rank, 9).batch(2)
        for _ in range(comm.rank):
            list(own)  # an epoch of this rank alone
        if way == "from a function":
            data = strategy.distribute_datasets_from_function(lambda context: own)
            one, two = iter(data), iter(data)
        else:
            one, two = (strategy.make_input_fn_iterator(lambda context: own) for _ in range(2))
        for iterator in (one, two):
            assert len(next(iterator).local) == 2
        with pytest.raises(ms.LockstepError, match=r"iterator \d of dataset no\. \d, epoch"):
            next(one if comm.rank else two)
        return True

    assert run_ranks(rank, 2) == [True, True]


SAME = re.escape("dataset.shard(context.num_input_pipelines, context.input_pipeline_id)")
UNSHARDED = {
    "one array": lambda context, rank: ms.Dataset.range(8).batch(2),
    "a tree": lambda context, rank: ms.Dataset(
        {"x": np.arange(8), "t": np.array(list("abcdefgh"))}
    ),
    "a generator": lambda context, rank: batches(False, None),
}
SHARDED = {
    "shards": lambda context, rank: (
        ms.Dataset.range(8).shard(context.num_input_pipelines, context.input_pipeline_id).batch(2)
    ),
    "random": lambda context, rank: ms.Dataset.range(8).batch(2).map(noisy(rank)),
    "none has rows": lambda context, rank: ms.Dataset.from_batches([np.ones((0, 3))]),
    "none has data": lambda context, rank: ms.Dataset(np.ones((0, 3))).batch(2),
    "one has no data": lambda context, rank: ms.Dataset(np.ones((2 * (rank < 1), 3))).batch(2),
    "only the first rows are alike": lambda context, rank: ms.Dataset(
        np.array([0, rank, rank])
    ).batch(2),
}


def brought(n, dataset_fn, make=ms.MirroredStrategy):
    """How many handshakes two epochs of a dataset of each rank took, besides one per step."""

    def rank(comm):
        count = []
        inner = comm.allgather
        comm.allgather = lambda *args: (count.append(1), inner(*args))[1]
        data = make().distribute_datasets_from_function(lambda c: dataset_fn(c, comm.rank))
        count.clear()
        steps = [len(list(data)) for _ in range(2)]
        return len(count) - sum(steps)

    return run_ranks(rank, n)


@pytest.mark.parametrize("n", NUMBERS)
@pytest.mark.parametrize("what", UNSHARDED)
def test_ranks_that_all_bring_the_same_are_warned_of_once(what, n):
    make = [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy][n % 2]
    with pytest.warns(
        UserWarning, match=f"first elements of all ranks are the same.*{SAME}"
    ) as told:
        brought(n, UNSHARDED[what], make)
    assert len(told) == 1
    assert told[0].filename == __file__


@pytest.mark.parametrize("n", NUMBERS)
@pytest.mark.parametrize("what", SHARDED)
def test_ranks_that_bring_their_own_are_not(what, n):
    brought(n, SHARDED[what])  # a warning would be an error


@pytest.mark.parametrize("n", [1, 2])
def test_looking_at_what_ranks_bring_is_no_further_exchange(n):
    if n == 1:
        return  # and none at all
    assert brought(n, SHARDED["shards"]) == [4] * n  # two epochs: each begins and ends


def test_a_warning_that_is_an_error_is_one_on_all_ranks_and_the_next_element_follows():
    def rank(comm):
        data = ms.MirroredStrategy().distribute_datasets_from_function(
            lambda context: ms.Dataset.range(4).batch(2)
        )
        iterator = iter(data)
        with pytest.raises((UserWarning, ms.RemoteError), match="first elements"):
            next(iterator)
        return next(iterator).local.tolist()

    assert run_ranks(rank, 3) == [[2, 3]] * 3


def test_digest():
    x = np.arange(12.0).reshape(3, 4)
    same = [x, x.T.copy().T, x[:, :], x.astype(">f8"), np.asfortranarray(x)]
    assert len({digest([y]) for y in same}) == 1
    odd = [x, x.T, x.reshape(4, 3), x.astype("f4"), x + np.eye(3, 4) * 1e-9, -x, x[:0]]
    assert len({digest([y]) for y in odd}) == len(odd)
    kinds = ["M8[s]", "U2", "S2", "?", "c16", "g", "f2", "u1", "O"]
    made = {code: digest([np.array([0, 1]).astype(code)]) for code in kinds}
    assert len(set(made.values())) == len(kinds)
    # Bytes that belong to no value: of a longdouble, and between the fields of a structure.
    for dtype in ("g", np.dtype("i1,f8,g", align=True)):
        ones, zeros = np.full(64, 255, np.uint8), np.zeros(64, np.uint8)
        both = [np.ndarray(1, dtype, memory) for memory in (ones, zeros)]
        for array in both:
            array[...] = (
                np.ones(1, "i1").astype(dtype) if dtype == "g" else np.array((1, 2, 3), dtype)
            )
        assert len({digest([array]) for array in both}) == 1

"""Distributed datasets: the exact split, each example once, the same steps on all ranks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat.testing import run_ranks

VIEWS = [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy]


def lists(distributed):
    return [element.local.tolist() for element in distributed]


def whole_step(parts):
    return [row for part in parts for row in part]


def split(rows, n, r):
    k = math.ceil(len(rows) / n)
    return rows[r * k : (r + 1) * k]


@every("make", VIEWS)
@every("depth", [0, 2])
@every(("length", "batch"), [(10, 4), (9, 4), (7, 7), (3, 8), (1, 1), (0, 4), (64, 5)])
@every("n", [1, 2, 3, 4])
def test_every_batch_is_cut_exactly(make, depth, length, batch, n):
    def rank(comm):
        data = ms.Dataset.range(length).batch(batch).prefetch(depth)
        return lists(make().experimental_distribute_dataset(data))

    batches = [list(range(length))[i : i + batch] for i in range(0, length, batch)]
    for at, got in enumerate(run_ranks(rank, n)):
        assert got == [split(rows, n, at) for rows in batches]


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_each_example_once_an_epoch_in_a_new_order(seed, n):
    def rank(comm):
        data = ms.Dataset.range(23).shuffle(seed=seed).batch(6)
        distributed = ms.MirroredStrategy().experimental_distribute_dataset(data)
        return [lists(distributed) for _ in range(3)]

    everyones = run_ranks(rank, n)
    orders = []
    for epoch in range(3):
        steps = zip(*(found[epoch] for found in everyones), strict=True)
        order = [row for step in steps for part in step for row in part]
        assert sorted(order) == list(range(23))
        orders.append(order)
    assert len({tuple(order) for order in orders}) == 3
    if seed is not None:
        again = run_ranks(rank, n)
        assert again == everyones


def test_the_order_does_not_depend_on_the_number_of_ranks():
    def rank(comm):
        data = ms.Dataset.range(20).shuffle(seed=5).batch(8)
        return lists(ms.MirroredStrategy().experimental_distribute_dataset(data))

    whole = [whole_step(step) for step in zip(*run_ranks(rank, 1), strict=True)]
    for n in (2, 3, 4):
        assert [whole_step(step) for step in zip(*run_ranks(rank, n), strict=True)] == whole


@pytest.mark.parametrize("make", [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_a_batch_that_was_forgotten_is_an_error_unless_it_is_meant(n, make):
    """At every number of ranks, and for the older iterator; the ranks can continue."""

    def rank(comm):
        strategy, data = make(), ms.Dataset({"x": np.arange(5)}).shuffle(seed=1).repeat(1)
        newer, older = strategy.experimental_distribute_dataset, strategy.make_dataset_iterator
        for distribute in (newer, older):
            with pytest.raises(ms.DataError, match=r"single examples.*\.batch\(.*unbatched=True"):
                distribute(data)
            with pytest.raises(TypeError, match="unbatched"):
                distribute(data, unbatched="yes")
        rows = ms.Dataset.range(5)
        batches = strategy.experimental_distribute_dataset(rows, unbatched=True)
        older = strategy.make_dataset_iterator(rows, unbatched=True)
        assert lists(strategy.experimental_distribute_dataset(rows.batch(n), unbatched=True)) == (
            lists(older)
        )
        return lists(batches)

    dealt = [[[*range(at, 5)][:n][r : r + 1] for at in range(0, 5, n)] for r in range(n)]
    assert run_ranks(rank, n) == dealt


def test_one_rank_alone_that_asks_for_single_examples():
    def rank(comm):
        strategy = ms.MirroredStrategy()
        with pytest.raises(ms.DataError):  # its class on the other rank too
            strategy.experimental_distribute_dataset(ms.Dataset.range(4), unbatched=comm.rank == 0)
        return float(strategy.all_reduce("sum", 1.0))

    assert run_ranks(rank, 2) == [2.0, 2.0]


@pytest.mark.parametrize("make", [lambda: ms.OneDeviceStrategy("cpu"), ms.get_strategy])
def test_single_examples_are_not_divided_where_there_is_one_replica_by_construction(make):
    data = ms.Dataset.range(2)
    assert make().experimental_distribute_dataset(data) is data
    assert [int(x) for x in make().make_dataset_iterator(data)] == [0, 1]
    assert [int(x) for x in make().distribute_datasets_from_function(lambda context: data)] == [
        0,
        1,
    ]


@pytest.mark.parametrize("code", ["u1", "?", "f2", "U4", "M8[s]", "c8"])
def test_replicas_without_rows_get_the_right_dtype_and_shape(code):
    def rank(comm):
        x = np.ones((5, 2, 3), np.int8).astype(code)
        tree = {"x": x, "y": np.arange(5)}
        data = ms.MirroredStrategy().experimental_distribute_dataset(ms.Dataset(tree).batch(4))
        last = list(data)[-1]
        return last["x"].local.dtype, last["x"].local.shape, last["y"].local.shape

    for at, (dtype, shape, labels) in enumerate(run_ranks(rank, 3)):
        assert dtype == np.dtype(code)
        assert shape == ((1 if at == 0 else 0), 2, 3)
        assert labels == ((1 if at == 0 else 0),)


@pytest.mark.parametrize("make", VIEWS)
@pytest.mark.parametrize("lengths", [[3, 1, 0], [0, 0, 2], [0, 0, 0], [2, 2, 2]], ids=str)
def test_datasets_of_uneven_length(make, lengths):
    """Who has ended gets empties; also who never had anything."""

    def rank(comm):
        def dataset_fn(context):
            assert context.num_replicas_in_sync == 3
            assert context.input_pipeline_id == comm.rank
            assert context.get_per_replica_batch_size(6) == 2
            rows = lengths[comm.rank] * 2
            images = np.full((rows, 4), comm.rank, np.uint8)
            return ms.Dataset({"x": images, "y": np.arange(rows)}).batch(2)

        data = make().distribute_datasets_from_function(dataset_fn)
        out = []
        for _ in range(2):
            steps = [(e["x"].local, e["y"].local.tolist()) for e in data]
            assert all(x.dtype == np.uint8 and x.shape[1:] == (4,) for x, _ in steps)
            out.append([y for _, y in steps])
        return out

    for at, (first, second) in enumerate(run_ranks(rank, 3)):
        own = [[2 * i, 2 * i + 1] for i in range(lengths[at])]
        assert first == second == own + [[]] * (max(lengths) - len(own))


def test_one_array_of_bytes_where_a_replica_never_had_any():
    def rank(comm):
        data = ms.Dataset(np.zeros((4 * comm.rank, 2), np.uint8)).batch(2)
        distributed = ms.MirroredStrategy().distribute_datasets_from_function(lambda c: data)
        return [(e.local.dtype.name, e.local.shape) for e in distributed]

    zero, one = run_ranks(rank, 2)
    assert zero == [("uint8", (0, 2))] * 2
    assert one == [("uint8", (2, 2))] * 2


@pytest.mark.parametrize("lengths", [(8, 6), (6, 8), (8, 7), (0, 8), (8, 16)], ids=str)
def test_different_datasets_are_an_error_on_every_rank(lengths):
    def rank(comm):
        data = ms.Dataset.range(lengths[comm.rank]).batch(2)
        strategy = ms.MirroredStrategy()
        with pytest.raises(ms.LockstepError):
            list(strategy.experimental_distribute_dataset(data))
        return float(strategy.reduce("SUM", ms.PerReplica(1.0), None))

    assert run_ranks(rank, 2) == [2.0, 2.0]


ALIKE = pytest.mark.filterwarnings("ignore:.*first elements of all ranks are the same")
WAYS = ["one dataset", "a dataset each", "a function"]


def distributed_by(way, strategy, data):
    if way == "one dataset":
        return iter(strategy.experimental_distribute_dataset(data))
    if way == "a dataset each":
        return iter(strategy.distribute_datasets_from_function(lambda c: data))
    batches = iter(data)
    return strategy.make_input_fn_iterator(lambda c: lambda: next(batches))


@ALIKE
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("who", [{0}, {1}, {0, 1}], ids=str)
def test_a_batch_that_cannot_be_read_does_not_take_the_rest_along(way, depth, who):
    """The error is one on all ranks, and the steps after it are those of an epoch without it."""

    def rank(comm):
        def fn(x):
            if comm.rank in who and x[0] == 4:
                raise OSError("bad sector")
            return x

        data = ms.Dataset.range(8).batch(2).map(fn).prefetch(depth)
        iterator, seen = distributed_by(way, ms.MirroredStrategy(), data), []
        while True:
            try:
                seen.append(next(iterator).local.tolist())
            except OSError as error:
                assert "bad sector" in str(error)
                seen.append("error")
            except StopIteration:
                return seen

    batches = [[0, 1], [2, 3], "error", [6, 7]]
    for r, seen in enumerate(run_ranks(rank, 2)):
        if way == "one dataset":
            assert seen == [b if b == "error" else [b[r]] for b in batches]
        else:
            assert seen == batches


class Untold(OSError):
    """An error that cannot say what it is."""

    def __str__(self):
        raise ValueError


@ALIKE
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize(
    ("error", "words"), [(OSError, "OSError: gone"), (Untold, r"Untold: .no text.*ValueError.")]
)
def test_a_source_that_has_failed_is_never_an_end(way, depth, error, words):
    """A generator that has raised has nothing more; on all ranks, and at every further step."""

    def rank(comm):
        def batches():
            yield np.zeros(2)
            if comm.rank == 1:
                raise error("gone")
            yield np.zeros(2)
            yield np.zeros(2)
            yield np.zeros(2)
            yield np.zeros(2)

        data = ms.Dataset.from_batches(batches).prefetch(depth)
        strategy = ms.MirroredStrategy()
        iterator = distributed_by(way, strategy, data)
        next(iterator)
        with pytest.raises(OSError):
            next(iterator)
        for _ in range(2):
            with pytest.raises(ms.DataError, match=rf"has failed .{words}.*make a new one"):
                next(iterator)
        return strategy.run(lambda: comm.rank).local

    assert run_ranks(rank, 2) == [0, 1]


@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_map_that_raises_stopiteration_is_named(rowwise, depth):
    def rank(comm):
        def exhausted(x):
            return next(iter(())) if comm.rank == 1 else x

        data = ms.Dataset.range(4).batch(4).map(exhausted, rowwise=rowwise).prefetch(depth)
        iterator = distributed_by("one dataset", ms.MirroredStrategy(), data)
        with pytest.raises(ms.DataError, match=r"map, .*exhausted, raised StopIteration"):
            next(iterator)
        return True

    assert run_ranks(rank, 2) == [True, True]


@pytest.mark.parametrize("make", VIEWS)
@pytest.mark.parametrize("tree", [False, True])
def test_texts_where_a_replica_never_had_an_element(make, tree):
    def rank(comm):
        words = np.array(["a", "bcd"] * comm.rank, dtype="U3")
        data = ms.Dataset({"w": words, "b": words.astype("S3")} if tree else words).batch(2)
        found = make().distribute_datasets_from_function(lambda c: data)
        return [
            [(leaf.local.dtype, leaf.local.tolist()) for leaf in (e.values() if tree else [e])]
            for e in found
        ]

    none, some = run_ranks(rank, 2)
    assert some == [[("<U3", ["a", "bcd"]), ("S3", [b"a", b"bcd"])][: 1 + tree]]
    assert none == [[("<U3", []), ("S3", [])][: 1 + tree]]


def test_iter_on_one_rank_only_is_an_error_and_the_next_epoch_works():
    def rank(comm):
        strategy = ms.MirroredStrategy()
        data = strategy.experimental_distribute_dataset(
            ms.Dataset.range(4).shuffle(seed=1).batch(2)
        )
        with pytest.raises(ms.LockstepError):
            iter(data) if comm.rank == 0 else strategy.run(lambda: 1)
        return lists(data)

    both = run_ranks(rank, 2)
    assert sorted(row for found in both for part in found for row in part) == [0, 1, 2, 3]


def test_an_early_break_on_one_rank_is_reported():
    def rank(comm):
        strategy = ms.MirroredStrategy()
        data = strategy.experimental_distribute_dataset(ms.Dataset.range(8).batch(2))
        with pytest.raises(ms.LockstepError, match="next"):
            for _ in data:
                if comm.rank == 1:
                    break
            strategy.reduce("SUM", ms.PerReplica(1.0), None)
        return True

    assert run_ranks(rank, 2) == [True, True]


@pytest.mark.parametrize(
    "name", ["experimental_distribute_dataset", "distribute_datasets_from_function"]
)
def test_what_is_no_dataset(name):
    def rank(comm):
        with pytest.raises(TypeError, match=r"mpistrat\.Dataset"):
            getattr(ms.MirroredStrategy(), name)(
                np.ones(3) if name.endswith("dataset") else lambda c: [1, 2]
            )

    run_ranks(rank, 2)


def test_a_dataset_fn_that_fails_on_one_rank():
    def rank(comm):
        def dataset_fn(context):
            if comm.rank == 1:
                raise OSError("no file")
            return ms.Dataset.range(2).batch(1)

        strategy = ms.MirroredStrategy()
        with pytest.raises(OSError, match="no file"):
            iter(strategy.distribute_datasets_from_function(dataset_fn))
        return float(strategy.reduce("SUM", ms.PerReplica(1.0), None))

    assert run_ranks(rank, 2) == [2.0, 2.0]


def test_one_replica_by_construction_gets_the_dataset_itself():
    data = ms.Dataset.range(4).batch(2)
    for strategy in (ms.OneDeviceStrategy("cpu"), ms.get_strategy()):
        assert strategy.experimental_distribute_dataset(data) is data
        assert strategy.distribute_datasets_from_function(lambda c: data) is data


def test_means_over_a_last_batch_count_its_examples():
    """A last batch of six over two replicas is four and two, and the mean divides by six."""

    def rank(comm):
        s = ms.MirroredStrategy()
        data = s.experimental_distribute_dataset(ms.Dataset(np.arange(14.0)).batch(8))
        return [float(s.reduce("MEAN", s.run(lambda x: x, args=(b,)), axis=0)) for b in data]

    for n in (1, 2, 3, 4):
        assert run_ranks(rank, n) == [[3.5, 10.5]] * n


F4, F8 = np.float32, np.float64
ODD = {
    "dtype": (lambda x: np.ones(4, F4), lambda x: np.ones(4, F8), ["float32", "float64"]),
    "dtype of a leaf": (
        lambda x: {"x": np.ones(4), "y": np.ones(4, np.int32)},
        lambda x: {"x": np.ones(4), "y": np.ones(4, np.int64)},
        ["x float64, y int32", "x float64, y int64"],
    ),
    "key": (lambda x: {"x": np.ones(4)}, lambda x: {"z": np.ones(4)}, ["'x'", "'z'"]),
    "kind of node": (lambda x: (np.ones(4),), lambda x: [np.ones(4)], ["(*)", "[*]"]),
    "number of leaves": (
        lambda x: (np.ones(4), np.ones(4)),
        lambda x: (np.ones(4),),
        ["(*, *)", "(*)"],
    ),
}


@ALIKE
@every("what", ODD)
@every("step", [0, 2])
@every("way", ["one dataset", "a dataset each"])
@every("frames", [True, False])
def test_another_dtype_or_structure_on_one_rank_is_named_on_all(what, step, way, frames):
    good, odd, said = ODD[what]

    def rank(comm):
        def batches():
            for i in range(4):
                yield (odd if comm.rank == 1 and i == step else good)(i)

        strategy = ms.MirroredStrategy()
        strategy._replicas.lockstep.uses_frames = frames
        data = ms.Dataset.from_batches(batches)
        if way == "one dataset":
            distributed = strategy.experimental_distribute_dataset(data)
        else:
            distributed = strategy.distribute_datasets_from_function(lambda context: data)
        iterator = iter(distributed)
        for _ in range(step):
            next(iterator)
        with pytest.raises(ms.LockstepError, match="structure or dtype") as found:
            next(iterator)
        with pytest.raises(ms.DataError, match=r"has failed .*make a new one"):
            iterator.get_next_as_optional()
        text = str(found.value)
        assert f"step {step}" in text
        ours, theirs = text.splitlines()[1:3]
        assert (ours.split(":")[0].strip(), said[0] in ours) == ("ranks 0, 2", True)
        assert (theirs.split(":")[0].strip(), said[1] in theirs) == ("rank 1", True)
        return float(strategy.reduce("SUM", ms.PerReplica(1.0), None))

    assert run_ranks(rank, 3) == [3.0] * 3


@ALIKE
@pytest.mark.parametrize("ended", [0, 1])
def test_what_an_ended_replica_would_be_given_has_to_fit_too(ended):
    """A rank that has never read takes what the others say; one that has, gives empties of that."""

    def rank(comm):
        kinds = [[F4] * ended, [F4, F8 if ended else F4], [F4, F4]][comm.rank]
        data = ms.Dataset.from_batches([np.ones(2, kind) for kind in kinds])
        iterator = iter(ms.MirroredStrategy().distribute_datasets_from_function(lambda c: data))
        next(iterator)
        if ended:
            with pytest.raises(ms.LockstepError, match=r"rank 1: float64"):
                next(iterator)
            return None
        return [e.local.dtype.name for e in iterator]

    assert run_ranks(rank, 3) == [None if ended else ["float32"]] * 3


def test_that_elements_look_alike_is_shown_at_no_further_exchange():
    def rank(comm):
        count = []
        inner = comm.allgather
        comm.allgather = lambda *args: (count.append(1), inner(*args))[1]
        words = ["a", "longer"][comm.rank]  # not as wide, and of other sizes: this is alike
        data = ms.Dataset.from_batches(
            lambda: (
                {"x": np.ones(2 + comm.rank), "t": np.array([words] * (2 + comm.rank))}
                for _ in range(3)
            )
        )
        iterator = iter(ms.MirroredStrategy().distribute_datasets_from_function(lambda c: data))
        count.clear()
        sizes = [len(element["x"].local) for element in iterator]
        return sizes, len(count)

    assert run_ranks(rank, 2) == [([2, 2, 2], 4), ([3, 3, 3], 4)]


UNLIKE = {
    "a dict and an array": lambda rank: ms.Dataset(
        {"x": np.ones((4, 2))} if rank == 0 else np.ones((4, 2))
    ),
    "a map": lambda rank: ms.Dataset(np.ones((4, 2))).map(
        lambda x: x if rank == 0 else x.astype(np.float32)
    ),
}


@pytest.mark.parametrize("what", UNLIKE)
@pytest.mark.parametrize("make", VIEWS)
@pytest.mark.parametrize("old", [False, True])
def test_arrays_and_maps_that_differ_between_ranks_are_named_at_the_first_step(what, make, old):
    def rank(comm):
        strategy, data = make(), UNLIKE[what](comm.rank).batch(2)
        if old:
            iterator = strategy.make_input_fn_iterator(lambda c: lambda: next(batches))
            batches = iter(data)
        else:
            iterator = iter(strategy.distribute_datasets_from_function(lambda c: data))
        with pytest.raises(ms.LockstepError, match=r"step 0: .*(?s:.)* rank 1: .*float"):
            next(iterator)
        return True

    assert run_ranks(rank, 2) == [True, True]

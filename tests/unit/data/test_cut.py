"""How a global batch is divided, and that a replica reads its own rows only."""

from __future__ import annotations

import math

import numpy as np
import pytest
from drawn import drawn
from every import every
from hypothesis import strategies as st

from mpistrat.data.dataset import Dataset
from mpistrat.errors import DataError


def parts(dataset, count, epoch=0, seeds=()):
    """The batches of one epoch, each as the list of what the replicas get."""
    return [
        [piece.read_part(index, count).tolist() for index in range(count)]
        for piece in dataset._iterate_lazy_batches(epoch, seeds)
    ]


def joined(lots):
    return [x for lot in lots for x in lot]


def both(rows, batch):
    """The same batches from an array and from an iterable."""
    numbers = np.arange(rows)
    lots = [numbers[lo : lo + batch] for lo in range(0, rows, batch)]
    return [Dataset(numbers).batch(batch), Dataset(lots), Dataset(lambda: iter(lots))]


@every("kind", [0, 1, 2])
@every(
    ("count", "rows", "batch", "expected"),
    [
        (1, 5, 4, [[[0, 1, 2, 3]], [[4]]]),
        (2, 10, 4, [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], [9]]]),
        (2, 14, 8, [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8, 9, 10], [11, 12, 13]]]),
        (2, 10, 3, [[[0, 1], [2]], [[3, 4], [5]], [[6, 7], [8]], [[9], []]]),
        (2, 1, 4, [[[0], []]]),
        (2, 5, 4, [[[0, 1], [2, 3]], [[4], []]]),
        (3, 8, 4, [[[0, 1], [2, 3], []], [[4, 5], [6, 7], []]]),
        (4, 10, 4, [[[0], [1], [2], [3]], [[4], [5], [6], [7]], [[8], [9], [], []]]),
        (4, 10, 5, [[[0, 1], [2, 3], [4], []], [[5, 6], [7, 8], [9], []]]),
        (4, 14, 8, [[[0, 1], [2, 3], [4, 5], [6, 7]], [[8, 9], [10, 11], [12, 13], []]]),
        (4, 6, 8, [[[0, 1], [2, 3], [4, 5], []]]),
        (4, 2, 1, [[[0], [], [], []], [[1], [], [], []]]),
    ],
)
def test_each_replica_gets_the_rows_of_the_table(kind, count, rows, batch, expected):
    assert parts(both(rows, batch)[kind], count) == expected


def test_repeat_after_batch_is_cut_epoch_by_epoch():
    dataset = Dataset.range(5).batch(4).repeat(2)
    assert parts(dataset, 2) == [[[0, 1], [2, 3]], [[4], []]] * 2


@drawn(
    150,
    rows=st.integers(0, 40),
    batch=st.integers(1, 12),
    count=st.integers(1, 6),
    shuffle=st.sampled_from([None, "examples", "batches", "both"]),
    repeat=st.integers(1, 3),
    repeat_first=st.booleans(),
    epoch=st.integers(0, 5),
)
def test_every_example_is_seen_exactly_once(
    rows, batch, count, shuffle, repeat, repeat_first, epoch
):
    dataset = Dataset.range(rows)
    if shuffle in ("examples", "both"):
        dataset = dataset.shuffle(seed=7)
    if repeat_first:
        dataset = dataset.repeat(repeat)
    dataset = dataset.batch(batch)
    if shuffle in ("batches", "both"):
        dataset = dataset.shuffle()
    if not repeat_first:
        dataset = dataset.repeat(repeat)
    seeds = [99] * dataset._seed_count
    cuts = parts(dataset, count, epoch, seeds)
    assert sorted(x for step in cuts for part in step for x in part) == sorted(
        list(range(rows)) * repeat
    )
    # Whatever the number of replicas, together they see the same global batch.
    whole = [
        piece.read_part(0, 1).tolist() for piece in dataset._iterate_lazy_batches(epoch, seeds)
    ]
    assert [joined(step) for step in cuts] == whole
    assert len(whole) == dataset.cardinality()
    if not repeat_first:  # and every epoch inside holds every example once
        steps = math.ceil(rows / batch)
        for start in range(0, len(whole), max(steps, 1)):
            assert sorted(joined(whole[start : start + steps])) == list(range(rows))


@drawn(
    80,
    rows=st.integers(0, 30),
    batch=st.integers(1, 9),
    count=st.integers(1, 5),
    taken=st.integers(0, 35),
    late=st.booleans(),
)
def test_take_limits_what_all_replicas_see_together(rows, batch, count, taken, late):
    dataset = Dataset.range(rows).shuffle(seed=3)
    dataset = dataset.batch(batch).take(taken) if late else dataset.take(taken).batch(batch)
    seen = [x for step in parts(dataset, count) for part in step for x in part]
    assert len(set(seen)) == len(seen) == min(rows, taken * batch if late else taken)


@pytest.mark.parametrize("fancy", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", [None, 5])
def test_a_replica_reads_its_own_rows_and_no_other(recorder, fancy, count, seed):
    numbers = np.arange(46).reshape(23, 2)
    touched = []
    for index in range(count):
        source = recorder(numbers, fancy)
        dataset = Dataset({"x": source})
        dataset = (dataset if seed is None else dataset.shuffle(seed=seed)).batch(6)
        got = [piece.read_part(index, count)["x"] for piece in dataset._iterate_lazy_batches(1, [])]
        assert sorted(source.touched) == sorted(np.concatenate(got)[:, 0] // 2)
        touched += source.touched
    assert sorted(touched) == list(range(23))


def test_replicas_without_rows_touch_nothing(recorder):
    source = recorder(np.zeros((1, 3), np.float32))
    (piece,) = Dataset(source).batch(4)._iterate_lazy_batches(0, [])
    empty = piece.read_part(3, 4)
    assert (empty.shape, empty.dtype, source.keys) == ((0, 3), np.float32, [])


def test_pieces_know_their_rows_before_anything_is_read(recorder):
    source = recorder(np.arange(5))
    batches = Dataset(source).batch(4)
    for dataset in (batches.shuffle(seed=0), batches.map(abs, rowwise=True)):
        assert sorted(piece.count_rows() for piece in dataset._iterate_lazy_batches(0, [])) == [
            1,
            4,
        ]
    assert source.keys == []
    assert [piece.count_rows() for piece in Dataset([np.ones(3)])._iterate_lazy_batches(0, [])] == [
        3
    ]


@pytest.mark.parametrize("dtype", ["f2", ">f4", "c16", "?", "u1", "S3", "M8[s]", "O"])
def test_empty_parts_have_dtype_and_trailing_shape(dtype):
    array = np.zeros((1, 0, 2), dtype)
    for dataset in (Dataset({"x": array}).batch(8), Dataset([{"x": array}])):
        (piece,) = dataset._iterate_lazy_batches(0, [])
        assert piece.read_part(1, 2)["x"].shape == (0, 0, 2)
        assert piece.read_part(1, 2)["x"].dtype == np.dtype(dtype)


def test_a_batch_of_no_rows_is_empty_everywhere():
    (piece,) = Dataset([np.zeros((0, 2))])._iterate_lazy_batches(0, [])
    assert [piece.read_part(i, 3).shape for i in range(3)] == [(0, 2)] * 3


@pytest.mark.parametrize("index", [-1, 2, 3])
def test_a_replica_that_does_not_exist_is_an_error(index):
    (piece,) = Dataset([np.zeros(4)])._iterate_lazy_batches(0, [])
    with pytest.raises(DataError, match=f"Replica {index} of 2"):
        piece.read_part(index, 2)


def test_pieces_wants_batches_the_right_seeds_and_an_epoch():
    with pytest.raises(DataError, match=r"call batch\(global_batch_size\) first"):
        Dataset.range(3)._iterate_lazy_batches(0, [])
    dataset = Dataset.range(3).shuffle().shuffle(seed=3).shuffle().batch(2)
    assert dataset._seed_count == 2
    for seeds in ([], [1], [1, 2, 3]):
        with pytest.raises(DataError, match="needs 2 seeds"):
            dataset._iterate_lazy_batches(0, seeds)
    with pytest.raises(DataError, match="seeds"):
        dataset._iterate_lazy_batches(0, [1, -2])
    with pytest.raises(DataError, match="epoch"):
        dataset._iterate_lazy_batches(-1, [1, 2])
    with pytest.raises(TypeError, match="epoch"):
        dataset._iterate_lazy_batches(0.5, [1, 2])


def test_both_seeds_from_outside_matter():
    dataset = Dataset.range(64).shuffle().batch(8).shuffle()

    def order(*seeds):
        return [piece.read_part(0, 1).tolist() for piece in dataset._iterate_lazy_batches(0, seeds)]

    assert order(1, 2) == order(1, 2)
    assert order(1, 2) != order(3, 2)
    assert sorted(order(1, 2)) == sorted(order(1, 3)) != order(1, 2)
    assert order(1, 2) != order(1, 3)


class TestMap:
    def test_after_batch_sees_the_whole_batch_whatever_the_number_of_replicas(self):
        dataset = Dataset(np.arange(10.0)).batch(4).map(lambda x: x - x.mean())
        expected = [[-1.5, -0.5, 0.5, 1.5], [-1.5, -0.5, 0.5, 1.5], [-0.5, 0.5]]
        for count in (1, 2, 3, 4):
            assert [joined(step) for step in parts(dataset, count)] == expected

    def test_after_batch_may_change_the_number_of_rows(self):
        dataset = Dataset.range(4).batch(3).map(lambda x: np.repeat(x, 2))
        assert parts(dataset, 2) == [[[0, 0, 1], [1, 2, 2]], [[3], [3]]]

    def test_rowwise_reads_and_sees_the_rows_of_the_replica(self, recorder):
        source, seen = recorder(np.arange(7)), []

        def double(x):
            seen.append(x.tolist())
            return x * 2.0

        dataset = Dataset(source).batch(4).map(double, rowwise=True)
        got = [piece.read_part(1, 2) for piece in dataset._iterate_lazy_batches(0, [])]
        assert [x.tolist() for x in got] == [[4.0, 6.0], [12.0]]
        assert (source.touched, seen) == ([2, 3, 6], [[2, 3], [6]])

    def test_rowwise_gets_empty_arrays(self):
        dataset = Dataset(np.ones((1, 2), np.float32)).batch(4)
        dataset = dataset.map(lambda x: {"sum": x.sum(1)}, rowwise=True)
        (piece,) = dataset._iterate_lazy_batches(0, [])
        assert piece.read_part(1, 2)["sum"].shape == (0,)
        assert piece.read_part(1, 2)["sum"].dtype == np.float32

    def test_rowwise_that_changes_the_rows_is_an_error(self):
        dataset = Dataset.range(4).batch(4).map(lambda x: x[:1], rowwise=True)
        with pytest.raises(DataError, match="given 2 rows and returned 1"):
            parts(dataset, 2)

    def test_rowwise_after_a_whole_map_gets_the_part(self):
        seen = []
        dataset = Dataset(np.arange(6.0)).batch(6).map(lambda x: x / x.max())
        dataset = dataset.map(lambda x: seen.append(len(x)) or x, rowwise=True)
        assert parts(dataset, 3) == [[[0.0, 0.2], [0.4, 0.6], [0.8, 1.0]]]
        assert seen == [2, 2, 2]

    def test_before_batch_gets_one_example_of_the_replica(self, recorder):
        source = recorder(np.arange(10).reshape(5, 2))
        dataset = Dataset(source).map(lambda x: (x.sum(), x.shape)).batch(4)
        got = [piece.read_part(1, 2) for piece in dataset._iterate_lazy_batches(0, [])]
        assert got[0][0].tolist() == [9, 13]
        assert got[1][0].shape == (0,)
        assert got[1][1][0].dtype == np.int64
        assert source.touched == [2, 3]

    def test_before_batch_remembers_what_an_empty_part_looks_like(self, recorder):
        source = recorder(np.arange(5))
        dataset = Dataset(source).map(lambda x: {"y": np.float32([x, x])}).batch(4)
        got = [piece.read_part(1, 2)["y"] for piece in dataset._iterate_lazy_batches(0, [])]
        assert (got[1].shape, got[1].dtype) == ((0, 2), np.float32)
        assert source.touched == [2, 3]  # nothing read for the empty part

    def test_before_batch_reads_one_row_if_it_never_had_any(self, recorder):
        source = recorder(np.arange(3))
        dataset = Dataset(source).map(lambda x: {"y": np.float32([x, x])}).batch(1)
        got = [piece.read_part(1, 2)["y"] for piece in dataset._iterate_lazy_batches(0, [])]
        assert {(x.shape, x.dtype) for x in got} == {((0, 2), np.dtype("f4"))}
        assert source.touched == [0]

    def test_an_empty_part_can_be_changed_without_harm(self):
        dataset = Dataset.range(1).map(lambda x: [x]).batch(1)
        (piece,) = dataset._iterate_lazy_batches(0, [])
        first, second = piece.read_part(1, 2), piece.read_part(1, 2)
        assert first[0] is not second[0]

    def test_maps_before_batch_follow_each_other(self):
        dataset = Dataset.range(5).map(lambda x: (x, x + 1)).map(lambda a, b: a * b).batch(3)
        assert parts(dataset, 2) == [[[0, 2], [6]], [[12], [20]]]

"""Batches of other sizes, shards, what is skipped, and padding: against plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from every import every

from mpistrat import DataError, Dataset, StructureError
from mpistrat.data.sources import Spec
from mpistrat.data.steps import divide_evenly


def lists(dataset):
    return [np.asarray(element).tolist() for element in dataset]


@every("sizes", [[4, 4, 2], [1, 0, 5, 3], [], [0], [7]])
@every("size", [1, 3, 4, 20])
@every("drop", [False, True])
@every("mapped", [False, True])
def test_rebatch(sizes, size, drop, mapped):
    rows = np.arange(sum(sizes))
    data = Dataset.from_batches(np.split(rows, np.cumsum(sizes)[:-1]) if sizes else [])
    data = (data.map(np.negative) if mapped else data).rebatch(size, drop)
    want = [rows[i : i + size] * (-1 if mapped else 1) for i in range(0, len(rows), size)]
    want = [w.tolist() for w in want if len(w) == size or not drop]
    assert lists(data) == want
    for n in (1, 2, 3):
        pieces = list(data._iterate_lazy_batches(0, []))
        found = [[row for i in range(n) for row in p.read_part(i, n).tolist()] for p in pieces]
        assert found == want


@pytest.mark.parametrize(
    ("sizes", "drop", "want"),  # as of tf.data 2.18
    [
        ([1, 2], False, [[0], [1, 2], [3], [4, 5], [6]]),
        (np.array([1, 2]), False, [[0], [1, 2], [3], [4, 5], [6]]),
        ((2, 3), True, [[0, 1], [2, 3, 4], [5, 6]]),
        ([2, 6], True, [[0, 1]]),
        ([5], True, [[0, 1, 2, 3, 4]]),
    ],
)
def test_sizes_in_turns(sizes, drop, want):
    data = Dataset.range(7).batch(4).rebatch(sizes, drop)
    assert lists(data) == want
    assert data.batch_size is None or len(sizes) == 1
    assert lists(data.rebatch(3)) == lists(Dataset.range(sum(map(len, want))).batch(3))
    pieces = list(data._iterate_lazy_batches(0, []))
    assert [[*p.read_part(0, 2).tolist(), *p.read_part(1, 2).tolist()] for p in pieces] == want


def test_rebatch_reads_the_rows_of_one_replica(recorder):
    source = recorder(np.arange(12))
    pieces = Dataset(source).batch(5).rebatch(6)._iterate_lazy_batches(0, [])
    assert [piece.read_part(1, 2).tolist() for piece in pieces] == [[3, 4, 5], [9, 10, 11]]
    assert source.touched == [3, 4, 5, 9, 10, 11]


def test_rebatch_knows_what_it_knows():
    data = Dataset(np.zeros((8, 2))).batch(3)
    assert data.rebatch(4).element_spec == Spec((None, 2), np.dtype("f8"))
    assert data.rebatch(4, drop_remainder=True).element_spec == Spec((4, 2), np.dtype("f8"))
    assert data.rebatch(4).batch_size == 4
    assert data.rebatch(4).cardinality() == Dataset.UNKNOWN
    assert data.repeat().rebatch(4).cardinality() == Dataset.INFINITE
    assert data.take(0).rebatch(4).cardinality() == 0
    assert data.map(abs).batch_size is None
    assert data.map(abs, rowwise=True).batch_size == 3


def test_rebatch_of_what_does_not_fit():
    with pytest.raises(DataError, match="call batch"):
        Dataset.range(3).rebatch(2)
    with pytest.raises(DataError, match="at least one size"):
        Dataset.range(3).batch(2).rebatch([])
    with pytest.raises(DataError, match="at least 1, got 0"):
        Dataset.range(3).batch(2).rebatch([1, 0])
    with pytest.raises(TypeError, match=r"integer, got 1\.5"):
        Dataset.range(3).batch(2).rebatch([1.5])
    with pytest.raises(DataError, match="one shape"):
        list(Dataset.from_batches([np.ones((1, 2)), np.ones((1, 3))]).rebatch(2))
    with pytest.raises(DataError, match="structure"):
        list(Dataset.from_batches([{"x": np.ones(1)}, {"y": np.ones(1)}]).rebatch(2))


@pytest.mark.parametrize(("rows", "count"), [(0, 3), (1, 4), (7, 2), (8, 4), (5, 1)])
def test_shares(rows, count):
    assert list(divide_evenly(rows, count)) == [
        len(part) for part in np.array_split(range(rows), count)
    ]


@every("length", [0, 1, 7, 12])
@every("count", [1, 3, 5])
@every("batched", [False, True])
def test_shard_and_skip_are_slices(length, count, batched):
    rows = list(range(length))
    data = Dataset.range(length).batch(1) if batched else Dataset.range(length)
    for index in range(count):
        shard = data.shard(count, index)
        assert np.ravel(lists(shard)).tolist() == rows[index::count]
        assert shard.cardinality() == len(rows[index::count])
    skipped = data.skip(count)
    assert np.ravel(lists(skipped)).tolist() == rows[count:]
    assert skipped.cardinality() == len(rows[count:])


def test_shard_of_a_shuffled_and_repeated_dataset_reads_no_other_row(recorder):
    source = recorder(np.arange(9))
    data = Dataset(source).shuffle(seed=4).repeat().shard(3, 1).take(6).batch(2)
    assert data.cardinality() == 3
    found = [row for batch in lists(data) for row in batch]
    assert sorted(source.touched) == sorted(found)
    whole = [int(x) for x in Dataset.range(9).shuffle(seed=4).repeat(2)]
    assert found == whole[1::3]


def test_bad_shards():
    with pytest.raises(DataError, match="0 to 1"):
        Dataset.range(3).shard(2, 2)
    with pytest.raises(DataError):
        Dataset.range(3).shard(0, 0)
    with pytest.raises(DataError):
        Dataset.range(3).skip(-1)


def ragged(count):
    return Dataset.range(1, count + 1).map(lambda i: {"x": np.full(i % 4, i), "y": i * 0.5})


def padded(count, width, fill):
    out = np.full((count, width), fill)
    for row in range(count):
        out[row, : (row + 1) % 4] = row + 1
    return out


@every("shape", [[5], [None], None])
@every("fill", [0, -1])
@every("n", [1, 2, 3, 4])
def test_padded_batches(shape, fill, n):
    shapes = None if shape is None else {"x": shape, "y": []}
    values = {"x": fill, "y": None}
    data = ragged(6).padded_batch(4, shapes, values)
    wide = padded(6, 5 if shape == [5] else 3, fill)
    last = wide[4:] if shape == [5] else wide[4:, :2]
    for piece, want in zip(data._iterate_lazy_batches(0, []), [wide[:4], last], strict=True):
        parts = [piece.read_part(i, n) for i in range(n)]
        assert all(part["x"].dtype == np.int64 for part in parts)
        assert all(part["x"].shape[1] == want.shape[1] for part in parts)
        np.testing.assert_array_equal(np.concatenate([p["x"] for p in parts]), want)
        assert all(part["y"].shape == part["x"].shape[:1] for part in parts)


def test_a_replica_reads_its_own_rows_where_the_shape_is_given(recorder):
    source = recorder(np.arange(6))
    data = Dataset(source).map(lambda i: np.full(i % 3, i)).padded_batch(4, [3])
    assert [piece.read_part(1, 2).tolist() for piece in data._iterate_lazy_batches(0, [])] == [
        [[2, 2, 0], [0, 0, 0]],
        [[5, 5, 0]],
    ]
    assert source.touched == [2, 3, 5]


def test_padding_all_leaves_with_one_number_and_dropping_the_rest():
    data = Dataset({"x": np.ones((5, 2), "f4")}).padded_batch(2, {"x": [3]}, -2, True)
    assert data.element_spec == {"x": Spec((2, 3), np.dtype("f4"))}
    assert data.cardinality() == 2
    assert [b["x"].tolist() for b in data] == [[[1, 1, -2]] * 2] * 2
    unknown = Dataset(np.ones((5, 2))).padded_batch(2)
    assert unknown.element_spec == Spec((None, None), np.dtype("f8"))


def test_padding_that_cannot_be():
    with pytest.raises(DataError, match=r"\(3,\) does not fit the padded shape \(2,\)"):
        list(Dataset.range(4).map(lambda i: np.full(3, i)).padded_batch(2, [2]))
    with pytest.raises(DataError, match="1 dimensions"):
        list(Dataset(np.ones((4, 2))).padded_batch(2, [2, 2]))
    with pytest.raises(DataError, match="dimensions"):
        list(Dataset.range(2).map(lambda i: np.zeros((1,) * int(i))).padded_batch(2))
    with pytest.raises(StructureError, match="padded_shapes"):
        list(ragged(3).padded_batch(2, {"x": [3]}))
    with pytest.raises(DataError, match="batches"):
        Dataset.range(4).batch(2).padded_batch(2)
    for value, dtype in ((-1.5, "i8"), (np.nan, "i4"), (-1, "u1"), (1j, "f4"), (2, "?")):
        with pytest.raises(DataError, match=r"padding_values has .* does not fit"):
            list(Dataset(np.ones((4, 2), dtype)).padded_batch(2, [3], value))
    for value, dtype in ((0.1, "f4"), (np.inf, "f2"), (255, "u1"), (2, "c8"), (True, "i4")):
        (found,) = Dataset(np.ones((1, 1), dtype)).padded_batch(1, [2], value)
        assert found.tolist() == np.array([[1, value]], dtype).tolist()

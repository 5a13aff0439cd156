"""Reading rows of real files and of array-likes of every temper."""

from __future__ import annotations

import array
import tracemalloc

import h5py
import numpy as np
import pytest
from every import every

from mpistrat.data.dataset import Dataset
from mpistrat.data.sources import ArrayTree, is_array
from mpistrat.errors import DataError

DATA = np.arange(23 * 6, dtype=np.float32).reshape(23, 2, 3)


@pytest.fixture(params=["numpy", "fortran", "strided", "memmap", "hdf5", "hdf5-chunked", "zarr"])
def source(request, tmp_path):
    """The same numbers behind every kind of array."""
    kind = request.param
    if kind == "numpy":
        yield DATA.copy()
    elif kind == "fortran":
        yield np.asfortranarray(DATA)
    elif kind == "strided":
        yield np.repeat(DATA, 2, axis=0)[::-2][::-1]
    elif kind == "memmap":
        np.save(tmp_path / "data.npy", DATA)
        yield np.load(tmp_path / "data.npy", mmap_mode="r")
    elif kind == "zarr":
        zarr = pytest.importorskip("zarr")  # needs Python 3.11
        array = zarr.create_array(
            tmp_path / "data.zarr", shape=DATA.shape, chunks=(5, 2, 3), dtype=DATA.dtype
        )
        array[:] = DATA
        yield array
    else:
        chunks = (4, 2, 3) if kind == "hdf5-chunked" else None
        with h5py.File(tmp_path / "data.h5", "w") as file:
            yield file.create_dataset("x", data=DATA, chunks=chunks)


@every("rows", [[], [0], [22], [3, 4, 5], [5, 3, 4], [2, 2, 2], [22, 0, 7, 8, 7], [1, 2, 9, 10, 4]])
def test_rows_come_in_their_order(source, rows):
    got = ArrayTree(source, "x").read_at_indices(np.array(rows, np.int64))
    np.testing.assert_array_equal(got, DATA[rows])
    assert (type(got), got.dtype) == (np.ndarray, DATA.dtype)


@every("count", [1, 2, 3, 4])
def test_every_kind_gives_the_same_batches(source, count):
    twin = Dataset((DATA, np.arange(23))).shuffle(seed=11).batch(5)
    dataset = Dataset((source, np.arange(23))).shuffle(seed=11).batch(5)
    for piece, other in zip(
        dataset._iterate_lazy_batches(2, []), twin._iterate_lazy_batches(2, []), strict=True
    ):
        for index in range(count):
            x, y = piece.read_part(index, count)
            np.testing.assert_array_equal(x, other.read_part(index, count)[0])
            np.testing.assert_array_equal(x, DATA[y])


def test_results_belong_to_the_caller(source):
    for dataset in (Dataset(source).batch(4), Dataset(source).shuffle(seed=0).batch(4)):
        for piece in dataset._iterate_lazy_batches(0, []):
            part = piece.read_part(0, 2)
            assert part.flags.writeable
            part[:] = -1
    for batch in Dataset(source).batch(23):
        batch[:] = -1
    next(iter(Dataset(source)))[:] = -1
    np.testing.assert_array_equal(source[:], DATA)


def test_given_batches_are_not_changed_through_their_parts():
    given = [np.arange(4)]
    (piece,) = Dataset(given)._iterate_lazy_batches(0, [])
    piece.read_part(0, 2)[:] = -1
    piece.read_part(0, 1)[:] = -1
    for batch in Dataset(given).map(lambda x: np.negative(x, out=x)):
        assert batch.tolist() == [0, -1, -2, -3]
    assert given[0].tolist() == [0, 1, 2, 3]


def test_hdf5_reads_each_row_once_and_upwards(recorder):
    class Increasing(recorder):
        def __getitem__(self, key):
            if isinstance(key, np.ndarray) and np.any(np.diff(key) <= 0):
                raise TypeError("Indexing elements must be in increasing order")
            return super().__getitem__(key)

    inner = Increasing(DATA)
    got = ArrayTree(inner, "x").read_at_indices(np.array([9, 2, 9, 4]))
    np.testing.assert_array_equal(got, DATA[[9, 2, 9, 4]])
    assert inner.touched == [2, 4, 9]


def test_consecutive_rows_are_one_slice(recorder):
    inner = recorder(DATA)
    ArrayTree(inner, "x").read_at_indices(np.arange(4, 9))
    assert inner.keys == [slice(4, 9)]


def test_sources_without_index_arrays_get_slices_of_runs(recorder):
    inner = recorder(DATA, fancy=False)
    column = ArrayTree(inner, "x")
    for _ in range(2):
        got = column.read_at_indices(np.array([7, 1, 2, 20, 3]))
        np.testing.assert_array_equal(got, DATA[[7, 1, 2, 20, 3]])
    assert inner.keys == [slice(1, 4), slice(7, 8), slice(20, 21)] * 2
    assert inner.refused == 1  # it is not asked again


def test_a_source_that_misreads_index_arrays_gets_slices(recorder):
    class Odd(recorder):
        def __getitem__(self, key):
            return super().__getitem__(slice(0, 1) if isinstance(key, np.ndarray) else key)

    got = ArrayTree(Odd(DATA), "x").read_at_indices(np.array([5, 1]))
    np.testing.assert_array_equal(got, DATA[[5, 1]])


def test_a_source_that_slices_wrongly_is_named(recorder):
    class Flat(recorder):
        def __getitem__(self, key):
            return 0.0

    with pytest.raises(DataError, match=r"x: asked for 2 rows, Flat gave .* shape \(\)"):
        ArrayTree(Flat(DATA), "x").read_at_indices(np.arange(2))


def test_a_sparse_matrix_says_what_to_pass(recorder):
    class Sparse(recorder):
        def toarray(self):
            return self.array

    with pytest.raises(DataError, match=r"x is a sparse matrix \(Sparse\).* Pass toarray\(\)"):
        ArrayTree(Sparse(DATA), "x")


def test_reading_errors_pass_unchanged(recorder):
    class Broken(recorder):
        def __getitem__(self, key):
            raise OSError("disk")

    for dataset in (Dataset(Broken(DATA)).batch(2), Dataset(Broken(DATA)).shuffle(seed=0).batch(2)):
        with pytest.raises(OSError, match="disk"):
            next(iter(dataset))


def test_foreign_dtypes_are_converted():
    class Foreign:
        shape = (3, 2)
        dtype = "not a NumPy dtype"

        def __getitem__(self, key):
            return np.ones(self.shape, np.float32)[key].tolist()

    (piece,) = Dataset(Foreign()).batch(9)._iterate_lazy_batches(0, [])
    assert piece.read_part(0, 1).shape == (3, 2)
    assert piece.read_part(3, 4).dtype == np.float64  # what the list becomes


def test_what_counts_as_an_array():
    assert is_array(np.ones(2))
    assert is_array(np.float32(1))
    assert not is_array([1, 2])
    assert not is_array(3)
    assert not is_array(np.float32)  # whose objects have a shape


@pytest.mark.parametrize(
    "lends", [memoryview(np.ones((3, 2))), array.array("d", [1, 2]), bytearray(b"abc")]
)
def test_memory_that_is_lent_is_an_array(lends):
    found = [row.tolist() for row in Dataset(lends)]
    assert found == np.asarray(lends).tolist()


def test_hdf5_text_and_zarr_beside_numpy(tmp_path):
    zarr = pytest.importorskip("zarr")
    with h5py.File(tmp_path / "text.h5", "w") as file:
        words = file.create_dataset("w", data=["a", "bb", "ccc"], dtype=h5py.string_dtype())
        labels = zarr.array(np.array([1, 2, 3]))
        dataset = Dataset({"w": words, "y": labels}).shuffle(seed=0).batch(2)
        seen = {w: int(y) for batch in dataset for w, y in zip(batch["w"], batch["y"], strict=True)}
    assert seen == {b"a": 1, b"bb": 2, b"ccc": 3}


def _field(x):
    packed = np.zeros(len(x), [("a", x.dtype, x.shape[1:]), ("b", "i4")])
    packed["a"] = x
    return packed["a"]


@pytest.mark.parametrize(
    "layout",
    [np.ascontiguousarray, np.asfortranarray, lambda x: x[:, ::2], lambda x: x[::2], _field],
)
def test_rows_in_another_order_are_read_without_a_copy_of_the_rest(layout):
    x = layout(np.arange(2_000_000, dtype=np.float32).reshape(20_000, 100))
    source, rows = ArrayTree(x, "x"), np.array([7, 3, 9_000, 7])
    tracemalloc.start()
    found = source.read_at_indices(rows)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert np.array_equal(found, x[rows])
    assert peak < 100_000


@pytest.mark.parametrize("source", [lambda: None, np.float32])
def test_a_callable_that_returns_no_batches_is_told_of(source):
    with pytest.raises(TypeError, match=r"has returned .*; expected an iterable of batches"):
        next(iter(Dataset(source)))

"""Rows that differ between ranks: other contents, another order, other last bits."""

from __future__ import annotations

import re
import warnings

import ml_dtypes
import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat.data.sources import ArrayTree
from mpistrat.testing import run_ranks

NUMBERS = [2, 3, 4]
ALL = [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy]


def permuted(x, seed):
    return x[np.random.default_rng(seed).permutation(len(x))]


def reversed_part(x, first, last):
    x = x.copy()
    x[first:last] = x[first:last][::-1]
    return x


def outcome(make, size, **options):
    """What distributing the dataset of each rank gives: an error's text, a warning's, or neither.

    After an error the ranks can continue.
    """

    def rank(comm, strategy):
        try:
            strategy().experimental_distribute_dataset(make(comm.rank), **options)
        except ms.LockstepError as error:
            text = str(error)
        else:
            text = "no error"
        assert float(strategy().all_reduce("sum", 1.0)) == comm.size
        return text

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        texts = run_ranks(lambda comm: rank(comm, ALL[size % 2]), size)
    return texts, [str(warning.message) for warning in caught]


def rows(shape=(64, 3), dtype=float):
    return np.random.default_rng(5).normal(size=shape).astype(dtype)


X = rows()
LARGE = rows((60_000, 5))
WIDE = rows((40, 30_000))
ORDERS = {
    "a permutation": lambda rank: permuted(np.arange(64.0), rank),
    "rows of a tree": lambda rank: (permuted(X, rank), permuted(np.arange(64), rank)),
    "a split": lambda rank: np.concatenate(np.split(permuted(X, rank), [48])[::-1]),
    "texts": lambda rank: permuted(np.array([f"row {i}" for i in range(64)]), rank),
    "objects": lambda rank: permuted(np.array([f"row {i}" for i in range(64)], object), rank),
    "texts of any length": lambda rank: permuted(
        np.array([f"row {i}" for i in range(64)], np.dtypes.StringDType()), rank
    ),
    "dates": lambda rank: permuted(np.arange(64).astype("M8[D]"), rank),
    "other bytes first": lambda rank: permuted(np.arange(64).astype(">i4"), rank),
    "a view": lambda rank: permuted(X, rank).T.copy().T,
    "a reversed part": lambda rank: reversed_part(np.arange(64.0), 5 * (rank > 0), 59),
    "a reversed part of a large array": lambda rank: reversed_part(LARGE, 5 * (rank > 0), 59),
    "long rows": lambda rank: permuted(WIDE, rank),
}


@every("size", NUMBERS)
@every("what", ORDERS)
def test_the_same_rows_in_another_order_are_an_error_on_all_ranks(what, size):
    texts, warned = outcome(lambda rank: ms.Dataset(ORDERS[what](rank)).batch(8), size)
    assert not warned
    for rank, text in enumerate(texts):
        assert text.startswith(
            "dataset no. 1: the ranks hold the same rows in different orders "
            f"(this is rank {rank} of {size})"
        )
        assert re.search(r"Compared with rank 0, they hold\n  ranks? 1", text)
        assert "the same rows in another order" in text
        assert "seed" in text and "Dataset.shuffle(seed=...)" in text
        assert "rows_may_differ=True" in text and "distribute_datasets_from_function" in text
        assert text.endswith(".")


DIFFERENCES = {
    "rows of its own": lambda rank: np.array_split(np.arange(24.0), 4)[rank],
    "noise": lambda rank: X + 1e-6 * np.random.default_rng(rank).normal(size=X.shape),
    "noise of a small column": lambda rank: np.column_stack([X * 1e9, X[:, 0] * (1 + 1e-6 * rank)]),
    "an integer": lambda rank: np.arange(64) + rank * (np.arange(64) == 33),
    "a NaN": lambda rank: np.where((np.arange(64) == 20) & (rank > 0), np.nan, np.arange(64.0)),
    "one leaf": lambda rank: {"x": X, "y": np.arange(64) == rank},
    "float32": lambda rank: X.astype("f4") * np.float32(1 + 1e-3 * rank),
    "objects": lambda rank: np.array([None, "a", rank], object),
    "bfloat16": lambda rank: (X * (1 + rank)).astype(ml_dtypes.bfloat16),
    "a large array in another order": lambda rank: permuted(LARGE, rank),
    "its last rows": lambda rank: LARGE + (np.arange(len(LARGE)) > 59_998)[:, None] * rank,
    "the end of long rows": lambda rank: WIDE + (np.arange(30_000) > 29_998) * rank,
    "a large array that is a view": lambda rank: permuted(LARGE, rank).T.copy().T,
    "a structure": lambda rank: np.rec.fromarrays(
        [np.arange(8, dtype="i1"), np.arange(8) + 0.5 * rank], dtype=np.dtype("i1,f8", align=True)
    ).view(np.ndarray),
}


@every("size", NUMBERS)
@every("what", DIFFERENCES)
def test_rows_that_differ_by_more_than_rounding_are_an_error_on_all_ranks(what, size):
    texts, warned = outcome(lambda rank: ms.Dataset(DIFFERENCES[what](rank)).batch(8), size)
    assert not warned
    for text in texts:
        assert "the ranks hold different rows" in text
        assert re.search(r"\n  ranks? 1[^:]*: different rows, or the same rows in another", text)
        assert "seed" in text


def last_bits(x):
    return np.nextafter(x, np.inf)


BITS = {
    "one bit": lambda rank: last_bits(X) if rank else X,
    "float32": lambda rank: X.astype("f4") * np.float32(1 + 3e-7 * rank),
    "float16": lambda rank: last_bits(X.astype("f2")) if rank else X.astype("f2"),
    "complex": lambda rank: (X + 1j) * (1 + 1e-15 * rank),
    "bfloat16": lambda rank: (X * (1 + 0.004 * rank)).astype(ml_dtypes.bfloat16),
    "what is left of a difference": lambda rank: np.append(1.0, np.full(63, 1e-16 * rank)),
    "numbers beside a NaN": lambda rank: np.where(X > 1, np.nan, last_bits(X) if rank else X),
    "a zero with a sign": lambda rank: np.array([1.0, -0.0 if rank else 0.0]),
    "one leaf of two": lambda rank: (X * (1 + 1e-15 * rank), np.arange(64)),
    "a large array": lambda rank: last_bits(LARGE) if rank else LARGE,
}


@every("size", NUMBERS)
@every("what", BITS)
def test_other_last_bits_are_a_warning(what, size):
    texts, warned = outcome(lambda rank: ms.Dataset(BITS[what](rank)).batch(8), size)
    assert texts == ["no error"] * size
    (text,) = warned
    assert re.search(r"\n  ranks? 1[^:]*: rows that differ in their last bits\.\n", text)
    assert "BLAS threads" in text and "strategy.broadcast" in text


@every("size", [2, 3])
@every("what", [*ORDERS, *DIFFERENCES, *BITS])
def test_rows_may_differ_if_that_is_said(what, size):
    make = (ORDERS | DIFFERENCES | BITS)[what]
    data = {rank: ms.Dataset(make(rank)).batch(8) for rank in range(size)}
    assert outcome(data.get, size, rows_may_differ=True) == (["no error"] * size, [])


def test_rows_may_differ_in_batches_of_a_map_and_with_the_older_iterator():
    def rank(comm):
        strategy = ms.MirroredStrategy()
        data = ms.Dataset.range(24).batch(8).map(lambda x: x + 100 * comm.rank)
        steps = strategy.experimental_distribute_dataset(data, rows_may_differ=True)
        older = strategy.make_dataset_iterator(
            ms.Dataset(np.arange(24) + 100 * comm.rank).batch(8), rows_may_differ=True
        )
        return [step.local.tolist() for step in steps], [step.local.tolist() for step in older]

    for r, (steps, older) in enumerate(run_ranks(rank, 2)):
        assert steps == older
        assert steps[0] == [100 * r + 4 * r + i for i in range(4)]


def test_a_rank_alone_that_says_that_rows_may_differ():
    def rank(comm):
        strategy, data = ms.MirroredStrategy(), ms.Dataset.range(8).batch(4)
        with pytest.raises(ms.LockstepError, match="rows may differ"):
            strategy.experimental_distribute_dataset(data, rows_may_differ=comm.rank == 1)
        return True

    assert run_ranks(rank, 2) == [True, True]


def policy(name):
    options = ms.DatasetOptions()
    options.experimental_distribute.auto_shard_policy = ms.AutoShardPolicy[name]
    return options


def test_what_each_rank_brings_is_never_compared(tmp_path):
    for name in "ab":
        np.save(tmp_path / f"{name}.npy", np.arange(4.0))
    paths = sorted(map(str, tmp_path.iterdir()))

    def rank(comm):
        own = ms.Dataset(np.arange(8.0) + comm.rank).batch(4)
        strategy = ms.MultiWorkerMirroredStrategy()
        files = ms.Dataset.from_files(paths, lambda path: np.load(path) + comm.rank)
        distributed = [
            strategy.distribute_datasets_from_function(lambda context: own),
            strategy.experimental_distribute_dataset(own.with_options(policy("OFF"))),
            strategy.experimental_distribute_dataset(files.with_options(policy("FILE"))),
        ]
        return [sum(1 for _ in dataset) for dataset in distributed]

    assert run_ranks(rank, 2) == [[2, 4, 2]] * 2


@every("size", [1, *NUMBERS])
def test_equal_rows_cost_one_handshake(size):
    def rank(comm):
        count = []
        inner = comm.allgather
        strategy = ms.MirroredStrategy()
        comm.allgather = lambda *args: (count.append(1), inner(*args))[1]
        strategy.experimental_distribute_dataset(ms.Dataset((LARGE, LARGE[:, 0] > 0)).batch(9))
        return len(count)

    assert run_ranks(rank, size) == [int(size > 1)] * size


def test_a_leaf_in_a_file_on_one_rank_is_not_compared(tmp_path):
    np.save(tmp_path / "x.npy", X)

    def make(rank, y=0):
        x = np.load(tmp_path / "x.npy", mmap_mode="r" if rank else None)
        return ms.Dataset((x, np.arange(64) + y * rank)).batch(8)

    assert outcome(make, 2) == (["no error"] * 2, [])
    texts, _ = outcome(lambda rank: make(rank, y=1), 2)
    assert all("different rows" in text for text in texts)


@every("shape", [(0,), (0, 3), (5, 0), (1,), (131_072,), (131_073,), (7, 99_991), (9, 30, 30, 30)])
@every("dtype", ["f8", "u1", "U3", "O", "?"])
def test_a_sample_is_whole_up_to_1_mb_and_has_the_ends_of_what_is_larger(shape, dtype):
    array = np.arange(np.prod(shape)).astype(dtype).reshape(shape)
    (sample,) = ArrayTree(array, "x").sample_rows()
    assert sample.ndim == 2
    if array.size * (64 if dtype == "O" else array.itemsize) <= 1 << 20:
        assert np.array_equal(sample, array.reshape(len(array), -1) if array.size else sample)
        assert sample.size == array.size
    else:
        assert sample.nbytes <= 1 << 20
        assert sample.size >= 8000
        ends = array.reshape(-1)[[0, -1]]
        assert (sample.reshape(-1)[[0, -1]] == ends).all()
    assert np.array_equal(ArrayTree(array.T.copy().T, "x").sample_rows()[0], sample)

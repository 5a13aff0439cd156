"""Partitioners: against examples of tf.distribute's documentation, and against trying all cuts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from every import every

from mpistrat.errors import AxisError
from mpistrat.experimental.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
)


@pytest.mark.parametrize(
    ("partitioner", "shape", "dtype", "shards"),
    [
        (FixedShardsPartitioner(2), [10, 3], "float32", [2, 1]),
        (FixedShardsPartitioner(20), [10, 3], "float32", [10, 1]),
        (MinSizePartitioner(min_shard_bytes=4, max_shards=2), [6, 1], "float32", [2, 1]),
        (MinSizePartitioner(min_shard_bytes=4, max_shards=10), [6, 1], "float32", [6, 1]),
        (MinSizePartitioner(), [1024, 1024], "float32", [1, 1]),
        (MinSizePartitioner(max_shards=100), [1024, 1024], "float32", [16, 1]),
        (MinSizePartitioner(max_shards=8), [1024, 1024], "float32", [8, 1]),
        (MinSizePartitioner(4 << 20, 100), [1024, 1024], "float64", [2, 1]),
        (MaxSizePartitioner(max_shard_bytes=4), [6, 1], "float32", [6, 1]),
        (MaxSizePartitioner(max_shard_bytes=4, max_shards=2), [6, 1], "float32", [2, 1]),
        (MaxSizePartitioner(max_shard_bytes=1024), [6, 1], "float32", [1, 1]),
        (MaxSizePartitioner(max_shard_bytes=1), [6, 5], "float32", [6, 1]),
        # text: 16 bytes an element, unless something else is said
        (MaxSizePartitioner(max_shard_bytes=32), [6], "str", [3]),
        (MaxSizePartitioner(max_shard_bytes=32, bytes_per_string=32), [6], object, [6]),
        (MinSizePartitioner(16, 100, bytes_per_string=8), [6], "S3", [3]),
    ],
)
def test_examples(partitioner, shape, dtype, shards):
    assert partitioner(shape, np.dtype(dtype)) == shards


@every("limit", [1, 7, 8, 24, 25, 100, 10_000])
@every("shape", [(1,), (7,), (7, 3), (12, 2, 2)])
def test_no_cut_with_fewer_shards_keeps_the_limit(limit, shape):
    def largest(count):
        parts = np.array_split(np.zeros(shape), count)
        return max(part.nbytes for part in parts)

    fitting = [k for k in range(1, shape[0] + 1) if largest(k) <= limit]
    wanted = min(fitting, default=shape[0])
    got = MaxSizePartitioner(limit)(shape, np.float64)
    assert got == [wanted] + [1] * (len(shape) - 1)


@pytest.mark.parametrize("smallest", [1, 8, 50, 100, 10_000])
@pytest.mark.parametrize("shape", [(1,), (7,), (7, 3), (12, 2, 2)])
def test_the_bytes_say_how_many_shards(smallest, shape):
    wanted = min(shape[0], math.ceil(np.zeros(shape).nbytes / smallest))
    assert MinSizePartitioner(smallest, 1000)(shape, np.float64)[0] == wanted


PARTITIONERS = (FixedShardsPartitioner(3), MinSizePartitioner(4, 3), MaxSizePartitioner(16))


@pytest.mark.parametrize("partitioner", PARTITIONERS)
def test_other_axes(partitioner):
    assert partitioner((1, 8, 1), np.float32, axis=1)[::2] == [1, 1]
    assert partitioner((1, 8, 1), np.float32, axis=1)[1] > 1
    assert partitioner((1, 8, 1), np.float32, axis=-2) == partitioner((1, 8, 1), np.float32, 1)
    for shape, axis in [((2, 3), 2), ((2, 3), -3), ((), 0)]:
        with pytest.raises(AxisError, match="cannot be cut"):
            partitioner(shape, np.float32, axis)


@pytest.mark.parametrize("partitioner", PARTITIONERS)
@pytest.mark.parametrize("shape", [(0, 3), (0,)])
def test_without_rows_there_is_one_shard(partitioner, shape):
    assert partitioner(shape, np.float32) == [1] * len(shape)


def test_rows_without_bytes():
    assert MaxSizePartitioner(4)((5, 0), np.float32) == [1, 1]
    assert MinSizePartitioner(4, 9)((5, 0), np.float32) == [1, 1]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: FixedShardsPartitioner(0), "num_shards"),
        (lambda: MinSizePartitioner(min_shard_bytes=0), "min_shard_bytes"),
        (lambda: MinSizePartitioner(max_shards=0), "max_shards"),
        (lambda: MinSizePartitioner(bytes_per_string=0), "bytes_per_string"),
        (lambda: MaxSizePartitioner(0), "max_shard_bytes"),
        (lambda: MaxSizePartitioner(1, max_shards=0), "max_shards"),
        (lambda: MaxSizePartitioner(1, bytes_per_string=-1), "bytes_per_string"),
    ],
)
def test_what_is_not_positive(make, name):
    with pytest.raises(ValueError, match=f"Argument `{name}` must be positive"):
        make()
    with pytest.raises(TypeError, match=r"Argument `num_shards` must be positive.*None"):
        FixedShardsPartitioner(None)


def test_one_of_ones_own():
    with pytest.raises(TypeError, match="abstract"):
        Partitioner()

    class Halves(Partitioner):
        def __call__(self, shape, dtype, axis=0):
            return [2 if place == axis else 1 for place in range(len(shape))]

    assert Halves()((4, 4), np.float32, 1) == [1, 2]

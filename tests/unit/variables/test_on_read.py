"""ON_READ variables: what is read, written, saved and restored, by aggregation."""

from __future__ import annotations

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.testing import run_ranks
from mpistrat.variables.on_read import split_exactly, split_sum

ON_READ = ms.VariableSynchronization.ON_READ
# What three replicas read of their copies 1, 2, 3; what each has after 6 was assigned to all, and
# after a checkpoint was restored.
TABLE = {
    "SUM": (6.0, 2.0, [2.0] * 3),
    "MEAN": (2.0, 6.0, [2.0] * 3),
    "ONLY_FIRST_REPLICA": (1.0, 6.0, [1.0] * 3),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_aggregation_says_what_is_read_and_had(name, tmp_path):
    read, assigned, restored = TABLE[name]

    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        aggregation = getattr(ms.VariableAggregation, name)
        with strategy.scope():
            v = ms.Variable(0.0, name="v", synchronization=ON_READ, aggregation=aggregation)
        own = lambda: float(strategy.run(v.read_value).local)  # noqa: E731
        strategy.run(lambda: v.assign(comm.rank + 1.0) is None)
        assert (own(), float(v.numpy())) == (comm.rank + 1.0, read)
        path = ms.Checkpoint(v=v).save(tmp_path / "c")
        v.assign(6.0)
        assert (own(), float(v.numpy())) == (assigned, 6.0)
        ms.Checkpoint(v=v).restore(path)
        assert float(v.numpy()) == read
        return own()

    assert run_ranks(rank, 3) == restored


def test_without_aggregation_there_is_nothing_to_read_or_save(tmp_path):
    def rank(comm):
        with ms.MirroredStrategy(comm=comm).scope():
            v = ms.Variable(0.0, name="v", synchronization=ON_READ)
        v.assign(4.0)
        with pytest.raises(ValueError, match="aggregation NONE, so cross-replica code cannot"):
            v.numpy()
        with pytest.raises(ValueError, match="ON_READ with aggregation NONE, so it has no single"):
            ms.Checkpoint(v=v).save(tmp_path / "c")
        return float(v._component())

    assert run_ranks(rank, 2) == [4.0] * 2


@pytest.mark.parametrize("code", ["?", "i1", "u8", "f4", "f8", "c16"])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_parts_add_up_to_the_last_bit(code, size):
    rng = np.random.default_rng(0)
    saved = rng.integers(0, 2 if code == "?" else 100, 50).astype(code)
    if saved.dtype.kind in "fc":
        saved = (saved * rng.normal(size=50)).astype(code)
    assert split_sum(saved, size).dtype == saved.dtype

    def reduce(part):  # of floating point all replicas give the same first
        return np.add.reduce([part] * size, dtype=part.dtype)

    parts = [split_exactly(reduce, rank, size, saved) for rank in range(size)]
    total = np.add.reduce(parts, dtype=saved.dtype)
    np.testing.assert_array_equal(total, saved)
    assert all(part.dtype == saved.dtype for part in parts)

"""Jobs larger than frames are for: everything that is sent with a frame moves by other ways."""

from __future__ import annotations

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.testing import run_ranks


@pytest.mark.parametrize("size", [2, 3, 5])
def test_values_variables_and_data(words_on, size):
    def rank(comm):
        s = words_on(comm)
        kinds = [None, "text", np.ones(60), 2.5, {"set"}]
        mixed = s.run(lambda: {"v": kinds[comm.rank]})["v"]
        alike = s.run(lambda: (None, 7))
        assert alike[0] is None
        with s.scope():
            v = ms.Variable(float(comm.rank), name="v", aggregation=ms.VariableAggregation.MEAN)
        s.run(lambda: v.assign(float(comm.rank)))
        with pytest.raises(ms.LockstepError):
            v.assign(float(comm.rank))
        with pytest.raises(ms.LockstepError):
            s.extended.update(v, lambda var, x: None, args=(float(comm.rank),))
        data = s.experimental_distribute_dataset(ms.Dataset.range(11).shuffle().batch(4))
        rows = [s.gather(batch, 0).tolist() for batch in data]
        own = s.distribute_datasets_from_function(lambda c: ms.Dataset.range(comm.rank).batch(1))
        counts = [int(s.gather(batch, 0).size) for batch in own]
        return (
            [type(x).__name__ for x in s.experimental_local_results(mixed)],
            s.experimental_local_results(alike[1]),
            float(v.numpy()),
            rows,
            counts,
        )

    everyones = run_ranks(rank, size)
    assert all(found == everyones[0] for found in everyones)
    names, sevens, mean, rows, counts = everyones[0]
    assert names == ["NoneType", "str", "ndarray", "float", "set"][:size]
    assert sevens == (7,) * size
    assert mean == (size - 1) / 2
    assert sorted(row for batch in rows for row in batch) == list(range(11))
    assert counts == [size - 1 - step for step in range(size - 1)]


@pytest.mark.parametrize("size", [2, 3])
def test_variables_without_names_that_differ_are_a_warning(words_on, size):
    def rank(comm):
        with words_on(comm).scope():
            rng = np.random.default_rng(comm.rank)
            random = [ms.Variable(rng.normal(), name=name) for name in "ab"]
            with pytest.raises(UserWarning, match=r"no\. 3 .* is another on rank 1 than on rank 0"):
                ms.Variable(2.0 if comm.rank == 1 else 1.0)
        return [float(v.numpy()) for v in random]

    rng = np.random.default_rng(0)
    wanted = [rng.normal(), rng.normal()]
    assert run_ranks(rank, size) == [wanted] * size

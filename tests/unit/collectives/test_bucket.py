"""Plans: every leaf once, one dtype a message, bounded packs."""

from __future__ import annotations

import numpy as np
import pytest

from mpistrat.collectives.bucket import ALONE, LIMIT, plan

F4, F8 = np.dtype("f4"), np.dtype("f8")


@pytest.mark.parametrize("seed", range(20))
def test_any_plan_is_complete_and_bounded(seed):
    draw = np.random.default_rng(seed)
    dtypes = [np.dtype(c) for c in ("f4", "f8", "i8", "u1")]
    specs = tuple(
        (dtypes[draw.integers(4)], int(draw.choice([0, 1, 7, 1000, 8000, 9000, 10**6])))
        for _ in range(int(draw.integers(0, 900)))
    )
    buckets = plan(specs)
    assert sorted(i for b in buckets for i in b.leaves) == [i for i, s in enumerate(specs) if s[1]]
    for b in buckets:
        assert list(b.leaves) == sorted(b.leaves)
        assert {specs[i][0] for i in b.leaves} == {b.dtype}
        assert b.size == sum(specs[i][1] for i in b.leaves)
        nbytes = [specs[i][1] * b.dtype.itemsize for i in b.leaves]
        assert len(b.leaves) == 1 or (max(nbytes) < ALONE and sum(nbytes) <= LIMIT)


def test_the_limits_themselves():
    assert len(plan(((F8, ALONE // 8), (F8, 1), (F8, 1)))) == 2
    assert len(plan(((F8, ALONE // 8 - 1), (F8, 1), (F8, 1)))) == 1
    many = ((F4, 16000),) * 66
    assert [b.size * 4 <= LIMIT for b in plan(many)] == [True, True]


def test_few_large_packs_for_many_tiny_leaves():
    buckets = plan(((F4, 3),) * 100_000)
    assert len(buckets) == 1
    assert plan(()) == ()

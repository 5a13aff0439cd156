"""Buckets: every leaf once, one dtype each, bounded."""

from __future__ import annotations

import numpy as np
import pytest

from mpistrat.collectives.layout import OWN_MESSAGE_NBYTES, make_buckets

F4, F8 = np.dtype("f4"), np.dtype("f8")
LIMIT = 4 * 1024 * 1024


def messages(specs):
    """What MPI is given."""
    return make_buckets(specs, LIMIT, False, OWN_MESSAGE_NBYTES)


@pytest.mark.parametrize("seed", range(20))
def test_any_leaves_are_complete_and_bounded(seed):
    draw = np.random.default_rng(seed)
    dtypes = [np.dtype(c) for c in ("f4", "f8", "i8", "u1")]
    specs = tuple(
        (dtypes[draw.integers(4)], int(draw.choice([0, 1, 7, 1000, 8000, 9000, 10**6])))
        for _ in range(int(draw.integers(0, 900)))
    )
    found = messages(specs)
    leaves = sorted(p.leaf_index for b in found for p in b.pieces)
    assert leaves == [i for i, s in enumerate(specs) if s[1]]
    for b in found:
        assert {specs[p.leaf_index][0] for p in b.pieces} == {b.dtype}
        assert [(p.start, p.stop, p.is_whole) for p in b.pieces] == [
            (0, specs[p.leaf_index][1], True) for p in b.pieces
        ]
        assert [p.column for p in b.pieces] == np.cumsum([0, *[p.stop for p in b.pieces]])[
            :-1
        ].tolist()
        assert b.columns == sum(p.stop for p in b.pieces)
        nbytes = [p.stop * b.dtype.itemsize for p in b.pieces]
        assert len(nbytes) == 1 or (max(nbytes) < OWN_MESSAGE_NBYTES and sum(nbytes[:-1]) <= LIMIT)


def test_the_limits_themselves():
    assert len(messages(((F8, OWN_MESSAGE_NBYTES // 8), (F8, 1), (F8, 1)))) == 2
    assert len(messages(((F8, OWN_MESSAGE_NBYTES // 8 - 1), (F8, 1), (F8, 1)))) == 1
    assert [b.nbytes <= LIMIT + OWN_MESSAGE_NBYTES for b in messages(((F4, 16000),) * 67)] == [
        True,
        True,
    ]


def test_few_large_buckets_for_many_tiny_leaves():
    assert len(messages(((F4, 3),) * 100_000)) == 1
    assert messages(()) == ()

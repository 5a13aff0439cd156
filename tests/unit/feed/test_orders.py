"""Index arithmetic of epochs."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from mpistrat.feed.orders import Listed, Repeated, Straight, Taken
from mpistrat.feed.sources import INFINITE


def repeated(count, each=4):
    """Repetitions that count from 0, 100, 200 and so on, and a record of what was made."""
    made = []

    def make(index):
        order = Listed(np.arange(each) + 100 * index)
        made.append((index, weakref.ref(order)))
        return order

    length = INFINITE if count is None else count * each
    return Repeated(make(0), make, length), made


@pytest.mark.parametrize("count", [3, None])
def test_any_span_is_that_part_of_the_repetitions(count):
    whole = [i + 100 * r for r in range(3) for i in range(4)]
    for lo in range(13):
        for hi in range(lo, 13):
            order, _ = repeated(count)
            span = order.span(lo, hi)
            assert (span.tolist(), span.dtype) == (whole[lo:hi], np.int64)


def test_walking_makes_each_repetition_once_and_keeps_two():
    order, made = repeated(None)
    for lo in range(0, 39, 3):
        order.span(lo, lo + 3)
        order.span(lo, lo + 3)  # again, as when several replicas are cut
        assert sum(ref() is not None for _, ref in made) <= 2
    assert [index for index, _ in made] == list(range(10))


def test_taken_is_as_long_as_both_allow():
    assert Taken(Straight(5), 3).length == 3
    assert Taken(Straight(2), 3).length == 2
    assert Taken(repeated(None)[0], 3).length == 3
    assert Taken(Straight(5), 3).span(1, 3).tolist() == [1, 2]

"""Index arithmetic of epochs."""

from __future__ import annotations

import itertools
import weakref

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.data.pieces import (
    make_listed_order,
    make_straight_order,
    make_strided_order,
)
from mpistrat.data.pieces import make_repeated_order as in_a_row
from mpistrat.data.sources import INFINITE
from mpistrat.data.steps import iterate_bounds
from mpistrat.testing import run_ranks


def make_repeated_order(count, each=4):
    """Repetitions that count from 0, 100, 200 and so on, and a record of what was made."""
    made = []

    def make(index):
        order = make_listed_order(np.arange(each) + 100 * index)
        made.append((index, weakref.ref(order.get_rows)))
        return order

    length = INFINITE if count is None else count * each
    return in_a_row(make(0), make, length), made


@pytest.mark.parametrize("size", [1, 3, 4, 20])
@pytest.mark.parametrize("drop_remainder", [False, True])
def test_bounds_are_those_of_a_list_cut_in_batches(size, drop_remainder):
    for length in range(13):
        rows = [*range(length)]
        batches = [rows[lo : lo + size] for lo in range(0, length, size)]
        whole = [batch for batch in batches if len(batch) == size or not drop_remainder]
        assert [rows[lo:hi] for lo, hi in iterate_bounds(size, drop_remainder, length)] == whole
    first = list(itertools.islice(iterate_bounds(size, drop_remainder, INFINITE), 3))
    assert first == [(0, size), (size, 2 * size), (2 * size, 3 * size)]


@pytest.mark.parametrize("count", [3, None])
def test_any_span_is_that_part_of_the_repetitions(count):
    whole = [i + 100 * r for r in range(3) for i in range(4)]
    for lo in range(13):
        for hi in range(lo, 13):
            order, _ = make_repeated_order(count)
            span = order.get_rows(lo, hi)
            assert (span.tolist(), span.dtype) == (whole[lo:hi], np.int64)


def test_walking_makes_each_repetition_once_and_keeps_two():
    order, made = make_repeated_order(None)
    for lo in range(0, 39, 3):
        order.get_rows(lo, lo + 3)
        order.get_rows(lo, lo + 3)  # again, as when several replicas are cut
        assert sum(ref() is not None for _, ref in made) <= 2
    assert [index for index, _ in made] == list(range(10))


@pytest.mark.parametrize("where", [(0, 3, 1), (2, None, 1), (1, None, 3), (9, None, 1), (0, 0, 1)])
def test_a_stride_is_that_slice_of_the_order(where):
    for inner in (make_straight_order(5), make_straight_order(2), make_repeated_order(None)[0]):
        order = make_strided_order(inner, *where)
        some = 12 if inner.length == INFINITE else inner.length
        whole = inner.get_rows(0, some).tolist()[slice(*where)]
        assert order.length == (
            INFINITE if inner.length == INFINITE and where[1] is None else len(whole)
        )
        for lo in range(len(whole) + 1):
            for hi in range(lo, len(whole) + 1):
                assert order.get_rows(lo, hi).tolist() == whole[lo:hi]


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("batches", [False, True])
def test_one_order_for_all_epochs_and_repetitions(n, batches):
    """As TensorFlow documents ``shuffle(seed=, reshuffle_each_iteration=False)``."""

    def read(data, comm):
        strategy = ms.MirroredStrategy()
        given = strategy.experimental_distribute_dataset(data)
        found = [[strategy.gather(batch, axis=0).tolist() for batch in given] for _ in range(2)]
        return [[number for batch in epoch for number in batch] for epoch in found]

    def program(comm):
        once, orders = ms.Dataset.range(24), []
        for seed, again in ((3, False), (4, False), (3, True)):
            data = once.batch(2) if batches else once
            data = data.shuffle(seed=seed, reshuffle_each_iteration=again).repeat(2)
            first, second = read(data if batches else data.batch(2), comm)
            assert all(sorted(part) == list(range(24)) for part in (first[:24], first[24:]))
            parts = (first[:24], first[24:], second[:24], second[24:])
            orders.append([parts.index(part) for part in parts])
            orders.append(first[:24])
        assert orders[1] != orders[3] and list(range(24)) not in orders
        return orders[::2]

    assert run_ranks(program, n) == [[[0] * 4, [0] * 4, [0, 1, 2, 3]]] * n

"""Runs of pages hold the pages that they should, and no others."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from mpistrat.memory.touched import NOTHING, few, joined, pages_of, part_of, whole

PAGE = mmap.PAGESIZE


def pages(runs):
    """The pages of runs; which are in order, and do not meet."""
    borders = runs.reshape(-1).tolist()
    assert borders == sorted(set(borders))
    return {page for first, stop in runs.tolist() for page in range(first, stop)}


def drawn(rng, count=40):
    return pages_of(rng.integers(0, 3 * count, count), PAGE)


@pytest.mark.parametrize("row_nbytes", [1, 8, 120, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE // 2])
@pytest.mark.parametrize("count", [0, 1, 2, 30, 500])
def test_pages_of_rows(row_nbytes, count):
    rows = np.random.default_rng(count).integers(0, 300, count)
    want = {byte // PAGE for row in rows for byte in _bytes(row, row_nbytes)}
    assert pages(pages_of(rows, row_nbytes)) == want


def _bytes(row, nbytes):
    start = int(row) * nbytes
    return [*range(start, start + nbytes, PAGE), start + nbytes - 1]


def test_large_numbers_do_not_wrap():
    rows = np.array([2**31 - 1], np.int32)
    assert pages_of(rows, 4 * PAGE).tolist() == [[2**33 - 4, 2**33]]


@pytest.mark.parametrize("nbytes", [1, PAGE, PAGE + 1, 10 * PAGE])
def test_the_whole(nbytes):
    assert pages(whole(nbytes)) == set(range(-(-nbytes // PAGE)))


@pytest.mark.parametrize("seed", range(20))
def test_both(seed):
    rng = np.random.default_rng(seed)
    one, two = drawn(rng, seed), drawn(rng)
    assert pages(joined(one, two)) == pages(joined(two, one)) == pages(one) | pages(two)
    assert joined(one, NOTHING) is one
    assert joined(NOTHING, one).tolist() == one.tolist()


def test_a_run_that_holds_others_stays():
    assert joined(np.array([[0, 9]]), np.array([[1, 2], [5, 6]])).tolist() == [[0, 9]]


@pytest.mark.parametrize("most", [1, 2, 7, 100])
@pytest.mark.parametrize("seed", range(5))
def test_few_fill_the_narrowest_gaps(seed, most):
    runs = drawn(np.random.default_rng(seed))
    found = few(runs, most)
    assert len(found) == min(most, len(runs))
    assert pages(found) >= pages(runs)
    gaps = sorted((runs[1:, 0] - runs[:-1, 1]).tolist())
    filled = gaps[: len(runs) - len(found)]
    assert len(pages(found)) == len(pages(runs)) + sum(filled)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("count", [0, 1, 2, 40])
def test_parts_are_the_whole_and_about_as_large(count, size):
    runs = drawn(np.random.default_rng(count), count)
    parts = [pages(part_of(runs, rank, size)) for rank in range(size)]
    assert sorted(page for part in parts for page in part) == sorted(pages(runs))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1

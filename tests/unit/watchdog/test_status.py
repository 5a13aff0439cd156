"""Rows travel in few bytes."""

import random

import pytest

from mpistrat.watchdog.status_board import (
    BETWEEN_CALLS,
    IN_CALL,
    Status,
    decode_statuses,
    encode_statuses,
)


def some(count, places):
    rng = random.Random(0)
    return [
        Status((rank,), f"node{rank // 8}", rank // 8, (5 if rank % 3 else 4) << 20,
            IN_CALL if rank % 3 else BETWEEN_CALLS, rng.random() * 100, "S",
            f"a_rather_long_name_of_a_file_{rank % places}.py:{rank % places}",
            f"all_reduce(SUM, float32[{rank % places}])")
        for rank in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 128])
def test_rows_that_fit_come_back(count):
    rows = some(count, 1)
    back = decode_statuses(encode_statuses(rows, 10**6))
    assert sorted(rank for row in back for rank in row.ranks) == list(range(count))
    for row in rows:
        (found,) = [other for other in back if row.ranks[0] in other.ranks]
        assert found[1:5] == row[1:5]
        assert found[6:] == row[6:]
        assert found.age <= row.age + 1e-3


@pytest.mark.parametrize("count", [128, 1024, pytest.param(20000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("places", [1, 5, 1000])
def test_rows_always_fit_and_keep_both_ends(count, places):
    rows = some(count, places)
    data = encode_statuses(rows, 4095)
    assert len(data) <= 4095
    keys = {row.key for row in decode_statuses(data)}
    assert keys == {4 << 20, 5 << 20}


def test_ranks_are_not_lost_before_places_are():
    rows = some(1024, 1000)
    found = sorted(
        rank for row in decode_statuses(encode_statuses(rows, 65536)) for rank in row.ranks
    )
    assert found == list(range(1024))

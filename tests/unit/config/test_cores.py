"""How many threads a rank may use, from masks and quotas made up here."""

from __future__ import annotations

import math
import os

import pytest

from mpistrat.config import (
    MASK_BYTES,
    MAX_THREADS,
    affinity_mask,
    complete_masks,
    cores_of_rank,
    cpu_quota,
    node_size,
    ranks_sharing_cores,
    threads_of_rank,
)


def cores(*masks, limit=math.inf):
    """What each rank of a node gets, whose ranks may run on these cores."""
    bits = [sum(1 << core for core in mask) for mask in masks]
    return [threads_of_rank(bits, rank, limit) for rank in range(len(masks))]


@pytest.mark.parametrize(
    ("masks", "wanted"),
    [
        ([range(8)], [8]),
        ([range(8)] * 2, [4, 4]),
        ([range(8)] * 3, [2, 2, 2]),
        ([range(2)] * 2, [1, 1]),
        ([range(2)] * 8, [1] * 8),  # more ranks than cores
        ([range(4), range(4, 8)], [4, 4]),  # bound to sockets
        ([range(6), range(4, 8)], [3, 2]),  # two cores are shared, so ranks count as neighbours
        ([[0], [1], [2]], [1, 1, 1]),
        ([range(1000, 1010)], [10]),
        ([range(500)], [MAX_THREADS]),
        ([[]], [1]),
    ],
    ids=str,
)
def test_cores_are_divided_among_the_ranks_that_may_use_them(masks, wanted):
    assert cores(*masks) == wanted


@pytest.mark.parametrize(("limit", "wanted"), [(0.5, 1), (1.9, 1), (4, 2), (6.5, 3), (100, 4)])
def test_a_quota_is_shared_too(limit, wanted):
    assert cores(range(8), range(8), limit=limit) == [wanted] * 2


def test_the_mask_is_what_the_scheduler_says():
    allowed = {core for core in range(8 * MASK_BYTES) if affinity_mask() >> core & 1}
    assert allowed == os.sched_getaffinity(0)


def test_a_thread_that_is_bound_has_a_smaller_mask():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert affinity_mask() == 1 << min(before)
    finally:
        os.sched_setaffinity(0, before)


def groups(tmp_path, process, files):
    (tmp_path / "process").write_text(process)
    for name, text in files.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return cpu_quota(tmp_path / "fs", tmp_path / "process")


@pytest.mark.parametrize(
    ("process", "files", "wanted"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {}, math.inf),
        ("", {"cpu.max": "200000 100000\n"}, 2.0),
        ("0::/a/b\n", {"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "max 100000\n"}, 3.0),
        ("0::/a/b\n", {"a/cpu.max": "9 1\n", "a/b/cpu.max": "50000 25000\n"}, 2.0),
        ("0::/elsewhere/x\n", {"cpu.max": "400000 100000\n"}, 4.0),  # a namespace of its own
        ("0::/b\n", {"a/cpu.max": "1 1\n"}, math.inf),  # another one's
        ("0::/\n", {"cpu.max": "nonsense\n"}, math.inf),
        (
            "3:cpu,cpuacct:/\n",
            {"cpu/cpu.cfs_quota_us": "250000\n", "cpu/cpu.cfs_period_us": "100000\n"},
            2.5,
        ),
        (
            "3:cpu,cpuacct:/\n",
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
            math.inf,
        ),
    ],
)
def test_the_quota_is_the_least_of_the_groups_above(tmp_path, process, files, wanted):
    assert groups(tmp_path, process, files) == wanted


def test_a_share_has_no_largest_number():
    masks = [(1 << 128) - 1] * 2
    assert [cores_of_rank(masks, rank) for rank in (0, 1)] == [64, 64]
    assert cores_of_rank(masks, 0, 3.0) == 1
    assert threads_of_rank(masks, 0) == MAX_THREADS


def test_sharers_are_those_that_may_use_cores_of_a_rank():
    masks = [0b11, 0b110, 0b1000, 0]
    assert [ranks_sharing_cores(masks, rank) for rank in range(4)] == [[0, 1], [0, 1], [2], [3]]


@pytest.mark.parametrize(
    ("env", "ranks"),
    [
        ({}, 0),
        ({"MPI_LOCALNRANKS": "3", "PMI_SIZE": "12"}, 3),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        ({"MPI_LOCALNRANKS": "many"}, 0),
    ],
)
def test_launchers_say_how_many_ranks_a_node_has(env, ranks):
    assert node_size(env) == ranks


@pytest.mark.parametrize(
    ("masks", "ranks", "cores", "expected"),
    [
        ([0b11], 2, 2, [0b11] * 2),  # a group of one rank, of two that are not bound
        ([0b01], 2, 2, [0b01]),  # bound
        ([0b11, 0b11], 2, 2, [0b11] * 2),  # all are known
        ([0b11], 0, 2, [0b11]),  # the launcher does not say
        ([0b11], 8, 64, [0b11]),
    ],
)
def test_ranks_of_other_groups_are_taken_to_be_bound_as_this_one(masks, ranks, cores, expected):
    assert complete_masks(masks, 0, ranks, cores) == expected

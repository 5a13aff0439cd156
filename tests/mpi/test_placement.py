"""Each rank takes the pages of its own slice of shared memory: they lie near the core it runs on.

The system tells of each process which pages of a mapping it has touched, and on which NUMA node
they lie.
"""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.shm import segments
from mpistrat.shm.storage import NodeStorage

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(
        not segments._can_populate(), reason="this system cannot take pages in advance"
    ),
]

COUNT = 3_000_000
SETTING = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
HUGE = SETTING.exists() and "[never]" not in SETTING.read_text()
NODES = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))


def touched(array):
    """How many bytes of the mapping that holds an array this process has touched."""
    at, here = array.__array_interface__["data"][0], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            here = int(found[1], 16) <= at < int(found[2], 16)
        elif here and line.startswith("Rss:"):
            return 1024 * int(line.split()[1])
    raise LookupError("the system does not list this memory")


def near():
    """The numbers of the NUMA nodes of this rank's cores."""
    cores, found = os.sched_getaffinity(0), set()
    for node in NODES:
        for part in (node / "cpulist").read_text().split(","):
            first, _, last = part.strip().partition("-")
            if first and cores & set(range(int(first), int(last or first) + 1)):
                found.add(int(node.name[4:]))
    return found


def where(array):
    """On which NUMA nodes the pages of an array's mapping lie that this process has touched."""
    start = array.__array_interface__["data"][0]
    best = {}
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        first = int(line.split()[0], 16)
        if first <= start:
            best[first] = {int(node) for node in re.findall(r" N(\d+)=", line)}
    return best[max(best)]


def is_slice(touched, whole, size, edges):
    """A slice, and at most a page for each of its edges."""
    page = 2 * 2**20 if HUGE else mmap.PAGESIZE
    return whole / size - page <= touched <= whole / size + edges * page


@pytest.fixture
def strategy(world):
    if world.size == 1:
        pytest.skip("one rank shares nothing")
    return ms.MirroredStrategy()


def test_each_rank_touches_its_columns_of_all_rows_of_buffers(strategy, world):
    leaves = [np.zeros(COUNT, "f4"), np.zeros(1000, "f8"), np.zeros((100, 300), "f4")]
    buffers = strategy.gradient_buffers(leaves)
    world.Barrier()
    row = sum(leaf.nbytes for leaf in leaves)
    found = touched(buffers[0])
    assert is_slice(found, row * world.size, world.size, 4 * world.size + 4)
    assert sum(world.allgather(found)) >= row * world.size  # no page has been left out


def test_each_rank_touches_its_slice_of_a_variable_before_it_has_contents(
    strategy, world, monkeypatch
):
    before = []
    real = NodeStorage.fill

    def fill(self, values):
        before.append(touched(self._shared))
        real(self, values)

    monkeypatch.setattr(NodeStorage, "fill", fill)
    with strategy.scope():
        variable = ms.Variable(np.ones(COUNT, "f4"))
    world.Barrier()
    # One rank writes the contents; the others have not even looked at more than is theirs.
    found = before[0] if world.rank == 0 else touched(variable._storage._shared)
    assert is_slice(found, 4 * COUNT, world.size, 3)  # of the first page all have tried the mapping


def test_a_variable_that_shares_its_mapping_with_others_is_placed_too(strategy, world):
    with strategy.scope():
        variables = [ms.Variable(np.ones(100_000, "f4")) for _ in range(3)]
    # Of the mapping other variables may have had a part before; of these, each rank its slice.
    storage = variables[-1]._storage
    before = touched(storage._shared)
    with strategy.scope():
        one = ms.Variable(np.ones(100_000, "f4"))._storage
    if world.rank and one._pages is storage._pages and not HUGE:
        assert 0 < touched(one._shared) - before <= 400_000 / world.size + 2 * mmap.PAGESIZE


@pytest.mark.skipif(len(NODES) < 2, reason="this machine has one NUMA node, so all pages are near")
def test_what_a_rank_owns_lies_near_its_cores(strategy, world):
    buffers = strategy.gradient_buffers([np.zeros(COUNT, "f4")])
    assert where(buffers[0]) <= near()
    with strategy.scope():
        variable = ms.Variable(np.ones(COUNT, "f4"))
    if world.rank:  # the first rank has written to the slices of the others too
        assert where(variable._storage._shared) <= near()

"""Ranks find out together how many threads their kernels may use."""

from __future__ import annotations

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.kernels import rows
from mpistrat.testing import same

pytestmark = pytest.mark.mpi


@pytest.fixture
def parent(world):
    made = world.Dup()
    yield made
    made.Free()


def threads(parent):
    team = ms.MirroredStrategy(comm=parent).replicas.lockstep.session.team
    return 1 if team is None else team.count


@pytest.mark.parametrize("cores", [1, 2, 5, 12, 1000])
def test_ranks_that_may_use_the_same_cores_divide_them(world, parent, cores, monkeypatch):
    monkeypatch.setattr("mpistrat.lockstep.startup.mask_of", lambda: (1 << cores) - 1)
    monkeypatch.setattr("mpistrat.lockstep.startup.quota", lambda: 10_000.0)
    assert threads(parent) == max(1, min(16, cores // world.size))


def test_ranks_that_are_bound_apart_have_all_of_their_own(world, parent, monkeypatch):
    mine = 0b111 << 8 * (world.rank // 2) + 500  # pairs of ranks share three cores
    monkeypatch.setattr("mpistrat.lockstep.startup.mask_of", lambda: mine)
    monkeypatch.setattr("mpistrat.lockstep.startup.quota", lambda: 10_000.0)
    alone = world.rank == world.size - 1 and world.size % 2 == 1
    assert threads(parent) == (3 if alone else 1)


@pytest.mark.parametrize("asked", [1, 2, 3, 5])
def test_folds_have_the_bits_of_one_thread(world, parent, asked, monkeypatch):
    monkeypatch.setattr(rows, "_PART", 5000)
    monkeypatch.setenv("MPISTRAT_THREADS", str(asked))
    mine = [np.random.default_rng(r).standard_normal(150_001) for r in range(world.size)]
    want = mine[0].copy()
    for value in mine[1:]:
        want += value
    strategy = ms.MirroredStrategy(comm=parent)
    assert threads(parent) == asked
    (place,) = strategy.buffers([want])
    for given in (place, mine[world.rank]):
        place[:] = mine[world.rank]
        strategy.run(lambda x: ms.get_replica_context().all_reduce("SUM", x, out=place), (given,))
        same(world, place, want)

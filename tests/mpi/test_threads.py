"""Ranks find out together how many threads their kernels may use."""

from __future__ import annotations

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.config import THREAD_VARIABLES
from mpistrat.kernels import rows
from mpistrat.testing import same

pytestmark = pytest.mark.mpi


@pytest.fixture
def parent(world):
    made = world.Dup()
    yield made
    made.Free()


def threads(parent):
    team = ms.MirroredStrategy(comm=parent)._replicas.lockstep.session.team
    return 1 if team is None else team.count


@pytest.mark.parametrize("cores", [1, 2, 5, 12, 1000])
def test_ranks_that_may_use_the_same_cores_divide_them(world, parent, cores, monkeypatch):
    monkeypatch.setattr("mpistrat.lockstep.startup.affinity_mask", lambda: (1 << cores) - 1)
    monkeypatch.setattr("mpistrat.lockstep.startup.cpu_quota", lambda: 10_000.0)
    assert threads(parent) == max(1, min(16, cores // world.size))


def test_ranks_that_are_bound_apart_have_all_of_their_own(world, parent, monkeypatch):
    mine = 0b111 << 8 * (world.rank // 2) + 500  # pairs of ranks share three cores
    monkeypatch.setattr("mpistrat.lockstep.startup.affinity_mask", lambda: mine)
    monkeypatch.setattr("mpistrat.lockstep.startup.cpu_quota", lambda: 10_000.0)
    alone = world.rank == world.size - 1 and world.size % 2 == 1
    assert threads(parent) == (3 if alone else 1)


@pytest.fixture
def limits(monkeypatch):
    """To how many threads the libraries of this rank are limited, one number for each time."""
    numbers = []
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("MPISTRAT_BLAS_THREADS", raising=False)
    monkeypatch.setattr("mpistrat.lockstep.startup.cpu_quota", lambda: 10_000.0)
    monkeypatch.setattr("mpistrat.lockstep.startup.node_size", lambda: 0)
    monkeypatch.setattr(
        "mpistrat.lockstep.startup.limit_threads", lambda count: bool(numbers.append(count)) or True
    )
    return numbers


@pytest.mark.parametrize("cores", [1, 2, 5, 64])
def test_libraries_get_the_share_of_a_rank(world, parent, cores, limits, monkeypatch, capfd):
    monkeypatch.setattr("mpistrat.lockstep.startup.affinity_mask", lambda: (1 << cores) - 1)
    threads(parent)
    assert limits == ([max(1, cores // world.size)] if world.size > 1 else [])
    said = capfd.readouterr().err
    assert ("MPISTRAT_BLAS_THREADS=keep" in said) == (world.size > 1 and world.rank == 0)


def test_all_ranks_have_the_least_share(world, parent, limits, monkeypatch):
    """Else what each of them computes for itself would have other bits."""
    mask = 0b11111111 if world.rank else 0b1111
    monkeypatch.setattr("mpistrat.lockstep.startup.affinity_mask", lambda: mask)
    threads(parent)
    assert limits == ([max(1, 4 // world.size)] if world.size > 1 else [])


def test_libraries_of_ranks_that_are_bound_apart_stay(world, parent, limits, monkeypatch):
    monkeypatch.setattr("mpistrat.lockstep.startup.affinity_mask", lambda: 0b1111 << 4 * world.rank)
    threads(parent)
    assert limits == []


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "MPISTRAT_BLAS_THREADS"])
def test_libraries_stay_where_the_user_says_so(world, parent, limits, variable, monkeypatch):
    monkeypatch.setattr("mpistrat.lockstep.startup.affinity_mask", lambda: 0b1111)
    monkeypatch.setenv(variable, "keep" if "BLAS" in variable else "4")
    threads(parent)
    assert limits == []


def test_a_number_of_the_user_holds_for_one_rank_too(world, parent, limits, monkeypatch, capfd):
    monkeypatch.setenv("MPISTRAT_BLAS_THREADS", "3")
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    threads(parent)
    assert limits == [3]
    assert not capfd.readouterr().err


def test_groups_of_one_rank_share_the_cores_of_their_node(world, limits, monkeypatch):
    monkeypatch.setattr("mpistrat.lockstep.startup.affinity_mask", lambda: 0b1111)
    monkeypatch.setattr("mpistrat.lockstep.startup.node_size", lambda: world.size)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    group = world.Split(world.rank)
    threads(group)
    group.Free()
    assert limits == ([max(1, 4 // world.size)] if world.size > 1 else [])


@pytest.mark.parametrize("asked", [1, 2, 3, 5])
def test_folds_have_the_bits_of_one_thread(world, parent, asked, monkeypatch):
    monkeypatch.setattr(rows, "_MIN_PART_COLUMNS", 5000)
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

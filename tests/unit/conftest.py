"""Strategies that prove with frames, and with the header-only words of large jobs."""

from __future__ import annotations

import gc

import pytest

import mpistrat as ms
from mpistrat.collectives.plan_cache import PlanCache
from mpistrat.collectives.reducer import Reducer
from mpistrat.comm.session import Session
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.shm import storage
from mpistrat.strategy.replica_group import ReplicaGroup
from mpistrat.strategy.strategy import Strategy
from mpistrat.variables.kinds import GLOBAL_VIEW
from mpistrat.variables.regroup import Regrouper


def _words(comm):
    """Return a strategy that believes its job to be larger than frames are for."""
    lockstep = Lockstep(Session.of_parent(comm), max_frame_ranks=1)
    reducer = Reducer(lockstep)
    return Strategy(
        ReplicaGroup(
            GLOBAL_VIEW, lockstep, PlanCache(reducer), reducer, Regrouper(lockstep, GLOBAL_VIEW)
        )
    )


@pytest.fixture(params=["frames", "words"])
def strategy_on(request):
    """A function from a communicator to a strategy of all its ranks."""
    return _words if request.param == "words" else lambda comm: ms.MirroredStrategy(comm=comm)


@pytest.fixture
def words_on():
    """The same, header-only."""
    return _words


@pytest.fixture(scope="module")
def quick_collections():
    """Keep what the tests before have left out of the collections that a module asks for."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["own", "common"])
def kept(request, monkeypatch):
    """Have each rank keep copies of its own, or the ranks of a node one, however small."""
    if request.param == "common":
        monkeypatch.setattr(storage, "MIN_SHARED_NBYTES", 0)
    return request.param

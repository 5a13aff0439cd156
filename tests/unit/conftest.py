"""Strategies that prove with frames, and with the header-only words of large jobs."""

from __future__ import annotations

import gc

import pytest

import mpistrat as ms
from mpistrat.collectives.plan_cache import PlanCache
from mpistrat.collectives.reducer import Reducer
from mpistrat.comm.session import Session
from mpistrat.distribute.regroup import Regroup
from mpistrat.distribute.replica_group import ReplicaGroup
from mpistrat.distribute.strategy import Strategy
from mpistrat.distribute.views import GLOBAL
from mpistrat.lockstep.lockstep import Lockstep


def _words(comm):
    """Return a strategy that believes its job to be larger than frames are for."""
    lockstep = Lockstep(Session.on(comm), frame_ranks=1)
    reducer = Reducer(lockstep)
    return Strategy(
        ReplicaGroup(GLOBAL, lockstep, PlanCache(reducer), reducer, Regroup(lockstep, GLOBAL))
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

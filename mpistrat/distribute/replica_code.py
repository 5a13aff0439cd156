"""Replica code begins and ends: as the function of ``run``, or as the body of a ``with``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mpistrat.collectives.alarms import compare_copies
from mpistrat.distribute.mode import Mode, cross_replica, current, entered
from mpistrat.errors import ContextError

if TYPE_CHECKING:
    from mpistrat.comm.session import Session
    from mpistrat.distribute.context import ReplicaContext
    from mpistrat.distribute.strategy import Strategy

__all__ = ["begin", "body", "end", "proved"]


def begin(session: Session) -> None:
    """Note that replica code begins; `end` must follow, whatever happens."""
    if not session.run.depth:
        session.raised = None  # what ended another run says nothing of this one
    session.run.depth += 1


def end(session: Session) -> None:
    """Note that replica code has ended."""
    session.run.depth -= 1
    if not session.run.depth:
        session.run.failed = None


def proved(strategy: Strategy, call: str, result: Any, failure: BaseException | None) -> Any:
    """End replica code in one proof, and return what cross-replica code sees of its results.

    Collective. When a call of the code has failed on all ranks, that has been the proof, and none
    follows.

    Args:
      strategy: Whose replica code it is.
      call: What it is called in the proof.
      result: What it returned here.
      failure: What it raised here instead.

    Raises:
      Exception: `failure`, if there is one.
      RemoteError: It failed on another rank.
      LockstepError: The ranks made different calls, or hold results of different structures.
    """
    lockstep = strategy.parts.lockstep
    session = lockstep.session
    if session.run.failed is not None:
        raise failure or session.run.failed
    seen = strategy.parts.regroup.gathered(call, result, failure)
    session.steps += 1
    every = lockstep.options.check_every
    if every and session.steps % every == 0 and session.comm.size > 1:
        compare_copies(lockstep)
    return seen


@contextlib.contextmanager
def body(replica: ReplicaContext) -> Iterator[None]:
    """Let the body of a ``with`` be the code of `replica`; it ends in one proof, as a run does.

    Collective. In code of this very replica it changes nothing.

    Raises:
      ContextError: `replica` is not this rank's, or this is replica code of another context.
      StrategyError: Another strategy rules here.
      Exception: As `proved`.
    """
    mode = current()
    if mode is not None and mode.replica is replica:
        yield
        return
    strategy = replica.strategy
    lockstep = strategy.parts.lockstep
    session = lockstep.session
    with cross_replica(strategy, "with ReplicaContext", "the body itself"):
        failure: BaseException | None = None
        begin(session)
        try:
            try:
                _check(replica, lockstep.comm.rank)
                with entered(Mode(strategy, replica)):
                    if session.on_fn is not None:
                        session.on_fn()
                    yield
                session.interrupted.check()
            except BaseException as error:
                failure = error
            proved(strategy, "with ReplicaContext, whose body ended", None, failure)
        finally:
            end(session)


def _check(replica: ReplicaContext, mine: int) -> None:
    asked = replica.replica_id_in_sync_group
    if asked not in (None, mine):
        raise ContextError(
            f"with ReplicaContext: this rank is replica {mine} of {replica.num_replicas_in_sync}, "
            f"and cannot run the code of replica {asked}. Each rank enters a context of its own: "
            "replica_id_in_sync_group=None, or better, strategy.run(fn)."
        )

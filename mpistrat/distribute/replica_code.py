"""Replica code begins and ends: as the function of ``run``, or as the body of a ``with``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from mpistrat.distribute.arguments import check_function, given
from mpistrat.distribute.handles import ended
from mpistrat.distribute.mode import Mode, Replica, cross_replica, current, entered
from mpistrat.distribute.regroup import select
from mpistrat.distribute.replica_group import StrategyBase
from mpistrat.errors import ContextError, text_of
from mpistrat.lockstep.guards import compare_copies
from mpistrat.lockstep.ranks import CallState, Caught


def begin(state: CallState) -> None:
    """Note that replica code begins; `end` must follow, whatever happens."""
    if not state.run.depth:
        state.raised = None  # what ended another run says nothing of this one
    state.run.depth += 1


def end(state: CallState) -> None:
    """Note that replica code has ended."""
    state.run.depth -= 1
    if not state.run.depth:
        state.run.failed = None


def proved(strategy: StrategyBase, call: str, result: Any, failure: BaseException | None) -> Any:
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
    lockstep = strategy.replicas.lockstep
    state = lockstep.state
    if failure is not None or lockstep.session.awaited is not None:
        lockstep.session.check()  # what other threads do in its name may be what it has failed with
    if state.run.handles:
        failure = ended(lockstep, failure)
    failed = state.run.failed
    if failed is not None:
        if isinstance(failure, state.run.carriers) and text_of(failed) in text_of(failure):
            raise failed from failure
        raise failed if failure is None else failure
    seen = strategy.replicas.regroup.gathered(call, result, failure)
    state.steps += 1
    every = lockstep.session.options.check_every
    if every and state.steps % every == 0 and lockstep.comm.size > 1:
        compare_copies(lockstep)
    return seen


def merged(strategy: Any, merge_fn: Callable[..., Any], args: Any = (), kwargs: Any = None) -> Any:
    """Call `merge_fn` in cross-replica code; see `ReplicaContext.merge_call`. Collective."""
    check_function("merge_call", "merge_fn", merge_fn)
    mine = given("merge_call", args, kwargs)
    seen_args, seen_kwargs = strategy.replicas.regroup.gathered("merge_call", mine)
    with entered(Mode(strategy)):
        result = merge_fn(strategy, *seen_args, **seen_kwargs)
    return select(result)


@contextlib.contextmanager
def body(strategy: StrategyBase, replica: Replica) -> Iterator[None]:
    """Let the body of a ``with`` be the code of `replica`; it ends in one proof, as a run does.

    Collective. In code of this very replica it changes nothing.

    Raises:
      ContextError: `replica` is not this rank's, or this is replica code of another context.
      StrategyError: Another strategy rules here.
      Exception: As `proved`.
    """
    mode = current()
    here = None if mode is None else mode.replica
    if here is not None and here.context is replica.context:
        yield
        return
    lockstep = strategy.replicas.lockstep
    state = lockstep.state
    with cross_replica(strategy, "with ReplicaContext", "the body itself"):
        begin(state)
        try:
            with Caught() as caught:
                _check(replica, lockstep.comm.rank)
                with entered(Mode(strategy, replica)):
                    if lockstep.hooks.on_fn is not None:
                        lockstep.hooks.on_fn()
                    yield
                state.interrupted.check()
            proved(strategy, "with ReplicaContext, whose body ended", None, caught.failure)
        finally:
            end(state)


def _check(replica: Replica, mine: int) -> None:
    asked = replica.id
    if asked not in (None, mine):
        raise ContextError(
            f"with ReplicaContext: this rank is replica {mine} of {replica.count}, "
            f"and cannot run the code of replica {asked}. Each rank enters a context of its own: "
            "replica_id_in_sync_group=None, or better, strategy.run(fn)."
        )

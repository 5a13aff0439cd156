"""One call of a function on every replica."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpistrat.collectives.alarms import compare_copies
from mpistrat.distribute.arguments import check_function, given
from mpistrat.distribute.context import ReplicaContext
from mpistrat.distribute.mode import Mode, entered
from mpistrat.distribute.regroup import select

if TYPE_CHECKING:
    from mpistrat.distribute.strategy import Strategy

__all__ = ["run"]


def run(strategy: Strategy, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call `fn` as this rank's replica, and end in one proof whatever happened.

    That proof is what makes ``try`` around ``run`` symmetric: it ends `run` on every rank, with an
    exception on all of them or on none. When a call inside `fn` failed on all ranks, it has been
    that proof, and none follows.
    """
    lockstep = strategy.parts.lockstep
    session = lockstep.session
    failure: BaseException | None = None
    result: Any = None
    session.run.depth += 1
    try:
        try:
            result = _call(strategy, fn, args, kwargs)
            session.interrupted.check()
        except BaseException as error:
            failure = error
        if session.run.failed is not None:
            raise failure or session.run.failed
        seen = strategy.parts.regroup.gathered("run, whose function returned", result, failure)
        session.steps += 1
        every = lockstep.options.check_every
        if every and session.steps % every == 0 and session.comm.size > 1:
            compare_copies(lockstep)
        return seen
    finally:
        session.run.depth -= 1
        if not session.run.depth:
            session.run.failed = None


def _call(strategy: Strategy, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    check_function("run", "fn", fn)
    positional, by_name = given("run", args, kwargs)
    replica = ReplicaContext(strategy, strategy.parts.lockstep.comm.rank)
    mine, named = select((positional, by_name))
    with entered(Mode(strategy, replica)):
        on_fn = strategy.parts.lockstep.session.on_fn
        if on_fn is not None:
            on_fn()
        return fn(*mine, **named)

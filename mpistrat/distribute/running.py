"""Replica code begins and ends: as the function of ``run``, or as the body of a ``with``."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

from mpistrat import nest
from mpistrat.distribute.arguments import check_function, explain_arguments, normalize_arguments
from mpistrat.distribute.handles import end_handles
from mpistrat.distribute.mode import Mode, Replica, cross_replica, current
from mpistrat.distribute.regroup import select
from mpistrat.distribute.replica_group import StrategyBase
from mpistrat.distribute.undistributed import note_batch
from mpistrat.errors import ContextError, LeafTypeError, MpistratError, text_of
from mpistrat.feed.iterators import latest
from mpistrat.lockstep.guards import compare_batches, compare_copies
from mpistrat.lockstep.ranks import CallState, Caught

# What functions with `async` and `yield` return before they begin.
_UNSTARTED = frozenset({CoroutineType, GeneratorType, AsyncGeneratorType})
_NO_KWARGS: dict[str, Any] = {}


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
        state.run.uneven, state.run.batch_digest = False, b""


def proved(strategy: StrategyBase, call: str, result: Any, failure: BaseException | None) -> Any:
    """End replica code in one handshake, and return what cross-replica code sees of its results.

    Collective. When a call of the code has failed on all ranks, that has been the handshake, and
    none follows.

    Args:
      strategy: Whose replica code it is.
      call: What it is called in the handshake.
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
        failure = end_handles(lockstep, failure)
    failed = state.run.failed
    if failed is not None:
        if isinstance(failure, state.run.carriers) and text_of(failed) in text_of(failure):
            raise failed from failure
        raise failed if failure is None else failure
    has_batch_digest = bool(state.run.batch_digest)
    visible_result = strategy.replicas.regroup.gathered(
        call, result, failure, has_more=has_batch_digest
    )
    state.steps += 1
    if state.asked:
        compare_batches(lockstep, stacklevel=6)
    check_interval = lockstep.session.options.check_every
    if check_interval and state.steps % check_interval == 0 and lockstep.comm.size > 1:
        compare_copies(lockstep)
    return visible_result


def run(strategy: StrategyBase, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call `fn` as this rank's replica, and end in one handshake whatever happened.

    That handshake is what makes ``try`` around ``run`` symmetric: it ends `run` on every rank, with
    an exception on all of them or on none.
    """
    state = strategy.replicas.lockstep.state
    failure: BaseException | None = None
    result: Any = None
    begin(state)
    try:
        try:
            result = _call(strategy, fn, args, kwargs)
            if state.interrupted.pending:
                state.interrupted.check()
        except BaseException as error:
            failure = error
        return proved(strategy, "run, whose function returned", result, failure)
    finally:
        end(state)


def _call(strategy: StrategyBase, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    check_function("run", "fn", fn)
    if type(args) is tuple and kwargs is None:
        positional, by_name = args, _NO_KWARGS
    else:
        positional, by_name = normalize_arguments("run", args, kwargs)
    regroup = strategy.replicas.regroup
    if batch := regroup.lockstep.state.uneven:
        values = (args, *positional, *by_name.values())
        regroup.lockstep.state.run.uneven = any(a is b for a in values for b in batch)
    if latest.iterator is not None and regroup.size > 1:
        note_batch(regroup.lockstep.state, fn, (args, by_name))
    local_args = [*map(select, positional)]
    named = {name: select(value) for name, value in by_name.items()} if by_name else by_name
    with Mode(strategy, Replica(regroup.rank, regroup.size)):
        on_fn = regroup.lockstep.hooks.on_fn
        if on_fn is not None:
            on_fn()
        try:
            result = fn(*local_args, **named)
        except Exception as error:
            explain_arguments("run", fn, local_args, named, error)
            _of_no_rows(error, [*local_args, *named.values()])
            raise
    if type(result) in _UNSTARTED:
        if isinstance(result, CoroutineType):
            result.close()  # or Python warns that nobody has waited for it
        raise LeafTypeError(
            f"run: the function returned a {type(result).__name__}, so nothing of it has run. Give "
            "a plain function: without `async`, without `yield`."
        )
    return result


def _of_no_rows(error: Exception, arguments: list[Any]) -> None:
    """Add to the text of an error that this replica's part of a batch is empty, if it is.

    Some of NumPy's functions refuse an array without rows, and their errors do not say why.
    """
    has_plain_text = type(error).__str__ is Exception.__str__
    if (
        not has_plain_text
        or isinstance(error, MpistratError)
        or len(error.args) != 1
        or not isinstance(error.args[0], str)
    ):
        return
    with contextlib.suppress(
        Exception
    ):  # whatever was given, it is the program's error that is raised
        if any(getattr(leaf, "shape", ())[:1] == (0,) for leaf in nest.flatten(arguments)[0]):
            error.args = (
                f"{error.args[0]}\n  This replica's part of the batch has no rows, as may be in a "
                "short last batch; see 'A part without rows' in docs/sharp-edges.md.",
            )


def merged(strategy: Any, merge_fn: Callable[..., Any], args: Any = (), kwargs: Any = None) -> Any:
    """Call `merge_fn` in cross-replica code; see `ReplicaContext.merge_call`. Collective."""
    check_function("merge_call", "merge_fn", merge_fn)
    local_arguments = normalize_arguments("merge_call", args, kwargs)
    seen_args, seen_kwargs = strategy.replicas.regroup.gathered(
        "merge_call", local_arguments, plain=True
    )
    with Mode(strategy):
        try:
            result = merge_fn(strategy, *seen_args, **seen_kwargs)
        except TypeError as error:
            partial = functools.partial(merge_fn, strategy)
            explain_arguments("merge_call", partial, seen_args, seen_kwargs, error)
            raise
    return select(result)


@contextlib.contextmanager
def body(strategy: StrategyBase, replica: Replica) -> Iterator[None]:
    """Run the body of a ``with`` as code of `replica`; a handshake ends it, as it ends a run.

    Collective. In code of this very replica it changes nothing.

    Raises:
      ContextError: `replica` is not this rank's, or this is replica code of another context.
      StrategyError: Another strategy is in scope.
      Exception: As `proved`.
    """
    mode = current()
    current_replica = None if mode is None else mode.replica
    if current_replica is not None and current_replica.context is replica.context:
        yield
        return
    lockstep = strategy.replicas.lockstep
    state = lockstep.state
    with cross_replica(strategy, "with ReplicaContext", "the body itself"):
        begin(state)
        try:
            with Caught() as caught:
                _check(replica, lockstep.comm.rank)
                with Mode(strategy, replica):
                    if lockstep.hooks.on_fn is not None:
                        lockstep.hooks.on_fn()
                    yield
                state.interrupted.check()
            proved(strategy, "with ReplicaContext, whose body ended", None, caught.failure)
        finally:
            end(state)


def _check(replica: Replica, rank: int) -> None:
    replica_id = replica.id
    if replica_id not in (None, rank):
        raise ContextError(
            f"with ReplicaContext: this rank is replica {rank} of {replica.count}, "
            f"and cannot run the code of replica {replica_id}. Each rank enters a context of its "
            "own: replica_id_in_sync_group=None, or better, strategy.run(fn)."
        )

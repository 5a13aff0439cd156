"""Replica code begins and ends: as the function of ``run``, or as the body of a ``with``.

Batches of a dataset that is not distributed, where replica code is given them.

Several steps in one call, and the outputs of the last one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, final

import numpy as np

from mpistrat import pytree
from mpistrat.arrays import check_int, digest
from mpistrat.data.iterators import latest
from mpistrat.errors import (
    ContextError,
    LeafTypeError,
    MpistratError,
    OutOfRangeError,
    StructureError,
    text_of,
)
from mpistrat.kernels.ops import ReduceOp
from mpistrat.lockstep.guards import compare_batches, compare_copies
from mpistrat.lockstep.ranks import CallState, Caught
from mpistrat.strategy.all_reduce import end_handles
from mpistrat.strategy.context_stack import Mode, Replica, cross_replica, current
from mpistrat.strategy.replica_group import StrategyBase
from mpistrat.variables.arguments import (
    check_function,
    explain_arguments,
    normalize_arguments,
)
from mpistrat.variables.regroup import select

# A batch that the first runs were not given is not looked for in further runs.
_MOST_RUNS = 8


def note_batch(state: CallState, fn: Callable[..., Any], arguments: Any) -> None:
    """Keep a digest of the batch that was read last, if replica code is given it.

    Not collective: at the end of the run the ranks compare digests, once in a session. Of a dataset
    that each rank has taken its own part of, they differ.

    Args:
      state: Of the calls of this rank.
      fn: The function that runs; what it refers to counts as given.
      arguments: Tree of its arguments.
    """
    iterator = None if latest.iterator is None else latest.iterator()
    if iterator is None or state.batches_compared or state.batches_sought > _MOST_RUNS:
        latest.iterator = None
        return
    state.batches_sought += 1
    kinds = np.ndarray, np.number
    batch = [leaf for leaf in pytree.flatten(iterator.element)[0] if isinstance(leaf, kinds)]
    if not any(leaf.size for leaf in batch):
        return
    parts = {*map(id, [iterator.element, *batch])}
    values = itertools.chain(pytree.flatten(arguments)[0], _references(fn))
    if not parts.isdisjoint(map(id, values)):
        state.run.batch_digest = digest(map(np.asarray, batch))


def _references(fn: Callable[..., Any]) -> Iterator[Any]:
    """Iterate over what a function refers to by the names of its closure and of its module."""
    for cell in getattr(fn, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # nothing is in it yet
            yield cell.cell_contents
    code = getattr(fn, "__code__", None)
    if code is not None:
        yield from (fn.__globals__[name] for name in code.co_names if name in fn.__globals__)


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
    if failure is not None or lockstep.session.await_borrowers is not None:
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
        if any(getattr(leaf, "shape", ())[:1] == (0,) for leaf in pytree.flatten(arguments)[0]):
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


_CALL = "experimental_run_steps_on_iterator"


@final
class MultiStepContext:
    """The outputs of the steps that one call makes; every step gets the same context.

    Attributes:
      last_step_outputs: By name, what the last step set.
      non_tensor_outputs: By name, what any step set that is not an array.
      run_op: None; the steps have been made.
    """

    def __init__(self, strategy: StrategyBase, initial: Any = None):
        """Create a context with the outputs that the program began with."""
        self._strategy = strategy
        self._reductions: dict[str, ReduceOp | None] = {}
        self.last_step_outputs: dict[str, Any] = dict(initial or {})
        self.non_tensor_outputs: dict[str, Any] = {}
        self.run_op = None

    def set_last_step_output(self, name: str, output: Any, reduce_op: Any = None) -> None:
        """Set the output `name` of this step, in place of that of the step before.

        Collective with a `reduce_op`: every rank calls it.

        Args:
          name: A name.
          output: A value per replica, or a tree of them; in replica code, this replica's.
          reduce_op: ``"SUM"`` or another operation: the output is reduced over the replicas. None:
            it is kept as it is.

        Raises:
          ContextError: Called in replica code without `reduce_op`: what one replica gives is
            not an output of the step.
          ValueError: There is no such operation, or an earlier step reduced it with another one.
        """
        if not _in_replica():
            with self._strategy.replicas.lockstep.preparing("set_last_step_output"):
                op = self._register_reduction(name, reduce_op)
            self._keep(name, output, op)
        elif reduce_op is None:
            raise ContextError(
                "set_last_step_output was called in replica code without reduce_op. Give it one, "
                "or call it on what strategy.run returned."
            )
        else:
            op = self._register_reduction(name, reduce_op)
            _merged(lambda _, value: self._keep(name, value, op), output)

    def _register_reduction(self, name: str, reduce_op: Any) -> ReduceOp | None:
        op = None if reduce_op is None else ReduceOp.parse(reduce_op)
        if self._reductions.setdefault(name, op) is not op:
            raise StructureError(
                f"output {name!r} was set with {self._reductions[name]} before, now with {op}."
            )
        return op

    def _keep(self, name: str, output: Any, op: ReduceOp | None) -> None:
        if op is not None:
            output = self._strategy.reduce(op, output, axis=None)
        self.last_step_outputs[name] = output

    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Set something that is not an array under `name`.

        Collective in replica code: every replica calls it, and what is kept is the tuple of what
        all of them gave, as far as the strategy shows them.

        Args:
          name: A name.
          output: Anything; in replica code, anything that can be sent.
        """
        if not _in_replica():
            self.non_tensor_outputs[name] = output
            return

        def keep(strategy: StrategyBase, value: Any) -> None:
            self.non_tensor_outputs[name] = strategy.experimental_local_results(value)

        _merged(keep, output)


def _in_replica() -> bool:
    mode = current()
    return mode is not None and mode.replica is not None


def _merged(keep: Callable[[Any, Any], None], output: Any) -> None:
    mode = current()
    assert mode is not None  # this is replica code
    mode.strategy.replicas.lockstep.state.interrupted.check()
    merged(mode.strategy, keep, (output,))


def run_steps(
    strategy: StrategyBase,
    fn: Callable[..., Any],
    iterator: Iterator[Any],
    iterations: int,
    initial: Any = None,
) -> MultiStepContext:
    """Call ``fn(context, inputs)`` once per step, in cross-replica code. Collective.

    Args:
      strategy: Whose code it is.
      fn: One step; `inputs` is the next element of the iterator.
      iterator: A distributed iterator.
      iterations: How many steps.
      initial: Outputs by name, as they are before the first step; the steps then have to set no
        others.

    Raises:
      OutOfRangeError: The data end before the steps do.
      TypeError: `iterations` is not an integer, or `iterator` is not an iterator.
      StructureError: There are no steps to make, or the outputs are not those of `initial`.
    """
    lockstep = strategy.replicas.lockstep
    with lockstep.preparing(_CALL):
        iterations = check_int(f"{_CALL}: iterations", iterations, 1, StructureError)
        check_function(_CALL, "fn", fn)
        if not hasattr(iterator, "__next__"):
            raise TypeError(
                f"{_CALL}: iterator must be an iterator, iter(distributed), got {iterator!r:.80}."
            )
        context = MultiStepContext(strategy, initial)
    with strategy.scope():
        for step in range(iterations):
            try:
                inputs = next(iterator)
            except StopIteration:
                lockstep.refuse(
                    _CALL,
                    OutOfRangeError(
                        f"{_CALL}: the data ended after {step} of {iterations} steps. Ask for "
                        "fewer, or repeat() the dataset."
                    ),
                )
            fn(context, inputs)
    with lockstep.preparing(_CALL):
        if initial is not None and set(initial) != set(context.last_step_outputs):
            raise StructureError(
                f"initial_loop_values are called {sorted(initial)}, the outputs of the steps "
                f"{sorted(context.last_step_outputs)}."
            )
    return context

"""Replica code begins and ends: as the function of ``run``, or as the body of a ``with``.

It ends in one handshake whatever happened. Where a call of the code has failed on all ranks, that
was the handshake, and none follows; until the run has ended, nothing else can be called, even if
the program swallows the exception.

`note_batch` looks for batches of a dataset that is not distributed. `run_steps` makes several steps
in one call, and `MultiStepContext` has the outputs of the last one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, final

import numpy as np

from mpistrat import pytree
from mpistrat.arrays import check_int, digest
from mpistrat.data.iterators import latest_iterator
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
from mpistrat.lockstep.ranks import CallState, FailureCatcher, RunState
from mpistrat.strategy.all_reduce import end_handles
from mpistrat.strategy.context_stack import (
    CodeContext,
    Replica,
    current_context,
    enter_cross_replica,
)
from mpistrat.strategy.replica_group import StrategyBase
from mpistrat.variables.arguments import (
    check_function,
    explain_arguments,
    normalize_arguments,
)
from mpistrat.variables.regroup import select_local

# A batch that the first runs were not given is not looked for in further runs.
_MAX_RUNS_SEARCHED = 8


def note_batch(state: CallState, fn: Callable[..., Any], arguments: object) -> None:
    """Keep a digest of the batch that was read last, if replica code is given it.

    Not collective: at the end of the run the ranks compare digests, once in a session. They differ
    where each rank has taken its own part of a dataset. A digest of the dataset's rows follows
    that of the batch: a shuffle without a seed gives each rank another batch of the same rows.

    Args:
      state: The state of the calls of this rank.
      fn: The function that runs; the objects that it refers to count as arguments.
      arguments: Tree of its arguments.
    """
    iterator = None if latest_iterator.iterator is None else latest_iterator.iterator()
    if (
        iterator is None
        or state.has_compared_batches
        or state.batch_search_count > _MAX_RUNS_SEARCHED
    ):
        latest_iterator.iterator = None
        return
    state.batch_search_count += 1
    array_classes = np.ndarray, np.number
    batch = [
        leaf for leaf in pytree.flatten(iterator.element)[0] if isinstance(leaf, array_classes)
    ]
    if not any(leaf.size for leaf in batch):
        return
    batch_ids = {*map(id, [iterator.element, *batch])}
    values = itertools.chain(pytree.flatten(arguments)[0], _iterate_references(fn))
    if not batch_ids.isdisjoint(map(id, values)):
        state.run.batch_digest = digest(map(np.asarray, batch)) + iterator.digest_source()


def _iterate_references(fn: Callable[..., Any]) -> Iterator[Any]:
    """Iterate over what a function refers to by the names of its closure and of its module."""
    for cell in getattr(fn, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # nothing is in it yet
            yield cell.cell_contents
    code = getattr(fn, "__code__", None)
    if code is not None:
        yield from (fn.__globals__[name] for name in code.co_names if name in fn.__globals__)


# The results of functions with `async` and `yield`, which have not begun.
_UNSTARTED_TYPES = frozenset({CoroutineType, GeneratorType, AsyncGeneratorType})
_NO_KWARGS: dict[str, Any] = {}


def begin_replica_code(state: CallState) -> None:
    """Note that replica code begins; `end_replica_code` must follow, whatever happens."""
    if not state.run.depth:
        state.common_error = None  # what ended another run says nothing of this one
    state.run.depth += 1


def end_replica_code(state: CallState) -> None:
    """Note that replica code has ended."""
    run_state = state.run
    run_state.depth -= 1
    if not run_state.depth:
        run_state.failure = None
        run_state.uneven_row_count, run_state.batch_digest = None, b""


def end_in_handshake(
    strategy: StrategyBase, call: str, returned_tree: object, failure: BaseException | None
) -> Any:
    """End replica code in one handshake, and return what cross-replica code sees of its results.

    Collective. When a call of the code has failed on all ranks, that has been the handshake, and
    none follows.

    Args:
      strategy: Whose replica code it is.
      call: Its name in the handshake.
      returned_tree: Its result here.
      failure: The error that it raised here instead.

    Raises:
      Exception: `failure`, if there is one.
      RemoteError: It failed on another rank.
      LockstepError: The ranks made different calls, or hold results of different structures.
    """
    lockstep = strategy._replicas.lockstep
    state = lockstep.state
    if failure is not None or lockstep.session.await_borrowers is not None:
        lockstep.session.check()  # what other threads do in its name may be what it has failed with
    if state.run.pending_handles:
        failure = end_handles(lockstep, failure)
    agreed_failure = state.run.failure
    if agreed_failure is not None:
        if isinstance(failure, state.run.carrier_types) and text_of(agreed_failure) in text_of(
            failure
        ):
            raise agreed_failure from failure
        raise agreed_failure if failure is None else failure
    has_batch_digest = bool(state.run.batch_digest)
    visible_result = strategy._replicas.regrouper.regroup_tree(
        call, returned_tree, failure, has_more=has_batch_digest
    )
    state.step_count += 1
    if state.needs_comparison:
        compare_batches(lockstep)
    check_interval = lockstep.session.options.check_every
    if check_interval and state.step_count % check_interval == 0 and lockstep.comm.size > 1:
        compare_copies(lockstep)
    return visible_result


def run(strategy: StrategyBase, fn: Callable[..., Any], args: object, kwargs: object) -> Any:
    """Call `fn` as this rank's replica, and end in one handshake whatever happened.

    That handshake is what makes ``try`` around ``run`` symmetric: it ends `run` on every rank, with
    an exception on all of them or on none.
    """
    state = strategy._replicas.lockstep.state
    failure: BaseException | None = None
    returned_tree: Any = None
    begin_replica_code(state)
    try:
        try:
            returned_tree = _call_function(strategy, fn, args, kwargs)
            if state.kept_interrupt.is_pending:
                state.kept_interrupt.raise_pending()
        except BaseException as error:
            failure = error
        return end_in_handshake(strategy, "run, whose function returned", returned_tree, failure)
    finally:
        end_replica_code(state)


def _call_function(
    strategy: StrategyBase, fn: Callable[..., Any], args: object, kwargs: object
) -> Any:
    check_function("run", "fn", fn)
    if type(args) is tuple and kwargs is None:
        positional, named_arguments = args, _NO_KWARGS
    else:
        positional, named_arguments = normalize_arguments("run", args, kwargs)
    regroup = strategy._replicas.regrouper
    if uneven_batch := regroup.lockstep.state.uneven_batch:
        values = (args, *positional, *named_arguments.values())
        note_rows(regroup.lockstep.state.run, values, uneven_batch)
    if latest_iterator.iterator is not None and regroup.size > 1:
        note_batch(regroup.lockstep.state, fn, (args, named_arguments))
    local_args = [*map(select_local, positional)]
    local_kwargs = (
        {name: select_local(value) for name, value in named_arguments.items()}
        if named_arguments
        else named_arguments
    )
    with CodeContext(strategy, Replica(regroup.rank, regroup.size)):
        on_fn = regroup.lockstep.hooks.on_fn
        if on_fn is not None:
            on_fn()
        try:
            returned_tree = fn(*local_args, **local_kwargs)
        except Exception as error:
            explain_arguments("run", fn, local_args, local_kwargs, error)
            _explain_empty_part(error, [*local_args, *local_kwargs.values()])
            raise
    if type(returned_tree) in _UNSTARTED_TYPES:
        if isinstance(returned_tree, CoroutineType):
            returned_tree.close()  # or Python warns that nobody has waited for it
        raise LeafTypeError(
            f"run: the function returned a {type(returned_tree).__name__}, so nothing of it has "
            "run. Give a plain function: without `async`, without `yield`."
        )
    return returned_tree


def note_rows(run_state: RunState, values: Iterable[Any], uneven_batch: Sequence[Any]) -> None:
    """Note how many rows of an uneven batch replica code is given here, if it is given one.

    Args:
      run_state: The state of the call.
      values: The arguments.
      uneven_batch: A batch of which the replicas have different numbers of rows, and its leaves.
    """
    is_given = any(a is b for a in values for b in uneven_batch)
    shapes = [getattr(select_local(leaf), "shape", ()) for leaf in uneven_batch[1:]]
    row_counts = [shape[0] for shape in shapes if shape]
    run_state.uneven_row_count = max(row_counts, default=1) if is_given else None


def _explain_empty_part(error: Exception, arguments: list[Any]) -> None:
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


def call_merged(
    strategy: Any, merge_fn: Callable[..., Any], args: Any = (), kwargs: Any = None
) -> Any:
    """Call `merge_fn` in cross-replica code; see `ReplicaContext.merge_call`. Collective."""
    check_function("merge_call", "merge_fn", merge_fn)
    local_arguments = normalize_arguments("merge_call", args, kwargs)
    seen_args, seen_kwargs = strategy._replicas.regrouper.regroup_tree(
        "merge_call", local_arguments, should_unwrap_plain=True
    )
    with CodeContext(strategy):
        try:
            returned_tree = merge_fn(strategy, *seen_args, **seen_kwargs)
        except TypeError as error:
            partial = functools.partial(merge_fn, strategy)
            explain_arguments("merge_call", partial, seen_args, seen_kwargs, error)
            raise
    return select_local(returned_tree)


@contextlib.contextmanager
def run_body(strategy: StrategyBase, replica: Replica) -> Iterator[None]:
    """Run the body of a ``with`` as code of `replica`; a handshake ends it, as it ends a run.

    Collective. In code of this very replica it changes nothing.

    Raises:
      ContextError: `replica` is not this rank's, or this is replica code of another context.
      StrategyError: Another strategy is in scope.
      Exception: As `end_in_handshake`.
    """
    context = current_context()
    current_replica = None if context is None else context.replica
    if current_replica is not None and current_replica.context is replica.context:
        yield
        return
    lockstep = strategy._replicas.lockstep
    state = lockstep.state
    with enter_cross_replica(strategy, "with ReplicaContext", "the body itself"):
        begin_replica_code(state)
        try:
            with FailureCatcher() as caught:
                _check_replica(replica, lockstep.comm.rank)
                with CodeContext(strategy, replica):
                    if lockstep.hooks.on_fn is not None:
                        lockstep.hooks.on_fn()
                    yield
                state.kept_interrupt.raise_pending()
            end_in_handshake(
                strategy, "with ReplicaContext, whose body ended", None, caught.failure
            )
        finally:
            end_replica_code(state)


def _check_replica(replica: Replica, rank: int) -> None:
    replica_id = replica.id
    if replica_id not in (None, rank):
        raise ContextError(
            f"with ReplicaContext: this rank is replica {rank} of {replica.count}, "
            f"and cannot run the code of replica {replica_id}. Each rank enters a context of its "
            "own: replica_id_in_sync_group=None, or better, strategy.run(fn)."
        )


_RUN_STEPS = "experimental_run_steps_on_iterator"


@final
class MultiStepContext:
    """The outputs of the steps that one call makes; every step gets the same context.

    Attributes:
      last_step_outputs: By name, what the last step set.
      non_tensor_outputs: By name, what any step set that is not an array.
      run_op: None; the steps have been made.
    """

    def __init__(self, strategy: StrategyBase, initial_outputs: Any = None):
        """Create a context with the outputs that the program began with."""
        self._strategy = strategy
        self._reductions: dict[str, ReduceOp | None] = {}
        self.last_step_outputs: dict[str, Any] = dict(initial_outputs or {})
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
        if not _is_replica_code():
            with self._strategy._replicas.lockstep.validating_collectively("set_last_step_output"):
                op = self._register_reduction(name, reduce_op)
            self._keep_output(name, output, op)
        elif reduce_op is None:
            raise ContextError(
                "set_last_step_output was called in replica code without reduce_op. Give it one, "
                "or call it on what strategy.run returned."
            )
        else:
            op = self._register_reduction(name, reduce_op)
            _call_merged_here(lambda _, value: self._keep_output(name, value, op), output)

    def _register_reduction(self, name: str, reduce_op: ReduceOp | str) -> ReduceOp | None:
        op = None if reduce_op is None else ReduceOp.parse(reduce_op)
        if self._reductions.setdefault(name, op) is not op:
            raise StructureError(
                f"output {name!r} was set with {self._reductions[name]} before, now with {op}."
            )
        return op

    def _keep_output(self, name: str, output: Any, op: ReduceOp | None) -> None:
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
        if not _is_replica_code():
            self.non_tensor_outputs[name] = output
            return

        def keep(strategy: StrategyBase, value: object) -> None:
            self.non_tensor_outputs[name] = strategy.experimental_local_results(value)

        _call_merged_here(keep, output)


def _is_replica_code() -> bool:
    context = current_context()
    return context is not None and context.replica is not None


def _call_merged_here(keep_output: Callable[[Any, Any], None], output: Any) -> None:
    context = current_context()
    assert context is not None  # this is replica code
    context.strategy._replicas.lockstep.state.kept_interrupt.raise_pending()
    call_merged(context.strategy, keep_output, (output,))


def run_steps(
    strategy: StrategyBase,
    fn: Callable[..., Any],
    iterator: Iterator[Any],
    iterations: int,
    initial_outputs: Any = None,
) -> MultiStepContext:
    """Call ``fn(context, inputs)`` once per step, in cross-replica code. Collective.

    Args:
      strategy: Whose code it is.
      fn: One step; `inputs` is the next element of the iterator.
      iterator: A distributed iterator.
      iterations: How many steps.
      initial_outputs: Outputs by name, as they are before the first step; the steps then have to
        set no others.

    Raises:
      OutOfRangeError: The data end before the steps do.
      TypeError: `iterations` is not an integer, or `iterator` is not an iterator.
      StructureError: There are no steps to make, or the outputs are not those of `initial_outputs`.
    """
    lockstep = strategy._replicas.lockstep
    with lockstep.validating_collectively(_RUN_STEPS):
        iterations = check_int(f"{_RUN_STEPS}: iterations", iterations, 1, StructureError)
        check_function(_RUN_STEPS, "fn", fn)
        if not hasattr(iterator, "__next__"):
            raise TypeError(
                f"{_RUN_STEPS}: iterator must be an iterator, iter(distributed), got "
                f"{iterator!r:.80}."
            )
        context = MultiStepContext(strategy, initial_outputs)
    with strategy.scope():
        for step in range(iterations):
            try:
                inputs = next(iterator)
            except StopIteration:
                lockstep.fail_collectively(
                    _RUN_STEPS,
                    OutOfRangeError(
                        f"{_RUN_STEPS}: the data ended after {step} of {iterations} steps. Ask for "
                        "fewer, or repeat() the dataset."
                    ),
                )
            fn(context, inputs)
    with lockstep.validating_collectively(_RUN_STEPS):
        if initial_outputs is not None and set(initial_outputs) != set(context.last_step_outputs):
            raise StructureError(
                f"initial_loop_values are called {sorted(initial_outputs)}, the outputs of the "
                f"steps {sorted(context.last_step_outputs)}."
            )
    return context

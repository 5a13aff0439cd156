"""One call of a function on every replica."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

from mpistrat import nest
from mpistrat.distribute.arguments import check_function, given
from mpistrat.distribute.mode import Entered, Mode, Replica
from mpistrat.distribute.regroup import select
from mpistrat.distribute.replica_code import begin, end, proved
from mpistrat.distribute.replica_group import StrategyBase
from mpistrat.errors import LeafTypeError, MpistratError

# What functions with `async` and `yield` return before they begin.
_UNSTARTED = frozenset({CoroutineType, GeneratorType, AsyncGeneratorType})
_NOTHING: dict[str, Any] = {}


def run(strategy: StrategyBase, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call `fn` as this rank's replica, and end in one proof whatever happened.

    That proof is what makes ``try`` around ``run`` symmetric: it ends `run` on every rank, with an
    exception on all of them or on none.
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
        positional, by_name = args, _NOTHING
    else:
        positional, by_name = given("run", args, kwargs)
    regroup = strategy.replicas.regroup
    mine = [*map(select, positional)]
    named = {name: select(value) for name, value in by_name.items()} if by_name else by_name
    with Entered(Mode(strategy, Replica(regroup.rank, regroup.size))):
        on_fn = regroup.lockstep.hooks.on_fn
        if on_fn is not None:
            on_fn()
        try:
            result = fn(*mine, **named)
        except Exception as error:
            _of_no_rows(error, [*mine, *named.values()])
            raise
    if type(result) in _UNSTARTED:
        if isinstance(result, CoroutineType):
            result.close()  # or Python warns that nobody has waited for it
        raise LeafTypeError(
            f"run: the function returned a {type(result).__name__}, so nothing of it has run. Give "
            "a plain function: without `async`, without `yield`."
        )
    return result


def _of_no_rows(error: Exception, given: list[Any]) -> None:
    """Add to the text of an error that this replica's part of a batch is empty, if it is.

    What has no rows is refused by some of NumPy's functions, and their errors do not tell why.
    """
    plain = type(error).__str__ is Exception.__str__ and not isinstance(error, MpistratError)
    if not plain or len(error.args) != 1 or not isinstance(error.args[0], str):
        return
    with suppress(Exception):  # whatever was given, it is the program's error that is raised
        if any(getattr(leaf, "shape", ())[:1] == (0,) for leaf in nest.flatten(given)[0]):
            error.args = (
                f"{error.args[0]}\n  This replica's part of the batch has no rows, as may be in a "
                "short last batch; see 'A part without rows' in docs/sharp-edges.md.",
            )

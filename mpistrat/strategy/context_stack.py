"""The mode of the running code: replica code, cross-replica code, or neither.

One context variable holds one `Mode`, which does not change; nothing else in the package remembers
a context.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, final

from mpistrat import advice
from mpistrat.comm.session import known_job_size
from mpistrat.errors import ContextError, StrategyError
from mpistrat.lockstep import exits
from mpistrat.variables.kinds import ALONE, DistributedVariable


class Ruling(Protocol):
    """A strategy, as far as a mode looks into it."""

    @property
    def replicas(self) -> Any:
        """What it is made of."""

    @property
    def is_default(self) -> bool:
        """Whether it is the current one where no other does."""


@final
@dataclass(eq=False)
class Replica:
    """One replica, while its code runs.

    Attributes:
      id: Which one it is; None if nobody said.
      count: How many there are.
      context: What the program sees of it, once it has asked.
    """

    id: int | None
    count: int
    context: Any = None


@final
class Mode:
    """What the running code may do. The body of a ``with`` runs in it; each is entered once.

    Attributes:
      strategy: The strategy that rules here.
      replica: The replica, in replica code; None in cross-replica code.
      updating: The variable whose copy ``extended.update`` lets its function write here.
      lasting: It rules until further notice, and not for the body of a ``with``.

    Raises:
      ContextError: On leaving, a scope that was entered later has not been left yet.
    """

    __slots__ = ("_added_contexts", "_token", "lasting", "replica", "strategy", "updating")

    def __init__(
        self,
        strategy: Ruling,
        replica: Replica | None = None,
        updating: DistributedVariable | None = None,
        lasting: bool = False,
    ):
        """Create a mode; nothing runs in it yet."""
        self.strategy, self.replica = strategy, replica
        self.updating, self.lasting = updating, lasting

    def __enter__(self) -> None:
        """Enter the mode."""
        self._token = _mode.set(self)
        self._added_contexts = (
            [enter(self.strategy) for enter in _context_makers] if _context_makers else []
        )
        for context in self._added_contexts:
            context.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: object) -> None:
        """Leave the mode."""
        for context in self._added_contexts:
            context.__exit__(None, None, None)
        if error is not None:
            advice.explain(error, self.replica is None)
        if _mode.get() is self:
            _mode.reset(self._token)
            return
        _mode.set(None)
        if error is None:
            raise ContextError(
                f"scopes were exited out of order: that of {self.strategy!r} before one that "
                "was entered inside it. All are exited now; use `with strategy.scope():`."
            )


_mode: contextvars.ContextVar[Mode | None] = contextvars.ContextVar("mpistrat_mode", default=None)
_is_default_chosen: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "mpistrat_chosen", default=False
)
# Returns the mode of the running code; None where the default strategy rules.
current: Callable[[], Mode | None] = _mode.get
_context_makers: list[Callable[[Ruling], AbstractContextManager[Any]]] = []


def beside(enter: Callable[[Ruling], AbstractContextManager[Any]]) -> None:
    """Register ``enter(strategy)``, a context manager to enter with each mode, in all threads."""
    _context_makers.append(enter)


def again(mode: Mode | None, strategy: Ruling) -> Mode:
    """Return a new mode like `mode`, or of cross-replica code of `strategy`, to be entered."""
    return Mode(strategy) if mode is None else Mode(mode.strategy, mode.replica, mode.updating)


def explain(error: BaseException) -> None:
    """Say what to use instead of an attribute that is missing where the code is; see `advice`."""
    mode = current()
    advice.explain(error, mode is not None and mode.replica is None)


exits.explaining.append(explain)


def settle(strategy: Ruling | None) -> None:
    """Let cross-replica code of `strategy` begin here, and last until further notice.

    Args:
      strategy: The strategy; None for the default one, which rules outside of replica code.

    Raises:
      ContextError: This is in a scope or in replica code.
    """
    mode = current()
    if mode is not None and not mode.lasting:
        raise ContextError(
            f"experimental_set_strategy was called inside a scope of {mode.strategy!r}. Call it at "
            "the top of the program."
        )
    _mode.set(None if strategy is None else Mode(strategy, lasting=True))


_OUTSIDE_ADVICE = (
    "What is created outside of all scopes is the default strategy's: create it in "
    "`with strategy.scope():`."
)
_TWO_STRATEGIES_ADVICE = "Make one strategy and use it everywhere, or leave that scope first."


def same_strategy(strategy: Ruling, subject: str) -> Mode | None:
    """Return the current mode, provided that no other strategy is in scope.

    Raises:
      StrategyError: Another strategy is.
    """
    mode = current()
    if mode is not None and mode.strategy is not strategy:
        current_name = f"{mode.strategy!r}"
        raise StrategyError(
            f"Mixing different strategies: {subject} belongs to {strategy!r}, but the code is "
            f"inside the scope of {'another ' * (current_name == repr(strategy))}{current_name}. "
            + (_OUTSIDE_ADVICE if strategy.is_default else _TWO_STRATEGIES_ADVICE)
            + " Variables and metrics belong to the strategy in whose scope they are created, and "
            "an optimizer to that of its variables."
        )
    return mode


def check_readable(variable: DistributedVariable) -> None:
    """Raise if code here may not read a variable, as another strategy is in scope.

    A variable of one rank alone is an ordinary one, whichever strategy is in scope.

    Raises:
      StrategyError: Another one is in scope, and the variable has copies on other ranks.
    """
    if variable.strategy.replicas.view is not ALONE:
        same_strategy(variable.strategy, f"variable {variable.name!r}")


def check_writable(variable: DistributedVariable, call: str, mode: Mode) -> None:
    """Raise if code in the mode of another strategy may not write to a variable.

    Cross-replica code may, if the variable is one of one rank alone. How often replicas write to
    it would depend on how many of them a process has: where a process has all, copies add up.

    Raises:
      StrategyError: It may not.
    """
    check_readable(variable)
    is_per_replica = mode.replica is not None or mode.updating is not None
    if is_per_replica and mode.strategy.replicas.view is not ALONE:
        code_text = "in replica code" if mode.updating is None else "in the function of update"
        raise StrategyError(
            f"{call} of variable {variable.name!r} {code_text} of {mode.strategy!r}: it belongs to "
            f"{variable.strategy!r}, so each rank has one of its own, and nobody can tell whether "
            "what replicas write counts once or once per replica. Create it in the scope of the "
            "strategy, with an aggregation, or write to it outside of run and update."
        )


def check_cross_replica(strategy: Ruling, call: str, replacement: str) -> Mode | None:
    """Return the current mode, provided that cross-replica code of `strategy` may begin here.

    Args:
      strategy: The strategy whose call this is.
      call: The call, for messages.
      replacement: What replica code calls instead, for messages.

    Raises:
      ContextError: This is replica code.
      StrategyError: This is code of another strategy, or another thread than the strategy's.
    """
    lockstep = strategy.replicas.lockstep
    lockstep.session.check()
    if lockstep.state.interrupted.pending:
        lockstep.state.interrupted.check()
    mode = _mode.get()
    if mode is not None and mode.strategy is not strategy:
        same_strategy(strategy, call)
    if mode is not None and mode.replica is not None:
        replica = mode.replica
        raise ContextError(
            f"{call} is cross-replica code, but this is replica "
            f"{replica.id} of {replica.count} inside run().\n"
            f"  Here, call {replacement}, or pass a function to "
            "get_replica_context().merge_call()."
        )
    return mode


def cross_replica(strategy: Ruling, call: str, replacement: str) -> Any:
    """Return a context manager that enters cross-replica code of `strategy`.

    Arguments and errors are those of `check_cross_replica`.
    """
    return again(check_cross_replica(strategy, call, replacement), strategy)


def as_replica(strategy: Ruling, call: str) -> AbstractContextManager[Any]:
    """Return a context manager whose body is replica code of a strategy, as it may be already.

    Args:
      strategy: The strategy.
      call: Who enters it, for messages.

    Raises:
      StrategyError: Another one is in scope.
    """
    mode = current()
    if mode is not None and mode.replica is not None and mode.strategy is strategy:
        return contextlib.nullcontext()
    same_strategy(strategy, call)
    regroup = strategy.replicas.regroup
    return Mode(strategy, Replica(regroup.rank, regroup.size))


@contextlib.contextmanager
def choose_default_strategy() -> Iterator[None]:
    """Run the body as code that has chosen the default strategy, which rules in any case."""
    previous_choice = _is_default_chosen.get()
    _is_default_chosen.set(True)
    try:
        yield
    finally:
        _is_default_chosen.set(previous_choice)


_IN_RUN = (
    "Call it in the function that Strategy.run calls, in the thread that calls run; elsewhere use "
    "what a strategy of several ranks has, such as strategy.all_reduce(...)"
)


def refuse_unchosen(call: str, remedy: str = _IN_RUN) -> None:
    """Raise if a call would stay on this rank only because no strategy is in scope.

    Args:
      call: The call.
      remedy: The advice of the message.

    Raises:
      ContextError: No strategy is in scope, and none was chosen, in a job of several ranks.
    """
    if current() is not None or _is_default_chosen.get():
        return
    size = known_job_size()
    if size > 1:
        raise ContextError(
            f"{call} was called where no strategy is in scope, in a job of {size} ranks: each "
            f"would keep its own value. {remedy}. If each rank is meant to work alone, use a "
            "OneDeviceStrategy."
        )


@final
class Scope:
    """A scope of a strategy, which can be entered again, also within itself.

    Args:
      strategy: What ``with ... as`` gives.
      enter: Returns what is entered, again each time.
    """

    def __init__(self, strategy: Ruling, enter: Callable[[], AbstractContextManager[Any]]):
        """Enter nothing yet."""
        self._strategy, self._enter = strategy, enter
        self._open: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> Any:
        """Enter the scope once more, and return the strategy."""
        entered = self._enter()
        entered.__enter__()
        self._open.append(entered)
        return self._strategy

    def __exit__(self, *exception: Any) -> None:
        """Leave the scope once.

        Raises:
          ContextError: It is not entered; or scopes are left out of order.
        """
        if not self._open:
            raise ContextError(
                f"a scope of {self._strategy!r} was exited that had not been entered."
            )
        self._open.pop().__exit__(*exception)

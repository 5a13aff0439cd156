"""The context of the running code: replica code, cross-replica code, or neither.

One context variable holds one `CodeContext`, which does not change. Nothing else in the package
remembers a context.
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
from mpistrat.variables.kinds import SINGLE_REPLICA, DistributedVariable


class StrategyLike(Protocol):
    """A strategy, as far as this module needs it."""

    @property
    def _replicas(self) -> Any:
        """Its ranks, and the objects that move values between them."""

    @property
    def _is_default(self) -> bool:
        """Whether it is the current one where no other does."""


@final
@dataclass(eq=False)
class Replica:
    """One replica, while its code runs.

    Attributes:
      id: Its number; None if it is not known.
      count: The number of replicas.
      context: Its `ReplicaContext`, once the program has asked for it.
    """

    id: int | None
    count: int
    context: Any = None


@final
class CodeContext:
    """The rights of the running code. The body of a ``with`` runs in it; each is entered once.

    Attributes:
      strategy: The strategy that rules here.
      replica: The replica, in replica code; None in cross-replica code.
      updated_variable: The variable whose copy ``extended.update`` lets its function write here.
      is_lasting: It lasts until it is replaced, and not for the body of a ``with``.

    Raises:
      ContextError: On leaving, a scope that was entered later has not been left yet.
    """

    __slots__ = (
        "_added_contexts",
        "_token",
        "is_lasting",
        "replica",
        "strategy",
        "updated_variable",
    )

    def __init__(
        self,
        strategy: StrategyLike,
        replica: Replica | None = None,
        updated_variable: DistributedVariable | None = None,
        is_lasting: bool = False,
    ):
        """Create a context; nothing runs in it yet."""
        self.strategy, self.replica = strategy, replica
        self.updated_variable, self.is_lasting = updated_variable, is_lasting

    def __enter__(self) -> None:
        """Enter the context."""
        self._token = _code_context.set(self)
        self._added_contexts = (
            [enter(self.strategy) for enter in _context_makers] if _context_makers else []
        )
        for context in self._added_contexts:
            context.__enter__()

    def __exit__(self, error_class: object, error: BaseException | None, trace: object) -> None:
        """Leave the context."""
        for context in self._added_contexts:
            context.__exit__(None, None, None)
        if error is not None:
            advice.explain_program_error(error, self.replica is None)
        if _code_context.get() is self:
            _code_context.reset(self._token)
            return
        _code_context.set(None)
        if error is None:
            raise ContextError(
                f"scopes were exited out of order: that of {self.strategy!r} before one that "
                "was entered inside it. All are exited now; use `with strategy.scope():`."
            )


_code_context: contextvars.ContextVar[CodeContext | None] = contextvars.ContextVar(
    "mpistrat_mode", default=None
)
_is_default_chosen: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "mpistrat_chosen", default=False
)
# Returns the context of the running code; None where the default strategy is the current one.
current_context: Callable[[], CodeContext | None] = _code_context.get
_context_makers: list[Callable[[StrategyLike], AbstractContextManager[Any]]] = []


def register_context_maker(enter: Callable[[StrategyLike], AbstractContextManager[Any]]) -> None:
    """Register ``enter(strategy)``, whose context manager is entered with each context.

    It holds for all threads.
    """
    _context_makers.append(enter)


def copy_context(context: CodeContext | None, strategy: StrategyLike) -> CodeContext:
    """Return a new context like `context`; where that is None, cross-replica code of `strategy`."""
    return (
        CodeContext(strategy)
        if context is None
        else CodeContext(context.strategy, context.replica, context.updated_variable)
    )


def explain_program_error(error: BaseException) -> None:
    """Add the cure to an error of the program; see `mpistrat.advice`."""
    context = current_context()
    advice.explain_program_error(error, context is not None and context.replica is None)


exits.explainers.append(explain_program_error)


def set_lasting_strategy(strategy: StrategyLike | None) -> None:
    """Let cross-replica code of `strategy` begin here, and last until the next call.

    Args:
      strategy: The strategy; None for the default one, which rules outside of replica code.

    Raises:
      ContextError: This is in a scope or in replica code.
    """
    context = current_context()
    if context is not None and not context.is_lasting:
        raise ContextError(
            f"experimental_set_strategy was called inside a scope of {context.strategy!r}. Call it "
            "at the top of the program."
        )
    _code_context.set(None if strategy is None else CodeContext(strategy, is_lasting=True))


_OUTSIDE_ADVICE = (
    "What is created outside of all scopes is the default strategy's: create it in "
    "`with strategy.scope():`."
)
_TWO_STRATEGIES_ADVICE = "Make one strategy and use it everywhere, or leave that scope first."


def check_same_strategy(strategy: StrategyLike, subject: str) -> CodeContext | None:
    """Return the current context, provided that no other strategy is in scope.

    Raises:
      StrategyError: Another strategy is.
    """
    context = current_context()
    if context is not None and context.strategy is not strategy:
        current_name = f"{context.strategy!r}"
        raise StrategyError(
            f"Mixing different strategies: {subject} belongs to {strategy!r}, but the code is "
            f"inside the scope of {'another ' * (current_name == repr(strategy))}{current_name}. "
            + (_OUTSIDE_ADVICE if strategy._is_default else _TWO_STRATEGIES_ADVICE)
            + " Variables and metrics belong to the strategy in whose scope they are created, and "
            "an optimizer to that of its variables."
        )
    return context


def check_readable(variable: DistributedVariable) -> None:
    """Raise if code here may not read a variable, as another strategy is in scope.

    A variable of one rank alone is an ordinary one, whichever strategy is in scope.

    Raises:
      StrategyError: Another one is in scope, and the variable has copies on other ranks.
    """
    if variable.strategy._replicas.view is not SINGLE_REPLICA:
        check_same_strategy(variable.strategy, f"variable {variable.name!r}")


def check_writable(variable: DistributedVariable, call: str, context: CodeContext) -> None:
    """Raise if code in the context of another strategy may not write to a variable.

    Cross-replica code may, if the variable is one of one rank alone. How often replicas write to
    it would depend on how many of them a process has: where a process has all, copies add up.

    Raises:
      StrategyError: It may not.
    """
    check_readable(variable)
    is_per_replica = context.replica is not None or context.updated_variable is not None
    if is_per_replica and context.strategy._replicas.view is not SINGLE_REPLICA:
        code_text = (
            "in replica code" if context.updated_variable is None else "in the function of update"
        )
        raise StrategyError(
            f"{call} of variable {variable.name!r} {code_text} of {context.strategy!r}: it belongs "
            f"to {variable.strategy!r}, so each rank has one of its own, and nobody can tell "
            "whether what replicas write counts once or once per replica. Create it in the scope "
            "of the strategy, with an aggregation, or write to it outside of run and update."
        )


def check_cross_replica(strategy: StrategyLike, call: str, replacement: str) -> CodeContext | None:
    """Return the current context, provided that cross-replica code of `strategy` may begin here.

    Args:
      strategy: The strategy whose call this is.
      call: The call, for messages.
      replacement: The call for replica code, for messages.

    Raises:
      ContextError: This is replica code.
      StrategyError: This is code of another strategy, or another thread than the strategy's.
    """
    lockstep = strategy._replicas.lockstep
    lockstep.session.check()
    if lockstep.state.kept_interrupt.is_pending:
        lockstep.state.kept_interrupt.raise_pending()
    context = _code_context.get()
    if context is not None and context.strategy is not strategy:
        check_same_strategy(strategy, call)
    if context is not None and context.replica is not None:
        replica = context.replica
        raise ContextError(
            f"{call} is cross-replica code, but this is replica "
            f"{replica.id} of {replica.count} inside run().\n"
            f"  Here, call {replacement}, or pass a function to "
            "get_replica_context().merge_call()."
        )
    return context


def enter_cross_replica(strategy: StrategyLike, call: str, replacement: str) -> Any:
    """Return a context manager that enters cross-replica code of `strategy`.

    Arguments and errors are those of `check_cross_replica`.
    """
    return copy_context(check_cross_replica(strategy, call, replacement), strategy)


def enter_replica(strategy: StrategyLike, call: str) -> AbstractContextManager[Any]:
    """Return a context manager whose body is replica code of a strategy, as it may be already.

    Args:
      strategy: The strategy.
      call: The call that enters it, for messages.

    Raises:
      StrategyError: Another one is in scope.
    """
    context = current_context()
    if context is not None and context.replica is not None and context.strategy is strategy:
        return contextlib.nullcontext()
    check_same_strategy(strategy, call)
    regroup = strategy._replicas.regrouper
    return CodeContext(strategy, Replica(regroup.rank, regroup.size))


@contextlib.contextmanager
def choose_default_strategy() -> Iterator[None]:
    """Run the body as code that has chosen the default strategy, which rules in any case."""
    previous_choice = _is_default_chosen.get()
    _is_default_chosen.set(True)
    try:
        yield
    finally:
        _is_default_chosen.set(previous_choice)


_IN_RUN_ADVICE = (
    "Call it in the function that Strategy.run calls, in the thread that calls run; elsewhere use "
    "what a strategy of several ranks has, such as strategy.all_reduce(...)"
)


def require_chosen_strategy(call: str, remedy: str = _IN_RUN_ADVICE) -> None:
    """Raise if a call would stay on this rank only because no strategy is in scope.

    Args:
      call: The call.
      remedy: The advice of the message.

    Raises:
      ContextError: No strategy is in scope, and none was chosen, in a job of several ranks.
    """
    if current_context() is not None or _is_default_chosen.get():
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
      strategy: The strategy, which ``with ... as`` gives.
      enter: Returns a new context manager each time.
    """

    def __init__(self, strategy: StrategyLike, enter: Callable[[], AbstractContextManager[Any]]):
        """Enter nothing yet."""
        self._strategy, self._enter = strategy, enter
        self._entered_contexts: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> Any:
        """Enter the scope once more, and return the strategy."""
        context = self._enter()
        context.__enter__()
        self._entered_contexts.append(context)
        return self._strategy

    def __exit__(self, *exception: Any) -> None:
        """Leave the scope once.

        Raises:
          ContextError: It is not entered; or scopes are left out of order.
        """
        if not self._entered_contexts:
            raise ContextError(
                f"a scope of {self._strategy!r} was exited that had not been entered."
            )
        self._entered_contexts.pop().__exit__(*exception)

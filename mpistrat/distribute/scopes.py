"""What ``with strategy.scope():`` enters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, final

from mpistrat.errors import ContextError

if TYPE_CHECKING:
    from mpistrat.distribute.strategy import Strategy

__all__ = ["Scope"]


@final
class Scope:
    """A scope of a strategy, which can be entered again, also within itself.

    Args:
      strategy: What ``with ... as`` gives.
      enter: Returns what is entered, anew each time.
    """

    def __init__(self, strategy: Strategy, enter: Callable[[], AbstractContextManager[Any]]):
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
            raise ContextError(f"a scope of {self._strategy!r} was left that was not entered.")
        self._open.pop().__exit__(*exception)

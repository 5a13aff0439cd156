"""Elements read one after the other, where one that cannot be read does not take the rest along."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar, final

from mpistrat.errors import DataError, text_of

P = TypeVar("P")
T = TypeVar("T")


def failed(error: BaseException) -> str:
    """Return what is said in place of elements that an iterator could not come to.

    It belongs in a `DataError`, not in the error itself, whose traceback would keep the iterator
    alive; and a StopIteration would end an epoch in its middle, unseen.

    Args:
      error: What it failed with.
    """
    reason = f"{type(error).__name__}: {text_of(error):.300}".partition("\n")[0]
    return (
        f"this iterator has failed ({reason}), and cannot find its next element: make a new one, "
        "by iter(dataset)."
    )


@final
class Reads(Iterator[T], Generic[P, T]):
    """What a function reads of each of many things.

    An error of the function stands in place of one element; the next ``next()`` continues with
    the next thing. If the things themselves cannot be had any more, that is an error at each
    further ``next()``.

    Example:
      >>> halves = Reads(iter([2, 0, 4]), {2: 4, 4: 2}.__getitem__)
      >>> next(halves)
      4
      >>> next(halves)
      Traceback (most recent call last):
      KeyError: 0
      >>> next(halves)
      2
    """

    def __init__(self, sources: Iterator[P], read: Callable[[P], T]):
        """Create an iterator of ``read(source)`` for each of `sources`."""
        self._things = sources
        self._read = read
        self._broken = ""

    def __next__(self) -> T:
        """Read the next one.

        Raises:
          StopIteration: There are no more.
          DataError: The iterator of sources has failed before.
        """
        if self._broken:
            raise DataError(self._broken)
        try:
            source = next(self._things)
        except StopIteration:
            raise
        except Exception as error:
            # A generator that has raised says that it has ended.
            self._broken = failed(error)
            raise
        return self._read(source)

    @property
    def broken(self) -> bool:
        """Whether nothing more can come, because the things have failed."""
        return bool(self._broken)

    def close(self) -> None:
        """Close the things."""
        close: Any = getattr(self._things, "close", None)
        if close is not None:
            close()

"""Iterators over elements, with the methods that iterators of ``tf.data`` have."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NoReturn, final

from mpistrat.errors import DataError, OutOfRangeError


@final
class Optional:
    """An element, or nothing, if none was left.

    Like: ``tf.experimental.Optional``.

    Example:
      >>> Optional.empty().has_value()
      False
    """

    __slots__ = ("_held",)

    def __init__(self, *held: Any):
        """Create one that holds a value, or nothing."""
        self._held = held

    @staticmethod
    def from_value(value: Any) -> Optional:
        """Return one that holds `value`."""
        return Optional(value)

    @staticmethod
    def empty(element_spec: Any = None) -> Optional:
        """Return one that holds nothing, whatever it might have held."""
        return Optional()

    def has_value(self) -> bool:
        """Return whether there is an element; the same on every rank."""
        return bool(self._held)

    def get_value(self) -> Any:
        """Return the element.

        Raises:
          DataError: It holds no value.
        """
        if not self._held:
            raise DataError("This Optional holds no value: the data have ended. Ask has_value().")
        return self._held[0]

    def __repr__(self) -> str:
        """Return what it holds."""
        return f"Optional({self._held[0]!r})" if self._held else "Optional.empty()"


class ElementIterator(ABC):
    """An iterator with the further methods of iterators of ``tf.data``."""

    @abstractmethod
    def __next__(self) -> Any:
        """Return the next element."""

    @property
    @abstractmethod
    def element_spec(self) -> Any:
        """What an element looks like."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse: it is somewhere in its data, and what it reads from cannot be in two places.

        Raises:
          TypeError: Always, when it is copied as when it is pickled; says what to do instead.
        """
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: it stands in the middle of its "
            "data. Copy or pickle the dataset, and begin another iter() of that; of a distributed "
            "dataset on every rank. To begin where a program has stopped: dataset.begin_after."
        )

    def __iter__(self) -> Any:
        """Return itself."""
        return self

    def next(self) -> Any:
        """Return ``next(self)``."""
        return next(self)

    def get_next(self, *, name: Any = None) -> Any:
        """Return the next element; as ``next()``, except for the error at the end.

        Args:
          name: No effect; iterators of tf.distribute take it, though their interface has none.

        Raises:
          OutOfRangeError: The data have ended.
        """
        optional = self.get_next_as_optional()
        if not optional.has_value():
            raise OutOfRangeError("End of sequence: the data of all replicas have ended.")
        return optional.get_value()

    def get_next_as_optional(self) -> Optional:
        """Return the next element as an `Optional`, which is empty at the end."""
        try:
            return Optional(next(self))
        except StopIteration:
            return Optional()


class _Latest(threading.local):
    """The iterator over a dataset that is not distributed from which this thread has read last.

    Attributes:
      iterator: A weak reference to it; None if there was none.
    """

    iterator: weakref.ref[DatasetIterator] | None = None


latest = _Latest()


@final
class DatasetIterator(ElementIterator):
    """An iterator over the whole elements of a dataset that is not distributed.

    Attributes:
      element: The last one that it gave.
    """

    def __init__(self, elements: Iterator[Any], spec: Any):
        """Create an iterator over `elements`, which look like `spec`."""
        self._elements = elements
        self._spec = spec
        self._reference = weakref.ref(self)
        self.element: Any = None

    def __next__(self) -> Any:
        """Return the next element."""
        self.element = element = next(self._elements)
        latest.iterator = self._reference
        return element

    @property
    def element_spec(self) -> Any:
        """As that of the dataset."""
        return self._spec

    def close(self) -> None:
        """End the iteration, and the thread that reads ahead."""
        close = getattr(self._elements, "close", None)
        if close is not None:
            close()

"""Iterators over elements, with the methods that iterators of ``tf.data`` have; reading ahead.

`prefetch_elements` makes the next elements in one background thread while the program's thread
works.
"""

from __future__ import annotations

import collections
import contextvars
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, NoReturn, SupportsIndex, TypeVar, final

from mpistrat.data.sources import ReadIterator, describe_failure
from mpistrat.errors import DataError, OutOfRangeError


@final
class Optional:
    """An element, or nothing, if none was left.

    Like: ``tf.experimental.Optional``.

    Example:
      >>> Optional.empty().has_value()
      False
    """

    __slots__ = ("_values",)

    def __init__(self, *values: Any):
        """Create one that holds a value, or nothing."""
        self._values = values

    @staticmethod
    def from_value(value: Any) -> Optional:
        """Return one that holds `value`."""
        return Optional(value)

    @staticmethod
    def empty(element_spec: object = None) -> Optional:
        """Return one that holds nothing, whatever it might have held."""
        return Optional()

    def has_value(self) -> bool:
        """Return whether there is an element; the same on every rank."""
        return bool(self._values)

    def get_value(self) -> Any:
        """Return the element.

        Raises:
          DataError: It holds no value.
        """
        if not self._values:
            raise DataError("This Optional holds no value: the data have ended. Ask has_value().")
        return self._values[0]

    def __repr__(self) -> str:
        """Return what it holds."""
        return f"Optional({self._values[0]!r})" if self._values else "Optional.empty()"


class ElementIterator(ABC):
    """An iterator with the further methods of iterators of ``tf.data``."""

    @abstractmethod
    def __next__(self) -> Any:
        """Return the next element."""

    @property
    @abstractmethod
    def element_spec(self) -> Any:
        """The tree of specs of an element."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Raise: it is in the middle of its data, and its source cannot be read from two places.

        Raises:
          TypeError: Always, when it is copied or pickled; the text names alternatives.
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

    def get_next(self, *, name: object = None) -> Any:
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


class _LatestIterator(threading.local):
    """This thread's last iterator over a dataset that is not distributed.

    Attributes:
      iterator: A weak reference to it; None if there was none.
    """

    iterator: weakref.ref[DatasetIterator] | None = None


latest_iterator = _LatestIterator()


@final
class DatasetIterator(ElementIterator):
    """An iterator over the whole elements of a dataset that is not distributed.

    Attributes:
      element: The last one that it gave.
      digest_source: Returns a digest of the rows in memory, and of the steps, of the dataset.
    """

    def __init__(self, elements: Iterator[Any], spec: Any, digest_source: Callable[[], bytes]):
        """Create an iterator over `elements`, which look like `spec`."""
        self._elements = elements
        self._spec = spec
        self.digest_source = digest_source
        self._reference = weakref.ref(self)
        self.element: Any = None

    def __next__(self) -> Any:
        """Return the next element."""
        self.element = element = next(self._elements)
        latest_iterator.iterator = self._reference
        return element

    @property
    def element_spec(self) -> Any:
        """The spec of the dataset's elements."""
        return self._spec

    def close(self) -> None:
        """End the iteration, and the thread that reads ahead."""
        close = getattr(self._elements, "close", None)
        if close is not None:
            close()


T = TypeVar("T")


class _Entry(NamedTuple):
    value: Any
    is_last: bool = False
    error: BaseException | None = None


@final
class _BoundedQueue:
    """A queue between one producer and one consumer that either side can close."""

    def __init__(self, depth: int):
        self._depth = depth
        self._entries: collections.deque[_Entry] = collections.deque()
        self._is_open = True
        # Condition's own lock is re-entrant: the garbage collector may close the consumer's
        # generator inside the producer, while that holds the lock.
        self._condition = threading.Condition()

    def wait_for_room(self) -> bool:
        """Wait until an element fits; False if nobody wants one any more."""
        with self._condition:
            self._condition.wait_for(lambda: not self._is_open or len(self._entries) < self._depth)
            return self._is_open

    def put(self, entry: _Entry) -> None:
        with self._condition:
            if self._is_open:
                self._entries.append(entry)
            self._condition.notify_all()

    def get(self) -> _Entry:
        with self._condition:
            self._condition.wait_for(lambda: self._entries)
            entry = self._entries.popleft()
            self._condition.notify_all()
            return entry

    def close(self) -> None:
        with self._condition:
            self._is_open = False
            self._entries.clear()
            self._condition.notify_all()


def _produce_elements(iterable: Iterable[Any], queue: _BoundedQueue) -> None:
    error: BaseException | None = None
    try:
        elements = iter(iterable)
        end_marker = object()
        while queue.wait_for_room():
            try:
                element = next(elements, end_marker)
            except Exception as exception:
                if not isinstance(elements, ReadIterator) or elements.has_failed:
                    raise
                queue.put(_Entry(None, error=exception))
                continue
            if element is end_marker:
                break
            queue.put(_Entry(element))
            del element  # the consumer alone decides how long an element lives
        if hasattr(elements, "close"):
            elements.close()
    except BaseException as exception:  # whatever it is belongs to the consumer
        error = exception
    queue.put(_Entry(None, is_last=True, error=error))


def _convert_for_consumer(error: BaseException) -> BaseException:
    """Return the error that the consumer raises for an error of the producer.

    A ``sys.exit`` there may end the program here, and its code is known only if it is called here.
    """
    if type(error) is not SystemExit:
        return error
    try:
        sys.exit(error.code)
    except SystemExit as exit_error:
        return exit_error.with_traceback(error.__traceback__)


@final
class _PrefetchIterator(Iterator[T]):
    """Elements that a thread makes, which starts with the first ``next()``."""

    def __init__(self, iterable: Iterable[T], depth: int):
        self._iterable: Iterable[T] | None = iterable
        self._queue = _BoundedQueue(depth)
        self._is_exhausted = False
        self._failure = ""
        # When the iterator is dropped the thread ends: it only holds the queue.
        weakref.finalize(self, self._queue.close)

    def __next__(self) -> T:
        if self._failure:
            raise DataError(self._failure)
        if self._is_exhausted:
            raise StopIteration
        if self._iterable is not None:
            # The copied context carries numpy.errstate and the like to the thread that works.
            run = contextvars.copy_context().run
            args = (_produce_elements, self._iterable, self._queue)
            self._iterable = None
            threading.Thread(target=run, args=args, name="mpistrat-prefetch", daemon=True).start()
            del args
        entry = self._queue.get()
        try:
            if entry.error is not None:
                if entry.is_last:
                    self._failure = describe_failure(entry.error)
                raise _convert_for_consumer(entry.error)
            if entry.is_last:
                self.close()
                raise StopIteration
            value: T = entry.value
            return value
        finally:
            del entry  # an error that holds this frame, which holds the error, would keep us alive

    def close(self) -> None:
        self._is_exhausted = True
        self._iterable = None
        self._queue.close()


def prefetch_elements(iterable: Iterable[T], depth: int) -> Iterator[T]:
    """Iterate with the next elements made ahead of time, in one background thread.

    The thread starts with the first ``next()``. It ends when the elements do, or when the iterator
    is closed or dropped: then it finishes the element it is making, closes the iterator it reads
    and makes no more. It is a daemon, so it never keeps a process alive.

    Args:
      iterable: The elements. Only the background thread iterates over it.
      depth: The number of elements to hold ready; 0 reads in the calling thread.

    Returns:
      An iterator over the elements, in order. An exception of `iterable` is raised at the element
      where it happened. A `ReadIterator` continues after it; other iterables have ended, and each
      further ``next()`` raises a `DataError`.

    Raises:
      DataError: `depth` is negative.

    Cost:
      Memory for `depth` more elements. It helps where reading and mapping release the interpreter
      lock, as NumPy and files do.

    Example:
      >>> list(prefetch_elements(range(3), depth=2))
      [0, 1, 2]
    """
    if depth < 0:
        raise DataError(f"prefetch wants a number of elements of at least 0, not {depth}.")
    return _PrefetchIterator(iterable, depth) if depth else iter(iterable)

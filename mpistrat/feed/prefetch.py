"""Reading ahead: the next elements are made in one background thread while this one works."""

from __future__ import annotations

import collections
import contextvars
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeVar, final

from mpistrat.errors import DataError
from mpistrat.feed.reads import Reads, failed

T = TypeVar("T")


class _Entry(NamedTuple):
    value: Any
    last: bool = False
    error: BaseException | None = None


@final
class _Lane:
    """A queue between one producer and one consumer that either side can close."""

    def __init__(self, depth: int):
        self._depth = depth
        self._entries: collections.deque[_Entry] = collections.deque()
        self._open = True
        # Condition's own lock is re-entrant: the garbage collector may close the consumer's
        # generator inside the producer, while that holds the lock.
        self._changed = threading.Condition()

    def room(self) -> bool:
        """Wait until an element fits; False if nobody wants one any more."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open or len(self._entries) < self._depth)
            return self._open

    def put(self, entry: _Entry) -> None:
        with self._changed:
            if self._open:
                self._entries.append(entry)
            self._changed.notify_all()

    def get(self) -> _Entry:
        with self._changed:
            self._changed.wait_for(lambda: self._entries)
            entry = self._entries.popleft()
            self._changed.notify_all()
            return entry

    def close(self) -> None:
        with self._changed:
            self._open = False
            self._entries.clear()
            self._changed.notify_all()


def _produce(iterable: Iterable[Any], lane: _Lane) -> None:
    error: BaseException | None = None
    try:
        items = iter(iterable)
        end_marker = object()
        while lane.room():
            try:
                item = next(items, end_marker)
            except Exception as caught:
                if not isinstance(items, Reads) or items.broken:
                    raise
                lane.put(_Entry(None, error=caught))
                continue
            if item is end_marker:
                break
            lane.put(_Entry(item))
            del item  # the consumer alone decides how long an element lives
        if hasattr(items, "close"):
            items.close()
    except BaseException as caught:  # whatever it is belongs to the consumer
        error = caught
    lane.put(_Entry(None, last=True, error=error))


def _consumers(error: BaseException) -> BaseException:
    """Return what the consumer raises for an error of the producer.

    A ``sys.exit`` there may end the program here, and its code is known only if it is called here.
    """
    if type(error) is not SystemExit:
        return error
    try:
        sys.exit(error.code)
    except SystemExit as called:
        return called.with_traceback(error.__traceback__)


@final
class _Ahead(Iterator[T]):
    """Elements that a thread makes, which runs from the first ``next()`` on."""

    def __init__(self, iterable: Iterable[T], depth: int):
        self._iterable: Iterable[T] | None = iterable
        self._lane = _Lane(depth)
        self._ended = False
        self._broken = ""
        # Dropped, it takes the thread along, which holds no more of it than the lane.
        weakref.finalize(self, self._lane.close)

    def __next__(self) -> T:
        if self._broken:
            raise DataError(self._broken)
        if self._ended:
            raise StopIteration
        if self._iterable is not None:
            # The copied context carries numpy.errstate and the like to the thread that works.
            run = contextvars.copy_context().run
            args = (_produce, self._iterable, self._lane)
            self._iterable = None
            threading.Thread(target=run, args=args, name="mpistrat-prefetch", daemon=True).start()
            del args
        entry = self._lane.get()
        try:
            if entry.error is not None:
                if entry.last:
                    self._broken = failed(entry.error)
                raise _consumers(entry.error)
            if entry.last:
                self.close()
                raise StopIteration
            value: T = entry.value
            return value
        finally:
            del entry  # an error that holds this frame, which holds the error, would keep us alive

    def close(self) -> None:
        self._ended = True
        self._iterable = None
        self._lane.close()


def prefetched(iterable: Iterable[T], depth: int) -> Iterator[T]:
    """Iterate with the next elements made ahead of time, in one background thread.

    The thread starts with the first ``next()``. It ends when the elements do, or when the iterator
    is closed or dropped: then it finishes the element it is making, closes the iterator it reads
    and makes no more. It is a daemon, so it never keeps a process alive.

    Args:
      iterable: Whose elements to give, in order. Only the background thread iterates over it.
      depth: How many elements to hold ready; 0 reads in the calling thread.

    Returns:
      An iterator. An exception of `iterable` is raised at the element where it happened. `Reads`
      continue after it; of others nothing more can come, and each further ``next()`` says so by a
      `DataError`.

    Raises:
      DataError: `depth` is negative.

    Cost:
      Memory for `depth` more elements. It helps where reading and mapping release the interpreter
      lock, as NumPy and files do.

    Example:
      >>> list(prefetched(range(3), depth=2))
      [0, 1, 2]
    """
    if depth < 0:
        raise DataError(f"prefetch wants a number of elements of at least 0, not {depth}.")
    return _Ahead(iterable, depth) if depth else iter(iterable)

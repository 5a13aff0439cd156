"""Threads for kernels whose work is large, where a rank has several cores.

Kernels give up the GIL, so plain threads do. They are started by the first work that is large
enough, not before; a rank with one core never has any. The number of threads is determined once,
when the session begins: the cores of the affinity mask, or of the quota if that is less, divided by
the number of ranks of the node whose masks overlap it; ``MPISTRAT_THREADS`` overrides it. The
kernels choose the cuts so that the bits of a result do not depend on the number of threads.

Other libraries, such as BLAS, begin with a thread for every core that they see. With R ranks on the
same cores there are R times too many, which wait for one another. So where masks overlap, other
libraries get at most the least share of all ranks (`limit_threads`, ``MPISTRAT_BLAS_THREADS``): the
bits of their products depend on their threads, and cross-replica code computes the same on all
ranks.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, final

from mpistrat.config import set_thread_variable

if TYPE_CHECKING:
    from concurrent.futures import Executor

# Signals about an error of the thread itself; another thread cannot take them.
_CRASH_SIGNALS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}


def cut_range(start: int, stop: int, part_count: int, step: int) -> list[tuple[int, int]]:
    """Cut a range into at most so many parts, at multiples of `step` except for its two ends.

    Example:
      >>> cut_range(3, 40, 2, 16)
      [(3, 16), (16, 40)]
    """
    first, last = start // step, -(-stop // step)
    borders = [first + (last - first) * number // part_count for number in range(part_count + 1)]
    edges = [min(max(border * step, start), stop) for border in borders]
    return [(low, high) for low, high in itertools.pairwise(edges) if low < high]


@final
class Team:
    """The calling thread, and those that help it.

    They belong to the session: they end when it is freed, or with the process. A child that is
    forked has none of its parent's threads, and gets its own when it needs them.

    Attributes:
      count: How many threads work at once, this one among them; 2 or more.
    """

    def __init__(self, count: int):
        """Create a team; no thread is started yet."""
        self.count = count
        self._pool: Executor | None = None
        self._pid = 0
        self._lock = threading.Lock()

    def run(
        self,
        run_part: Callable[[int, int], object],
        start: int,
        stop: int,
        part_count: int,
        step: int = 1,
    ) -> None:
        """Call ``work(low, high)`` for parts of a range, at once, and return when all have ended.

        Args:
          run_part: Does a part; parts do not touch each other's results.
          start: Where the range begins.
          stop: Where it ends.
          part_count: How many parts the work is worth; no more than `count` are made.
          step: Parts meet at multiples of it.

        Raises:
          BaseException: The exception of a part; of the lowest part, if several raised.

        Cost: 20 to 40 microseconds beside the work; the first call starts the threads.
        """
        (low, high), *rest = cut_range(start, stop, min(part_count, self.count), step) or [
            (start, stop)
        ]
        futures = []
        pool = self._get_pool() if rest else None
        try:
            if pool is not None:
                with suppress(RuntimeError):  # at exit the interpreter has ended all threads
                    for part in rest:
                        futures.append(pool.submit(run_part, *part))
            run_part(low, high)
            for part in rest[len(futures) :]:
                run_part(*part)
        finally:
            # Also on the way out with an error: nobody may write once the caller thinks it is over.
            errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error

    def _get_pool(self) -> Executor | None:
        """Return the threads, or None if they cannot be started: the results are the same."""
        with self._lock:
            if self._pid != os.getpid():
                self._pool = None
                self._pool = _start_pool(self.count - 1)
                self._pid = os.getpid()
            return self._pool

    def free(self) -> None:
        """Wait for the threads to end. They come again if there is more work."""
        with self._lock:
            pool, self._pool = self._pool, None
            is_own_process, self._pid = self._pid == os.getpid(), 0
        if pool is not None and is_own_process:
            pool.shutdown()


def block_signals() -> None:
    """Leave signals to the thread that Python handles them in: it has to wake up from waiting."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _CRASH_SIGNALS)


def _start_pool(count: int) -> Executor | None:
    """Return so many threads, all of them started, so that work cannot fail to find one."""
    from concurrent.futures import ThreadPoolExecutor

    pool = ThreadPoolExecutor(count, "mpistrat kernels", block_signals)
    go = threading.Event()
    try:
        for _ in range(count):
            pool.submit(go.wait)
    except BaseException as error:
        go.set()
        pool.shutdown(cancel_futures=True)
        if isinstance(error, RuntimeError):  # the system gives no more
            return None
        raise
    go.set()
    return pool


def limit_threads(count: int) -> bool:
    """Let BLAS, OpenMP, PyTorch and numexpr use at most so many threads in this process.

    Libraries that are loaded already are asked; those that come later find it in the environment,
    as do the processes that this one starts.

    Args:
      count: How many.

    Returns:
      Whether some library used more.

    Cost: Some milliseconds, mostly for looking at what is loaded.
    """
    from threadpoolctl import ThreadpoolController  # of no use to one rank alone

    set_thread_variable(count)
    lowered = False
    for library in ThreadpoolController().lib_controllers:
        if (library.num_threads or 0) > count:
            library.set_num_threads(count)
            lowered = True
    for name in ("torch", "numexpr"):
        module: Any = sys.modules.get(name)
        # One that is being imported may not have come so far.
        thread_count = getattr(module, "get_num_threads", lambda: 0)()
        if thread_count > count and hasattr(module, "set_num_threads"):
            module.set_num_threads(count)
            lowered = True
    return lowered

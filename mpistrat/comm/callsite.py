"""File and line of a frame, and lists of ranks, in words."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import TypeVar, final

K = TypeVar("K")
T = TypeVar("T")

# As frames name it: links on the way to it stay.
_PACKAGE = str(Path(__file__).parent.parent)
_EXAMPLES = str(Path(_PACKAGE, "examples"))
# Where the program wrote the call that runs; empty if it runs where it was written.
_named_call_site: ContextVar[str] = ContextVar("mpistrat_written", default="")
_library_directories: list[str] = []
# Where threads begin, and wait.
_THREAD_FILES = (
    threading.__file__,
    str(Path(threading.__file__).with_name("concurrent") / "futures" / "thread.py"),
)
_MAX_LINES = 16  # runs of ranks, or groups of ranks, that one message names


@functools.cache
def is_package_file(filename: str) -> bool:
    """Tell whether a file is of mpistrat itself, and not one of its examples."""
    return filename.startswith(_PACKAGE + os.sep) and not filename.startswith(_EXAMPLES + os.sep)


@functools.cache
def is_library_file(filename: str) -> bool:
    """Tell whether a file is of mpistrat, except for examples, or of a library that calls it."""
    if filename == contextlib.__file__:  # a frame between a context manager and its generator
        return True
    if _library_directories and filename.startswith(tuple(_library_directories)):
        return True
    return is_package_file(filename)


def add_library_directory(directory: str) -> None:
    """Skip files below a directory from now on: those of a library that calls mpistrat."""
    if directory not in _library_directories:
        _library_directories.append(directory)
        is_library_file.cache_clear()
        _is_skipped_file.cache_clear()


@functools.cache
def _is_skipped_file(filename: str) -> bool:
    # Import machinery and waits are skipped, too: they do not show a purpose.
    return (
        is_library_file(filename)
        or filename.startswith("<frozen importlib")
        or filename in _THREAD_FILES
    )


def call_site_of(frame: FrameType | None) -> str:
    """Return ``file:line`` of the innermost frame outside mpistrat, or an empty string.

    In a thread that has nothing of the program it is the outermost frame: it shows the purpose of a
    library's thread, such as a checkpoint. An empty string, too, where the stack of another thread
    changes too fast to be read.
    """
    try:
        return "" if frame is None else _find_call_site(frame)
    except AttributeError:  # `f_back` was no frame: see `mpistrat.watchdog.processes`
        return ""


def _find_call_site(frame: FrameType) -> str:
    inner = frame
    while _is_skipped_file(frame.f_code.co_filename) and (outer := frame.f_back) is not None:
        frame = outer
    if frame.f_code.co_filename in _THREAD_FILES:
        frame = inner
        while (outer := inner.f_back) is not None:
            inner = outer
            if inner.f_code.co_filename not in _THREAD_FILES:
                frame = inner
    return f"{frame.f_code.co_filename.rpartition(os.sep)[2]}:{frame.f_lineno}"


def stack_fingerprint(frame: FrameType | None) -> int:
    """Return a number that changes when any frame of a thread executes another line of its code.

    Args:
      frame: The innermost frame of the thread. A stack that changes too fast to be read is another
        one each time.
    """
    lines = []
    with contextlib.suppress(AttributeError):  # as in `call_site_of`
        while frame is not None:
            lines.append((id(frame.f_code), frame.f_lineno))
            frame = frame.f_back
    return hash(tuple(lines))


def find_call_site() -> str:
    """Return ``file:line`` of the innermost caller outside mpistrat."""
    return _named_call_site.get() or call_site_of(sys._getframe(1))


def get_program_stacklevel() -> int:
    """Return the ``stacklevel`` with which the caller warns at the line of the program."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and is_library_file(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level


@final
class naming_call_site:
    """A context in which messages name `call_site` as the line of the program that makes a call."""

    def __init__(self, call_site: str):
        """Create it; it can be entered once."""
        self._call_site = call_site

    def __enter__(self) -> None:
        """Name `call_site` from now on."""
        self._token = _named_call_site.set(self._call_site)

    def __exit__(self, *_: object) -> None:
        """Name what was named before."""
        _named_call_site.reset(self._token)


def is_numba_on_stack(frame: FrameType | None) -> bool:
    """Tell whether code of Numba is on the stack: it compiles, loads what it has, or is imported.

    Compiled code runs without such frames.
    """
    with contextlib.suppress(AttributeError):  # as in `call_site_of`
        while frame is not None:
            if str(frame.f_globals.get("__name__")).partition(".")[0] == "numba":
                return True
            frame = frame.f_back
    return False


def group_by_key(keys: Iterable[K], values: Iterable[T]) -> dict[K, list[T]]:
    """Return the values of each key; keys come in the order in which each comes first.

    Args:
      keys: The key of each value.
      values: For example ranks.

    Example:
      >>> group_by_key("aba", [0, 1, 2])
      {'a': [0, 2], 'b': [1]}
    """
    groups: dict[K, list[T]] = {}
    for key, value in zip(keys, values, strict=True):
        groups.setdefault(key, []).append(value)
    return groups


def rank_runs(ranks: Iterable[int]) -> list[list[int]]:
    """Return ranks as pairs of first and last.

    Example:
      >>> rank_runs([5, 0, 1, 2])
      [[0, 2], [5, 5]]
    """
    if isinstance(ranks, range) and ranks and ranks.step == 1:
        return [[ranks[0], ranks[-1]]]
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return runs


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ``rank 2``, ``ranks 0, 1, 3`` or ``ranks 0-4, 7``; of many apart, the first and last.

    Example:
      >>> ranks_text([0, 1, 2, 5])
      'ranks 0-2, 5'
      >>> ranks_text(range(0, 512, 2))
      'ranks 0, 2, 4, 6, 8, 10, 12, 14, ..., 510 (256 ranks)'
    """
    run_texts: list[str] = []
    for first, last in rank_runs(ranks):
        run_texts += [f"{first}-{last}"] if last - first > 1 else map(str, range(first, last + 1))
    text = ", ".join(run_texts)
    if len(run_texts) > _MAX_LINES:
        text = (
            f"{', '.join(run_texts[: _MAX_LINES // 2])}, ..., {run_texts[-1]} ({len(ranks)} ranks)"
        )
    return ("rank " if len(ranks) == 1 else "ranks ") + text


def shorten(texts: Sequence[str], line_limit: int = _MAX_LINES, hidden_count: int = 0) -> list[str]:
    """Return texts, each of some of the ranks; of many, the first and how many more there are.

    Args:
      texts: The texts.
      line_limit: How many lines there may be.
      hidden_count: How many more there are that are not among the texts.

    Example:
      >>> shorten(["rank 0: a", "rank 1: b"])
      ['rank 0: a', 'rank 1: b']
      >>> shorten([str(rank) for rank in range(512)])[-2:]
      ['14', '... and 497 more']
    """
    if len(texts) + hidden_count <= line_limit:
        return list(texts)
    return [*texts[: line_limit - 1], f"... and {len(texts) + hidden_count - line_limit + 1} more"]

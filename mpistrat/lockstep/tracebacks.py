"""Tracebacks as they are printed: the frames of the program, and at most two of the library."""

from __future__ import annotations

import contextlib
import functools
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from mpistrat.comm.callsite import in_package, ours, ranks_text, where
from mpistrat.errors import text_of
from mpistrat.options import patience

_MOST = 2  # frames of the library in all that is printed of one exception
_LONGEST = 300  # characters of the text in `failure_line`


def chain_of(error: BaseException) -> list[BaseException]:
    """Return all exceptions that Python prints for one: its causes, contexts and members."""
    chain: list[BaseException] = []
    pending: list[BaseException | None] = [error]
    while pending:
        each = pending.pop(0)
        if each is None or any(each is known for known in chain):
            continue
        chain.append(each)
        pending += [each.__cause__, None if each.__suppress_context__ else each.__context__]
        members = getattr(each, "exceptions", ())  # of an ExceptionGroup
        if isinstance(members, tuple):
            pending += [member for member in members if isinstance(member, BaseException)]
    return chain


def _without_library(trace: TracebackType | None, most: int) -> tuple[TracebackType | None, int]:
    """Return a traceback without frames of the library, and how many of these it still has.

    The last frame stays if `most` allows it: there the library has raised. Frames of `contextlib`
    that the library has called are hidden, too.
    """
    links: list[tuple[TracebackType, bool]] = []
    hides = False
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        hides = in_package(name) or (hides and name == contextlib.__file__)
        links.append((trace, hides))
        trace = trace.tb_next
    keeps_last = hides and most > 0
    kept: TracebackType | None = None
    for number, (link, hidden) in reversed(list(enumerate(links, 1))):
        if not hidden or (keeps_last and number == len(links)):
            kept = TracebackType(kept, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return kept, int(keeps_last)


@contextlib.contextmanager
def shortened(error: BaseException) -> Iterator[None]:
    """Hide the frames of the library in the body, which prints an exception.

    At most two stay: where the library has raised. ``MPISTRAT_TRACEBACK=full`` hides none.
    """
    if patience().traceback == "full":
        yield
        return
    traces = [(each, each.__traceback__) for each in chain_of(error)]
    most = _MOST
    # Not by assignment, which the class of an exception may have replaced.
    for each, trace in traces:
        kept, count = _without_library(trace, most)
        BaseException.with_traceback(each, kept)
        most -= count
    try:
        yield
    finally:
        for each, trace in traces:
            BaseException.with_traceback(each, trace)


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an exception, whatever its class does; see `shortened`.

    Python parses lines of it with `ast`, which another thread may disturb; see `checkpoint.format`.
    """
    with shortened(error):
        for _ in range(2):
            with contextlib.suppress(BaseException):
                return "".join(traceback.format_exception(error))
        return "".join(traceback.format_tb(error.__traceback__))


@functools.cache
def _installed() -> tuple[str, ...]:
    """Return the directories of Python's own modules and of installed packages."""
    paths = sysconfig.get_paths()
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return (*{str(Path(paths[name], "")) + "/" for name in names}, "<frozen ")


def place_of_failure(error: BaseException) -> str:
    """Return ``file:line (function)`` of the program's innermost frame, where it has raised.

    If only installed packages were running, it is their innermost frame.
    """
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not ours(f.filename)]
    program = [frame for frame in frames if not frame.filename.startswith(_installed())]
    last = (program or frames)[-1:]
    return f"{Path(last[0].filename).name}:{last[0].lineno} ({last[0].name})" if last else where()


def failure_line(ranks: list[int], kind: str, place: str, text: str) -> str:
    """Return the line that says what has ended a job.

    Args:
      ranks: Those that have failed alike.
      kind: The class of their exception.
      place: Where the program has raised it.
      text: That of the exception; its first line is shown.

    Example:
      >>> failure_line([1], "KeyError", "train.py:24 (step)", "'missing'")
      "mpistrat: rank 1 raised KeyError in train.py:24 (step): 'missing'"
      >>> failure_line([0, 1], "ValueError", "train.py:3 (<module>)", "")
      'mpistrat: ranks 0, 1 raised ValueError in train.py:3 (<module>)'
    """
    first = next(iter(text.strip().splitlines()), "")
    shown = first if len(first) <= _LONGEST else f"{first[:_LONGEST]} ..."
    return f"mpistrat: {ranks_text(ranks)} raised {kind} in {place}{shown and f': {shown}'}"


def line_of(rank: int, error: BaseException) -> str:
    """Return the same line about an exception of `rank`; empty for a ``sys.exit``."""
    if isinstance(error, SystemExit):
        return ""
    return failure_line([rank], type(error).__name__, place_of_failure(error), text_of(error))

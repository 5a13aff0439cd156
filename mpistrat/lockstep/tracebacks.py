"""Tracebacks for messages: the frames of the program, and at most two of the library."""

from __future__ import annotations

import contextlib
import functools
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from mpistrat.comm.callsite import find_call_site, is_library_file, is_package_file, ranks_text
from mpistrat.config import read_or_default
from mpistrat.errors import text_of

_MAX_LIBRARY_FRAMES = 2  # frames of the library in all that is printed of one exception
_MAX_LENGTH = 300  # characters of the text in `format_failure_line`


def list_exceptions(error: BaseException) -> list[BaseException]:
    """Return all exceptions that Python prints with one: its causes, contexts and members."""
    chain: list[BaseException] = []
    pending: list[BaseException | None] = [error]
    while pending:
        exception = pending.pop(0)
        if exception is None or any(exception is chained for chained in chain):
            continue
        chain.append(exception)
        pending += [
            exception.__cause__,
            None if exception.__suppress_context__ else exception.__context__,
        ]
        members = getattr(exception, "exceptions", ())  # of an ExceptionGroup
        if isinstance(members, tuple):
            pending += [member for member in members if isinstance(member, BaseException)]
    return chain


def _hide_library_frames(
    trace: TracebackType | None, frame_limit: int
) -> tuple[TracebackType | None, int]:
    """Return a traceback without frames of the library, and the number of those that remain.

    The last frame, where the library has raised, stays if `frame_limit` allows it. Frames of
    `contextlib` that the library has called are hidden, too.
    """
    links: list[tuple[TracebackType, bool]] = []
    is_hidden = False
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        is_hidden = is_package_file(name) or (is_hidden and name == contextlib.__file__)
        links.append((trace, is_hidden))
        trace = trace.tb_next
    keeps_last = is_hidden and frame_limit > 0
    shown_trace: TracebackType | None = None
    for number, (link, is_hidden) in reversed(list(enumerate(links, 1))):
        if not is_hidden or (keeps_last and number == len(links)):
            shown_trace = TracebackType(shown_trace, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return shown_trace, int(keeps_last)


@contextlib.contextmanager
def shortened(error: BaseException) -> Iterator[None]:
    """Hide the frames of the library in the body, which prints an exception.

    At most two stay: where the library has raised. ``MPISTRAT_TRACEBACK=full`` hides none.
    """
    if read_or_default().traceback == "full":
        yield
        return
    traces = [(exception, exception.__traceback__) for exception in list_exceptions(error)]
    frame_limit = _MAX_LIBRARY_FRAMES
    # Not by assignment, which the class of an exception may have replaced.
    for exception, trace in traces:
        shown_trace, count = _hide_library_frames(trace, frame_limit)
        BaseException.with_traceback(exception, shown_trace)
        frame_limit -= count
    try:
        yield
    finally:
        for exception, trace in traces:
            BaseException.with_traceback(exception, trace)


def format_traceback(error: BaseException) -> str:
    """Return the traceback of an exception, even if its class fails; see `shortened`.

    Python parses lines of it with `ast`, which another thread may disturb; see `checkpoint.format`.
    """
    with shortened(error):
        for _ in range(2):
            with contextlib.suppress(BaseException):
                return "".join(traceback.format_exception(error))
        return "".join(traceback.format_tb(error.__traceback__))


@functools.cache
def _list_installed_paths() -> tuple[str, ...]:
    """Return the directories of Python's own modules and of installed packages."""
    paths = sysconfig.get_paths()
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return (*{str(Path(paths[name], "")) + "/" for name in names}, "<frozen ")


def _is_generated(frame: traceback.FrameSummary) -> bool:
    """Tell whether a frame is of code that `dataclasses` has made, such as ``__init__``."""
    return frame.filename == "<string>" and frame.name.startswith("__")


def locate_failure(error: BaseException) -> str:
    """Return ``file:line (function)`` of the program's innermost frame, where it has raised.

    If only installed packages were running, it is their innermost frame. For a program that Python
    cannot parse it is the line that is wrong.
    """
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if not is_library_file(f.filename) and not _is_generated(f)
    ]
    installed_paths = _list_installed_paths()
    program_frames = [frame for frame in frames if not frame.filename.startswith(installed_paths)]
    if isinstance(error, SyntaxError) and error.filename and not program_frames:
        return f"{Path(error.filename).name}:{error.lineno} (<module>)"
    shown_frames = program_frames or frames
    if not shown_frames:
        return find_call_site()
    if shown_frames[-1].filename.startswith("<frozen "):
        return "the start of the program"
    frame = shown_frames[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} ({frame.name})"


def format_failure_line(ranks: Sequence[int], kind: str, position: str, text: str) -> str:
    """Return the line about the exception that has ended a job.

    Args:
      ranks: The ranks that have failed alike.
      kind: The class of their exception.
      position: ``file:line (function)`` where the program has raised it.
      text: The text of the exception; its first line is shown.

    Example:
      >>> format_failure_line([1], "KeyError", "train.py:24 (step)", "'missing'")
      "mpistrat: rank 1 raised KeyError in train.py:24 (step): 'missing'"
      >>> format_failure_line([0, 1], "ValueError", "train.py:3 (<module>)", "")
      'mpistrat: ranks 0, 1 raised ValueError in train.py:3 (<module>)'
    """
    line = next(iter(text.strip().splitlines()), "")
    summary = line if len(line) <= _MAX_LENGTH else f"{line[:_MAX_LENGTH]} ..."
    return f"mpistrat: {ranks_text(ranks)} raised {kind} in {position}{summary and f': {summary}'}"


def describe_failure(rank: int, error: BaseException) -> str:
    """Return the same line about an exception of `rank`; empty for a ``sys.exit``."""
    if isinstance(error, SystemExit):
        return ""
    return format_failure_line([rank], type(error).__name__, locate_failure(error), text_of(error))

"""Progress of a program: a bar on a terminal, lines elsewhere; one rank shows it."""

from __future__ import annotations

import contextlib
import sys
from typing import Any, final

from mpistrat import config


@final
class ProgressBar:
    """A bar that moves and lines above it; lines alone where stderr is not a terminal.

    Lines go to stdout, the bar to stderr. A bar is drawn with control characters, so none is drawn
    in files. It needs tqdm, and is left out where that is not installed. A rank that a launcher
    started sees a pipe; `mpistrat run` says whether a terminal is behind it.

    Args:
      step_count: How many steps there will be; None where that is not known.
      is_shown: Whether this rank shows anything; say True on one rank.
      made_count: How many of the steps are made already.

    Example:
      >>> with ProgressBar(2, is_shown=True) as progress:
      ...     progress.advance()
      ...     progress.print_line("half done")
      half done
    """

    def __init__(self, step_count: int | None, is_shown: bool, made_count: int = 0):
        """Show a bar, if there is a terminal."""
        self._is_shown = is_shown
        self._bar: Any = None
        if is_shown and (sys.stderr.isatty() or config.read_options().terminal):
            with contextlib.suppress(ImportError):
                from tqdm import tqdm

                self._bar = tqdm(total=step_count, unit="step", leave=False, initial=made_count)

    def __enter__(self) -> ProgressBar:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()

    def advance(self) -> None:
        """Move the bar by one step."""
        if self._bar is not None:
            self._bar.update()

    def print_line(self, line: str) -> None:
        """Print a line, above the bar."""
        if self._bar is not None:
            self._bar.write(line)
        elif self._is_shown:
            # A file or pipe is buffered, and somebody may be watching it.
            print(line, flush=True)

"""What is shown while a program runs: by one rank, and on a terminal with a bar."""

from __future__ import annotations

import sys
from typing import Any, final

from mpistrat import options

__all__ = ["ProgressBar"]


@final
class ProgressBar:
    """A bar that moves and lines above it; lines alone where stderr is not a terminal.

    Lines go to stdout, the bar to stderr. A bar is drawn with control characters, which belong in
    no file.

    A rank that a launcher started sees a pipe; `mpistrat run` says whether a terminal is behind it.

    Args:
      steps: How many steps there will be.
      shown: Whether this rank shows anything; say True on one rank.

    Example:
      >>> with ProgressBar(2, shown=True) as progress:
      ...     progress.step()
      ...     progress.say("half done")
      half done
    """

    def __init__(self, steps: int, shown: bool):
        """Show a bar at 0, if there is a terminal."""
        self._shown = shown
        self._bar: Any = None
        if shown and (sys.stderr.isatty() or options.read().terminal):
            from tqdm import tqdm

            self._bar = tqdm(total=steps, unit="step", leave=False)

    def __enter__(self) -> ProgressBar:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()

    def step(self) -> None:
        """Move the bar by one step."""
        if self._bar is not None:
            self._bar.update()

    def say(self, line: str) -> None:
        """Print a line, above the bar."""
        if self._bar is not None:
            self._bar.write(line)
        elif self._shown:
            # A file or pipe is buffered, and somebody may be watching it.
            print(line, flush=True)

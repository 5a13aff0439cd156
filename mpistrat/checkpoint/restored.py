"""What a restore has done, for programs that ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

__all__ = ["Restored", "listed"]

_SHOWN = 20  # names that one message lists


def listed(texts: Sequence[str]) -> str:
    """Return texts as a message shows them: the first few, and how many more there are.

    Example:
      >>> listed(["a", "b"])
      'a, b'
    """
    more = len(texts) - _SHOWN
    return ", ".join(texts[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


@final
class Restored(NamedTuple):
    """What `Checkpoint.restore` has done; its methods are those of TensorFlow's status.

    Attributes:
      path: The file; None if there was nothing to restore.
      missing: Variables that the file does not have, and that are as they were.
      unused: Arrays of the file that no variable has taken.
    """

    path: str | None
    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    def assert_consumed(self) -> Restored:
        """Return this if every array of the file went to a variable, and every variable got one.

        Raises:
          AssertionError: Not so, or nothing was restored.
        """
        if self.unused:
            raise AssertionError(f"{self.path} also has {listed(self.unused)}.")
        return self.assert_existing_objects_matched()

    def assert_existing_objects_matched(self) -> Restored:
        """Return this if every variable got a value.

        Raises:
          AssertionError: Not so, or nothing was restored.
        """
        if self.path is None:
            raise AssertionError("there was no checkpoint, so nothing was restored.")
        if self.missing:
            raise AssertionError(f"{self.path} does not have {listed(self.missing)}.")
        return self

    def expect_partial(self) -> Restored:
        """Return this; what the file has beyond the variables gives no warning here anyway."""
        return self

"""Groups of variables that have hyper-parameters of their own."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from typing import Any, TypeAlias, final

__all__ = ["Group", "Match"]

Match: TypeAlias = str | Callable[[str, tuple[int, ...]], bool]


@final
class Group:
    """Some of the variables, and the hyper-parameters that are different for them.

    A variable may be in several groups; of two that change the same thing the later one counts.

    Args:
      match: A pattern of names as shells have it, with case (``"*bias*"``), or a function of name
        and shape that returns whether the variable is in the group.
      changes: Hyper-parameters by name, such as ``weight_decay=0.0`` or ``learning_rate=1e-4``.

    Raises:
      TypeError: `match` is neither, or nothing is changed.

    Example:
      >>> Group("*bias*", weight_decay=0.0)
      Group('*bias*', weight_decay=0.0)
      >>> Group(lambda name, shape: len(shape) < 2, weight_decay=0.0).has("dense/bias", (10,))
      True
    """

    __slots__ = ("changes", "match")

    def __init__(self, match: Match, **changes: Any):
        """Check what is given, and keep it."""
        if not (isinstance(match, str) or callable(match)):
            raise TypeError(f"Group({match!r}): expected a pattern or a function.")
        if not changes:
            raise TypeError(f"Group({match!r}) changes nothing; give it a hyper-parameter by name.")
        self.match = match
        self.changes = changes

    def has(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether a variable of this `name` and `shape` is in the group."""
        if isinstance(self.match, str):
            return fnmatch.fnmatchcase(name, self.match)
        return bool(self.match(name, shape))

    def __eq__(self, other: object) -> bool:
        """Return whether `other` is a group of the same match and changes."""
        if not isinstance(other, Group):
            return NotImplemented
        return self.match == other.match and self.changes == other.changes

    def __hash__(self) -> int:
        """Return a hash of the match and the changes."""
        return hash((self.match, tuple(sorted(self.changes.items()))))

    def __repr__(self) -> str:
        """Return the call that makes it."""
        changes = "".join(f", {name}={value!r}" for name, value in self.changes.items())
        return f"Group({self.match!r}{changes})"

"""What the elements of a rank look like, so that ranks whose elements differ are found out."""

from __future__ import annotations

import hashlib
from typing import Any, final

from mpistrat import nest
from mpistrat.collectives.blame import ranks_text
from mpistrat.collectives.lockstep import Lockstep
from mpistrat.errors import LockstepError

__all__ = ["LOOK", "Looks"]

LOOK = 8  # bytes of a digest
_TEXTS = "SU"  # dtypes whose width is that of the longest text


@final
class Looks:
    """Structure and dtypes of the last element that a rank has read.

    Shapes are not looked at: batches of one step may be of different sizes.

    Attributes:
      digest: `LOOK` bytes, equal on two ranks exactly if the elements look alike; zeros as long as
        there was none.
      text: The same in words.
    """

    def __init__(self) -> None:
        """Have seen nothing."""
        self.digest = bytes(LOOK)
        self.text = ""
        self._seen: Any = None

    def see(self, element: Any) -> None:
        """Look at a tree of arrays. Cost: a microsecond if it looks like the one before."""
        leaves, structure = nest.flatten(element)
        seen = (structure, [leaf.dtype for leaf in leaves])
        if seen == self._seen:
            return
        self._seen = seen
        names = [t.kind if t.kind in _TEXTS else t.name for t in seen[1]]
        paths = nest.path_names(structure)
        told = ", ".join(f"{p} {name}".strip() for p, name in zip(paths, names, strict=True))
        self.text = told if nest.is_lone(structure) else f"{nest.describe(structure)} of {told}"
        self.digest = hashlib.blake2b(self.text.encode(), digest_size=LOOK).digest()

    def refuse(self, lockstep: Lockstep, call: str) -> None:
        """Raise on every rank, all of which have found that they differ. Collective."""
        groups: dict[str, list[int]] = {}
        ranks = lockstep.order or range(lockstep.comm.size)
        for rank, text in zip(ranks, lockstep.texts(self.text.encode()), strict=True):
            groups.setdefault(text.decode(), []).append(rank)
        known = {text: those for text, those in groups.items() if text}
        lines = "".join(f"\n  {ranks_text(those)}: {text}" for text, those in known.items())
        lockstep.fail(
            LockstepError(
                f"{call}: the elements of the ranks differ in structure or dtype (this is rank "
                f"{ranks[lockstep.comm.rank]} of {lockstep.comm.size}).{lines}\n  Give every rank "
                "elements of one structure and of the same dtypes, by dataset.map(...) for example."
            )
        )

"""What the elements of a rank look like, so that ranks whose elements differ are found out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NoReturn, final

import numpy as np

from mpistrat import nest
from mpistrat.comm.callsite import ranks_text
from mpistrat.errors import LockstepError
from mpistrat.lockstep.lockstep import Lockstep

__all__ = ["LOOK", "Looks", "refuse"]

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
        self._seen: tuple[nest.Structure, list[Any]] | None = None

    @property
    def seen(self) -> bool:
        """Whether there was an element."""
        return self._seen is not None

    def empty(self) -> Any:
        """Return an element that looks like the last one, and has no rows; None if none was."""
        if self._seen is None:
            return None
        structure, seen = self._seen
        return nest.unflatten(structure, [np.empty((0, *shape), dtype) for dtype, shape in seen])

    def see(self, element: Any) -> None:
        """Look at a tree of arrays. Cost: a microsecond if it looks like the one before."""
        leaves, structure = nest.flatten(element)
        seen = [
            ((a := leaf if type(leaf) is np.ndarray else np.asarray(leaf)).dtype, a.shape[1:])
            for leaf in leaves
        ]
        if self._seen is not None and seen == self._seen[1]:
            before = self._seen[0]
            if structure is before or structure == before:
                return
        self._seen = structure, seen
        names = [dtype.kind if dtype.kind in _TEXTS else dtype.name for dtype, _ in seen]
        paths = nest.path_names(structure)
        told = ", ".join(f"{p} {name}".strip() for p, name in zip(paths, names, strict=True))
        self.text = told if nest.is_lone(structure) else f"{nest.describe(structure)} of {told}"
        shown = self.text.encode(errors="surrogatepass")
        self.digest = hashlib.blake2b(shown, digest_size=LOOK).digest()

    def refuse(self, lockstep: Lockstep, call: str) -> None:
        """Raise on every rank, all of which have found that they differ. Collective."""
        refuse(
            lockstep,
            f"{call}: the elements of the ranks differ in structure or dtype",
            [text.decode() for text in lockstep.texts(self.text.encode(errors="replace"))],
            "Give every rank elements of one structure and of the same dtypes, by "
            "dataset.map(...) for example.",
        )


def refuse(lockstep: Lockstep, what: str, texts: Sequence[str], advice: str) -> NoReturn:
    """Raise on every rank, all of which know what differs between them. No communication.

    Args:
      lockstep: Of the call.
      what: The call, and what differs.
      texts: What each rank has, in the order of the replicas; an empty text is not shown.
      advice: What to do.

    Raises:
      LockstepError: Always.
    """
    groups: dict[str, list[int]] = {}
    for rank, text in zip(lockstep.ranks, texts, strict=True):
        groups.setdefault(text, []).append(rank)
    lines = "".join(f"\n  {ranks_text(those)}: {text}" for text, those in groups.items() if text)
    lockstep.fail(
        LockstepError(
            f"{what} (this is rank {lockstep.ranks[lockstep.comm.rank]} of "
            f"{lockstep.comm.size}).{lines}\n  {advice}"
        )
    )

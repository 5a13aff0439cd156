"""Structure and dtypes of the elements of a rank, so that ranks that differ are found out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NoReturn, final

import numpy as np

from mpistrat import nest
from mpistrat.comm.callsite import ranks_text
from mpistrat.errors import LockstepError
from mpistrat.lockstep.lockstep import Lockstep

LOOK = 8  # bytes of a digest
_TEXTS = "SU"  # dtypes whose width is that of the longest text


@final
class ElementSignature:
    """Structure and dtypes of the last element that a rank has read.

    Shapes are not looked at: batches of one step may be of different sizes.

    Attributes:
      digest: `LOOK` bytes, equal on two ranks exactly if the elements look alike; zeros as long as
        there was none.
      text: The same in words.
    """

    def __init__(self) -> None:
        """Create it before the first element."""
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
        seen = []
        for leaf in leaves:
            array = leaf if type(leaf) is np.ndarray else np.asarray(leaf)
            seen.append((array.dtype, array.shape[1:]))
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


_KNOWN = 256  # datasets that are remembered for it


class _Samples:
    """Samples of the newest datasets of a session that differ between ranks, by replica 0's."""

    def __init__(self) -> None:
        self.known: dict[bytes, tuple[int, list[bytes]]] = {}


def prove_dataset(lockstep: Lockstep, number: int, call: str, sample: bytes) -> None:
    """Prove that all ranks distribute this dataset, and none another one in its place. Collective.

    Contents of arrays may differ, as where each rank adds noise; but where a rank now has what
    replica 0 had in another dataset, the two have been exchanged.

    Args:
      lockstep: Proves it.
      number: Which dataset of the session it is, from 1.
      call: The text of the call.
      sample: A digest of some of the contents; empty if none is in memory.

    Raises:
      LockstepError: The calls differ, or two datasets have been exchanged; on every rank.
    """
    known = lockstep.session.kept(_Samples).known
    mine = lockstep.share(call, sample)
    if len(set(mine)) < 2 or b"" in mine:  # of what lies in a file on a rank, nothing is known
        return
    for other, shown in [known[one] for one in sorted(set(mine)) if one in known]:
        rows = zip(mine, shown, lockstep.ranks, strict=True)
        odd = [rank for new, old, rank in rows if new == shown[0] != old]
        if odd:
            lockstep.fail(
                LockstepError(
                    f"datasets no. {other} and no. {number} are distributed in another order on "
                    f"{ranks_text(odd)} ({lockstep.here}): their descriptions are equal, their "
                    "contents are swapped.\n  Distribute datasets in one order on all ranks; a "
                    "loop over a set has another order in each process: sort it."
                )
            )
    known.pop(mine[0], None)
    known[mine[0]] = number, mine
    if len(known) > _KNOWN:
        del known[next(iter(known))]


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
    lockstep.fail(LockstepError(f"{what} ({lockstep.here}).{lines}\n  {advice}"))

"""Structure and dtypes of the elements of each rank, compared between ranks."""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Sequence
from typing import Any, NoReturn, final

import numpy as np

from mpistrat import nest
from mpistrat.comm.callsite import few, grouped, ranks_text
from mpistrat.errors import LockstepError
from mpistrat.lockstep.guards import warn
from mpistrat.lockstep.lockstep import Lockstep

LOOK = 8  # bytes of a digest
_ARRAYS = {np.ndarray}
_DTYPE, _SHAPE = map(operator.attrgetter, ("dtype", "shape"))
_TEXTS = "SU"  # dtypes whose width is that of the longest text


@functools.lru_cache(maxsize=64)  # each epoch has the elements of the one before
def _look(structure: nest.Structure, *dtypes: np.dtype[Any]) -> tuple[str, bytes]:
    """Return text and digest of elements of this structure and these dtypes."""
    names = [dtype.kind if dtype.kind in _TEXTS else dtype.name for dtype in dtypes]
    paths = nest.path_names(structure)
    told = ", ".join(f"{p} {name}".strip() for p, name in zip(paths, names, strict=True))
    text = told if nest.is_lone(structure) else f"{nest.describe(structure)} of {told}"
    shown = text.encode(errors="surrogatepass")
    return text, hashlib.blake2b(shown, digest_size=LOOK).digest()


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
        self._structure: nest.Structure | None = None
        self._dtypes: list[Any] = []
        self._shapes: list[tuple[int, ...]] = []

    @property
    def seen(self) -> bool:
        """Whether there was an element."""
        return self._structure is not None

    def empty(self) -> Any:
        """Return an element that looks like the last one, and has no rows; None if none was."""
        if self._structure is None:
            return None
        pairs = zip(self._shapes, self._dtypes, strict=True)
        return nest.unflatten(self._structure, [np.empty((0, *s[1:]), dtype) for s, dtype in pairs])

    def see(self, element: Any) -> None:
        """Look at a tree of arrays. Cost: a microsecond if it looks like the one before."""
        leaves, structure = nest.flatten(element)
        if {*map(type, leaves)} != _ARRAYS:
            leaves = [*map(np.asarray, leaves)]
        dtypes, self._shapes = [*map(_DTYPE, leaves)], [*map(_SHAPE, leaves)]
        before = self._structure
        if dtypes == self._dtypes and (structure is before or structure == before):
            return
        self._structure, self._dtypes = structure, dtypes
        self.text, self.digest = _look(structure, *dtypes)

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
_OWN_ROWS = (
    "experimental_distribute_dataset: the ranks hold different rows, and are taken to hold the "
    "same. Each reads only its own part of every batch, so most of what it holds is never used. "
    "Give all ranks the same arrays; or, where each has loaded rows of its own, call "
    "distribute_datasets_from_function. Different are"
)


class _Samples:
    """Samples of the newest datasets of a session that differ between ranks, by replica 0's."""

    def __init__(self) -> None:
        self.known: dict[bytes, tuple[int, list[bytes]]] = {}


def prove_dataset(lockstep: Lockstep, number: int, call: str, sample: bytes) -> None:
    """Prove that all ranks distribute this dataset, and none another one in its place. Collective.

    Contents of arrays may differ, as where each rank adds noise, and all are warned once; but where
    a rank now has what replica 0 had in another dataset, the two have been exchanged.

    Args:
      lockstep: Proves it.
      number: Which dataset of the session it is, from 1.
      call: The text of the call.
      sample: A digest of some of the contents; empty if none is in memory.

    Raises:
      LockstepError: The calls differ, or two datasets have been exchanged; on every rank.
    """
    known = lockstep.session.kept(_Samples).known
    mine = lockstep.gather_payloads(call, sample)
    if len(set(mine)) < 2 or b"" in mine:  # of what is in a file on a rank, nothing is known
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
    groups = [ranks_text(ranks) for ranks in grouped(mine, lockstep.ranks).values()]
    text = f"{_OWN_ROWS} ({'; '.join(few(groups))})."
    warn(lockstep, "experimental_distribute_dataset", text, stacklevel=5)


def refuse(lockstep: Lockstep, what: str, texts: Sequence[str], advice: str) -> NoReturn:
    """Raise on every rank, all of which know what differs between them. No communication.

    Args:
      lockstep: Of the call.
      what: The call, and what differs.
      texts: What each rank has, in the order of the replicas; an empty string is not shown.
      advice: What to do.

    Raises:
      LockstepError: Always.
    """
    groups = grouped(texts, lockstep.ranks)
    told = few([f"{ranks_text(those)}: {text}" for text, those in groups.items() if text])
    lines = "\n  ".join((f"{what} ({lockstep.here}).", *told, advice))
    lockstep.fail(LockstepError(lines))

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
    leaves_text = ", ".join(f"{p} {name}".strip() for p, name in zip(paths, names, strict=True))
    text = (
        leaves_text if nest.is_lone(structure) else f"{nest.describe(structure)} of {leaves_text}"
    )
    encoded_text = text.encode(errors="surrogatepass")
    return text, hashlib.blake2b(encoded_text, digest_size=LOOK).digest()


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

    def see(self, element: Any) -> tuple[list[Any], nest.Structure]:
        """Look at a tree of arrays; return its leaves and its structure.

        Cost: a microsecond if it looks like the one before.
        """
        leaves, structure = flat = nest.flatten(element)
        if {*map(type, leaves)} != _ARRAYS:
            leaves = [*map(np.asarray, leaves)]
        dtypes, self._shapes = [*map(_DTYPE, leaves)], [*map(_SHAPE, leaves)]
        previous_structure = self._structure
        if dtypes != self._dtypes or (
            structure is not previous_structure and structure != previous_structure
        ):
            self._structure, self._dtypes = structure, dtypes
            self.text, self.digest = _look(structure, *dtypes)
        return flat

    def refuse(self, lockstep: Lockstep, call: str) -> None:
        """Raise on every rank, all of which have found that they differ. Collective."""
        refuse(
            lockstep,
            f"{call}: the elements of the ranks differ in structure or dtype",
            [text.decode() for text in lockstep.texts(self.text.encode(errors="replace"))],
            "Give every rank elements of one structure and of the same dtypes, by "
            "dataset.map(...) for example.",
        )


def refuse(lockstep: Lockstep, subject: str, texts: Sequence[str], advice: str) -> NoReturn:
    """Raise on every rank, all of which know what differs between them. No communication.

    Args:
      lockstep: Of the call.
      subject: The call, and what differs.
      texts: What each rank has, in the order of the replicas; an empty string is not shown.
      advice: What to do.

    Raises:
      LockstepError: Always.
    """
    groups = grouped(texts, lockstep.ranks)
    group_texts = few(
        [f"{ranks_text(group_ranks)}: {text}" for text, group_ranks in groups.items() if text]
    )
    lines = "\n  ".join((f"{subject} ({lockstep.here}).", *group_texts, advice))
    lockstep.fail(LockstepError(lines))

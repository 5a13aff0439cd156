"""Rows that all ranks hold in memory, compared between ranks when a dataset is distributed.

A digest of a sample of the rows is sent with the handshake. Only where digests differ, replica 0
broadcasts its sample, and every rank says how its own differs from that.

Structure and dtypes of the elements of each rank, compared between ranks.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import json
import operator
from collections.abc import Sequence
from typing import Any, NoReturn, final

import numpy as np
from xxhash import xxh3_128_digest

from mpistrat import pytree
from mpistrat.arrays import Array, as_bytes, digest, is_bfloat16
from mpistrat.comm.callsite import group_by_key, ranks_text, shorten
from mpistrat.errors import LockstepError
from mpistrat.lockstep.ending import aborting
from mpistrat.lockstep.guards import warn
from mpistrat.lockstep.handshake import Lockstep

# Objects of these kinds are compared by a digest of their text.
_TEXTUAL = (str, bytes, bool, int, float, complex, type(None))
_BFLOAT16_EPS = 2.0**-7

_ADVICE = (
    "Each rank reads only its own part of every batch, so some rows would be used twice and others "
    "never. Give all ranks the same arrays in the same order: give a seed to whatever permutes, "
    "splits or draws rows, such as np.random.default_rng(seed) or train_test_split(..., "
    "random_state=seed), or leave the order to Dataset.shuffle(seed=...); distribute several "
    "datasets in one order on all ranks. Where each rank has loaded rows of its own, call "
    "distribute_datasets_from_function. If the ranks are meant to hold different rows, call "
    "experimental_distribute_dataset(dataset, rows_may_differ=True)."
)
_LAST_BITS_ADVICE = (
    "Each rank reads its own part of every batch, so results depend on the number of ranks in "
    "these bits. Other hosts, or another number of BLAS threads, compute them so. Compute the "
    "arrays on one rank, x = strategy.broadcast(x), or pass rows_may_differ=True to "
    "experimental_distribute_dataset."
)


class _Difference(enum.IntEnum):
    """How the rows of a rank differ from those of replica 0."""

    NONE = 0
    LAST_BITS = 1
    ORDER = 2
    CONTENTS = 3


# What the ranks hold, and what those of one kind hold compared with replica 0.
_HELD_TEXTS = {
    _Difference.LAST_BITS: (
        "rows that differ in their last bits",
        "rows that differ in their last bits",
    ),
    _Difference.ORDER: ("the same rows in different orders", "the same rows in another order"),
    _Difference.CONTENTS: ("different rows", "different rows, or the same rows in another order"),
}


def compare_rows(lockstep: Lockstep, name: str, call: str, sample: Sequence[Array | None]) -> None:
    """Show that all ranks distribute this dataset, with the same rows. Collective.

    Cost: one handshake. If the samples differ, replica 0's is broadcast.

    Args:
      lockstep: Shows it.
      name: What messages call the dataset.
      call: The text of the call.
      sample: What `Arrays.sample` returns; empty if nothing is to be compared.

    Raises:
      LockstepError: The calls differ; or the rows do, by more than rounding; on every rank.
    """
    with lockstep.preparing(call):
        leaves = [None if leaf is None else _comparable(leaf) for leaf in sample]
        present = [leaf for leaf in leaves if leaf is not None and leaf.size]
        sample_digest = digest(present) if present else b""
    digests = lockstep.gather_payloads(call, sample_digest)
    if len(set(digests)) < 2:
        return
    differences = _differences(lockstep, call, leaves)
    worst = max(differences)
    if worst is _Difference.NONE:  # what is in memory of all ranks is the same
        return
    pairs = list(zip(differences, lockstep.ranks, strict=True))
    kinds = [kind for kind in reversed(_Difference) if kind and kind in differences]
    groups = [
        f"{ranks_text([rank for diff, rank in pairs if diff is kind])}: {_HELD_TEXTS[kind][1]}"
        for kind in kinds
    ]
    lines = "\n  ".join(shorten(groups))
    start = f"{name}: the ranks hold {_HELD_TEXTS[worst][0]} ({lockstep.here})"
    text = f"{start}. Compared with rank {lockstep.ranks[0]}, they hold\n  {lines}.\n  "
    if worst is _Difference.LAST_BITS:
        warn(lockstep, f"distribute {name}", text + _LAST_BITS_ADVICE, stacklevel=5)
    else:
        lockstep.fail(LockstepError(text + _ADVICE))


def _comparable(leaf: Array) -> Array:
    """Return a leaf whose bytes tell what it holds; of an object that is no number or text none."""
    if leaf.dtype.kind in "OT":
        texts = [repr(x) if isinstance(x, _TEXTUAL) else "" for x in leaf.reshape(-1).tolist()]
        digests = b"".join(xxh3_128_digest(text.encode(errors="surrogatepass")) for text in texts)
        return np.frombuffer(digests, np.uint64).reshape(*leaf.shape, 2)
    return leaf if leaf.dtype.isnative else leaf.astype(leaf.dtype.newbyteorder("="))


def _differences(
    lockstep: Lockstep, call: str, leaves: Sequence[Array | None]
) -> list[_Difference]:
    """Return how the rows of each rank differ from replica 0's. Collective."""
    with aborting(lockstep, call):
        sizes = [None if leaf is None else leaf.nbytes for leaf in leaves]
        rows = [json.loads(text) for text in lockstep.texts(json.dumps(sizes).encode())]
        columns = list(zip(*rows, strict=True))
        local_leaves, root_leaves = [], []
        for leaf, column in zip(leaves, columns, strict=True):
            if leaf is None or not leaf.size or None in column or len(set(column)) > 1:
                continue
            root_leaf = np.array(leaf, order="C")
            lockstep.comm.bcast(root_leaf.reshape(-1).view(np.uint8), 0)
            local_leaves.append(leaf)
            root_leaves.append(root_leaf)
        uneven = any(None not in column and len(set(column)) > 1 for column in columns)
        difference = _Difference.CONTENTS if uneven else _difference(local_leaves, root_leaves)
        texts = lockstep.texts(bytes([difference]))
    return [_Difference(text[0]) for text in texts]


def _difference(local_leaves: Sequence[Array], root_leaves: Sequence[Array]) -> _Difference:
    """Return how leaves of shape (rows, n) differ from others of the same shapes and dtypes."""
    pairs = list(zip(local_leaves, root_leaves, strict=True))
    if all(digest([a]) == digest([b]) for a, b in pairs):
        return _Difference.NONE
    if all(digest([a]) == digest([b]) or _is_rounding(a, b) for a, b in pairs):
        return _Difference.LAST_BITS
    # Rows of leaves of different lengths are sampled at different places.
    aligned = len({len(leaf) for leaf in local_leaves}) == 1
    if aligned and _sorted_rows(local_leaves) == _sorted_rows(root_leaves):
        return _Difference.ORDER
    return _Difference.CONTENTS


def _is_rounding(a: Array, b: Array) -> bool:
    """Tell whether numbers differ by no more than rounding, measured by the largest of a column.

    That is ``eps ** 0.75`` of it: 1.8e-12 for float64, 6.4e-6 for float32.
    """
    if is_bfloat16(a.dtype):
        eps, a, b = _BFLOAT16_EPS, a.astype(np.float32), b.astype(np.float32)
    elif a.dtype.kind in "fc":
        eps = float(np.finfo(a.dtype).eps)
    else:
        return False
    with np.errstate(all="ignore"):
        finite = np.isfinite(a) & np.isfinite(b)
        if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
            return False
        a, b = np.where(finite, a, 0), np.where(finite, b, 0)
        scale = np.maximum(np.abs(a), np.abs(b)).max(axis=0)
        return bool((np.abs(a - b) <= eps**0.75 * scale).all())


def _sorted_rows(leaves: Sequence[Array]) -> list[bytes]:
    """Return the rows of all leaves together as bytes, sorted."""
    return sorted(map(bytes, np.hstack([as_bytes(leaf).reshape(len(leaf), -1) for leaf in leaves])))


LOOK = 8  # bytes of a digest
_ARRAYS = {np.ndarray}
_DTYPE, _SHAPE = map(operator.attrgetter, ("dtype", "shape"))
_TEXTS = "SU"  # dtypes whose width is that of the longest text


@functools.lru_cache(maxsize=64)  # each epoch has the elements of the one before
def _look(structure: pytree.Structure, *dtypes: np.dtype[Any]) -> tuple[str, bytes]:
    """Return text and digest of elements of this structure and these dtypes."""
    names = [dtype.kind if dtype.kind in _TEXTS else dtype.name for dtype in dtypes]
    paths = pytree.path_names(structure)
    leaves_text = ", ".join(f"{p} {name}".strip() for p, name in zip(paths, names, strict=True))
    text = (
        leaves_text
        if pytree.is_single_leaf(structure)
        else f"{pytree.describe(structure)} of {leaves_text}"
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
        self._structure: pytree.Structure | None = None
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
        return pytree.unflatten(
            self._structure, [np.empty((0, *s[1:]), dtype) for s, dtype in pairs]
        )

    def see(self, element: Any) -> tuple[list[Any], pytree.Structure]:
        """Look at a tree of arrays; return its leaves and its structure.

        Cost: a microsecond if it looks like the one before.
        """
        leaves, structure = flat = pytree.flatten(element)
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
    groups = group_by_key(texts, lockstep.ranks)
    group_texts = shorten(
        [f"{ranks_text(group_ranks)}: {text}" for text, group_ranks in groups.items() if text]
    )
    lines = "\n  ".join((f"{subject} ({lockstep.here}).", *group_texts, advice))
    lockstep.fail(LockstepError(lines))

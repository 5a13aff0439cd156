"""Rows, structures and dtypes, compared between ranks.

`compare_rows` compares the rows that all ranks hold in memory, when a dataset is distributed. A
digest of a sample of the rows is sent with the handshake (`ArrayTree.sample_rows`). Only if digests
differ, replica 0 broadcasts its sample, and every rank reports the difference of its own: in the
last bits, in the order of the rows, or in the contents.

`ElementSignature` is the structure and the dtypes of a rank's elements; a digest of it is sent with
the handshake of each step.
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


# Texts of each difference: for all ranks, and for the ranks that differ from replica 0 in this way.
_HELD_TEXTS = {
    _Difference.LAST_BITS: (
        "rows that differ in their last bits",
        "rows that differ in their last bits",
    ),
    _Difference.ORDER: ("the same rows in different orders", "the same rows in another order"),
    _Difference.CONTENTS: ("different rows", "different rows, or the same rows in another order"),
}


def compare_rows(lockstep: Lockstep, name: str, call: str, sample: Sequence[Array | None]) -> None:
    """Check that all ranks distribute this dataset, with the same rows. Collective.

    Cost: one handshake. If the samples differ, replica 0's is broadcast.

    Args:
      lockstep: The ranks, and their handshake.
      name: The name of the dataset in messages.
      call: The text of the call.
      sample: The arrays of `ArrayTree.sample_rows`; empty if nothing is compared.

    Raises:
      LockstepError: The calls differ; or the rows do, by more than rounding; on every rank.
    """
    with lockstep.validating_collectively(call):
        leaves = [None if leaf is None else _make_comparable(leaf) for leaf in sample]
        present = [leaf for leaf in leaves if leaf is not None and leaf.size]
        sample_digest = digest(present) if present else b""
    digests = lockstep.gather_payloads(call, sample_digest)
    if len(set(digests)) < 2:
        return
    differences = _find_differences(lockstep, call, leaves)
    worst = max(differences)
    if worst is _Difference.NONE:  # the arrays that all ranks have in memory are equal
        return
    ranks_by_difference: dict[_Difference, list[int]] = {}
    for difference, rank in zip(differences, lockstep.ranks, strict=True):
        ranks_by_difference.setdefault(difference, []).append(rank)
    groups = [
        f"{ranks_text(ranks_by_difference[difference])}: {_HELD_TEXTS[difference][1]}"
        for difference in reversed(_Difference)
        if difference and difference in ranks_by_difference
    ]
    lines = "\n  ".join(shorten(groups))
    start = f"{name}: the ranks hold {_HELD_TEXTS[worst][0]} ({lockstep.rank_text})"
    text = f"{start}. Compared with rank {lockstep.ranks[0]}, they hold\n  {lines}.\n  "
    if worst is _Difference.LAST_BITS:
        warn(lockstep, f"distribute {name}", text + _LAST_BITS_ADVICE)
    else:
        lockstep.raise_on_all_ranks(LockstepError(text + _ADVICE))


def _make_comparable(leaf: Array) -> Array:
    """Return a leaf whose bytes follow from its contents.

    Objects are numbers or texts; all other objects count as equal.
    """
    if leaf.dtype.kind in "OT":
        texts = [repr(x) if isinstance(x, _TEXTUAL) else "" for x in leaf.reshape(-1).tolist()]
        digests = b"".join(xxh3_128_digest(text.encode(errors="surrogatepass")) for text in texts)
        return np.frombuffer(digests, np.uint64).reshape(*leaf.shape, 2)
    return leaf if leaf.dtype.isnative else leaf.astype(leaf.dtype.newbyteorder("="))


def _find_differences(
    lockstep: Lockstep, call: str, leaves: Sequence[Array | None]
) -> list[_Difference]:
    """Return how the rows of each rank differ from replica 0's. Collective."""
    with aborting(lockstep, call):
        sizes = [None if leaf is None else leaf.nbytes for leaf in leaves]
        rows = [json.loads(text) for text in lockstep.gather_texts(json.dumps(sizes).encode())]
        columns = list(zip(*rows, strict=True))
        local_leaves, root_leaves = [], []
        for leaf, column in zip(leaves, columns, strict=True):
            if leaf is None or not leaf.size or None in column or len(set(column)) > 1:
                continue
            root_leaf = np.array(leaf, order="C")
            lockstep.comm.bcast(root_leaf.reshape(-1).view(np.uint8), 0)
            local_leaves.append(leaf)
            root_leaves.append(root_leaf)
        is_uneven = any(None not in column and len(set(column)) > 1 for column in columns)
        difference = (
            _Difference.CONTENTS if is_uneven else _find_difference(local_leaves, root_leaves)
        )
        texts = lockstep.gather_texts(bytes([difference]))
    return [_Difference(text[0]) for text in texts]


def _find_difference(local_leaves: Sequence[Array], root_leaves: Sequence[Array]) -> _Difference:
    """Return how leaves of shape (rows, n) differ from others of the same shapes and dtypes."""
    pairs = list(zip(local_leaves, root_leaves, strict=True))
    if all(digest([a]) == digest([b]) for a, b in pairs):
        return _Difference.NONE
    if all(digest([a]) == digest([b]) or _is_rounding(a, b) for a, b in pairs):
        return _Difference.LAST_BITS
    # Rows of leaves of different lengths are sampled at different places.
    is_aligned = len({len(leaf) for leaf in local_leaves}) == 1
    if is_aligned and _sort_rows(local_leaves) == _sort_rows(root_leaves):
        return _Difference.ORDER
    return _Difference.CONTENTS


def _is_rounding(a: Array, b: Array) -> bool:
    """Return whether numbers differ by no more than rounding, relative to the largest of a column.

    That is ``eps ** 0.75`` of it: 1.8e-12 for float64, 6.4e-6 for float32.
    """
    if is_bfloat16(a.dtype):
        eps, a, b = _BFLOAT16_EPS, a.astype(np.float32), b.astype(np.float32)
    elif a.dtype.kind in "fc":
        eps = float(np.finfo(a.dtype).eps)
    else:
        return False
    with np.errstate(all="ignore"):
        is_finite = np.isfinite(a) & np.isfinite(b)
        if not np.array_equal(a[~is_finite], b[~is_finite], equal_nan=True):
            return False
        a, b = np.where(is_finite, a, 0), np.where(is_finite, b, 0)
        scale = np.maximum(np.abs(a), np.abs(b)).max(axis=0)
        return bool((np.abs(a - b) <= eps**0.75 * scale).all())


def _sort_rows(leaves: Sequence[Array]) -> list[bytes]:
    """Return the rows of all leaves together as bytes, sorted."""
    return sorted(map(bytes, np.hstack([as_bytes(leaf).reshape(len(leaf), -1) for leaf in leaves])))


SIGNATURE_NBYTES = 8  # bytes of a digest
_ARRAYS = {np.ndarray}
_DTYPE, _SHAPE = map(operator.attrgetter, ("dtype", "shape"))
_TEXTS = "SU"  # dtypes whose width is that of the longest text


@functools.lru_cache(maxsize=64)  # each epoch has the elements of the one before
def _describe_elements(structure: pytree.Structure, *dtypes: np.dtype[Any]) -> tuple[str, bytes]:
    """Return the text and the digest of elements of this structure and these dtypes."""
    names = [dtype.kind if dtype.kind in _TEXTS else dtype.name for dtype in dtypes]
    paths = pytree.path_names(structure)
    leaves_text = ", ".join(f"{p} {name}".strip() for p, name in zip(paths, names, strict=True))
    text = (
        leaves_text
        if pytree.is_single_leaf(structure)
        else f"{pytree.describe(structure)} of {leaves_text}"
    )
    encoded_text = text.encode(errors="surrogatepass")
    return text, hashlib.blake2b(encoded_text, digest_size=SIGNATURE_NBYTES).digest()


@final
class ElementSignature:
    """The structure and the dtypes of the last element that a rank has read.

    Shapes are not compared: batches of one step may be of different sizes.

    Attributes:
      digest: `SIGNATURE_NBYTES` bytes, equal on two ranks exactly if structure and dtypes are;
        zeros before the first element.
      text: Structure and dtypes in words.
    """

    def __init__(self) -> None:
        """Create it before the first element."""
        self.digest = bytes(SIGNATURE_NBYTES)
        self.text = ""
        self._structure: pytree.Structure | None = None
        self._dtypes: list[Any] = []
        self._shapes: list[tuple[int, ...]] = []

    @property
    def has_element(self) -> bool:
        """Whether there was an element."""
        return self._structure is not None

    def make_empty_element(self) -> Any:
        """Return an element without rows, like the last one; None before the first element."""
        if self._structure is None:
            return None
        pairs = zip(self._shapes, self._dtypes, strict=True)
        return pytree.unflatten(
            self._structure, [np.empty((0, *s[1:]), dtype) for s, dtype in pairs]
        )

    def update_from(self, element: Any) -> tuple[list[Any], pytree.Structure]:
        """Take the signature of a tree of arrays, and return its leaves and its structure.

        Cost: a microsecond if the signature is that of the last element.
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
            self.text, self.digest = _describe_elements(structure, *dtypes)
        return flat

    def fail_on_difference(self, lockstep: Lockstep, call: str) -> None:
        """Raise on every rank, after all have found that they differ. Collective."""
        fail_with_groups(
            lockstep,
            f"{call}: the elements of the ranks differ in structure or dtype",
            [text.decode() for text in lockstep.gather_texts(self.text.encode(errors="replace"))],
            "Give every rank elements of one structure and of the same dtypes, by "
            "dataset.map(...) for example.",
        )


def fail_with_groups(
    lockstep: Lockstep, subject: str, texts: Sequence[str], advice: str
) -> NoReturn:
    """Raise on every rank, after all have received the texts of all. No communication.

    Args:
      lockstep: The ranks.
      subject: The call, and the difference.
      texts: The text of each rank, in the order of the replicas; an empty text is not shown.
      advice: The advice at the end.

    Raises:
      LockstepError: Always.
    """
    groups = group_by_key(texts, lockstep.ranks)
    group_texts = shorten(
        [f"{ranks_text(group_ranks)}: {text}" for text, group_ranks in groups.items() if text]
    )
    lines = "\n  ".join((f"{subject} ({lockstep.rank_text}).", *group_texts, advice))
    lockstep.raise_on_all_ranks(LockstepError(lines))

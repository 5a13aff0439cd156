"""Check that all ranks hold the same contents; and each replica's share of a sum."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from mpistrat import nest
from mpistrat.arrays import Array, as_array, digest, is_scalar
from mpistrat.comm.callsite import few, grouped, ranks_text
from mpistrat.comm.session import Session
from mpistrat.distribute.kinds import DistributedVariable, VariableAggregation
from mpistrat.distribute.slices import IndexedSlices, arrays_of
from mpistrat.distribute.values import DistributedValues, Mirrored
from mpistrat.errors import LeafTypeError, LockstepError
from mpistrat.kernels.ops import ReduceOp
from mpistrat.lockstep.lockstep import Lockstep

_SHOWN = 24  # letters of a number in messages
_DIGEST = 16
_ROW = _DIGEST + _SHOWN + len("[, ...]")  # bytes in a handshake for each compared value

# Texts, and what each replica may have its own of, or is compared when it is written.
_NO_DATA = (str, bytes, type(None), DistributedValues, DistributedVariable)

OPS = {VariableAggregation.SUM: ReduceOp.SUM, VariableAggregation.MEAN: ReduceOp.MEAN}


def prove_same(
    lockstep: Lockstep,
    call: str,
    contents: Array | Mapping[str, Array | bytes],
    advice: str,
    failure: BaseException | None = None,
    kinds: Mapping[str, type[Exception]] | None = None,
) -> None:
    """Prove that all ranks make this call with the same contents.

    Args:
      lockstep: Proves it.
      call: The text of the call.
      contents: What has to be the same: an array; or several, or digests of them, each with what
        messages call it.
      advice: What to do if it is not.
      failure: What this rank failed with before it had contents.
      kinds: The class of the error where these contents differ, if it is another one.

    Raises:
      LockstepError: The contents differ; on every rank.
    """
    parts = contents if isinstance(contents, Mapping) else {"the value": contents}
    mine = b"".join(map(_row, parts.values()))
    ranks = lockstep.ranks

    def validate(smalls: list[bytes] | None) -> Exception | None:
        smalls = lockstep.texts(mine) if smalls is None else smalls
        if all(small == mine for small in smalls):
            return None
        rows = [[small[at : at + _ROW] for small in smalls] for at in range(0, len(mine), _ROW)]
        told = dict(zip(parts, rows, strict=True))
        bad = {name: _who(row, ranks) for name, row in told.items() if len(set(row)) > 1}
        lines = "".join(f"\n  {name}: {groups}" for name, groups in bad.items())
        kind = next((kinds[name] for name in bad if name in kinds), None) if kinds else None
        return (kind or LockstepError)(
            f"{call}: {' and '.join(bad)} {'differs' if len(bad) == 1 else 'differ'} between ranks "
            f"({lockstep.here}), so the copies would "
            f"drift apart.{lines}\n  {advice}"
        )

    lockstep.prove(call, mine, failure, validate=validate)


def is_data(leaf: Any) -> bool:
    """Tell whether a leaf is an array, slices or a number, whose contents can be compared."""
    return isinstance(leaf, np.ndarray | IndexedSlices) or is_scalar(leaf)


def contents(tree: Any, session: Session) -> bytes:
    """Return digests of the data in a tree that has to be alike on all ranks.

    What another library or a buffer holds is data too, whichever way each rank has it. Of a
    `Mirrored` that this session has checked it is the number of its handshake.
    """
    digests = []
    for leaf in nest.flatten(tree)[0]:
        if isinstance(leaf, Mirrored):
            proof = leaf.proved_by(session)
            leaf = proof or leaf.local
            if proof:
                digests.append(proof.encode().ljust(16))
        if is_data(leaf):
            digests.append(digest(arrays_of(leaf)))
        elif not isinstance(leaf, _NO_DATA):
            with contextlib.suppress(LeafTypeError):  # it is no data at all
                digests.append(digest([as_array(leaf)]))
    return b"".join(digests)


def _row(part: Array | bytes) -> bytes:
    """Return a digest, and the first element as text."""
    if isinstance(part, bytes):
        return xxhash.xxh3_128_digest(part).ljust(_ROW)
    shown = str(part.reshape(-1)[0])[:_SHOWN] if part.size else ""
    shown = f"[{shown}, ...]" if part.size > 1 else shown
    return digest([part]) + shown.encode().ljust(_ROW - _DIGEST)


def _who(row: Sequence[bytes], ranks: Sequence[int]) -> str:
    """Return which ranks have what."""
    texts: list[str] = []
    for cell, those in grouped(row, ranks).items():
        first = cell[_DIGEST:].decode().strip()
        again = first and any(text.startswith(first) for text in texts)
        first = first or ("another value" if texts else "one value")
        texts.append(f"{first}{', but another,' if again else ''} on {ranks_text(those)}")
    return "; ".join(few(texts))


def share(array: Array, size: int) -> Array:
    """Return each replica's part of what is to read as `array` in sum; integers lose the rest.

    Example:
      >>> share(np.array([7, -7]), 2)
      array([ 3, -3])
    """
    if array.dtype.kind not in "iu":
        result: Array = (array / size).astype(array.dtype)
        return result
    whole: Array = _divided(array, size)[0].astype(array.dtype)
    return whole


def _divided(array: Array, size: int) -> tuple[Array, Array]:
    """Return quotient and remainder of integers, in 64 bits."""
    # Not by way of floats, which do not hold every integer of 64 bits; towards zero, as a cast is.
    wide = array.astype(np.uint64 if array.dtype.kind == "u" else np.int64)
    whole, rest = np.divmod(wide, wide.dtype.type(size))
    whole = whole + ((rest != 0) & (wide < 0))
    return whole, wide - whole * wide.dtype.type(size)


def exact_share(reduce: Callable[[Array], Array], rank: int, size: int, saved: Array) -> Array:
    """Return this replica's part of what reads as `saved` in sum, to the last bit.

    For integers the quotient, and 1 more on so many of the first replicas as remain; of floating
    point ``saved / size`` where the sum of that is `saved`, else replica 0 has all, the others 0.

    Collective, if there are several replicas.

    Args:
      reduce: Adds up what all replicas give it, in the way in which the sum will be read.
      rank: Which replica this is.
      size: How many there are.
      saved: The same on all of them.
    """
    if size == 1:
        return saved
    if saved.dtype.kind == "c":
        # Part by part: a quotient of complex numbers would lose the signs of zeros.
        flat = saved.reshape(-1)
        parts = flat.view(flat.real.dtype)
        halves = exact_share(lambda x: reduce(x.view(flat.dtype)).view(x.dtype), rank, size, parts)
        return halves.view(flat.dtype).reshape(saved.shape)
    if saved.dtype.kind in "iu":
        whole, rest = _divided(saved, size)
        result: Array = (whole + np.sign(rest) * (rank < np.abs(rest))).astype(saved.dtype)
        return result
    first = saved if rank == 0 else np.zeros_like(saved)
    if saved.dtype.kind == "b":
        return first
    with np.errstate(all="ignore"):
        part = share(saved, size)
        finite = np.isfinite(part)
        total = reduce(np.where(finite, part, np.zeros_like(part)))
        result = np.where(~finite | (total == saved), part, first)
    return result

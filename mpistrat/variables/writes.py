"""Check that all ranks hold the same contents, or take those of replica 0."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from mpistrat import pytree
from mpistrat.arrays import Array, as_array, digest, is_scalar, spec_text
from mpistrat.comm.callsite import group_by_key, ranks_text, shorten
from mpistrat.comm.session import Session
from mpistrat.errors import LeafTypeError, LockstepError
from mpistrat.kernels.ops import ReduceOp
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.variables.indexed_slices import IndexedSlices, arrays_of
from mpistrat.variables.kinds import DistributedVariable, VariableAggregation
from mpistrat.variables.values import DistributedValues, Mirrored

_MAX_LETTERS = 24  # letters of a number in messages
_DIGEST = 16
_ROW = _DIGEST + _MAX_LETTERS + len("[, ...]")  # bytes in a handshake for each compared value

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
    own_payload = b"".join(map(_row, parts.values()))

    payloads = lockstep.compare_payloads(call, own_payload, failure)
    if payloads is None:
        return
    rows = [
        [payload[at : at + _ROW] for payload in payloads] for at in range(0, len(own_payload), _ROW)
    ]
    columns = dict(zip(parts, rows, strict=True))
    differing_parts = {
        name: _describe_ranks(row, lockstep.ranks)
        for name, row in columns.items()
        if len(set(row)) > 1
    }
    lines = "".join(f"\n  {name}: {groups}" for name, groups in differing_parts.items())
    kind = next((kinds[name] for name in differing_parts if name in kinds), None) if kinds else None
    lockstep.fail(
        (kind or LockstepError)(
            f"{call}: {' and '.join(differing_parts)} "
            f"{'differs' if len(differing_parts) == 1 else 'differ'} between ranks "
            f"({lockstep.here}), so the copies would drift apart.{lines}\n  {advice}"
        )
    )


def is_data(leaf: Any) -> bool:
    """Tell whether a leaf is an array, slices or a number, whose contents can be compared."""
    return isinstance(leaf, np.ndarray | IndexedSlices) or is_scalar(leaf)


def contents(tree: Any, session: Session) -> bytes:
    """Return digests of the data in a tree that has to be alike on all ranks.

    What another library or a buffer holds is data too, whichever way each rank has it. Of a
    `Mirrored` that this session has checked it is the number of its handshake.
    """
    digests = []
    for leaf in pytree.flatten(tree)[0]:
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
    value_text = str(part.reshape(-1)[0])[:_MAX_LETTERS] if part.size else ""
    value_text = f"[{value_text}, ...]" if part.size > 1 else value_text
    return digest([part]) + value_text.encode().ljust(_ROW - _DIGEST)


def _describe_ranks(row: Sequence[bytes], ranks: Sequence[int]) -> str:
    """Return which ranks have what."""
    texts: list[str] = []
    for cell, group_ranks in group_by_key(row, ranks).items():
        first = cell[_DIGEST:].decode().strip()
        is_repeated = first and any(text.startswith(first) for text in texts)
        first = first or ("another value" if texts else "one value")
        texts.append(
            f"{first}{', but another,' if is_repeated else ''} on {ranks_text(group_ranks)}"
        )
    return "; ".join(shorten(texts))


def broadcast_replica0(lockstep: Lockstep, call: str, values: Array) -> Array:
    """Return what replica 0 gives. Collective. Cost: a handshake and a broadcast."""
    buffer = np.array(values, order="C")
    lockstep.handshake(f"{call} {spec_text(buffer)}")
    lockstep.comm.bcast(buffer, 0)
    return buffer

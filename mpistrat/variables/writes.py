"""Checks that all ranks hold the same contents, and the broadcast of replica 0's."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import numpy as np
import xxhash

from mpistrat import pytree
from mpistrat.arrays import DIGEST_NBYTES, Array, as_array, digest, is_scalar, spec_text
from mpistrat.comm.callsite import group_by_key, ranks_text, shorten
from mpistrat.comm.session import Session
from mpistrat.errors import LeafTypeError, LockstepError
from mpistrat.kernels.ops import ReduceOp
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.variables.indexed_slices import IndexedSlices, list_arrays
from mpistrat.variables.kinds import DistributedVariable, VariableAggregation
from mpistrat.variables.values import DistributedValues, Mirrored

_MAX_LETTERS = 24  # letters of a number in messages
# The bytes in a handshake for each compared value.
_CONTENT_NBYTES = DIGEST_NBYTES + _MAX_LETTERS + len("[, ...]")

# Texts; values that each replica may have its own of; and variables, whose writes are compared.
_UNCOMPARED_TYPES = (str, bytes, type(None), DistributedValues, DistributedVariable)

REDUCE_OPS = {VariableAggregation.SUM: ReduceOp.SUM, VariableAggregation.MEAN: ReduceOp.MEAN}


def check_same_contents(
    lockstep: Lockstep,
    call: str,
    contents: Array | Mapping[str, Array | bytes],
    advice: str,
    *,
    failure: BaseException | None = None,
    errors: Mapping[str, type[Exception]] | None = None,
) -> None:
    """Check that all ranks make this call with the same contents.

    Args:
      lockstep: Whose handshake compares them.
      call: The text of the call.
      contents: The contents: an array; or several, or digests of them, each with its name in
        messages.
      advice: The advice of the message if they differ.
      failure: The error of this rank before it had contents.
      errors: The class of the error where these contents differ, if it is another one.

    Raises:
      LockstepError: The contents differ; on every rank.
    """
    contents_by_name = contents if isinstance(contents, Mapping) else {"the value": contents}
    own_payload = b"".join(map(_encode_content, contents_by_name.values()))

    payloads = lockstep.compare_payloads(call, own_payload, failure)
    if payloads is None:
        return
    columns_of_bytes = [
        [payload[at : at + _CONTENT_NBYTES] for payload in payloads]
        for at in range(0, len(own_payload), _CONTENT_NBYTES)
    ]
    contents_of_ranks = dict(zip(contents_by_name, columns_of_bytes, strict=True))
    texts_of_differing = {
        name: _describe_differences(row, lockstep.ranks)
        for name, row in contents_of_ranks.items()
        if len(set(row)) > 1
    }
    lines = "".join(f"\n  {name}: {groups}" for name, groups in texts_of_differing.items())
    classes = [errors[name] for name in texts_of_differing if name in errors] if errors else []
    error_class = classes[0] if classes else LockstepError
    lockstep.raise_on_all_ranks(
        error_class(
            f"{call}: {' and '.join(texts_of_differing)} "
            f"{'differs' if len(texts_of_differing) == 1 else 'differ'} between ranks "
            f"({lockstep.rank_text}), so the copies would drift apart.{lines}\n  {advice}"
        )
    )


def is_comparable(leaf: object) -> bool:
    """Tell whether a leaf is an array, slices or a number, whose contents can be compared."""
    return isinstance(leaf, np.ndarray | IndexedSlices) or is_scalar(leaf)


def digest_contents(tree: object, session: Session) -> bytes:
    """Return digests of the data in a tree that has to be alike on all ranks.

    Arrays of other libraries and buffers are data too, whichever way each rank has them. A
    `Mirrored` that this session has checked counts by the number of its handshake.
    """
    digests = []
    for leaf in pytree.flatten(tree)[0]:
        if isinstance(leaf, Mirrored):
            handshake_name = leaf._find_handshake(session)
            leaf = handshake_name or leaf.local
            if handshake_name:
                digests.append(handshake_name.encode().ljust(16))
        if is_comparable(leaf):
            digests.append(digest(list_arrays(leaf)))
        elif not isinstance(leaf, _UNCOMPARED_TYPES):
            with contextlib.suppress(LeafTypeError):  # it is no data at all
                digests.append(digest([as_array(leaf)]))
    return b"".join(digests)


def _encode_content(content: Array | bytes) -> bytes:
    """Return a digest, and the first element as text."""
    if isinstance(content, bytes):
        return xxhash.xxh3_128_digest(content).ljust(_CONTENT_NBYTES)
    value_text = str(content.reshape(-1)[0])[:_MAX_LETTERS] if content.size else ""
    value_text = f"[{value_text}, ...]" if content.size > 1 else value_text
    return digest([content]) + value_text.encode().ljust(_CONTENT_NBYTES - DIGEST_NBYTES)


def _describe_differences(contents: Sequence[bytes], ranks: Sequence[int]) -> str:
    """Return a text of the different contents, and the ranks that have each."""
    texts: list[str] = []
    for content, group_ranks in group_by_key(contents, ranks).items():
        value_text = content[DIGEST_NBYTES:].decode().strip()
        is_repeated = value_text and any(text.startswith(value_text) for text in texts)
        value_text = value_text or ("another value" if texts else "one value")
        texts.append(
            f"{value_text}{', but another,' if is_repeated else ''} on {ranks_text(group_ranks)}"
        )
    return "; ".join(shorten(texts))


def broadcast_replica0(lockstep: Lockstep, call: str, array: Array) -> Array:
    """Return replica 0's array. Collective. Cost: a handshake and a broadcast."""
    buffer = np.array(array, order="C")
    lockstep.handshake(f"{call} {spec_text(buffer)}")
    lockstep.comm.bcast(buffer, 0)
    return buffer

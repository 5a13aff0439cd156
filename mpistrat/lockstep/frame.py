"""The bytes that ranks exchange in a handshake; nothing here communicates.

Up to `FRAME_RANKS` ranks gather frames of 256 bytes::

    bytes 0-15    digest of the call (128 bits)
    bytes 16-23   number of the call
    bytes 24-27   flags: FAILED, FOLLOWUP, LARGE, LEAVING, ALARM, and a bit for the format's version
    bytes 28-31   the size of the payload
    bytes 32-255  the payload, up to MAX_PAYLOAD bytes, followed by zeros

A new field comes after the flags, whose place must never change: ranks of two versions find the
version bits there. `read_frames` compares the first 24 bytes only. A frame stays 256 bytes long.

More ranks reduce seven words of 64 bits with BOR: three that have to be equal (two of the digest
and the number, one of the payload), their complements, and the flags. All ``h`` are equal exactly
if ``bor(h) & bor(~h) == 0``. Above the flags are the bits of the size of the payload; over all
ranks they give a size that no rank exceeds.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, final

import numpy as np

from mpistrat.arrays import Array

FRAME_NBYTES = 256
FRAME_RANKS = 64
FAILED, FOLLOWUP, LARGE, LEAVING, ALARM = 1, 2, 4, 8, 16
# Each version of this format has a bit of its own, so ranks of two versions see two bits.
VERSION = 1
VERSION_BIT = 1 << (7 + VERSION)
VERSION_BITS = 0xFFFFFF00
ERRORS = FAILED | LEAVING | ALARM
_SIZES = 32  # where sizes begin in the word of flags
_COMPARED_ROWS = 16  # different rows that are looked for one by one

_HEAD = struct.Struct("<16sQII")
HEAD_NBYTES = _HEAD.size
MAX_PAYLOAD = FRAME_NBYTES - HEAD_NBYTES
# A whole frame: digest and number of the call, flags, size of the payload, payload.
pack_frame = struct.Struct(f"<16sQII{MAX_PAYLOAD}s").pack


class HandshakeResult(NamedTuple):
    """The result of one handshake; the same on every rank.

    Attributes:
      are_equal: All ranks have sent the same payload.
      frames: The frames of all ranks, one after the other; None if all payloads are equal, and if
        there are more than `FRAME_RANKS` ranks.
      flags: The flags of all ranks, by OR.
      is_same_call: All ranks make the same call.
    """

    are_equal: bool
    frames: bytes | None
    flags: int = VERSION_BIT
    is_same_call: bool = True

    @property
    def needs_followup(self) -> bool:
        """Whether some rank needs another exchange after the handshake."""
        return bool(self.flags & FOLLOWUP)

    @property
    def size_limit(self) -> int | None:
        """The size that no payload exceeds, where there are no frames; None if one is too large."""
        return None if self.flags & LARGE else self.flags >> _SIZES

    @property
    def payloads(self) -> list[bytes] | None:
        """The payload of every rank, in rank order; None if they are equal, or were not sent.

        They were not sent if some rank's is larger than `MAX_PAYLOAD`, or there are no frames.
        """
        frames = self.frames
        if frames is None or self.are_equal or self.flags & LARGE:
            return None
        return unpack_payloads(frames)


def unpack_payloads(frames: bytes) -> list[bytes]:
    """Return the payloads of the frames of all ranks."""
    starts = range(0, len(frames), FRAME_NBYTES)
    sizes = [_HEAD.unpack_from(frames, start)[3] for start in starts]
    payload_starts = range(HEAD_NBYTES, len(frames), FRAME_NBYTES)
    return [frames[start : start + size] for start, size in zip(payload_starts, sizes, strict=True)]


@final
class PayloadRows(Sequence[bytes]):
    r"""The payloads of all ranks, in one array; read where somebody asks.

    Args:
      rows: uint8 of shape (ranks, 1 + bytes): the size of a payload, the payload, zeros.

    Example:
      >>> rows = PayloadRows(np.frombuffer(b"\2ab" + b"\1c\0", np.uint8).reshape(2, 3))
      >>> list(rows), sorted(rows.find_parts(0, 1))
      ([b'ab', b'c'], [b'a', b'c'])
    """

    def __init__(self, rows: Array):
        """Keep the array."""
        self.rows = rows

    def __len__(self) -> int:
        """Return the number of ranks."""
        return len(self.rows)

    def __getitem__(self, rank: Any) -> Any:
        """Return the payload of a rank."""
        row = self.rows[rank]
        return row[1 : 1 + row[0]].tobytes()

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over the payloads of all ranks."""
        return (row[1 : 1 + row[0]] for row in list_rows(self.rows))

    def find_parts(self, start: int, stop: int) -> set[bytes]:
        """Return the different bytes that payloads have between two offsets."""
        return find_distinct_rows(self.rows[:, 1 + start : 1 + stop])


def find_distinct_payloads(payloads: Sequence[bytes]) -> set[bytes]:
    """Return the different payloads of all ranks."""
    if type(payloads) is PayloadRows:
        return {row[1 : 1 + row[0]] for row in find_distinct_rows(payloads.rows)}
    return set(payloads)


def list_rows(rows: Array) -> list[bytes]:
    """Return the rows of a matrix of uint8 as bytes."""
    row_bytes: list[bytes] = _join_columns(rows).tolist()
    return row_bytes


def find_distinct_rows(rows: Array) -> set[bytes]:
    r"""Return the different rows of a matrix of uint8, as bytes.

    Cost: A comparison of all rows for each of the first different ones; then a set of the others.

    Example:
      >>> find_distinct_rows(np.zeros((1000, 2), np.uint8))
      {b'\x00\x00'}
    """
    other_rows, distinct_rows = _join_columns(rows), set[bytes]()
    while len(other_rows) and len(distinct_rows) < _COMPARED_ROWS:
        distinct_rows.add(other_rows[0].tobytes())
        other_rows = other_rows[other_rows != other_rows[0]]
    return distinct_rows.union(other_rows.tolist())


def _join_columns(rows: Array) -> Array:
    """Return a matrix of uint8 as an array of one element for each row."""
    return np.ascontiguousarray(rows).view(f"V{rows.shape[1]}").reshape(-1)


def read_frames(frames: bytes, own_rank: int) -> HandshakeResult:
    """Return the handshake's result from the frames of all ranks.

    Args:
      frames: The frames, one after the other.
      own_rank: The number of this rank's frame.
    """
    own_call = frames[own_rank * FRAME_NBYTES : own_rank * FRAME_NBYTES + 24]
    flags, is_same_call = 0, True
    for start in range(0, len(frames), FRAME_NBYTES):
        flags |= _HEAD.unpack_from(frames, start)[2]
        is_same_call = is_same_call and frames[start : start + 24] == own_call
    payloads = unpack_payloads(frames)
    are_equal = not flags & LARGE and payloads.count(payloads[0]) == len(payloads)
    return HandshakeResult(are_equal, frames, flags, is_same_call)


def pack_words(digest: bytes, number: int, payload: bytes, flags: int) -> Array:
    """Return the seven words of a rank: uint64 of shape (7,)."""
    call_words = np.frombuffer(digest, np.uint64) ^ np.array([number, 0], np.uint64)
    flags |= LARGE if len(payload) > MAX_PAYLOAD else len(payload) << _SIZES
    content = np.frombuffer(hashlib.blake2b(payload, digest_size=8).digest(), np.uint64)
    compared_words = np.concatenate([call_words, content])
    return np.concatenate([compared_words, ~compared_words, np.array([flags], np.uint64)])


def read_words(words: Array) -> HandshakeResult:
    """Return the handshake's result from the words of all ranks.

    Args:
      words: The words of all ranks, by OR.
    """
    differing = words[:3] & words[3:6]
    return HandshakeResult(not differing[2], None, int(words[6]), not differing[:2].any())

"""What the ranks exchange in a handshake, as bytes; pure.

Up to `FRAME_RANKS` ranks gather frames of 256 bytes::

    bytes 0-15    digest of the call (128 bits)
    bytes 16-23   number of the call
    bytes 24-27   flags: FAILED, MORE, LARGE, LEAVING, ALARM
    bytes 28-31   how many payload bytes follow
    bytes 32-255  payload, up to ROOM bytes

More ranks reduce seven words of 64 bits with BOR: three that have to be equal (two of the digest
and the number, one of the payload), their complements, and the flags. All ``h`` are equal exactly
if ``bor(h) & bor(~h) == 0``. Above the flags are the bits of how many payload bytes a rank has: of
all ranks together they say how many no rank has more of.
"""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

import numpy as np

from mpistrat.arrays import Array

FRAME = 256
FRAME_RANKS = 64
FAILED, MORE, LARGE, LEAVING, ALARM = 1, 2, 4, 8, 16

_HEAD = struct.Struct("<16sQII")
HEAD = _HEAD.size
pack = _HEAD.pack  # digest and number of the call, flags, and how many bytes of payload follow
ROOM = FRAME - HEAD
SIZES = 32  # where sizes begin in the word of flags


class Heard(NamedTuple):
    """What all ranks have said.

    Attributes:
      union: The flags of all ranks, by OR.
      same: All make the same call.
      smalls: The payload of every rank, in rank order; None if some rank's was not sent with it.
    """

    union: int
    same: bool
    smalls: list[bytes] | None


def read(received: bytes, mine: bytes, small: bytes, flags: int) -> Heard:
    """Return what the frames of all ranks say.

    Args:
      received: The frames, one after the other.
      mine: The head of this rank's.
      small: This rank's payload.
      flags: This rank's flags.
    """
    union, same, smalls = flags, True, []
    for at in range(0, len(received), FRAME):
        size = len(small)
        if received[at : at + HEAD] != mine:  # seldom, and then worth a closer look
            _, _, theirs, size = _HEAD.unpack_from(received, at)
            union |= theirs
            same = same and received[at : at + 24] == mine[:24]
        smalls.append(received[at + HEAD : at + HEAD + size])
    return Heard(union, same, None if union & LARGE else smalls)


def words(digest: bytes, number: int, small: bytes, flags: int) -> Array:
    """Return the seven words of a rank: uint64 of shape (7,)."""
    call = np.frombuffer(digest, np.uint64) ^ np.array([number, 0], np.uint64)
    flags |= LARGE if len(small) > ROOM else len(small) << SIZES
    payload = np.frombuffer(hashlib.blake2b(small, digest_size=8).digest(), np.uint64)
    asserted = np.concatenate([call, payload])
    return np.concatenate([asserted, ~asserted, np.array([flags], np.uint64)])


def read_words(union: Array, small: bytes, ranks: int) -> Heard:
    """Return what the words of all ranks say.

    Args:
      union: Those of all, by OR.
      small: This rank's payload; all ranks' if these are equal.
      ranks: How many there are.
    """
    differing = union[:3] & union[3:6]
    smalls = None if differing[2] else [small] * ranks
    return Heard(int(union[6]), not differing[:2].any(), smalls)

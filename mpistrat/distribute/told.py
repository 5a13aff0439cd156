"""A compact description of a tree, as bytes that are sent with a handshake; pure."""

from __future__ import annotations

import hashlib
import zlib
from typing import Any

from mpistrat import nest
from mpistrat.arrays import digest
from mpistrat.comm.codec import encode, pack, unpack
from mpistrat.distribute.kinds import DistributedVariable
from mpistrat.distribute.slices import arrays_of
from mpistrat.distribute.values import Mirrored, Origin, PerReplica
from mpistrat.errors import LeafTypeError
from mpistrat.lockstep.lockstep import Lockstep

NONE, VARIABLE, MIRRORED, ELSEWHERE = b"n", b"v", b"m", b"o"
UNWRAPPED = frozenset({NONE, VARIABLE, MIRRORED})
_NAMED = frozenset({VARIABLE[0], MIRRORED[0]})
_NAME = 8  # bytes that say which variable, or which mirrored value


def told(
    lockstep: Lockstep, home: Origin, tree: Any
) -> tuple[nest.Structure, str, list[Any], bytes, list[tuple[bytes, bytes]], bytes, bool]:
    """Return what this replica says of a tree.

    Args:
      lockstep: Tells how much is sent with its handshake.
      home: Whose values are known to be the same.
      tree: Any value.

    Returns:
      The structure of the tree, and that in words; this replica's leaves; `order_of` the tree; what
      it says of each leaf, as `read` returns that; the message; and whether no leaf has to be
      wrapped, if all replicas say the same.
    """
    leaves, structure = nest.flatten(tree)
    leaves = [leaf.local if type(leaf) is PerReplica else leaf for leaf in leaves]
    entries = [_entry(leaf, home) for leaf in leaves]
    order = order_of(tree)
    small = b"d" + order + pack(entries)
    if not lockstep.fits(len(small)):
        entries = [entry if entry[0] in UNWRAPPED else (ELSEWHERE, b"") for entry in entries]
        kinds, names = [kind for kind, _ in entries], [data for _, data in entries]
        small = b"k" + order + b"".join(kinds + names)
    bare = all(kind in UNWRAPPED for kind, _ in entries)
    return structure, nest.describe(structure), leaves, order, entries, small, bare


def _entry(leaf: Any, home: Origin) -> tuple[bytes, bytes]:
    if isinstance(leaf, DistributedVariable):
        return VARIABLE, leaf.number.to_bytes(_NAME, "little")
    if type(leaf) is Mirrored:
        return MIRRORED, _mirrored_name(leaf, home)
    return encode(leaf, whole=False)


def _mirrored_name(leaf: Mirrored, home: Origin) -> bytes:
    """Return what is equal on all ranks exactly if the value is."""
    proof = leaf.proved_by(home.session)
    if proof:
        return hashlib.blake2b(proof.encode(), digest_size=_NAME).digest()
    try:
        return digest(arrays_of(leaf.local))[:_NAME]
    except LeafTypeError:  # no array: then what it looks like has to do
        return hashlib.blake2b(repr(leaf.local).encode(), digest_size=_NAME).digest()


def order_of(tree: Any) -> bytes:
    """Return what differs between ranks whose dicts have their keys in different orders."""
    text = nest.order(tree)
    return zlib.crc32(text.encode()).to_bytes(4, "little") if text else b""


def read(message: bytes, at: int, count: int) -> list[tuple[bytes, bytes]]:
    """Return the kinds and bytes of the leaves that a message tells of.

    Args:
      message: As `told` makes it.
      at: Where they begin, after the order.
      count: How many there are.
    """
    if message[:1] != b"k":
        return unpack(message[at:])
    kinds, at, entries = message[at : at + count], at + count, []
    for kind in kinds:
        size = _NAME if kind in _NAMED else 0
        entries.append((bytes([kind]), message[at : at + size]))
        at += size
    return entries

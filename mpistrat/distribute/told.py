"""A compact description of a tree, as bytes that are sent with a handshake; pure."""

from __future__ import annotations

import functools
import hashlib
import zlib
from collections.abc import Iterable
from typing import Any, TypeAlias, final

from mpistrat import nest
from mpistrat.arrays import digest
from mpistrat.comm.codec import encode
from mpistrat.distribute.kinds import DistributedVariable
from mpistrat.distribute.slices import arrays_of
from mpistrat.distribute.values import Mirrored, Origin, PerReplica
from mpistrat.errors import LeafTypeError
from mpistrat.lockstep.frame import MAX_PAYLOAD

NONE, VARIABLE, MIRRORED, UNSENT_VALUE = b"n", b"v", b"m", b"o"
BOOL, SHORT_TEXT, TEXT = b"b", b"s", b"t"
UNWRAPPED_KINDS = frozenset({NONE, VARIABLE, MIRRORED})
# Kinds of the values that `merge_fn` gets unwrapped, if all replicas agree.
PLAIN_KINDS = frozenset({BOOL, TEXT, SHORT_TEXT})
_TINY = 64
_NAME = 8  # bytes that say which variable, which mirrored value, or which text
# How many bytes a message has of a leaf, where not all values could be sent.
_SIZES = {VARIABLE[0]: _NAME, MIRRORED[0]: _NAME, TEXT[0]: _NAME, BOOL[0]: 1}


# What `summarize_tree` returns.
Summary: TypeAlias = "tuple[nest.Structure, str, list[Any], bytes, bytes, bool]"


def summarize_tree(home: Origin, tree: Any, should_unwrap_plain: bool = False) -> Summary:
    """Return this replica's summary of a tree.

    Args:
      home: Whose values are known to be the same.
      tree: Any value.
      should_unwrap_plain: Text, bytes and bools are not wrapped where all replicas have the same.

    Returns:
      The structure of the tree, and that in words; this replica's leaves; `order_of` the tree; the
      message, as `LeafMessages` reads it; and whether no leaf has to be wrapped, if all replicas
      say the same.
    """
    leaves, structure = nest.flatten(tree)
    leaves = [leaf.local if type(leaf) is PerReplica else leaf for leaf in leaves]
    entries = [_entry(leaf, home, should_unwrap_plain) for leaf in leaves]
    order = order_of(tree)
    kinds, contents = zip(*entries, strict=True) if entries else ((), ())
    sizes = [*map(len, contents)]
    if 1 + len(order) + 2 * len(sizes) + sum(sizes) <= MAX_PAYLOAD:
        message = b"d" + order + b"".join(kinds) + bytes(sizes) + b"".join(contents)
    else:
        kinds, contents = zip(
            *[_name_only(*entry, should_unwrap_plain) for entry in entries], strict=True
        )
        message = b"k" + order + b"".join(kinds) + b"".join(contents)
    bare_kinds = UNWRAPPED_KINDS | PLAIN_KINDS if should_unwrap_plain else UNWRAPPED_KINDS
    is_bare = bare_kinds.issuperset(kinds)
    return structure, nest.describe(structure), leaves, order, message, is_bare


def _name_only(kind: bytes, data: bytes, should_unwrap_plain: bool) -> tuple[bytes, bytes]:
    """Return an entry without its value; plain values that may be unwrapped keep a name."""
    if should_unwrap_plain and kind in PLAIN_KINDS:
        return (kind, data) if kind == BOOL else text_name(kind, data)
    return (kind, data) if kind in UNWRAPPED_KINDS else (UNSENT_VALUE, b"")


def text_name(kind: bytes, data: bytes) -> tuple[bytes, bytes]:
    """Return the entry by which one short text is compared with others, which may be long."""
    return _digest_of(str, data) if kind == SHORT_TEXT else (kind, data)


def _digest_of(kind: type, data: bytes) -> tuple[bytes, bytes]:
    name = f"{kind.__module__}.{kind.__qualname__} ".encode()
    return TEXT, hashlib.blake2b(name + data, digest_size=_NAME).digest()


def _entry(leaf: Any, home: Origin, should_unwrap_plain: bool) -> tuple[bytes, bytes]:
    if isinstance(leaf, DistributedVariable):
        return VARIABLE, leaf.number.to_bytes(_NAME, "little")
    if type(leaf) is Mirrored:
        return MIRRORED, _mirrored_name(leaf, home)
    if should_unwrap_plain and isinstance(leaf, str | bytes):
        data = leaf.encode(errors="surrogatepass") if isinstance(leaf, str) else bytes(leaf)
        if type(leaf) is not str or len(data) > _TINY:
            return _digest_of(type(leaf), data)
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


@final
class LeafMessages:
    """What all ranks say of a tree, as `summarize_tree` makes it; read as far as somebody asks.

    Args:
      messages: Of all ranks, in replica order.
      start: Where the kinds of the leaves begin, after the order.
      count: How many leaves there are.
    """

    def __init__(self, messages: list[bytes], start: int, count: int):
        """Keep the messages."""
        self._messages, self._start, self._count = messages, start, count

    def kinds(self, leaf: int) -> set[bytes]:
        """Return the kinds that a leaf has."""
        at = self._start + leaf
        return {message[at : at + 1] for message in self._messages}

    def column(self, leaf: int) -> list[tuple[bytes, bytes]]:
        """Return kind and bytes of a leaf on each rank."""
        return [row[leaf] for row in self._rows]

    @functools.cached_property
    def _rows(self) -> list[list[tuple[bytes, bytes]]]:
        return [self._read(message) for message in self._messages]

    def _read(self, message: bytes) -> list[tuple[bytes, bytes]]:
        start, at = self._start, self._start + self._count
        kinds = message[start:at]
        sizes: Iterable[int] = (_SIZES.get(kind, 0) for kind in kinds)
        if message[:1] == b"d":
            sizes, at = message[at : at + self._count], at + self._count
        entries = []
        for kind, size in zip(kinds, sizes, strict=True):
            entries.append((bytes([kind]), message[at : at + size]))
            at += size
        return entries

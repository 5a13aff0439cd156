"""The trees of replicas, in the bytes that a handshake brings of each.

`summarize_tree` writes a compact summary of this replica's tree, with its small values, and
`LeafMessages` reads those of all ranks; above `FRAME_RANKS` ranks they stay one array, of which a
leaf is cut for all ranks at once. Nothing here communicates.

A dict has its keys in one order on all ranks: a checksum of the order is part of the summary.
"""

from __future__ import annotations

import functools
import hashlib
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np

from mpistrat import pytree
from mpistrat.arrays import Array, digest
from mpistrat.comm.serialization import encode
from mpistrat.errors import LeafTypeError
from mpistrat.lockstep.frame import MAX_PAYLOAD, PayloadRows, find_distinct_rows, list_rows
from mpistrat.variables.indexed_slices import list_arrays
from mpistrat.variables.kinds import DistributedVariable
from mpistrat.variables.values import Mirrored, Origin, PerReplica

NONE_TAG, VARIABLE_TAG, MIRRORED_TAG, UNSENT_TAG = b"n", b"v", b"m", b"o"
BOOL_TAG, SHORT_TEXT_TAG, TEXT_TAG = b"b", b"s", b"t"
UNWRAPPED_TAGS = frozenset({NONE_TAG, VARIABLE_TAG, MIRRORED_TAG})
# Kinds of the values that `merge_fn` gets unwrapped, if all replicas agree.
PLAIN_TAGS = frozenset({BOOL_TAG, TEXT_TAG, SHORT_TEXT_TAG})
_MAX_SHORT_TEXT = 64
_NAME_NBYTES = 8  # bytes that say which variable, which mirrored value, or which text
# How many bytes a message has of a leaf, where not all values could be sent.
_NBYTES_BY_TAG = {
    VARIABLE_TAG[0]: _NAME_NBYTES,
    MIRRORED_TAG[0]: _NAME_NBYTES,
    TEXT_TAG[0]: _NAME_NBYTES,
    BOOL_TAG[0]: 1,
}


_NBYTES_BY_BYTE = np.array([_NBYTES_BY_TAG.get(tag, 0) for tag in range(256)])
Entry: TypeAlias = tuple[bytes, bytes]  # the kind of a leaf, and its bytes


@final
class TreeSummary(NamedTuple):
    """The summary of one replica's tree.

    Attributes:
      structure: The structure.
      text: The structure in words.
      leaves: This replica's leaves.
      order: `encode_order` of the tree.
      message: The bytes that are sent, as `LeafMessages` reads them.
      is_bare: No leaf has to be wrapped if all replicas say the same.
    """

    structure: pytree.Structure
    text: str
    leaves: list[Any]
    order: bytes
    message: bytes
    is_bare: bool


def summarize_tree(origin: Origin, tree: object, should_unwrap_plain: bool = False) -> TreeSummary:
    """Return this replica's summary of a tree.

    Args:
      origin: The ranks whose values are known to be the same.
      tree: Any value.
      should_unwrap_plain: Text, bytes and bools are not wrapped where all replicas have the same.
    """
    leaves, structure = pytree.flatten(tree)
    leaves = [leaf.local if type(leaf) is PerReplica else leaf for leaf in leaves]
    entries = [_encode_leaf(leaf, origin, should_unwrap_plain) for leaf in leaves]
    order = encode_order(tree)
    tags, contents = zip(*entries, strict=True) if entries else ((), ())
    sizes = [*map(len, contents)]
    if 1 + len(order) + 2 * len(sizes) + sum(sizes) <= MAX_PAYLOAD:
        message = b"d" + order + b"".join(tags) + bytes(sizes) + b"".join(contents)
    else:
        tags, contents = zip(
            *[_drop_value(*entry, should_unwrap_plain) for entry in entries], strict=True
        )
        message = b"k" + order + b"".join(tags) + b"".join(contents)
    bare_tags = UNWRAPPED_TAGS | PLAIN_TAGS if should_unwrap_plain else UNWRAPPED_TAGS
    is_bare = bare_tags.issuperset(tags)
    text = pytree.describe(structure)
    # Without a call of a Python function, as each step has several.
    return tuple.__new__(TreeSummary, (structure, text, leaves, order, message, is_bare))


def _drop_value(tag: bytes, content: bytes, should_unwrap_plain: bool) -> tuple[bytes, bytes]:
    """Return an entry without its value; plain values that may be unwrapped keep a name."""
    if should_unwrap_plain and tag in PLAIN_TAGS:
        return (tag, content) if tag == BOOL_TAG else shorten_text(tag, content)
    return (tag, content) if tag in UNWRAPPED_TAGS else (UNSENT_TAG, b"")


def shorten_text(tag: bytes, content: bytes) -> tuple[bytes, bytes]:
    """Return the entry by which one short text is compared with others, which may be long."""
    return _digest_text(str, content) if tag == SHORT_TEXT_TAG else (tag, content)


def _digest_text(text_class: type, content: bytes) -> tuple[bytes, bytes]:
    class_name = f"{text_class.__module__}.{text_class.__qualname__} ".encode()
    return TEXT_TAG, hashlib.blake2b(class_name + content, digest_size=_NAME_NBYTES).digest()


def _encode_leaf(leaf: object, origin: Origin, should_unwrap_plain: bool) -> tuple[bytes, bytes]:
    if isinstance(leaf, DistributedVariable):
        return VARIABLE_TAG, leaf._number.to_bytes(_NAME_NBYTES, "little")
    if type(leaf) is Mirrored:
        return MIRRORED_TAG, _name_mirrored(leaf, origin)
    if should_unwrap_plain and isinstance(leaf, str | bytes):
        content = leaf.encode(errors="surrogatepass") if isinstance(leaf, str) else bytes(leaf)
        if type(leaf) is not str or len(content) > _MAX_SHORT_TEXT:
            return _digest_text(type(leaf), content)
    return encode(leaf, is_unlimited=False)


def _name_mirrored(mirrored: Mirrored, origin: Origin) -> bytes:
    """Return bytes that are equal on all ranks exactly if the value is."""
    handshake_name = mirrored._find_handshake(origin.session)
    if handshake_name:
        return hashlib.blake2b(handshake_name.encode(), digest_size=_NAME_NBYTES).digest()
    try:
        return digest(list_arrays(mirrored.local))[:_NAME_NBYTES]
    except LeafTypeError:  # no array: then what it looks like has to do
        return hashlib.blake2b(repr(mirrored.local).encode(), digest_size=_NAME_NBYTES).digest()


def encode_order(tree: object) -> bytes:
    """Return a checksum of the order of keys in the dicts of a tree; empty without dicts."""
    text = pytree.key_order_text(tree)
    return zlib.crc32(text.encode()).to_bytes(4, "little") if text else b""


@final
class LeafMessages:
    """The summaries of all ranks, as `summarize_tree` makes them; parsed as far as needed.

    Args:
      messages: The bytes of all ranks, in replica order; one message if all are equal.
      start: Where the kinds of the leaves begin, after the order.
      leaf_count: How many leaves there are.
    """

    def __init__(self, messages: Sequence[bytes], start: int, leaf_count: int):
        """Keep the messages."""
        self._messages, self._start, self._count = messages, start, leaf_count

    def find_tags(self, leaf_index: int) -> set[bytes]:
        """Return the kinds that a leaf has."""
        at, messages = self._start + leaf_index, self._messages
        if len(messages) == 1:
            return {messages[0][at : at + 1]}
        return find_parts(messages, at, at + 1)

    def find_entries(self, leaf_index: int) -> set[Entry]:
        """Return the different pairs of kind and bytes that a leaf has."""
        if type(self._messages) is PayloadRows:
            return {*map(_split_entry, find_distinct_rows(self._cut_leaf(leaf_index)))}
        return {*self.list_entries(leaf_index)}

    def list_entries(self, leaf_index: int) -> list[Entry]:
        """Return kind and bytes of a leaf on each rank; on one, if all messages are equal."""
        if type(self._messages) is PayloadRows:
            return [*map(_split_entry, list_rows(self._cut_leaf(leaf_index)))]
        return [entries[leaf_index] for entries in self._entries_by_rank]

    def _cut_leaf(self, leaf_index: int) -> Array:
        """Return the kind, the size and the bytes of a leaf, a row for each rank; then zeros."""
        assert type(self._messages) is PayloadRows
        messages, count = self._messages.rows[:, 1:], self._count
        tags = messages[:, self._start : self._start + count]
        sizes, has_sizes = _NBYTES_BY_BYTE[tags], messages[:, :1] == b"d"[0]
        if has_sizes.any():
            sent_sizes = messages[:, self._start + count : self._start + 2 * count]
            sizes = np.where(has_sizes, sent_sizes, sizes)
        leaf_sizes = sizes[:, leaf_index : leaf_index + 1]
        starts = self._start + count + count * has_sizes + sizes[:, :leaf_index].sum(1)[:, None]
        columns = np.arange(int(leaf_sizes.max()))
        indices = np.minimum(starts + columns, messages.shape[1] - 1)
        contents = np.take_along_axis(messages, indices, axis=1)
        contents = np.where(columns < leaf_sizes, contents, 0)
        leaf_tags = tags[:, leaf_index : leaf_index + 1]
        return np.concatenate([leaf_tags, leaf_sizes, contents], axis=1).astype(np.uint8)

    @functools.cached_property
    def _entries_by_rank(self) -> list[list[Entry]]:
        return [self._parse(message) for message in self._messages]

    def _parse(self, message: bytes) -> list[Entry]:
        start, at = self._start, self._start + self._count
        tags = message[start:at]
        sizes: Iterable[int] = (_NBYTES_BY_TAG.get(tag, 0) for tag in tags)
        if message[:1] == b"d":
            sizes, at = message[at : at + self._count], at + self._count
        entries = []
        for tag, size in zip(tags, sizes, strict=True):
            entries.append((bytes([tag]), message[at : at + size]))
            at += size
        return entries


def find_parts(messages: Sequence[bytes], start: int, stop: int) -> set[bytes]:
    """Return the different bytes that messages have between two offsets."""
    if type(messages) is PayloadRows:
        return messages.find_parts(start, stop)
    return {message[start:stop] for message in messages}


def _split_entry(row: bytes) -> Entry:
    return row[:1], row[2 : 2 + row[1]]

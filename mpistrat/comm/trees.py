"""Trees of any values as bytes that other ranks can read; nothing is pickled.

What `mpistrat.comm.codec` has no kind for is here: dicts, lists and tuples, and bytes and arrays of
objects inside of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from mpistrat.arrays import is_bfloat16, is_foreign, is_masked
from mpistrat.comm.codec import decode, encode, pack, unpack
from mpistrat.errors import LeafTypeError

_DICT, _LIST, _TUPLE = b"D", b"L", b"T"
_BYTES, _OBJECTS, _STRINGS = b"y", b"O", b"S"
_ADVICE = (
    "Give numbers, text, bytes, None, arrays of numbers, text or dates, and dicts, lists and "
    "tuples of these."
)


def encode_tree(value: Any, path: str = "") -> tuple[bytes, bytes]:
    """Return the kind of a tree, one byte, and its bytes.

    Args:
      value: A tree of dicts, lists and tuples, of numbers, text, bytes, None and arrays.
      path: What errors call it; empty for a whole tree.

    Raises:
      LeafTypeError: A leaf is something else.

    Example:
      >>> decode_tree(*encode_tree({"names": ["a", "bc"], 1: (None, b"d")}))
      {'names': ['a', 'bc'], 1: (None, b'd')}
    """
    if isinstance(value, dict):
        pairs = [(encode_tree(key, f"a key of {path or 'the value'}"), key) for key in value]
        items = [(key, encode_tree(value[name], f"{path}[{name!r}]")) for key, name in pairs]
        return _DICT, pack([*itertools.chain.from_iterable(items)])
    if isinstance(value, list | tuple):
        items_of = [encode_tree(item, f"{path}[{i}]") for i, item in enumerate(value)]
        return _LIST if isinstance(value, list) else _TUPLE, pack(items_of)
    if type(value) is bytes:
        return _BYTES, value
    if isinstance(value, np.ndarray) and value.dtype.kind in "OT":
        kind = _STRINGS if value.dtype.kind == "T" else _OBJECTS
        return kind, pack([encode_tree([*value.shape]), encode_tree([*value.flat], path)])
    if not _is_leaf(value):
        raise LeafTypeError(
            f"gather_objects: {path or 'the value'} is {_described(value)}, which is not sent to "
            f"other ranks. {_ADVICE}"
        )
    return encode(np.asarray(value) if isinstance(value, np.ndarray) else value, whole=True)


def _is_leaf(value: Any) -> bool:
    """Tell whether the codec sends a value without pickling it."""
    if isinstance(value, np.ndarray | np.generic):
        foreign = value.dtype.kind == "V" or is_foreign(value.dtype)
        return not is_masked(value) and (not foreign or is_bfloat16(value.dtype))
    return type(value) in (type(None), bool, int, float, complex, str)


def _described(value: Any) -> str:
    """Return what a leaf is, and of some arrays what to give instead."""
    if is_masked(value):
        return "a masked array, whose mask would be lost (give its data and its mask)"
    if isinstance(value, np.ndarray | np.generic):
        fields = " (give its fields as a dict)" if value.dtype.names else ""
        return f"an array of dtype {value.dtype}{fields}"
    return f"of type {type(value).__name__}"


def decode_tree(kind: bytes, content: bytes) -> Any:
    """Return the tree that `encode_tree` took, of plain dicts, lists and tuples.

    Arrays are fresh and writable.
    """
    if kind == _DICT:
        items: Iterator[Any] = itertools.starmap(decode_tree, unpack(content))
        return dict(zip(items, items, strict=True))
    if kind in (_LIST, _TUPLE):
        values = itertools.starmap(decode_tree, unpack(content))
        return [*values] if kind == _LIST else (*values,)
    if kind == _BYTES:
        return content
    if kind not in (_OBJECTS, _STRINGS):
        return decode(kind, content)
    shape, values = itertools.starmap(decode_tree, unpack(content))
    array = np.empty(len(values), np.dtypes.StringDType() if kind == _STRINGS else object)
    for index, value in enumerate(values):
        array[index] = value
    return array.reshape(shape)

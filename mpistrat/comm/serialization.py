"""Values of one replica, and trees of values, as bytes that other ranks can read.

`encode` takes one value: numbers and arrays become dtype, shape and raw bytes, text UTF-8. Only
other objects are pickled, and only when a program asks for them; ranks of one job trust each other.

`encode_tree` takes trees of dicts, lists and tuples, also with bytes and arrays of objects inside
of them; nothing is pickled.
"""

from __future__ import annotations

import importlib
import itertools
import pickle
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from mpistrat.arrays import is_bfloat16, is_foreign, is_masked
from mpistrat.errors import LeafTypeError, text_of

# A size below 255 takes one byte, so that many small values fit one frame.
_SHORT, _LONG = struct.Struct("<cB"), struct.Struct("<cBQ")
_MAX_SMALL_NBYTES = 64


def _encode_array(value: object, is_unlimited: bool) -> bytes | None:
    array = np.asarray(value)
    unnamed = array.dtype.kind == "V" or is_foreign(array.dtype)  # by its own text, to NumPy
    if unnamed and not (is_unlimited and is_bfloat16(array.dtype)):
        return None
    dtype_text = array.dtype.name if unnamed else array.dtype.str
    if array.dtype.hasobject or array.dtype.names is not None:
        return None
    head = f"{dtype_text};{','.join(map(str, array.shape))};".encode()
    return head + array.tobytes()


def encode(value: Any, is_unlimited: bool) -> tuple[bytes, bytes]:
    """Return the kind of a value, one byte, and its bytes.

    Args:
      value: Any value.
      is_unlimited: Encode it whatever its size. Otherwise values that are larger than a few
        numbers, or would have to be pickled, are only noted, with kind ``b"o"``.

    Raises:
      LeafTypeError: `is_unlimited`, and the value cannot be pickled.

    Example:
      >>> decode(*encode(2.5, False))
      2.5
    """
    if value is None:
        return b"n", b""
    # Not what refines these types, such as an IntEnum: it is to be the same on all ranks.
    kind = type(value)
    if kind is bool:
        return b"b", b"\1" if value else b"\0"
    if kind is int:
        return b"i", b"%x" % value  # of decimal digits Python converts no more than 4300
    if kind is float:
        return b"f", struct.pack("<d", value)
    if kind is complex:
        return b"c", struct.pack("<dd", value.real, value.imag)
    if kind is str and (is_unlimited or len(value) <= _MAX_SMALL_NBYTES):
        return b"s", value.encode(errors="surrogatepass")
    if kind in (np.ndarray, np.memmap) or isinstance(value, np.generic):
        content = (
            _encode_array(value, is_unlimited)
            if is_unlimited or value.nbytes <= _MAX_SMALL_NBYTES
            else None
        )
        if content is not None:
            return b"g" if isinstance(value, np.generic) else b"a", content
    return (b"p", _pickle(value)) if is_unlimited else (b"o", b"")


def _pickle(value: object) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        reason = text_of(error).rstrip(".")
        raise LeafTypeError(
            f"a value of type {type(value).__name__} cannot be sent to other ranks: {reason}. "
            "Use arrays, numbers or strings."
        ) from error


def decode(type_code: bytes, content: bytes) -> Any:
    """Return the value that `encode` took. Arrays are fresh and writable."""
    if type_code == b"n":
        return None
    if type_code == b"b":
        return content == b"\1"
    if type_code == b"i":
        return int(content, 16)
    if type_code == b"f":
        return struct.unpack("<d", content)[0]
    if type_code == b"c":
        return complex(*struct.unpack("<dd", content))
    if type_code == b"s":
        return content.decode(errors="surrogatepass")
    if type_code == b"p":
        return pickle.loads(content)
    dtype_text, shape, raw = content.split(b";", 2)
    sizes = [int(n) for n in shape.split(b",")] if shape else []
    if dtype_text == b"bfloat16":
        importlib.import_module("ml_dtypes")  # which makes the name known to NumPy
    array = np.frombuffer(raw, np.dtype(dtype_text.decode())).reshape(sizes).copy()
    return array[()] if type_code == b"g" else array


def pack(entries: list[tuple[bytes, bytes]]) -> bytes:
    """Return kinds and bytes of several values as one message."""
    pieces = []
    for kind, content in entries:
        size = len(content)
        pieces += [_SHORT.pack(kind, size) if size < 255 else _LONG.pack(kind, 255, size), content]
    return b"".join(pieces)


def unpack(message: bytes) -> list[tuple[bytes, bytes]]:
    """Return the entries that `pack` took.

    Example:
      >>> unpack(pack([(b"n", b""), (b"s", b"text")]))
      [(b'n', b''), (b's', b'text')]
    """
    entries = []
    at = 0
    while at < len(message):
        kind, size = _SHORT.unpack_from(message, at)
        head = _SHORT
        if size == 255:
            head = _LONG
            kind, _, size = _LONG.unpack_from(message, at)
        at += head.size
        entries.append((kind, message[at : at + size]))
        at += size
    return entries


_DICT, _LIST, _TUPLE = b"D", b"L", b"T"
_BYTES, _OBJECTS, _STRINGS = b"y", b"O", b"S"
_ADVICE = (
    "Give numbers, text, bytes, None, arrays of numbers, text or dates, and dicts, lists and "
    "tuples of these."
)


def encode_tree(value: object, path: str = "") -> tuple[bytes, bytes]:
    """Return the kind of a tree, one byte, and its bytes.

    Args:
      value: A tree of dicts, lists and tuples, of numbers, text, bytes, None and arrays.
      path: The name of the value in errors; empty for a whole tree.

    Raises:
      LeafTypeError: A leaf is something else.

    Example:
      >>> decode_tree(*encode_tree({"names": ["a", "bc"], 1: (None, b"d")}))
      {'names': ['a', 'bc'], 1: (None, b'd')}
    """
    if isinstance(value, dict):
        pairs = [(encode_tree(key, f"a key of {path or 'the value'}"), key) for key in value]
        encoded_pairs = [
            (key, encode_tree(value[name], f"{path}[{name!r}]")) for key, name in pairs
        ]
        return _DICT, pack([*itertools.chain.from_iterable(encoded_pairs)])
    if isinstance(value, list | tuple):
        encoded_elements = [encode_tree(element, f"{path}[{i}]") for i, element in enumerate(value)]
        return _LIST if isinstance(value, list) else _TUPLE, pack(encoded_elements)
    if type(value) is bytes:
        return _BYTES, value
    if isinstance(value, np.ndarray) and value.dtype.kind in "OT":
        kind = _STRINGS if value.dtype.kind == "T" else _OBJECTS
        return kind, pack([encode_tree([*value.shape]), encode_tree([*value.flat], path)])
    if not _is_leaf(value):
        raise LeafTypeError(
            f"gather_objects: {path or 'the value'} is {_describe_leaf(value)}, which is not sent "
            f"to other ranks. {_ADVICE}"
        )
    return encode(np.asarray(value) if isinstance(value, np.ndarray) else value, is_unlimited=True)


def _is_leaf(value: object) -> bool:
    """Tell whether the codec sends a value without pickling it."""
    if isinstance(value, np.ndarray | np.generic):
        foreign = value.dtype.kind == "V" or is_foreign(value.dtype)
        return not is_masked(value) and (not foreign or is_bfloat16(value.dtype))
    return type(value) in (type(None), bool, int, float, complex, str)


def _describe_leaf(value: object) -> str:
    """Return a description of a leaf, for some arrays with advice."""
    if is_masked(value):
        return "a masked array, whose mask would be lost (give its data and its mask)"
    if isinstance(value, np.ndarray | np.generic):
        fields = " (give its fields as a dict)" if value.dtype.names else ""
        return f"an array of dtype {value.dtype}{fields}"
    return f"of type {type(value).__name__}"


def decode_tree(type_code: bytes, content: bytes) -> Any:
    """Return the tree that `encode_tree` took, of plain dicts, lists and tuples.

    Arrays are fresh and writable.
    """
    if type_code == _DICT:
        decoded_items: Iterator[Any] = itertools.starmap(decode_tree, unpack(content))
        return dict(zip(decoded_items, decoded_items, strict=True))
    if type_code in (_LIST, _TUPLE):
        values = itertools.starmap(decode_tree, unpack(content))
        return [*values] if type_code == _LIST else (*values,)
    if type_code == _BYTES:
        return content
    if type_code not in (_OBJECTS, _STRINGS):
        return decode(type_code, content)
    shape, values = itertools.starmap(decode_tree, unpack(content))
    array = np.empty(len(values), np.dtypes.StringDType() if type_code == _STRINGS else object)
    for index, value in enumerate(values):
        array[index] = value
    return array.reshape(shape)

"""The entries for arrays in checkpoint manifests, and their validation."""

from __future__ import annotations

import contextlib
import errno
import importlib
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpistrat.arrays import Array, dtype_name, is_bfloat16
from mpistrat.checkpoint.files import of_file
from mpistrat.errors import CheckpointError, DataError, StructureError

MANIFEST = "manifest.json"
_CODES = np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?"
_ITEMS = {"bfloat16": 2, **{dtype_name(np.dtype(c)): np.dtype(c).itemsize for c in _CODES}}


class Entry(NamedTuple):
    """What the manifest says of an array."""

    dtype: str
    shape: tuple[int, ...]

    @staticmethod
    def from_array(array: Array) -> Entry:
        """Return the entry of an array."""
        return Entry(dtype_name(array.dtype), array.shape)

    def fits(self, other: Entry) -> bool:
        """Tell whether it differs in the length of the first axis at most."""
        return self.dtype == other.dtype and self.shape[1:] == other.shape[1:] and bool(self.shape)

    @property
    def has_known_dtype(self) -> bool:
        """Whether this library knows the dtype; else there is no `nbytes`."""
        return self.dtype in _ITEMS

    @property
    def nbytes(self) -> int:
        """The bytes of such an array."""
        return math.prod(self.shape) * _ITEMS[self.dtype]

    def __str__(self) -> str:
        """Return it as messages show dtypes and shapes."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class Contents(NamedTuple):
    """What was in a file.

    Attributes:
      entries: All arrays that are in it, by name.
      arrays: Those that were wanted and are as they were wanted.
      counter: How many times the checkpoint had been saved.
    """

    entries: dict[str, Entry]
    arrays: dict[str, Array]
    counter: int


def stored(array: Array) -> Array:
    """Return the array in a dtype that .npy knows."""
    return array.view(np.uint16) if is_bfloat16(array.dtype) else array


@contextlib.contextmanager
def checked(path: Path) -> Iterator[None]:
    """Raise what the body raises as an error of a checkpoint that is damaged, or of another kind.

    Raises:
      StructureError: Of the body.
      DataError: Of the body, with the path before it.
      OSError: Of the body, of the disk; it names a file.
      CheckpointError: All else, except for MemoryError.
    """
    try:
        yield
    except DataError as error:
        raise DataError(f"{path} {error}") from None
    except (StructureError, MemoryError):  # which say nothing against the file
        raise
    except Exception as error:  # parsers raise many kinds for bytes that make no sense
        reading = error if isinstance(error, OSError) else error.__context__
        if isinstance(reading, OSError) and reading.errno != errno.EINVAL:
            raise of_file(reading, path) from None  # zipfile calls that a bad archive
        reason = str(error) or type(error).__name__
        raise CheckpointError(f"{path} is damaged, or not a checkpoint: {reason}") from error


def fitting(
    stored_entries: Mapping[str, Entry], wanted_entries: Mapping[str, Entry] | None
) -> Collection[str]:
    """Return the names of stored arrays with the wanted dtype and shape; of all if that is None.

    Raises:
      ValueError: All are wanted, and one has a dtype that this library does not know.
    """
    if wanted_entries is not None:
        return {name for name in wanted_entries if wanted_entries[name] == stored_entries.get(name)}
    for name, entry in stored_entries.items():
        if not entry.has_known_dtype:
            raise ValueError(f"{name!r} has dtype {entry.dtype!r:.40}")
    return stored_entries


def formed(like: Entry, room: Array) -> Array:
    """Return the first of some bytes as such an array."""
    if like.dtype == "bfloat16":
        importlib.import_module("ml_dtypes")
    return room[: like.nbytes].view(np.dtype(like.dtype)).reshape(like.shape)


def head(manifest: Any, format_number: int, kind_text: str) -> tuple[dict[str, Entry], int]:
    """Return the entries of a manifest, and how many times the checkpoint had been saved.

    Args:
      manifest: The manifest.
      format_number: The number of its format.
      kind_text: Words before "format" in messages; empty for a file.

    Raises:
      DataError: It is of another format.
      ValueError: It makes no sense.
    """
    if not isinstance(manifest, dict) or type(manifest.get("format")) is not int:
        raise ValueError(f"{MANIFEST} does not name its format")
    if manifest["format"] != format_number:
        raise DataError(
            f"is of format {manifest['format']}, and this version of mpistrat reads {kind_text}"
            f"format {format_number}. Restore it by the version that wrote it."
        )
    counter = manifest["save_counter"]
    if type(counter) is not int or not 0 <= counter < 1 << 63:
        raise ValueError(f"save_counter is {counter!r:.40}")
    return {name: _entry(name, row) for name, row in manifest["arrays"].items()}, counter


def _entry(name: str, row: dict[str, Any]) -> Entry:
    """Return what a row of a manifest says of an array.

    Raises:
      ValueError: It makes no sense.
    """
    dtype, shape = row["dtype"], row["shape"]
    has_valid_sizes = isinstance(shape, list) and all(
        type(n) is int and 0 <= n < 1 << 63 for n in shape
    )
    if not isinstance(dtype, str) or not has_valid_sizes:
        raise ValueError(f"{name!r} has dtype {dtype!r:.40} and shape {shape!r:.40}")
    return Entry(dtype, tuple(shape))

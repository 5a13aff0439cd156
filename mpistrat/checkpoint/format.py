"""What is in the file of a checkpoint, and a reader that checks all of it.

It is a ZIP archive without compression, as ``numpy.savez`` writes it: a member ``name.npy`` for
each variable, so ``numpy.load(path)[name]`` reads it without this library, and ``manifest.json``,
which says what members there have to be, of which dtype and shape. ZIP has a checksum (CRC-32) of
the data of each member; what stands between them is covered by a digest in the archive's comment,
its last bytes. The reader looks at all of them before anything is given out.

Nothing in such a file is ever run: no pickle, and no dtype that the reader did not ask for. Every
size that a file claims is checked against the others, against the length of the file and against
the variables before memory is taken for it, and before any data is read: a file of gigabytes that
does not fit costs no more than its directory. A checksum is not a signature: whoever may write the
file may change it.

Sources: APPNOTE.TXT of PKWARE, 6.3.10; the .npy format, NumPy Enhancement Proposal 1.

The entries for arrays in checkpoint manifests, and their validation.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import json
import math
import os
import stat
import struct
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

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


FORMAT = 1
_MANIFEST_ROOM, _ROW_ROOM = 1 << 20, 1 << 12  # bytes of a manifest: at most, and for each array
_PIECE = 1 << 24  # bytes that are written, or read only for their checksum, at once
_HEADER = struct.Struct("<26xHH")  # of a member in the file: lengths of its name and extra field
_NPY_ROOM = 10 + 0xFFFF  # bytes before the data of a .npy of format 1.0, at most
# Rows of the directory: mark, lengths of name, extra field and comment; its end, for small archives
# and large ones: mark, and number of members, bytes of the directory and where it begins.
_ROW = struct.Struct("<4s24xHHH12x")
_END = struct.Struct("<4s6xHLL2x")
_LOCATOR = 20
_END64 = struct.Struct("<4s28xQQQ")
_SEAL = 16  # letters of the digest
# NumPy parses a header with `ast`. Up to Python 3.12 that counts its depth for all threads at once,
# so it fails now and then if another thread parses something, too, or prints a traceback.
_TRIES = 8
_EARLIEST = (1980, 1, 1, 0, 0, 0)  # the first date that ZIP knows: equal values, equal files


def write(file: IO[bytes], arrays: Mapping[str, Array], counter: int) -> None:
    """Write arrays to a file that can be read again and sought in.

    Args:
      file: Open for binary writing, and empty.
      arrays: By name; any dtype that can be sent between ranks.
      counter: How many times the checkpoint has been saved, this time included.

    Raises:
      OSError: The file cannot be written.
    """
    entries = {name: Entry.from_array(array)._asdict() for name, array in arrays.items()}
    manifest = {"format": FORMAT, "save_counter": counter, "arrays": entries}
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(zipfile.ZipInfo(MANIFEST, _EARLIEST), json.dumps(manifest, indent=1))
        for name, array in arrays.items():
            info = zipfile.ZipInfo(f"{name}.npy", _EARLIEST)
            with archive.open(info, "w", force_zip64=True) as member:
                flat = np.ascontiguousarray(stored(array))
                header = np.lib.format.header_data_from_array_1_0(flat)
                np.lib.format.write_array_header_1_0(member, {**header, "shape": array.shape})
                data = flat.reshape(-1).view(np.uint8).data
                for start in range(0, len(data), _PIECE):
                    member.write(data[start : start + _PIECE])
        archive.comment = bytes(_SEAL)
    end = file.seek(-_SEAL, os.SEEK_END)
    sealed = _seal(file, archive.infolist(), end)
    file.seek(end)
    file.write(sealed)


def _frames(file: IO[bytes], infos: Iterable[zipfile.ZipInfo], end: int) -> list[tuple[int, int]]:
    """Return where everything before `end` is that is not data of a member.

    Raises:
      ValueError: Members overlap, or there is something between them, or it ends in one.
    """
    frames, position = [], 0
    for info in sorted(infos, key=lambda info: info.header_offset):
        if info.header_offset != position:
            raise ValueError("members overlap, or there is something between them")
        begin = position + _HEADER.size + sum(_fields(file, position, _HEADER))
        frames.append((position, begin))
        position = begin + info.compress_size
    return [*frames, (position, end)]


def _fields(file: IO[bytes], place: int, form: struct.Struct) -> tuple[Any, ...]:
    """Return the fields of what stands at a place.

    Raises:
      ValueError: The file ends before that.
    """
    file.seek(place)
    data = file.read(form.size)
    if len(data) < form.size:
        raise ValueError(f"it ends where {form.size} bytes should follow byte {place}")
    return form.unpack(data)


def _seal(file: IO[bytes], infos: Iterable[zipfile.ZipInfo], end: int) -> bytes:
    """Return a digest of everything before `end` but the data of the members."""
    digest = hashlib.blake2b(digest_size=_SEAL // 2)
    for start, stop in _frames(file, infos, end):
        file.seek(start)
        digest.update(file.read(max(0, stop - start)))
    return digest.hexdigest().encode()


def _directory(file: IO[bytes], size: int) -> int:
    """Return where the directory of an archive begins, after looking at its rows one by one.

    Raises:
      ValueError: It is not where the end says, or not as long, or longer than names make it, or
        the file is too short to have one.
    """
    end = size - _SEAL - _END.size
    large = end - _LOCATOR - _END64.size
    if large < 0:
        raise ValueError(f"it is too short, with {size} bytes")
    mark, count, length, begin = _fields(file, end, _END)
    large_fields = _fields(file, large, _END64)
    if large_fields[0] == b"PK\6\6" and file.read(4) == b"PK\6\7":
        end, (_, count, length, begin) = large, large_fields
    if mark != b"PK\5\6" or begin + length != end:
        raise ValueError("it does not end as a checkpoint does")
    if length > max(_MANIFEST_ROOM, _ROW_ROOM * count):
        raise ValueError(f"its directory of {count} members has {length} bytes")
    place = int(begin)
    for _ in range(count):
        row, *lengths = _fields(file, place, _ROW)
        if row != b"PK\1\2" or place >= end:
            break
        place += _ROW.size + sum(lengths)
    if place != end:
        raise ValueError(f"its directory does not have {count} members")
    return int(begin)


def read(
    path: Path,
    wanted_entries: Mapping[str, Entry] | None = None,
    check: Callable[[Mapping[str, Entry]], None] = lambda entries: None,
) -> Contents:
    """Read a file, and check all of it.

    Args:
      path: The file.
      wanted_entries: The arrays that are wanted, by name; None for all. An array that the file
        lacks, or has with another dtype or shape, is missing from the result; that is not an error
        here.
      check: Called with what is in the file before any data is read; a StructureError of it is
        raised as it is.

    Raises:
      OSError: There is no such file, or it cannot be read.
      CheckpointError: It is damaged, or not a checkpoint.
      DataError: It is of another format.
    """
    # Not blocking: what has the name of a checkpoint may be a pipe.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is not a checkpoint: it is not a regular file.")
    with os.fdopen(descriptor, "rb") as file, checked(path):
        return _checked(file, wanted_entries, status.st_size, check)


def _checked(
    file: IO[bytes],
    wanted_entries: Mapping[str, Entry] | None,
    size: int,
    check: Callable[[Mapping[str, Entry]], None],
) -> Contents:
    begin = _directory(file, size)
    with zipfile.ZipFile(file) as archive:
        infos = {info.filename: info for info in archive.infolist()}
        if len(infos) < len(archive.infolist()):
            raise ValueError("two members have one name")
        for info in infos.values():
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise ValueError(f"{info.filename!r} is compressed")
        if _frames(file, infos.values(), size)[-1][0] != begin:
            raise ValueError("members overlap, or there is something between them")
        entries, counter = _manifest(archive, infos)
        _check_sizes(infos, entries)
        check(entries)
        arrays = _arrays(archive, infos, entries, fitting(entries, wanted_entries))
        if _seal(file, infos.values(), size - _SEAL) != archive.comment:
            raise ValueError("bytes between the arrays have been changed")
    return Contents(entries, arrays, counter)


def _check_sizes(infos: Mapping[str, zipfile.ZipInfo], entries: Mapping[str, Entry]) -> None:
    if set(infos) != {MANIFEST, *(f"{name}.npy" for name in entries)}:
        raise ValueError("the members are not those that the manifest lists")
    for name, entry in entries.items():
        # What nobody here can have asked for has no size.
        room = infos[f"{name}.npy"].file_size - entry.nbytes if entry.has_known_dtype else 1
        if not 0 < room <= _NPY_ROOM:
            raise ValueError(f"{name!r} has more or fewer bytes than its shape says")


def _arrays(
    archive: zipfile.ZipFile,
    infos: Mapping[str, zipfile.ZipInfo],
    entries: Mapping[str, Entry],
    wanted_names: Collection[str],
) -> dict[str, Array]:
    """Read what is wanted, and the rest for its checksum only."""
    arrays = {}
    for name, entry in entries.items():
        with archive.open(infos[f"{name}.npy"]) as member:
            if name in wanted_names:
                arrays[name] = _array(member, entry, infos[f"{name}.npy"].file_size)
            while member.read(_PIECE):  # at the end of a member its checksum is looked at
                pass
    return arrays


def _manifest(
    archive: zipfile.ZipFile, infos: Mapping[str, zipfile.ZipInfo]
) -> tuple[dict[str, Entry], int]:
    if MANIFEST not in infos:
        raise ValueError(f"there is no {MANIFEST} in it")
    if infos[MANIFEST].file_size > max(_MANIFEST_ROOM, _ROW_ROOM * len(infos)):
        raise ValueError(f"{MANIFEST} has {infos[MANIFEST].file_size} bytes")
    return head(json.loads(archive.read(MANIFEST)), FORMAT, "")


def _npy_header(member: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return shape, order and dtype of a .npy of format 1.0 that has been read up to its header."""
    begin = member.tell()
    for _ in range(_TRIES):
        with suppress(SystemError):
            return np.lib.format.read_array_header_1_0(member)
        member.seek(begin)
    return np.lib.format.read_array_header_1_0(member)


def _array(member: IO[bytes], like: Entry, size: int) -> Array:
    """Read a member that has to be as `like`."""
    version = np.lib.format.read_magic(member)
    if version != (1, 0):
        raise ValueError(f"an array is of .npy format {version}")
    shape, fortran, dtype = _npy_header(member)
    native_dtype = dtype.newbyteorder("=")
    expected_dtype = "uint16" if like.dtype == "bfloat16" else like.dtype  # as of `stored`
    if shape != like.shape or fortran or native_dtype != expected_dtype:
        raise ValueError("an array is not as the manifest says")
    if member.tell() + like.nbytes != size:
        raise ValueError("an array has more or fewer bytes than its shape says")
    room = np.empty(like.nbytes, np.uint8)
    for start in range(0, room.size, _PIECE):
        piece = room.data[start : start + _PIECE]
        piece[:] = member.read(len(piece))
    array = formed(like, room)
    return array if dtype == native_dtype else array.byteswap()

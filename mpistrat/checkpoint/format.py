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
"""

from __future__ import annotations

import errno
import hashlib
import importlib
import json
import math
import os
import stat
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from mpistrat.arrays import Array, dtype_name, is_bfloat16
from mpistrat.errors import CheckpointError, DataError, StructureError

__all__ = ["FORMAT", "Contents", "Entry", "dtype_of", "entry", "likes", "read", "stored", "write"]

FORMAT = 1
_MANIFEST = "manifest.json"
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
_CODES = np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?"
_ITEMS = {"bfloat16": 2, **{dtype_name(np.dtype(c)): np.dtype(c).itemsize for c in _CODES}}
_EARLIEST = (1980, 1, 1, 0, 0, 0)  # the first date that ZIP knows: equal values, equal files


class Entry(NamedTuple):
    """What the manifest says of an array."""

    dtype: str
    shape: tuple[int, ...]

    @staticmethod
    def of(array: Array) -> Entry:
        """Return the entry of an array."""
        return Entry(dtype_name(array.dtype), array.shape)

    def fits(self, other: Entry) -> bool:
        """Tell whether it differs in the length of the first axis at most."""
        return self.dtype == other.dtype and self.shape[1:] == other.shape[1:] and bool(self.shape)

    @property
    def known(self) -> bool:
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


def write(file: IO[bytes], arrays: Mapping[str, Array], counter: int) -> None:
    """Write arrays to a file that can be read again and sought in.

    Args:
      file: Open for binary writing, and empty.
      arrays: By name; any dtype that travels between ranks.
      counter: How many times the checkpoint has been saved, this time included.

    Raises:
      OSError: The file cannot be written.
    """
    entries = {name: Entry.of(array)._asdict() for name, array in arrays.items()}
    told = {"format": FORMAT, "save_counter": counter, "arrays": entries}
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(zipfile.ZipInfo(_MANIFEST, _EARLIEST), json.dumps(told, indent=1))
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
      ValueError: Members overlap, or there is something between them.
    """
    frames, done = [], 0
    for info in sorted(infos, key=lambda info: info.header_offset):
        if info.header_offset != done:
            raise ValueError("members overlap, or there is something between them")
        file.seek(done)
        begin = done + _HEADER.size + sum(_HEADER.unpack(file.read(_HEADER.size)))
        frames.append((done, begin))
        done = begin + info.compress_size
    return [*frames, (done, end)]


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
      ValueError: It is not where the end says, or not as long, or longer than names make it.
    """
    end = size - _SEAL - _END.size
    file.seek(max(0, end))
    mark, count, length, begin = _END.unpack(file.read(_END.size))
    large = end - _LOCATOR - _END64.size
    file.seek(max(0, large))
    found = _END64.unpack(file.read(_END64.size))
    if found[0] == b"PK\6\6" and file.read(4) == b"PK\6\7":
        end, (_, count, length, begin) = large, found
    if mark != b"PK\5\6" or begin + length != end:
        raise ValueError("it does not end as a checkpoint does")
    if length > max(_MANIFEST_ROOM, _ROW_ROOM * count):
        raise ValueError(f"its directory of {count} members has {length} bytes")
    place = int(begin)
    for _ in range(count):
        file.seek(place)
        row, *lengths = _ROW.unpack(file.read(_ROW.size))
        if row != b"PK\1\2" or place >= end:
            break
        place += _ROW.size + sum(lengths)
    if place != end:
        raise ValueError(f"its directory does not have {count} members")
    return int(begin)


def read(
    path: Path,
    wanted: Mapping[str, Array],
    check: Callable[[Mapping[str, Entry]], None] = lambda entries: None,
) -> Contents:
    """Read a file, and check all of it.

    Args:
      path: The file.
      wanted: An array like each that is wanted, by name. One that the file does not have, or has
        with another dtype or shape, is missing from what is returned; that is not an error here.
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
    with os.fdopen(descriptor, "rb") as file:
        try:
            return _checked(file, wanted, status.st_size, check)
        except StructureError:
            raise
        except DataError as error:
            raise DataError(f"{path} {error}") from None
        except MemoryError:  # which says nothing against the file
            raise
        except Exception as error:  # whatever the parts say of bytes that make no sense to them
            reading = error if isinstance(error, OSError) else error.__context__
            if isinstance(reading, OSError) and reading.errno != errno.EINVAL:
                raise reading from None  # the disk; zipfile calls that a bad archive
            raise CheckpointError(
                f"{path} is damaged, or not a checkpoint: {str(error) or type(error).__name__}"
            ) from error


def likes(entries: Mapping[str, Entry]) -> dict[str, Array]:
    """Return an array like each that a manifest lists; they take no memory.

    Raises:
      ValueError: An array has a dtype that this process does not know.
    """
    found: dict[str, Array] = {}
    for name, one in entries.items():
        if not one.known:
            raise ValueError(f"{name!r} has dtype {one.dtype!r:.40}")
        found[name] = np.broadcast_to(np.zeros((), dtype_of(one.dtype)), one.shape)
    return found


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the dtype that manifests call so."""
    if name == "bfloat16":
        importlib.import_module("ml_dtypes")
    return np.dtype(name)


def _checked(
    file: IO[bytes],
    wanted: Mapping[str, Array],
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
        _check_sizes(infos, entries, wanted)
        check(entries)
        arrays = _arrays(archive, infos, entries, wanted)
        if _seal(file, infos.values(), size - _SEAL) != archive.comment:
            raise ValueError("what stands between the arrays has been changed")
    return Contents(entries, arrays, counter)


def _check_sizes(
    infos: Mapping[str, zipfile.ZipInfo],
    entries: Mapping[str, Entry],
    wanted: Mapping[str, Array],
) -> None:
    if set(infos) != {_MANIFEST, *(f"{name}.npy" for name in entries)}:
        raise ValueError("the members are not those that the manifest lists")
    for name, entry in entries.items():
        item = _ITEMS.get(entry.dtype)  # what nobody here can have asked for has no size
        room = infos[f"{name}.npy"].file_size - math.prod(entry.shape) * (item or 0)
        short = room <= 0 and name in wanted and Entry.of(wanted[name]) == entry
        if item is not None and (short or room > _NPY_ROOM):
            raise ValueError(f"{name!r} has more or fewer bytes than its shape says")


def _arrays(
    archive: zipfile.ZipFile,
    infos: Mapping[str, zipfile.ZipInfo],
    entries: Mapping[str, Entry],
    wanted: Mapping[str, Array],
) -> dict[str, Array]:
    """Read what is wanted, and the rest for its checksum only."""
    arrays = {}
    for name, entry in entries.items():
        like = wanted.get(name)
        fits = like is not None and Entry.of(like) == entry
        with archive.open(infos[f"{name}.npy"]) as member:
            if fits and like is not None:
                arrays[name] = _array(member, like, infos[f"{name}.npy"].file_size)
            while member.read(_PIECE):  # at the end of a member its checksum is looked at
                if fits:
                    raise ValueError(f"{name!r} has more bytes than its shape says")
    return arrays


def _manifest(
    archive: zipfile.ZipFile, infos: Mapping[str, zipfile.ZipInfo]
) -> tuple[dict[str, Entry], int]:
    if _MANIFEST not in infos:
        raise ValueError(f"there is no {_MANIFEST} in it")
    if infos[_MANIFEST].file_size > max(_MANIFEST_ROOM, _ROW_ROOM * len(infos)):
        raise ValueError(f"{_MANIFEST} has {infos[_MANIFEST].file_size} bytes")
    told = json.loads(archive.read(_MANIFEST))
    if not isinstance(told, dict) or type(told.get("format")) is not int:
        raise ValueError(f"{_MANIFEST} does not say of which format it is")
    if told["format"] != FORMAT:
        raise DataError(
            f"is of format {told['format']}, and this version of mpistrat reads "
            f"format {FORMAT}. Restore it by the version that wrote it."
        )
    counter = told["save_counter"]
    if type(counter) is not int or not 0 <= counter < 1 << 63:
        raise ValueError(f"save_counter is {counter!r:.40}")
    entries = {name: entry(name, row) for name, row in told["arrays"].items()}
    return entries, counter


def entry(name: str, row: dict[str, Any]) -> Entry:
    """Return what a row of a manifest says of an array.

    Raises:
      ValueError: It makes no sense.
    """
    dtype, shape = row["dtype"], row["shape"]
    sizes = isinstance(shape, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in shape)
    if not isinstance(dtype, str) or not sizes:
        raise ValueError(f"{name!r} has dtype {dtype!r:.40} and shape {shape!r:.40}")
    return Entry(dtype, tuple(shape))


def _array(member: IO[bytes], like: Array, size: int) -> Array:
    """Read a member that has to be as `like`."""
    version = np.lib.format.read_magic(member)
    if version != (1, 0):
        raise ValueError(f"an array is of .npy format {version}")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(member)
    expected = stored(like)
    native = dtype.newbyteorder("=")
    if shape != like.shape or fortran or native != expected.dtype:
        raise ValueError("an array is not as the manifest says")
    if member.tell() + expected.nbytes != size:
        raise ValueError("an array has more or fewer bytes than its shape says")
    array = np.empty(shape, dtype)
    data = array.reshape(-1).view(np.uint8).data
    done = 0
    while done < len(data):
        got = member.read(min(_PIECE, len(data) - done))
        if not got:
            raise ValueError("an array ends too early")
        data[done : done + len(got)] = got
        done += len(got)
    return array.astype(native, copy=False).view(like.dtype)

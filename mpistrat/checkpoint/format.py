"""The contents of a checkpoint that is a file, and a reader that checks all of them.

The file is a ZIP archive without compression, as ``numpy.savez`` writes it: a member ``name.npy``
for each variable, so ``numpy.load(path)[name]`` reads it without this library, and
``manifest.json``, which lists the members with dtype and shape (an `Entry` for each). ZIP has a
checksum (CRC-32) of the data of each member; a digest in the archive's comment, its last bytes,
covers the bytes between them. The reader checks all of these before it gives out anything.

Nothing in such a file is ever run: no pickle, and no dtype that the reader did not ask for. Every
size that a file claims is checked against the others, against the length of the file and against
the variables before memory is taken for it, and before any data is read: a file of gigabytes that
does not fit costs no more than its directory. A checksum is not a signature: whoever may write the
file may change it.

Sources: APPNOTE.TXT of PKWARE, 6.3.10; the .npy format, NumPy Enhancement Proposal 1.
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
from types import MappingProxyType
from typing import IO, Any, NamedTuple

import numpy as np

from mpistrat.arrays import Array, dtype_name, is_bfloat16
from mpistrat.checkpoint.files import add_file_name
from mpistrat.errors import CheckpointError, DataError, StructureError

MANIFEST = "manifest.json"
NO_METRICS: Mapping[str, float] = MappingProxyType({})  # of most saves
_DTYPE_CODES = np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?"
_ITEM_NBYTES = {
    "bfloat16": 2,
    **{dtype_name(np.dtype(c)): np.dtype(c).itemsize for c in _DTYPE_CODES},
}


class Entry(NamedTuple):
    """Dtype and shape of an array, as the manifest has them."""

    dtype: str
    shape: tuple[int, ...]

    @staticmethod
    def from_array(array: Array) -> Entry:
        """Return the entry of an array."""
        return Entry(dtype_name(array.dtype), array.shape)

    def fits(self, other_entry: Entry) -> bool:
        """Return whether it differs in the length of the first axis at most."""
        return (
            self.dtype == other_entry.dtype
            and self.shape[1:] == other_entry.shape[1:]
            and bool(self.shape)
        )

    @property
    def has_known_dtype(self) -> bool:
        """Whether this library knows the dtype; else there is no `nbytes`."""
        return self.dtype in _ITEM_NBYTES

    @property
    def nbytes(self) -> int:
        """The bytes of such an array."""
        return math.prod(self.shape) * _ITEM_NBYTES[self.dtype]

    def __str__(self) -> str:
        """Return it as messages show dtypes and shapes."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class Contents(NamedTuple):
    """The contents of a file.

    Attributes:
      entries: All arrays that are in it, by name.
      arrays: Those that were wanted and are as they were wanted.
      counter: How many times the checkpoint had been saved.
      metrics: The metrics that it was saved with.
    """

    entries: dict[str, Entry]
    arrays: dict[str, Array]
    counter: int
    metrics: Mapping[str, float] = NO_METRICS


class ManifestHead(NamedTuple):
    """What the manifests of both kinds of checkpoints begin with.

    Attributes:
      entries: All arrays that are in it, by name.
      counter: How many times the checkpoint had been saved.
      metrics: The metrics that it was saved with.
    """

    entries: dict[str, Entry]
    counter: int
    metrics: Mapping[str, float]


def view_as_npy_dtype(array: Array) -> Array:
    """Return the array in a dtype that .npy knows."""
    return array.view(np.uint16) if is_bfloat16(array.dtype) else array


@contextlib.contextmanager
def explaining_read_errors(path: Path) -> Iterator[None]:
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
        read_error = error if isinstance(error, OSError) else error.__context__
        if isinstance(read_error, OSError) and read_error.errno != errno.EINVAL:
            raise add_file_name(read_error, path) from None  # zipfile calls that a bad archive
        reason = str(error) or type(error).__name__
        raise CheckpointError(f"{path} is damaged, or not a checkpoint: {reason}") from error


def select_matching_names(
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


def form_array(entry: Entry, buffer: Array) -> Array:
    """Return the first of some bytes as such an array."""
    if entry.dtype == "bfloat16":
        importlib.import_module("ml_dtypes")
    return buffer[: entry.nbytes].view(np.dtype(entry.dtype)).reshape(entry.shape)


def parse_manifest_head(manifest: Any, format_number: int, kind_text: str) -> ManifestHead:
    """Return what a manifest says of its arrays, its save, and its metrics.

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
    metrics = manifest.get("metrics", {})
    if not isinstance(metrics, dict) or any(type(value) is not float for value in metrics.values()):
        raise ValueError(f"metrics is {metrics!r:.40}")
    entries = {name: _parse_entry(name, fields) for name, fields in manifest["arrays"].items()}
    return ManifestHead(entries, counter, metrics)


def _parse_entry(name: str, entry_fields: dict[str, Any]) -> Entry:
    """Return what a row of a manifest says of an array.

    Raises:
      ValueError: It makes no sense.
    """
    dtype, shape = entry_fields["dtype"], entry_fields["shape"]
    has_valid_sizes = isinstance(shape, list) and all(
        type(n) is int and 0 <= n < 1 << 63 for n in shape
    )
    if not isinstance(dtype, str) or not has_valid_sizes:
        raise ValueError(f"{name!r} has dtype {dtype!r:.40} and shape {shape!r:.40}")
    return Entry(dtype, tuple(shape))


FORMAT_NUMBER = 1
_MAX_MANIFEST_NBYTES, _MAX_ROW_NBYTES = (
    1 << 20,
    1 << 12,
)  # bytes of a manifest: at most, and for each array
_BLOCK_NBYTES = 1 << 24  # bytes that are written, or read only for their checksum, at once
_MEMBER_HEADER = struct.Struct(
    "<26xHH"
)  # of a member in the file: lengths of its name and extra field
_MAX_NPY_HEADER_NBYTES = 10 + 0xFFFF  # bytes before the data of a .npy of format 1.0, at most
# Rows of the directory: mark, lengths of name, extra field and comment; its end, for small archives
# and large ones: mark, and number of members, bytes of the directory and where it begins.
_DIRECTORY_ROW = struct.Struct("<4s24xHHH12x")
_DIRECTORY_END = struct.Struct("<4s6xHLL2x")
_LOCATOR_NBYTES = 20
_DIRECTORY_END64 = struct.Struct("<4s28xQQQ")
_SEAL_LENGTH = 16  # letters of the digest
# NumPy parses a header with `ast`. Up to Python 3.12 that counts its depth for all threads at once,
# so it fails now and then if another thread parses something, too, or prints a traceback.
_HEADER_TRIES = 8
_EARLIEST_DATE = (1980, 1, 1, 0, 0, 0)  # the first date that ZIP knows: equal values, equal files


def write_archive(
    file: IO[bytes],
    arrays: Mapping[str, Array],
    counter: int,
    metrics: Mapping[str, float] = NO_METRICS,
) -> None:
    """Write arrays to a file that can be read again and sought in.

    Args:
      file: Open for binary writing, and empty.
      arrays: By name; any dtype that can be sent between ranks.
      counter: How many times the checkpoint has been saved, this time included.
      metrics: What it is saved with.

    Raises:
      OSError: The file cannot be written.
    """
    entries = {name: Entry.from_array(array)._asdict() for name, array in arrays.items()}
    manifest = {"format": FORMAT_NUMBER, "save_counter": counter, "arrays": entries}
    if metrics:
        manifest["metrics"] = dict(metrics)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(zipfile.ZipInfo(MANIFEST, _EARLIEST_DATE), json.dumps(manifest, indent=1))
        for name, array in arrays.items():
            member_info = zipfile.ZipInfo(f"{name}.npy", _EARLIEST_DATE)
            with archive.open(member_info, "w", force_zip64=True) as member:
                flat = np.ascontiguousarray(view_as_npy_dtype(array))
                header = np.lib.format.header_data_from_array_1_0(flat)
                np.lib.format.write_array_header_1_0(member, {**header, "shape": array.shape})
                array_bytes = flat.reshape(-1).view(np.uint8).data
                for start in range(0, len(array_bytes), _BLOCK_NBYTES):
                    member.write(array_bytes[start : start + _BLOCK_NBYTES])
        archive.comment = bytes(_SEAL_LENGTH)
    seal_offset = file.seek(-_SEAL_LENGTH, os.SEEK_END)
    seal_text = _compute_seal(file, archive.infolist(), seal_offset)
    file.seek(seal_offset)
    file.write(seal_text)


def _find_frames(
    file: IO[bytes], member_infos: Iterable[zipfile.ZipInfo], end_offset: int
) -> list[tuple[int, int]]:
    """Return where everything before `end_offset` is that is not data of a member.

    Raises:
      ValueError: Members overlap, or there is something between them, or it ends in one.
    """
    frames, offset = [], 0
    for member_info in sorted(member_infos, key=lambda member_info: member_info.header_offset):
        if member_info.header_offset != offset:
            raise ValueError("members overlap, or there is something between them")
        content_offset = (
            offset + _MEMBER_HEADER.size + sum(_read_fields(file, offset, _MEMBER_HEADER))
        )
        frames.append((offset, content_offset))
        offset = content_offset + member_info.compress_size
    return [*frames, (offset, end_offset)]


def _read_fields(file: IO[bytes], offset: int, layout: struct.Struct) -> tuple[Any, ...]:
    """Return the fields at an offset.

    Raises:
      ValueError: The file ends before that.
    """
    file.seek(offset)
    field_bytes = file.read(layout.size)
    if len(field_bytes) < layout.size:
        raise ValueError(f"it ends where {layout.size} bytes should follow byte {offset}")
    return layout.unpack(field_bytes)


def _compute_seal(
    file: IO[bytes], member_infos: Iterable[zipfile.ZipInfo], end_offset: int
) -> bytes:
    """Return a digest of everything before `end_offset` but the data of the members."""
    digest = hashlib.blake2b(digest_size=_SEAL_LENGTH // 2)
    for start, stop in _find_frames(file, member_infos, end_offset):
        file.seek(start)
        digest.update(file.read(max(0, stop - start)))
    return digest.hexdigest().encode()


def _find_directory(file: IO[bytes], size: int) -> int:
    """Return where the directory of an archive begins, after looking at its rows one by one.

    Raises:
      ValueError: It is not where the end says, or not as long, or longer than names make it, or
        the file is too short to have one.
    """
    end_offset = size - _SEAL_LENGTH - _DIRECTORY_END.size
    large_end_offset = end_offset - _LOCATOR_NBYTES - _DIRECTORY_END64.size
    if large_end_offset < 0:
        raise ValueError(f"it is too short, with {size} bytes")
    mark, member_count, directory_nbytes, directory_offset = _read_fields(
        file, end_offset, _DIRECTORY_END
    )
    large_fields = _read_fields(file, large_end_offset, _DIRECTORY_END64)
    if large_fields[0] == b"PK\6\6" and file.read(4) == b"PK\6\7":
        end_offset, (_, member_count, directory_nbytes, directory_offset) = (
            large_end_offset,
            large_fields,
        )
    if mark != b"PK\5\6" or directory_offset + directory_nbytes != end_offset:
        raise ValueError("it does not end as a checkpoint does")
    if directory_nbytes > max(_MAX_MANIFEST_NBYTES, _MAX_ROW_NBYTES * member_count):
        raise ValueError(f"its directory of {member_count} members has {directory_nbytes} bytes")
    row_offset = int(directory_offset)
    for _ in range(member_count):
        row_mark, *field_lengths = _read_fields(file, row_offset, _DIRECTORY_ROW)
        if row_mark != b"PK\1\2" or row_offset >= end_offset:
            break
        row_offset += _DIRECTORY_ROW.size + sum(field_lengths)
    if row_offset != end_offset:
        raise ValueError(f"its directory does not have {member_count} members")
    return int(directory_offset)


class _OpenArchive(NamedTuple):
    """A file that is open for reading.

    Attributes:
      file: The file.
      nbytes: Its length.
      archive: The archive in it.
      member_infos: The members of the archive, by name.
    """

    file: IO[bytes]
    nbytes: int
    archive: zipfile.ZipFile
    member_infos: Mapping[str, zipfile.ZipInfo]


@contextlib.contextmanager
def _open_archive(path: Path) -> Iterator[_OpenArchive]:
    """Open a file, and check everything in it but its members.

    Raises:
      OSError: There is no such file, or it cannot be read.
      CheckpointError: It is no checkpoint; or as of `explaining_read_errors`.
    """
    # Not blocking: what has the name of a checkpoint may be a pipe.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is not a checkpoint: it is not a regular file.")
    with os.fdopen(descriptor, "rb") as file, explaining_read_errors(path):
        directory_offset = _find_directory(file, status.st_size)
        with zipfile.ZipFile(file) as archive:
            member_infos = {member_info.filename: member_info for member_info in archive.infolist()}
            if len(member_infos) < len(archive.infolist()):
                raise ValueError("two members have one name")
            for member_info in member_infos.values():
                if (
                    member_info.compress_type != zipfile.ZIP_STORED
                    or member_info.file_size != member_info.compress_size
                ):
                    raise ValueError(f"{member_info.filename!r} is compressed")
            frames = _find_frames(file, member_infos.values(), status.st_size)
            if frames[-1][0] != directory_offset:
                raise ValueError("members overlap, or there is something between them")
            yield _OpenArchive(file, status.st_size, archive, member_infos)


def read_archive(
    path: Path,
    wanted_entries: Mapping[str, Entry] | None = None,
    check_entries: Callable[[Mapping[str, Entry]], None] = lambda entries: None,
) -> Contents:
    """Read a file, and check all of it.

    Args:
      path: The file.
      wanted_entries: The arrays that are wanted, by name; None for all. An array that the file
        lacks, or has with another dtype or shape, is missing from the result; that is not an error
        here.
      check_entries: Called with the entries of the file before any data is read; a StructureError
        of it is raised unchanged.

    Raises:
      OSError: There is no such file, or it cannot be read.
      CheckpointError: It is damaged, or not a checkpoint.
      DataError: It is of another format.
    """
    with _open_archive(path) as (file, nbytes, archive, member_infos):
        entries, counter, metrics = _read_manifest(archive, member_infos)
        _check_sizes(member_infos, entries)
        check_entries(entries)
        arrays = _read_arrays(
            archive, member_infos, entries, select_matching_names(entries, wanted_entries)
        )
        seal = _compute_seal(file, member_infos.values(), nbytes - _SEAL_LENGTH)
        if seal != archive.comment:
            raise ValueError("bytes between the arrays have been changed")
    return Contents(entries, arrays, counter, metrics)


def _check_sizes(member_infos: Mapping[str, zipfile.ZipInfo], entries: Mapping[str, Entry]) -> None:
    if set(member_infos) != {MANIFEST, *(f"{name}.npy" for name in entries)}:
        raise ValueError("the members are not those that the manifest lists")
    for name, entry in entries.items():
        # An array of an unknown dtype has no size; nobody here can have asked for it.
        header_nbytes = (
            member_infos[f"{name}.npy"].file_size - entry.nbytes if entry.has_known_dtype else 1
        )
        if not 0 < header_nbytes <= _MAX_NPY_HEADER_NBYTES:
            raise ValueError(f"{name!r} has more or fewer bytes than its shape says")


def _read_arrays(
    archive: zipfile.ZipFile,
    member_infos: Mapping[str, zipfile.ZipInfo],
    entries: Mapping[str, Entry],
    wanted_names: Collection[str],
) -> dict[str, Array]:
    """Read what is wanted, and the rest for its checksum only."""
    arrays = {}
    for name, entry in entries.items():
        with archive.open(member_infos[f"{name}.npy"]) as member:
            if name in wanted_names:
                arrays[name] = _read_array(member, entry, member_infos[f"{name}.npy"].file_size)
            while member.read(_BLOCK_NBYTES):  # at the end of a member its checksum is looked at
                pass
    return arrays


def read_archive_head(path: Path) -> ManifestHead:
    """Return the manifest of a file, whose arrays are not read.

    Raises:
      OSError: It is not there, or cannot be read.
      CheckpointError: It is no checkpoint.
      DataError: It is of another format.
    """
    with _open_archive(path) as opened_file:
        return _read_manifest(opened_file.archive, opened_file.member_infos)


def _read_manifest(
    archive: zipfile.ZipFile, member_infos: Mapping[str, zipfile.ZipInfo]
) -> ManifestHead:
    if MANIFEST not in member_infos:
        raise ValueError(f"there is no {MANIFEST} in it")
    if member_infos[MANIFEST].file_size > max(
        _MAX_MANIFEST_NBYTES, _MAX_ROW_NBYTES * len(member_infos)
    ):
        raise ValueError(f"{MANIFEST} has {member_infos[MANIFEST].file_size} bytes")
    return parse_manifest_head(json.loads(archive.read(MANIFEST)), FORMAT_NUMBER, "")


def _read_npy_header(member: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return shape, order and dtype of a .npy of format 1.0 that has been read up to its header."""
    header_offset = member.tell()
    for _ in range(_HEADER_TRIES):
        with suppress(SystemError):
            return np.lib.format.read_array_header_1_0(member)
        member.seek(header_offset)
    return np.lib.format.read_array_header_1_0(member)


def _read_array(member: IO[bytes], entry: Entry, member_nbytes: int) -> Array:
    """Read a member that has to be as `entry`."""
    version = np.lib.format.read_magic(member)
    if version != (1, 0):
        raise ValueError(f"an array is of .npy format {version}")
    shape, is_fortran_order, dtype = _read_npy_header(member)
    native_dtype = dtype.newbyteorder("=")
    # The dtype that `view_as_npy_dtype` gives.
    expected_dtype = "uint16" if entry.dtype == "bfloat16" else entry.dtype
    if shape != entry.shape or is_fortran_order or native_dtype != expected_dtype:
        raise ValueError("an array is not as the manifest says")
    if member.tell() + entry.nbytes != member_nbytes:
        raise ValueError("an array has more or fewer bytes than its shape says")
    buffer = np.empty(entry.nbytes, np.uint8)
    for start in range(0, buffer.size, _BLOCK_NBYTES):
        block = buffer.data[start : start + _BLOCK_NBYTES]
        block[:] = member.read(len(block))
    array = form_array(entry, buffer)
    return array if dtype == native_dtype else array.byteswap()

"""What is in the directory of a large checkpoint, and readers that check what they read.

``data-0.bin``, ``data-1.bin`` and so on have the bytes of the arrays, in C order, one array after
the other, each begun at a multiple of 64 bytes; no array is in two files. ``manifest.json`` says
which there are, of which dtype and shape, in which file and where, and has an xxh3-128 checksum of
each `CHUNK` bytes of an array and the zeros that follow it, so that every byte of a file has one.
The last entry of the manifest is the checksum of all that stands before. Where an array lies
follows from those before it: a manifest that says something else is refused.

Nothing in it is ever run, and every size that it claims is checked against the others and against
the files before memory is taken for it. A checksum is not a signature.

Source: xxHash, XXH3_128bits; the `memmap` of NumPy is what reads an array without this library.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from mpistrat.arrays import Array
from mpistrat.checkpoint import format
from mpistrat.checkpoint.files import of_file
from mpistrat.checkpoint.format import (
    MANIFEST,
    Contents,
    Entry,
    checked,
    fitting,
    formed,
    head,
)
from mpistrat.errors import CheckpointError, DataError

FORMAT = 1
# Bytes of arrays from which on a checkpoint is a directory, and a file is full.
MIN_DIRECTORY_NBYTES = 1 << 26
CHUNK = 1 << 22
_ALIGN = 64
SUM = 16  # bytes of a checksum
_ROOM = 1 << 24  # bytes of a manifest: at most, or as many as the data
_LARGEST = 1 << 26  # bytes of a chunk
_TAIL = b',\n "checksum": "%s"\n}\n'
_DATA = re.compile(r"data-(0|[1-9]\d{0,8})\.bin")


class Region(NamedTuple):
    """Where an array lies.

    Attributes:
      name: Its name.
      entry: Its dtype and shape.
      nbytes: Its bytes, without the zeros that follow.
      file: The number of its file.
      offset: Its first byte there.
    """

    name: str
    entry: Entry
    nbytes: int
    file: int
    offset: int

    @property
    def room(self) -> int:
        """Its bytes with the zeros that follow, up to the next array."""
        return -(-self.nbytes // _ALIGN) * _ALIGN

    def pieces(self, chunk: int) -> list[ChecksumRange]:
        """Return what has a checksum each, of so many bytes except for the last."""
        return [
            ChecksumRange(self, at, min(self.room, at + chunk)) for at in range(0, self.room, chunk)
        ]


class ChecksumRange(NamedTuple):
    """A part of a region that has a checksum.

    Attributes:
      region: Of which it is a part.
      start: Its first byte in the region.
      stop: The byte after its last.
      sum: The checksum that it has to have, where that is known.
    """

    region: Region
    start: int
    stop: int
    sum: bytes = b""


class Manifest(NamedTuple):
    """What a manifest says.

    Attributes:
      counter: How many times the checkpoint had been saved.
      regions: Where the arrays lie, in the order of the files.
      sums: The checksum of each of `pieces`.
      chunk: How many bytes have one checksum.
    """

    counter: int
    regions: tuple[Region, ...]
    sums: tuple[bytes, ...]
    chunk: int

    @property
    def entries(self) -> dict[str, Entry]:
        """All arrays, by name."""
        return {region.name: region.entry for region in self.regions}

    @property
    def sizes(self) -> list[int]:
        """The bytes of each file."""
        return sizes_of(self.regions)

    def pieces(self) -> list[ChecksumRange]:
        """Return all that has a checksum, with that."""
        pieces = (piece for region in self.regions for piece in region.pieces(self.chunk))
        return [piece._replace(sum=digest) for piece, digest in zip(pieces, self.sums, strict=True)]


def data_file(number: int) -> str:
    """Return the name of a file of data.

    Example:
      >>> data_file(0)
      'data-0.bin'
    """
    return f"data-{number}.bin"


def checksum(data: Any) -> bytes:
    """Return the checksum of some bytes. Cost: about 0.1 s for each GB."""
    return xxhash.xxh3_128_digest(data)


def sizes_of(regions: Iterable[Region]) -> list[int]:
    """Return the number of bytes of each file that holds regions."""
    sizes: list[int] = []
    for region in regions:
        sizes += [0] * (region.file + 1 - len(sizes))
        sizes[region.file] = region.offset + region.room
    return sizes


def plan(entries: Mapping[str, Entry], first_file_count: int, files: int) -> tuple[Region, ...]:
    """Return the file and offset of each array.

    Args:
      entries: The arrays, by name.
      first_file_count: So many of the first are in the first file.
      files: How many files there may be. Each has at least
        `MIN_DIRECTORY_NBYTES` bytes, except for the last.

    Example:
      >>> [region.offset for region in plan(dict.fromkeys("ab", Entry("int8", (3,))), 0, 1)]
      [0, 64]
    """
    rows = [Region(name, entry, entry.nbytes, 0, 0) for name, entry in entries.items()]
    total = sum(row.room for row in rows)
    regions, file, offset, previous_nbytes = [], 0, 0, 0
    for number, row in enumerate(rows):
        # Its middle is in the next of `files` equal parts; so there are no more than `files`.
        starts_next_file = (2 * previous_nbytes + row.room) * files > 2 * total * (file + 1)
        if offset >= MIN_DIRECTORY_NBYTES and number >= first_file_count and starts_next_file:
            file, offset = file + 1, 0
        regions.append(row._replace(file=file, offset=offset))
        offset, previous_nbytes = offset + row.room, previous_nbytes + row.room
    return tuple(regions)


def text_of(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest."""
    sums, rows = iter(manifest.sums), {}
    for name, entry, nbytes, file, offset in manifest.regions:
        count = len(Region(name, entry, nbytes, file, offset).pieces(manifest.chunk))
        rows[name] = {
            **entry._asdict(),
            "file": data_file(file),
            "offset": offset,
            "nbytes": nbytes,
            "checksums": b"".join(next(sums) for _ in range(count)).hex(),
        }
    content = {
        "format": FORMAT,
        "save_counter": manifest.counter,
        "byteorder": sys.byteorder,
        "chunk": manifest.chunk,
        "arrays": rows,
    }
    body = json.dumps(content, indent=1).removesuffix("\n}").encode()
    return body + _TAIL % checksum(body).hex().encode()


def parsed(data: bytes) -> Manifest:
    """Return the manifest that some bytes contain.

    Raises:
      DataError: It is of another format.
      ValueError: It makes no sense; or another error, see `checked`.
    """
    body = data[: -len(_TAIL % bytes(2 * SUM))]
    if data[len(body) :] != _TAIL % checksum(body).hex().encode():
        raise ValueError(f"{MANIFEST} has been changed, or is not whole")
    content = json.loads(data)
    entries, counter = head(content, FORMAT, "directories of ")
    if content["byteorder"] != sys.byteorder:
        raise DataError(
            f"is of byte order {content['byteorder']!r:.40}; this is {sys.byteorder!r}."
        )
    chunk = content["chunk"]
    if type(chunk) is not int or not _ALIGN <= chunk <= _LARGEST or chunk % _ALIGN:
        raise ValueError(f"chunk is {chunk!r:.40}")
    regions: list[Region] = []
    sums: list[bytes] = []
    for name, row in content["arrays"].items():
        regions.append(_region(name, entries[name], row, regions[-1] if regions else None))
        checksums = bytes.fromhex(row["checksums"])
        if len(checksums) != SUM * -(-regions[-1].room // chunk):
            raise ValueError(f"{name!r:.80} has {len(checksums)} bytes of checksums")
        sums += [checksums[at : at + SUM] for at in range(0, len(checksums), SUM)]
    return Manifest(counter, tuple(regions), tuple(sums), chunk)


def _region(name: str, entry: Entry, row: Any, previous_region: Region | None) -> Region:
    """Return the region of a row, which has to follow the region of the row before."""
    nbytes, offset = row["nbytes"], row["offset"]
    number = _DATA.fullmatch(row["file"])
    if number is None or type(nbytes) is not int or not 0 <= nbytes < 1 << 63:
        raise ValueError(f"{name!r:.80} has file {row['file']!r:.40} and {nbytes!r:.40} bytes")
    place = int(number[1]), offset
    last = (
        (0, 0)
        if previous_region is None
        else (previous_region.file, previous_region.offset + previous_region.room)
    )
    following = {last} if previous_region is None else {last, (last[0] + 1, 0)}
    if type(offset) is not int or place not in following:
        raise ValueError(f"{name!r:.80} does not follow the array before it")
    if entry.has_known_dtype and entry.nbytes != nbytes:
        raise ValueError(f"{name!r:.80} has more or fewer bytes than its shape says")
    return Region(name, entry, nbytes, *place)


def look(path: Path) -> tuple[bytes, Manifest]:
    """Return the manifest of a directory, as bytes and as what they say; look at the files' sizes.

    Args:
      path: The directory.

    Raises:
      OSError: It is not there, or cannot be read.
      CheckpointError: It is damaged, or not a checkpoint.
      DataError: It is of another format.
    """
    if path.is_file():
        raise CheckpointError(f"{path} is not a checkpoint: it is a file, not a directory.")
    with checked(path):
        names = {
            file_path.name for file_path in path.iterdir() if not file_path.name.startswith(".")
        }
        sizes = {name: _size(path, name) for name in sorted(names)}
        if MANIFEST not in sizes:
            raise ValueError(f"there is no {MANIFEST} in it")
        if sizes[MANIFEST] > max(_ROOM, sum(sizes.values()) - sizes[MANIFEST]):
            raise ValueError(f"{MANIFEST} has {sizes[MANIFEST]} bytes")
        data = (path / MANIFEST).read_bytes()
        manifest = parsed(data)
        expected_sizes = {data_file(number): size for number, size in enumerate(manifest.sizes)}
        damages = [f"{name} is missing" for name in sorted(expected_sizes.keys() - names)[:9]]
        damages += [
            f"{name} is not of this one" for name in sorted(names - {*expected_sizes, MANIFEST})[:9]
        ]
        for name in sorted(expected_sizes.keys() & names):
            if sizes[name] != expected_sizes[name]:
                damages.append(
                    f"{name} has {sizes[name]} bytes, and should have {expected_sizes[name]}"
                )
        if damages:
            raise ValueError("; ".join(damages))
        return data, manifest


def _size(path: Path, name: str) -> int:
    file_path = path / name
    if not file_path.is_file():  # nor a link to one
        raise ValueError(f"{name} in it is not a regular file")
    return file_path.stat().st_size


def fetch(
    path: Path, pieces: Iterable[ChecksumRange], room: Callable[[ChecksumRange], Array | None]
) -> None:
    """Read pieces of the arrays of a directory, and check each of them.

    Args:
      path: The directory.
      pieces: The pieces to read.
      room: Where the bytes of a piece are to go, as a flat array of uint8; None for nowhere.

    Raises:
      OSError: A file cannot be read.
      CheckpointError: A piece does not have its checksum; says where it lies.
    """
    scratch = np.empty(0, np.uint8)
    descriptors: dict[int, int] = {}
    with ExitStack() as stack:
        for piece in pieces:
            region, start, stop, expected_sum = piece
            if region.file not in descriptors:
                name, flags = path / data_file(region.file), os.O_RDONLY | os.O_CLOEXEC
                descriptors[region.file] = os.open(name, flags | os.O_NONBLOCK)
                stack.callback(os.close, descriptors[region.file])
            buffer = room(piece)
            if buffer is None:
                if scratch.size < stop - start:
                    scratch = np.empty(stop - start, np.uint8)
                buffer = scratch[: stop - start]
            view, at = buffer.data, region.offset + start
            try:
                while view and (read_nbytes := os.preadv(descriptors[region.file], [view], at)):
                    view, at = view[read_nbytes:], at + read_nbytes
            except OSError as error:
                raise of_file(error, path / data_file(region.file)) from None
            if view or checksum(buffer) != expected_sum:
                raise CheckpointError(
                    f"{path} is damaged: bytes {region.offset + start} to {region.offset + stop} "
                    f"of {data_file(region.file)}, in {region.name!r:.80}, are not those that were "
                    "saved."
                )


def read(path: Path, wanted_entries: Mapping[str, Entry] | None = None) -> Contents:
    """Read a checkpoint, a file or a directory, and check all of it.

    Args:
      path: The file or directory.
      wanted_entries: As of `format.read`.

    Raises:
      OSError: As of `format.read`.
      CheckpointError: As of `format.read`; or an array has a dtype that this process does not know.
      DataError: As of `format.read`.
    """
    if not path.is_dir():
        return format.read(path, wanted_entries)
    manifest = look(path)[1]
    with checked(path):
        fits = fitting(manifest.entries, wanted_entries)
    return Contents(manifest.entries, take(path, manifest, fits, True), manifest.counter)


def take(
    path: Path, manifest: Manifest, names: Container[str], checks_rest: bool
) -> dict[str, Array]:
    """Read arrays of a directory, and check them; with `checks_rest` check the others too.

    Raises:
      OSError: As of `fetch`.
      CheckpointError: As of `fetch`.
    """
    regions = [region for region in manifest.regions if region.name in names]
    rooms = {region.name: np.empty(region.room, np.uint8) for region in regions}

    def room(piece: ChecksumRange) -> Array | None:
        buffer = rooms.get(piece.region.name)
        return None if buffer is None else buffer[piece.start : piece.stop]

    fetch(
        path,
        (piece for piece in manifest.pieces() if checks_rest or piece.region.name in rooms),
        room,
    )
    return {region.name: formed(region.entry, rooms[region.name]) for region in regions}

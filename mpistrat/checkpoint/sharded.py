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
from mpistrat.checkpoint.entries import MANIFEST, Contents, Entry, checked, fitting, formed, head
from mpistrat.checkpoint.files import of_file
from mpistrat.errors import CheckpointError, DataError

FORMAT = 1
LEAST = 1 << 26  # bytes of arrays from which on a checkpoint is a directory, and a file is full
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

    def pieces(self, chunk: int) -> list[Stretch]:
        """Return what has a checksum each, of so many bytes except for the last."""
        return [Stretch(self, at, min(self.room, at + chunk)) for at in range(0, self.room, chunk)]


class Stretch(NamedTuple):
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

    def pieces(self) -> list[Stretch]:
        """Return all that has a checksum, with that."""
        every = (piece for region in self.regions for piece in region.pieces(self.chunk))
        return [piece._replace(sum=one) for piece, one in zip(every, self.sums, strict=True)]


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
    """Return the bytes of each file in which regions lie."""
    sizes: list[int] = []
    for region in regions:
        sizes += [0] * (region.file + 1 - len(sizes))
        sizes[region.file] = region.offset + region.room
    return sizes


def plan(entries: Mapping[str, Entry], together: int, files: int) -> tuple[Region, ...]:
    """Return where arrays are to lie.

    Args:
      entries: The arrays, by name.
      together: So many of the first are in the first file.
      files: How many files there may be. Each has at least `LEAST` bytes, except for the last.

    Example:
      >>> [region.offset for region in plan(dict.fromkeys("ab", Entry("int8", (3,))), 0, 1)]
      [0, 64]
    """
    rows = [Region(name, entry, entry.nbytes, 0, 0) for name, entry in entries.items()]
    total = sum(row.room for row in rows)
    done, file, offset, before = [], 0, 0, 0
    for number, row in enumerate(rows):
        # Whose middle is in the next of `files` equal parts; so there are no more than `files`.
        beyond = (2 * before + row.room) * files > 2 * total * (file + 1)
        if offset >= LEAST and number >= together and beyond:
            file, offset = file + 1, 0
        done.append(row._replace(file=file, offset=offset))
        offset, before = offset + row.room, before + row.room
    return tuple(done)


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
    told = {
        "format": FORMAT,
        "save_counter": manifest.counter,
        "byteorder": sys.byteorder,
        "chunk": manifest.chunk,
        "arrays": rows,
    }
    body = json.dumps(told, indent=1).removesuffix("\n}").encode()
    return body + _TAIL % checksum(body).hex().encode()


def parsed(data: bytes) -> Manifest:
    """Return what the bytes of a manifest say.

    Raises:
      DataError: It is of another format.
      ValueError: It makes no sense; or another error, see `checked`.
    """
    body = data[: -len(_TAIL % bytes(2 * SUM))]
    if data[len(body) :] != _TAIL % checksum(body).hex().encode():
        raise ValueError(f"{MANIFEST} has been changed, or is not whole")
    told = json.loads(data)
    entries, counter = head(told, FORMAT, "directories of ")
    if told["byteorder"] != sys.byteorder:
        raise DataError(f"is of byte order {told['byteorder']!r:.40}; this is {sys.byteorder!r}.")
    chunk = told["chunk"]
    if type(chunk) is not int or not _ALIGN <= chunk <= _LARGEST or chunk % _ALIGN:
        raise ValueError(f"chunk is {chunk!r:.40}")
    regions: list[Region] = []
    sums: list[bytes] = []
    for name, row in told["arrays"].items():
        regions.append(_region(name, entries[name], row, regions[-1] if regions else None))
        found = bytes.fromhex(row["checksums"])
        if len(found) != SUM * -(-regions[-1].room // chunk):
            raise ValueError(f"{name!r:.80} has {len(found)} bytes of checksums")
        sums += [found[at : at + SUM] for at in range(0, len(found), SUM)]
    return Manifest(counter, tuple(regions), tuple(sums), chunk)


def _region(name: str, entry: Entry, row: Any, before: Region | None) -> Region:
    """Return what a row says, if that follows from the row before."""
    nbytes, offset = row["nbytes"], row["offset"]
    number = _DATA.fullmatch(row["file"])
    if number is None or type(nbytes) is not int or not 0 <= nbytes < 1 << 63:
        raise ValueError(f"{name!r:.80} has file {row['file']!r:.40} and {nbytes!r:.40} bytes")
    here = int(number[1]), offset
    last = (0, 0) if before is None else (before.file, before.offset + before.room)
    following = {last} if before is None else {last, (last[0] + 1, 0)}
    if type(offset) is not int or here not in following:
        raise ValueError(f"{name!r:.80} does not follow the array before it")
    if entry.known and entry.nbytes != nbytes:
        raise ValueError(f"{name!r:.80} has more or fewer bytes than its shape says")
    return Region(name, entry, nbytes, *here)


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
        there = {one.name for one in path.iterdir() if not one.name.startswith(".")}
        sizes = {one: _size(path, one) for one in sorted(there)}
        if MANIFEST not in sizes:
            raise ValueError(f"there is no {MANIFEST} in it")
        if sizes[MANIFEST] > max(_ROOM, sum(sizes.values()) - sizes[MANIFEST]):
            raise ValueError(f"{MANIFEST} has {sizes[MANIFEST]} bytes")
        data = (path / MANIFEST).read_bytes()
        manifest = parsed(data)
        wanted = {data_file(number): size for number, size in enumerate(manifest.sizes)}
        wrong = [f"{one} is missing" for one in sorted(wanted.keys() - there)[:9]]
        wrong += [f"{one} is not of this one" for one in sorted(there - {*wanted, MANIFEST})[:9]]
        for name in sorted(wanted.keys() & there):
            if sizes[name] != wanted[name]:
                wrong.append(f"{name} has {sizes[name]} bytes, and should have {wanted[name]}")
        if wrong:
            raise ValueError("; ".join(wrong))
        return data, manifest


def _size(path: Path, name: str) -> int:
    inside = path / name
    if not inside.is_file():  # nor a link to one
        raise ValueError(f"{name} in it is not a regular file")
    return inside.stat().st_size


def fetch(path: Path, pieces: Iterable[Stretch], room: Callable[[Stretch], Array | None]) -> None:
    """Read pieces of the arrays of a directory, and check each of them.

    Args:
      path: The directory.
      pieces: What to read.
      room: Where the bytes of a piece are to go, as a flat array of uint8; None for nowhere.

    Raises:
      OSError: A file cannot be read.
      CheckpointError: A piece does not have its checksum; says where it lies.
    """
    scratch = np.empty(0, np.uint8)
    descriptors: dict[int, int] = {}
    with ExitStack() as stack:
        for piece in pieces:
            region, start, stop, wanted = piece
            if region.file not in descriptors:
                name, flags = path / data_file(region.file), os.O_RDONLY | os.O_CLOEXEC
                descriptors[region.file] = os.open(name, flags | os.O_NONBLOCK)
                stack.callback(os.close, descriptors[region.file])
            into = room(piece)
            if into is None:
                if scratch.size < stop - start:
                    scratch = np.empty(stop - start, np.uint8)
                into = scratch[: stop - start]
            view, at = into.data, region.offset + start
            try:
                while view and (got := os.preadv(descriptors[region.file], [view], at)):
                    view, at = view[got:], at + got
            except OSError as error:
                raise of_file(error, path / data_file(region.file)) from None
            if view or checksum(into) != wanted:
                raise CheckpointError(
                    f"{path} is damaged: bytes {region.offset + start} to {region.offset + stop} "
                    f"of {data_file(region.file)}, in {region.name!r:.80}, are not those that were "
                    "saved."
                )


def read(path: Path, wanted: Mapping[str, Entry] | None = None) -> Contents:
    """Read a checkpoint, a file or a directory, and check all of it.

    Args:
      path: The file or directory.
      wanted: As of `format.read`.

    Raises:
      OSError: As of `format.read`.
      CheckpointError: As of `format.read`; or an array has a dtype that this process does not know.
      DataError: As of `format.read`.
    """
    if not path.is_dir():
        return format.read(path, wanted)
    manifest = look(path)[1]
    with checked(path):
        fits = fitting(manifest.entries, wanted)
    return Contents(manifest.entries, take(path, manifest, fits, True), manifest.counter)


def take(path: Path, manifest: Manifest, names: Container[str], rest: bool) -> dict[str, Array]:
    """Read arrays of a directory, and check them; with `rest` check the others too.

    Raises:
      OSError: As of `fetch`.
      CheckpointError: As of `fetch`.
    """
    regions = [region for region in manifest.regions if region.name in names]
    rooms = {region.name: np.empty(region.room, np.uint8) for region in regions}

    def room(piece: Stretch) -> Array | None:
        found = rooms.get(piece.region.name)
        return None if found is None else found[piece.start : piece.stop]

    fetch(path, (one for one in manifest.pieces() if rest or one.region.name in rooms), room)
    return {region.name: formed(region.entry, rooms[region.name]) for region in regions}

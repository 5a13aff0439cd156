"""The contents of the directory of a large checkpoint, and readers that check all that they read.

``data-0.bin``, ``data-1.bin`` and so on have the bytes of the arrays, in C order, one array after
the other. Each array begins at a multiple of 64 bytes, and is in one file. ``manifest.json`` lists
the arrays with dtype, shape, file and offset. It has an xxh3-128 checksum of each `CHUNK_NBYTES`
bytes of an array and the zeros that follow it, so that every byte of a file is covered. The last
entry of the manifest is the checksum of all that precedes it. The layout follows from the list of
arrays, so the reader refuses a manifest with any other layout.

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
from mpistrat.checkpoint.files import add_file_name
from mpistrat.checkpoint.format import (
    MANIFEST,
    NO_METRICS,
    Contents,
    Entry,
    explaining_read_errors,
    form_array,
    parse_manifest_head,
    select_matching_names,
)
from mpistrat.errors import CheckpointError, DataError

FORMAT_NUMBER = 1
# Bytes of arrays from which on a checkpoint is a directory, and a file is full.
MIN_DIRECTORY_NBYTES = 1 << 26
CHUNK_NBYTES = 1 << 22
_ALIGNMENT_NBYTES = 64
CHECKSUM_NBYTES = 16  # bytes of a checksum
_MAX_MANIFEST_NBYTES = 1 << 24  # bytes of a manifest: at most, or as many as the data
_MAX_CHUNK_NBYTES = 1 << 26  # bytes of a chunk
_CHECKSUM_LINE = b',\n "checksum": "%s"\n}\n'
_DATA_FILE_NAME = re.compile(r"data-(0|[1-9]\d{0,8})\.bin")


class Region(NamedTuple):
    """The file, the offset and the size of an array.

    Attributes:
      name: Its name.
      entry: Its dtype and shape.
      nbytes: Its bytes, without the zeros that follow.
      file_number: The number of its file.
      offset: Its first byte there.
    """

    name: str
    entry: Entry
    nbytes: int
    file_number: int
    offset: int

    @property
    def padded_nbytes(self) -> int:
        """Its bytes with the zeros that follow, up to the next array."""
        return -(-self.nbytes // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES

    def split_pieces(self, chunk_nbytes: int) -> list[ChecksumRange]:
        """Return the pieces that have a checksum each, of so many bytes except for the last."""
        return [
            ChecksumRange(self, at, min(self.padded_nbytes, at + chunk_nbytes))
            for at in range(0, self.padded_nbytes, chunk_nbytes)
        ]


class ChecksumRange(NamedTuple):
    """A piece: a part of a region that has a checksum.

    Attributes:
      region: The region that it is a part of.
      start: Its first byte in the region.
      stop: The byte after its last.
      checksum: The checksum that it has to have, where that is known.
    """

    region: Region
    start: int
    stop: int
    checksum: bytes = b""


class Manifest(NamedTuple):
    """The contents of a manifest.

    Attributes:
      counter: How many times the checkpoint had been saved.
      regions: The regions of the arrays, in the order of the files.
      checksums: The checksum of each of `list_pieces`.
      chunk_nbytes: How many bytes have one checksum.
      metrics: The metrics that it was saved with.
    """

    counter: int
    regions: tuple[Region, ...]
    checksums: tuple[bytes, ...]
    chunk_nbytes: int
    metrics: Mapping[str, float] = NO_METRICS

    @property
    def entries(self) -> dict[str, Entry]:
        """All arrays, by name."""
        return {region.name: region.entry for region in self.regions}

    @property
    def file_sizes(self) -> list[int]:
        """The bytes of each file."""
        return compute_file_sizes(self.regions)

    def list_pieces(self) -> list[ChecksumRange]:
        """Return all pieces, with their checksums."""
        pieces = (
            piece for region in self.regions for piece in region.split_pieces(self.chunk_nbytes)
        )
        return [
            piece._replace(checksum=digest)
            for piece, digest in zip(pieces, self.checksums, strict=True)
        ]


def make_data_file_name(number: int) -> str:
    """Return the name of a file of data.

    Example:
      >>> make_data_file_name(0)
      'data-0.bin'
    """
    return f"data-{number}.bin"


def compute_checksum(data: Any) -> bytes:
    """Return the checksum of some bytes. Cost: about 0.1 s for each GB."""
    return xxhash.xxh3_128_digest(data)


def compute_file_sizes(regions: Iterable[Region]) -> list[int]:
    """Return the number of bytes of each file that holds regions."""
    sizes: list[int] = []
    for region in regions:
        sizes += [0] * (region.file_number + 1 - len(sizes))
        sizes[region.file_number] = region.offset + region.padded_nbytes
    return sizes


def plan_regions(
    entries: Mapping[str, Entry], first_file_count: int, max_file_count: int
) -> tuple[Region, ...]:
    """Return the file and offset of each array.

    Args:
      entries: The arrays, by name.
      first_file_count: So many of the first are in the first file.
      max_file_count: How many files there may be. Each has at least
        `MIN_DIRECTORY_NBYTES` bytes, except for the last.

    Example:
      >>> [region.offset for region in plan_regions(dict.fromkeys("ab", Entry("int8", (3,))), 0, 1)]
      [0, 64]
    """
    unplaced_regions = [Region(name, entry, entry.nbytes, 0, 0) for name, entry in entries.items()]
    total_nbytes = sum(region.padded_nbytes for region in unplaced_regions)
    regions, file_number, offset, previous_nbytes = [], 0, 0, 0
    for region_index, region in enumerate(unplaced_regions):
        # Its middle is in the next of `files` equal parts; so there are no more than `files`.
        starts_next_file = (
            2 * previous_nbytes + region.padded_nbytes
        ) * max_file_count > 2 * total_nbytes * (file_number + 1)
        if offset >= MIN_DIRECTORY_NBYTES and region_index >= first_file_count and starts_next_file:
            file_number, offset = file_number + 1, 0
        regions.append(region._replace(file_number=file_number, offset=offset))
        offset, previous_nbytes = (
            offset + region.padded_nbytes,
            previous_nbytes + region.padded_nbytes,
        )
    return tuple(regions)


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest."""
    sums, rows = iter(manifest.checksums), {}
    for name, entry, nbytes, file, offset in manifest.regions:
        count = len(Region(name, entry, nbytes, file, offset).split_pieces(manifest.chunk_nbytes))
        rows[name] = {
            **entry._asdict(),
            "file": make_data_file_name(file),
            "offset": offset,
            "nbytes": nbytes,
            "checksums": b"".join(next(sums) for _ in range(count)).hex(),
        }
    content: dict[str, Any] = {
        "format": FORMAT_NUMBER,
        "save_counter": manifest.counter,
        "byteorder": sys.byteorder,
        "chunk": manifest.chunk_nbytes,
        "arrays": rows,
    }
    if manifest.metrics:
        content["metrics"] = dict(manifest.metrics)
    body = json.dumps(content, indent=1).removesuffix("\n}").encode()
    return body + _CHECKSUM_LINE % compute_checksum(body).hex().encode()


def parse_manifest(manifest_bytes: bytes) -> Manifest:
    """Return the manifest that some bytes contain.

    Raises:
      DataError: It is of another format.
      ValueError: It makes no sense; or another error, see `explaining_read_errors`.
    """
    body = manifest_bytes[: -len(_CHECKSUM_LINE % bytes(2 * CHECKSUM_NBYTES))]
    if manifest_bytes[len(body) :] != _CHECKSUM_LINE % compute_checksum(body).hex().encode():
        raise ValueError(f"{MANIFEST} has been changed, or is not whole")
    content = json.loads(manifest_bytes)
    entries, counter, metrics = parse_manifest_head(content, FORMAT_NUMBER, "directories of ")
    if content["byteorder"] != sys.byteorder:
        raise DataError(
            f"is of byte order {content['byteorder']!r:.40}; this is {sys.byteorder!r}."
        )
    chunk_nbytes = content["chunk"]
    if (
        type(chunk_nbytes) is not int
        or not _ALIGNMENT_NBYTES <= chunk_nbytes <= _MAX_CHUNK_NBYTES
        or chunk_nbytes % _ALIGNMENT_NBYTES
    ):
        raise ValueError(f"chunk is {chunk_nbytes!r:.40}")
    regions: list[Region] = []
    checksums: list[bytes] = []
    for name, fields in content["arrays"].items():
        regions.append(_parse_region(name, entries[name], fields, regions[-1] if regions else None))
        checksum_bytes = bytes.fromhex(fields["checksums"])
        if len(checksum_bytes) != CHECKSUM_NBYTES * -(-regions[-1].padded_nbytes // chunk_nbytes):
            raise ValueError(f"{name!r:.80} has {len(checksum_bytes)} bytes of checksums")
        checksums += [
            checksum_bytes[at : at + CHECKSUM_NBYTES]
            for at in range(0, len(checksum_bytes), CHECKSUM_NBYTES)
        ]
    return Manifest(counter, tuple(regions), tuple(checksums), chunk_nbytes, metrics)


def _parse_region(name: str, entry: Entry, fields: Any, previous_region: Region | None) -> Region:
    """Return the region of a row, which has to follow the region of the row before."""
    nbytes, offset = fields["nbytes"], fields["offset"]
    number = _DATA_FILE_NAME.fullmatch(fields["file"])
    if number is None or type(nbytes) is not int or not 0 <= nbytes < 1 << 63:
        raise ValueError(f"{name!r:.80} has file {fields['file']!r:.40} and {nbytes!r:.40} bytes")
    start = int(number[1]), offset
    expected_start = (
        (0, 0)
        if previous_region is None
        else (previous_region.file_number, previous_region.offset + previous_region.padded_nbytes)
    )
    allowed_starts = (
        {expected_start}
        if previous_region is None
        else {expected_start, (expected_start[0] + 1, 0)}
    )
    if type(offset) is not int or start not in allowed_starts:
        raise ValueError(f"{name!r:.80} does not follow the array before it")
    if entry.has_known_dtype and entry.nbytes != nbytes:
        raise ValueError(f"{name!r:.80} has more or fewer bytes than its shape says")
    return Region(name, entry, nbytes, *start)


def read_manifest(path: Path) -> tuple[bytes, Manifest]:
    """Return the manifest of a directory, encoded and parsed, and check the files' sizes.

    Args:
      path: The directory.

    Raises:
      OSError: It is not there, or cannot be read.
      CheckpointError: It is damaged, or not a checkpoint.
      DataError: It is of another format.
    """
    if path.is_file():
        raise CheckpointError(f"{path} is not a checkpoint: it is a file, not a directory.")
    with explaining_read_errors(path):
        names = {
            file_path.name for file_path in path.iterdir() if not file_path.name.startswith(".")
        }
        sizes = {name: _file_size(path, name) for name in sorted(names)}
        if MANIFEST not in sizes:
            raise ValueError(f"there is no {MANIFEST} in it")
        if sizes[MANIFEST] > max(_MAX_MANIFEST_NBYTES, sum(sizes.values()) - sizes[MANIFEST]):
            raise ValueError(f"{MANIFEST} has {sizes[MANIFEST]} bytes")
        manifest_bytes = (path / MANIFEST).read_bytes()
        manifest = parse_manifest(manifest_bytes)
        expected_sizes = {
            make_data_file_name(number): size for number, size in enumerate(manifest.file_sizes)
        }
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
        return manifest_bytes, manifest


def _file_size(path: Path, name: str) -> int:
    file_path = path / name
    if not file_path.is_file():  # nor a link to one
        raise ValueError(f"{name} in it is not a regular file")
    return file_path.stat().st_size


def read_pieces(
    path: Path,
    pieces: Iterable[ChecksumRange],
    find_buffer: Callable[[ChecksumRange], Array | None],
) -> None:
    """Read pieces of the arrays of a directory, and check each of them.

    Args:
      path: The directory.
      pieces: The pieces to read.
      find_buffer: Where the bytes of a piece are to go, as a flat array of uint8; None for nowhere.

    Raises:
      OSError: A file cannot be read.
      CheckpointError: A piece does not have its checksum; the text names the bytes.
    """
    scratch = np.empty(0, np.uint8)
    descriptors: dict[int, int] = {}
    with ExitStack() as stack:
        for piece in pieces:
            region, start, stop, expected_sum = piece
            if region.file_number not in descriptors:
                name, flags = (
                    path / make_data_file_name(region.file_number),
                    os.O_RDONLY | os.O_CLOEXEC,
                )
                descriptors[region.file_number] = os.open(name, flags | os.O_NONBLOCK)
                stack.callback(os.close, descriptors[region.file_number])
            buffer = find_buffer(piece)
            if buffer is None:
                if scratch.size < stop - start:
                    scratch = np.empty(stop - start, np.uint8)
                buffer = scratch[: stop - start]
            unread_bytes, offset = buffer.data, region.offset + start
            try:
                while unread_bytes and (
                    read_nbytes := os.preadv(
                        descriptors[region.file_number], [unread_bytes], offset
                    )
                ):
                    unread_bytes, offset = unread_bytes[read_nbytes:], offset + read_nbytes
            except OSError as error:
                raise add_file_name(error, path / make_data_file_name(region.file_number)) from None
            if unread_bytes or compute_checksum(buffer) != expected_sum:
                raise CheckpointError(
                    f"{path} is damaged: bytes {region.offset + start} to {region.offset + stop} "
                    f"of {make_data_file_name(region.file_number)}, in {region.name!r:.80}, are "
                    "not those that were saved."
                )


def read_checkpoint(path: Path, wanted_entries: Mapping[str, Entry] | None = None) -> Contents:
    """Read a checkpoint, a file or a directory, and check all of it.

    Args:
      path: The file or directory.
      wanted_entries: As of `format.read_archive`.

    Raises:
      OSError: As of `format.read_archive`.
      CheckpointError: As of `format.read_archive`; or an array has a dtype that this process does
        not know.
      DataError: As of `format.read_archive`.
    """
    if not path.is_dir():
        return format.read_archive(path, wanted_entries)
    manifest = read_manifest(path)[1]
    with explaining_read_errors(path):
        matching_names = select_matching_names(manifest.entries, wanted_entries)
    arrays = read_arrays(path, manifest, matching_names, True)
    return Contents(manifest.entries, arrays, manifest.counter, manifest.metrics)


def read_metrics(path: Path) -> Mapping[str, float]:
    """Return the metrics that a checkpoint was saved with; none of one that cannot be read."""
    try:
        if path.is_dir():
            return read_manifest(path)[1].metrics
        return format.read_archive_head(path).metrics
    except (OSError, CheckpointError, DataError):
        return {}


def read_arrays(
    path: Path, manifest: Manifest, array_names: Container[str], checks_others: bool
) -> dict[str, Array]:
    """Read arrays of a directory, and check them; with `checks_others` check the others too.

    Raises:
      OSError: As of `read_pieces`.
      CheckpointError: As of `read_pieces`.
    """
    regions = [region for region in manifest.regions if region.name in array_names]
    buffers = {region.name: np.empty(region.padded_nbytes, np.uint8) for region in regions}

    def find_buffer(piece: ChecksumRange) -> Array | None:
        buffer = buffers.get(piece.region.name)
        return None if buffer is None else buffer[piece.start : piece.stop]

    read_pieces(
        path,
        (
            piece
            for piece in manifest.list_pieces()
            if checks_others or piece.region.name in buffers
        ),
        find_buffer,
    )
    return {region.name: form_array(region.entry, buffers[region.name]) for region in regions}

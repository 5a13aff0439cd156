"""What differs between two arrays, and between the newest checkpoints of two directories."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mpistrat.arrays import Array, bits
from mpistrat.checkpoint import files, sharded
from mpistrat.checkpoint.cells import is_part
from mpistrat.checkpoint.entries import Entry


def newest(directory: Path) -> dict[str, Path]:
    """Return the newest checkpoint of each name below a directory, by directory and name."""
    newest_by_name: dict[str, tuple[int, Path]] = {}
    for place, *name_lists in os.walk(directory):  # which passes over what is being removed
        for path in (Path(place, name) for names in name_lists for name in names):
            parts = files.parted(path)
            if parts is not None:
                name = (path.parent.relative_to(directory) / parts[0]).as_posix()
                newest_by_name[name] = max(newest_by_name.get(name, (-1, path)), (parts[1], path))
    return {name: path for name, (_, path) in sorted(newest_by_name.items())}


def differences(
    reference_directory: Path, interrupted_directory: Path, tolerance: float, ignore: Sequence[str]
) -> tuple[int, list[str]]:
    """Compare the newest checkpoints of two directories.

    Names that only the interrupted program has used, such as for what it saves when it is told to
    end, are passed over.

    Args:
      reference_directory: The directory of the reference run.
      interrupted_directory: That of one with interruptions.
      tolerance: How far floating-point arrays may be from each other, as a part of the largest
        number of the first; 0 for the same bits.
      ignore: Patterns of names of arrays that may differ.

    Returns:
      How many arrays were compared, and a line for each that differs.

    Raises:
      CheckpointError: One is damaged.
    """
    reference_paths, interrupted_paths = newest(reference_directory), newest(interrupted_directory)
    lines = [
        f"{name}: was saved by the reference run only"
        for name in reference_paths.keys() - interrupted_paths
    ]
    compared_count = 0
    for name in reference_paths.keys() & interrupted_paths:
        reference_arrays, interrupted_arrays = (
            sharded.read(path).arrays for path in (reference_paths[name], interrupted_paths[name])
        )
        entries = {
            name: Entry.from_array(array)
            for name, array in (interrupted_arrays | reference_arrays).items()
        }
        for key in sorted(entries):
            is_ignored = any(fnmatch.fnmatchcase(key, pattern) for pattern in ignore)
            if is_ignored or is_part(key, entries):
                continue
            compared_count += 1
            text = difference(reference_arrays.get(key), interrupted_arrays.get(key), tolerance)
            if text:
                lines.append(f"{name}: {key} {text}")
    return compared_count, sorted(lines)


def difference(
    first_array: Array | None, second_array: Array | None, tolerance: float = 0.0
) -> str:
    """Return in words how an array differs from the one that is wanted, or an empty string.

    Args:
      first_array: The first array; None where only the second checkpoint has one.
      second_array: The other.
      tolerance: As of `differences`.
    """
    if first_array is None or second_array is None:
        return "is in one of the two only"
    entries = Entry.from_array(first_array), Entry.from_array(second_array)
    if entries[0] != entries[1]:
        return f"is {entries[0]} in the first and {entries[1]} in the second"
    unequal = (bits(first_array) != bits(second_array)).any(axis=1)
    if not unequal.any():
        return ""
    if first_array.dtype.kind in "biu":
        return f"differs in {unequal.sum()} of {unequal.size} numbers"
    wide_dtype = np.complex128 if first_array.dtype.kind == "c" else np.float64
    a, b = first_array.astype(wide_dtype).ravel(), second_array.astype(wide_dtype).ravel()
    largest = float(np.max(np.abs(a), where=np.isfinite(a), initial=0.0)) or 1.0
    with np.errstate(invalid="ignore"):  # of two infinities
        gap = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b) / largest)
    farthest = float(np.max(np.where(np.isnan(gap), np.inf, gap)))
    if tolerance and farthest <= tolerance:
        return ""
    return (
        f"differs in {unequal.sum()} of {unequal.size} numbers, by up to {farthest:.2g} of the "
        "largest"
    )

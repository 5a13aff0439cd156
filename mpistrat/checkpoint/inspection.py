"""List, show, verify, compare and export checkpoints. MPI is not started.

PATH is a checkpoint, or a directory of checkpoints, of which the newest is used; verify checks all.
The exit code is 1 if verify finds damage, or diff a difference.

These are the reports of the command ``mpistrat checkpoint``, and the comparison of two runs for
``mpistrat drill`` (`compare_runs`). Nothing here communicates.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat.arrays import Array, as_bytes, is_inexact
from mpistrat.checkpoint import atomic, files, format, sharded
from mpistrat.checkpoint.format import Contents, Entry, explaining_read_errors
from mpistrat.checkpoint.tree import make_readable
from mpistrat.checkpoint.values import VALUES_NAME, format_value, is_parts_entry, parse_values
from mpistrat.errors import CheckpointError, DataError


def find_newest_checkpoints(directory: Path) -> dict[str, Path]:
    """Return the newest checkpoint of each name below a directory, by directory and name."""
    newest_by_name: dict[str, tuple[int, Path]] = {}
    for parent_path, *name_lists in os.walk(directory):  # which passes over what is being removed
        for path in (Path(parent_path, name) for names in name_lists for name in names):
            name_and_number = files.split_numbered_path(path)
            if name_and_number is not None:
                name = (path.parent.relative_to(directory) / name_and_number[0]).as_posix()
                newest_by_name[name] = max(
                    newest_by_name.get(name, (-1, path)), (name_and_number[1], path)
                )
    return {name: path for name, (_, path) in sorted(newest_by_name.items())}


def compare_runs(
    reference_directory: Path, interrupted_directory: Path, tolerance: float, ignore: Sequence[str]
) -> tuple[int, list[str]]:
    """Compare the newest checkpoints of two directories.

    Names that only the interrupted program has used are skipped, such as those of the checkpoints
    that it saves after a notice.

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
    reference_paths, interrupted_paths = (
        find_newest_checkpoints(reference_directory),
        find_newest_checkpoints(interrupted_directory),
    )
    lines = [
        f"{name}: was saved by the reference run only"
        for name in reference_paths.keys() - interrupted_paths
    ]
    compared_count = 0
    for name in reference_paths.keys() & interrupted_paths:
        reference_arrays, interrupted_arrays = (
            sharded.read_checkpoint(path).arrays
            for path in (reference_paths[name], interrupted_paths[name])
        )
        entries = {
            name: Entry.from_array(array)
            for name, array in (interrupted_arrays | reference_arrays).items()
        }
        for key in sorted(entries):
            is_ignored = any(fnmatch.fnmatchcase(key, pattern) for pattern in ignore)
            if is_ignored or is_parts_entry(key, entries):
                continue
            compared_count += 1
            text = describe_difference(
                reference_arrays.get(key), interrupted_arrays.get(key), tolerance
            )
            if text:
                lines.append(f"{name}: {key} {text}")
    return compared_count, sorted(lines)


def describe_difference(
    first_array: Array | None, second_array: Array | None, tolerance: float = 0.0
) -> str:
    """Return in words how an array differs from the one that is wanted, or an empty string.

    Args:
      first_array: The first array; None where only the second checkpoint has one.
      second_array: The other.
      tolerance: As of `compare_runs`.
    """
    if first_array is None or second_array is None:
        return "is in one of the two only"
    entries = Entry.from_array(first_array), Entry.from_array(second_array)
    if entries[0] != entries[1]:
        return f"is {entries[0]} in the first and {entries[1]} in the second"
    unequal = (as_bytes(first_array) != as_bytes(second_array)).any(axis=1)
    if not unequal.any():
        return ""
    if first_array.dtype.kind in "biu":
        return f"differs in {unequal.sum()} of {unequal.size} numbers"
    wide_dtype = np.complex128 if first_array.dtype.kind == "c" else np.float64
    a, b = first_array.astype(wide_dtype).ravel(), second_array.astype(wide_dtype).ravel()
    largest_magnitude = float(np.max(np.abs(a), where=np.isfinite(a), initial=0.0)) or 1.0
    with np.errstate(invalid="ignore"):  # of two infinities
        relative_gaps = np.where(
            (a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b) / largest_magnitude
        )
    largest_gap = float(np.max(np.where(np.isnan(relative_gaps), np.inf, relative_gaps)))
    if tolerance and largest_gap <= tolerance:
        return ""
    return (
        f"differs in {unequal.sum()} of {unequal.size} numbers, by up to {largest_gap:.2g} of the "
        "largest"
    )


_SAFETENSORS_DTYPES = {"bool", "bfloat16", "float16", "float32", "float64", "complex64"}
_SAFETENSORS_DTYPES |= {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}

ReportLines = tuple[list[str], int]  # lines, and the exit code


def _list_checkpoint_paths(directory: Path) -> list[Path]:
    """Return all checkpoints of a directory: by name, the oldest first."""
    named_paths = [
        (name, path) for path in directory.iterdir() if (name := files.split_numbered_path(path))
    ]
    return [path for _, path in sorted(named_paths)]


def _count_nbytes(path: Path) -> int:
    file_paths = path.iterdir() if path.is_dir() else [path]
    return sum(file_path.stat().st_size for file_path in file_paths)


def _describe_damage(path: Path, reads_all: bool) -> str:
    """Return what is wrong with a checkpoint, or nothing; a directory may be looked at only."""
    try:
        if path.is_dir() and not reads_all:
            counter = sharded.read_manifest(path)[1].counter
        else:
            counter = sharded.read_checkpoint(path, {}).counter
    except (OSError, CheckpointError, DataError) as error:
        return str(error)
    number = (files.split_numbered_path(path) or ("", counter))[1]
    return "" if counter == number else f"it holds checkpoint number {counter}, not {number}"


def make_printable(text: str) -> str:
    """Return a text, or its representation if it has characters that a terminal would obey."""
    return text if text.isprintable() else repr(text)


def list_checkpoints(directory: str) -> ReportLines:
    """List name, time, bytes and damage of each checkpoint in a directory.

    Files are read completely. For a directory only the manifest and the sizes are checked.
    """
    lines = []
    for path in _list_checkpoint_paths(Path(directory)):
        try:
            modified, nbytes = path.stat().st_mtime, _count_nbytes(path)
        except OSError as error:  # a running job has removed it, or a link leads nowhere
            lines.append(f"{path.name:<24} {error}")
            continue
        time = datetime.datetime.fromtimestamp(modified).isoformat(" ", "seconds")
        damage = _describe_damage(path, reads_all=False)
        metrics = {} if damage else sharded.read_metrics(path)
        words = [f"{make_printable(name)} {value:.6g}" for name, value in metrics.items()]
        text = "  ".join([damage or "ok", *words])
        lines.append(f"{path.name:<24} {time} {nbytes:>15,} bytes  {text}")
    return lines or [f"there is no checkpoint in {directory}"], 0


def show_checkpoint(path_like: str) -> ReportLines:
    """List arrays with dtype and shape, numbers and strings, and count what is not finite."""
    path = files.find_checkpoint(path_like)
    contents, values = _read_contents(path)
    lines = [f"{path}: save number {contents.counter}, {_count_text(contents)}"]
    lines += [
        f"  metric {make_printable(name)} = {value:.6g}" for name, value in contents.metrics.items()
    ]
    lines += [f"  {make_readable(name)} = {value:.60}" for name, value in values.items()]
    for name, array in contents.arrays.items():
        entry = contents.entries[name]
        number = f" = {array}" if entry.shape == () else ""
        if (nonfinite_count := _count_nonfinite(array)) and entry.shape:
            number = f": {nonfinite_count} of {array.size} are not finite"
        lines.append(f"  {make_readable(name)} {entry}{number}")
    return lines, 0


def _read_contents(path: Path) -> tuple[Contents, dict[str, str]]:
    """Return a checkpoint, and its numbers and strings, which are then not among the arrays."""
    contents = sharded.read_checkpoint(path)
    array = contents.arrays.pop(VALUES_NAME, None)
    contents.entries.pop(VALUES_NAME, None)
    with explaining_read_errors(path):
        values = {} if array is None else parse_values(array)
        return contents, {name: format_value(value) for name, value in values.items()}


def _count_text(contents: Contents) -> str:
    """Return how many arrays there are, and the name of that which has numbers and strings."""
    count = len(contents.arrays.keys() - {VALUES_NAME})
    values_text = f" and {VALUES_NAME}" if VALUES_NAME in contents.arrays else ""
    return f"{count} array{'s' * (count != 1)}{values_text}"


def _count_nonfinite(array: Array) -> int:
    if not is_inexact(array.dtype):
        return 0
    return int(array.size - np.isfinite(array).sum())


def verify_checkpoints(path_like: str) -> ReportLines:
    """Read all bytes of a checkpoint, or of all in a directory, and report damage."""
    path = Path(path_like)
    has_checkpoints = path.is_dir() and not path.name.endswith(files.DIRECTORY_SUFFIX)
    paths = _list_checkpoint_paths(path) if has_checkpoints else [files.find_checkpoint(path_like)]
    damages = {
        checkpoint_path: _describe_damage(checkpoint_path, reads_all=True)
        for checkpoint_path in paths
    }
    if not paths:
        raise FileNotFoundError(f"there is no checkpoint in {path}.")
    return [
        f"{checkpoint_path.name}: {text or 'ok'}" for checkpoint_path, text in damages.items()
    ], int(any(damages.values()))


def diff_checkpoints(first_path: str, second_path: str) -> ReportLines:
    """List the arrays in which two checkpoints differ, bit by bit.

    Parts of metrics are compared where as many replicas have saved both.
    """
    (first_contents, first_values), (second_contents, second_values) = (
        _read_contents(files.find_checkpoint(path_like)) for path_like in (first_path, second_path)
    )
    lines = []
    for sign, own_entries, other_entries in (
        ("-", first_contents.entries, second_contents.entries),
        ("+", second_contents.entries, first_contents.entries),
    ):
        extra_names = [
            name
            for name in own_entries
            if name not in other_entries and not is_parts_entry(name, own_entries)
        ]
        lines += [f"{sign} {make_readable(name)} {own_entries[name]}" for name in extra_names]
    for name in sorted(first_values.keys() | second_values):
        first_text, second_text = (
            first_values.get(name, "absent"),
            second_values.get(name, "absent"),
        )
        if first_text != second_text:
            lines.append(
                f"! {make_readable(name)} is {first_text:.40} in the first and "
                f"{second_text:.40} in the second"
            )
    for name in filter(second_contents.entries.__contains__, first_contents.entries):
        is_part_in_both = is_parts_entry(name, first_contents.entries) and is_parts_entry(
            name, second_contents.entries
        )
        if is_part_in_both and first_contents.entries[name] != second_contents.entries[name]:
            continue  # of other numbers of replicas
        if text := describe_difference(first_contents.arrays[name], second_contents.arrays[name]):
            lines.append(f"! {make_readable(name)} {text}")
    return lines or ["no difference"], int(bool(lines))


def export_checkpoint(path_like: str, output_path_like: str) -> ReportLines:
    """Write the arrays to a file that other libraries read."""
    path, output_path = files.find_checkpoint(path_like), Path(output_path_like)
    contents = sharded.read_checkpoint(path)
    if output_path.suffix == ".npz":
        with atomic.open_atomically(output_path, should_replace=False) as file:
            format.write_archive(file, contents.arrays, contents.counter, contents.metrics)
        return [f"{output_path}: {_count_text(contents)}"], 0
    if output_path.suffix != ".safetensors":
        raise CheckpointError(
            f"{output_path_like}: expected a name that ends with .safetensors or .npz."
        )
    try:
        library: Any = importlib.import_module("safetensors.numpy")
    except ImportError:
        raise ImportError(
            "writing .safetensors needs its package: pip install 'mpistrat[export]'"
        ) from None
    unsupported_arrays = [
        f"{name} {entry}"
        for name, entry in contents.entries.items()
        if entry.dtype not in _SAFETENSORS_DTYPES
    ]
    if unsupported_arrays:
        raise CheckpointError(
            f"{output_path_like}: safetensors has no such dtype: {', '.join(unsupported_arrays)}. "
            "Use .npz."
        )
    with atomic.open_atomically(output_path, should_replace=False) as file:
        file.write(
            library.save(dict(contents.arrays), metadata={"save_counter": str(contents.counter)})
        )
    return [f"{output_path}: {_count_text(contents)}"], 0


REPORTS: dict[str, Callable[..., ReportLines]] = {
    "list": list_checkpoints,
    "show": show_checkpoint,
    "verify": verify_checkpoints,
    "diff": diff_checkpoints,
    "export": export_checkpoint,
}


_ACTIONS = {
    "list": ("DIR", "each checkpoint of a directory: number, time, bytes, and what is wrong"),
    "show": ("PATH", "names, dtypes, shapes, single numbers, and how many are not finite"),
    "verify": ("PATH", "read every byte"),
    "diff": ("PATH OTHER", "what differs between two"),
    "export": ("PATH OUT", "write OUT, which ends with .safetensors or .npz"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    acts = parser.add_subparsers(dest="act", metavar="ACT", required=True)
    for name, (words, text) in _ACTIONS.items():
        act = acts.add_parser(name, help=text, description=text)
        for word in words.split():
            act.add_argument(word.lower(), metavar=word)


def main(args: argparse.Namespace) -> int:
    """Run the chosen report, print it, and return the exit code."""
    words = [getattr(args, word.lower()) for word in _ACTIONS[args.act][0].split()]
    try:
        lines, code = REPORTS[args.act](*words)
    except (OSError, ImportError) as error:
        print(f"mpistrat checkpoint {args.act}: error: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines), flush=True)
    return int(code)

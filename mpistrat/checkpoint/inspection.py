"""What ``mpistrat checkpoint`` tells of checkpoints. Nothing here communicates."""

from __future__ import annotations

import datetime
import importlib
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat.arrays import Array, is_inexact
from mpistrat.checkpoint import files, format, parts, sharded
from mpistrat.checkpoint.cells import is_part
from mpistrat.checkpoint.differences import difference
from mpistrat.checkpoint.entries import Contents, checked
from mpistrat.checkpoint.tree import readable
from mpistrat.checkpoint.values import NAME, parsed, shown
from mpistrat.errors import CheckpointError, DataError

_SAFETENSORS = {"bool", "bfloat16", "float16", "float32", "float64", "complex64"}
_SAFETENSORS |= {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}

Told = tuple[list[str], int]  # lines, and the exit code


def _found(directory: Path) -> list[Path]:
    """Return all checkpoints of a directory: by name, the oldest first."""
    there = [(parts, path) for path in directory.iterdir() if (parts := files.parted(path))]
    return [path for _, path in sorted(there)]


def _bytes(path: Path) -> int:
    inside = path.iterdir() if path.is_dir() else [path]
    return sum(one.stat().st_size for one in inside)


def _damage(path: Path, everything: bool) -> str:
    """Return what is wrong with a checkpoint, or nothing; a directory may be looked at only."""
    try:
        if path.is_dir() and not everything:
            counter = sharded.look(path)[1].counter
        else:
            counter = sharded.read(path, {}).counter
    except (OSError, CheckpointError, DataError) as error:
        return str(error)
    number = (files.parted(path) or ("", counter))[1]
    return "" if counter == number else f"it holds checkpoint number {counter}, not {number}"


def list_of(directory: str) -> Told:
    """Tell number, time, bytes, and what is wrong of each checkpoint in a directory.

    Files are read whole; of directories the manifest and the sizes are looked at.
    """
    lines = []
    for path in _found(Path(directory)):
        try:
            modified, nbytes = path.stat().st_mtime, _bytes(path)
        except OSError as error:  # a running job has removed it, or a link leads nowhere
            lines.append(f"{path.name:<24} {error}")
            continue
        time = datetime.datetime.fromtimestamp(modified).isoformat(" ", "seconds")
        wrong = _damage(path, everything=False)
        lines.append(f"{path.name:<24} {time} {nbytes:>15,} bytes  {wrong or 'ok'}")
    return lines or [f"there is no checkpoint in {directory}"], 0


def show_of(given: str) -> Told:
    """Tell name, dtype and shape of arrays, numbers and strings, and how many are not finite."""
    path = files.found(given)
    found, values = _read(path)
    lines = [f"{path}: save number {found.counter}, {_counted(found)}"]
    lines += [f"  {readable(name)} = {value:.60}" for name, value in values.items()]
    for name, array in found.arrays.items():
        entry = found.entries[name]
        number = f" = {array}" if entry.shape == () else ""
        if (bad := _not_finite(array)) and entry.shape:
            number = f": {bad} of {array.size} are not finite"
        lines.append(f"  {readable(name)} {entry}{number}")
    return lines, 0


def _read(path: Path) -> tuple[Contents, dict[str, str]]:
    """Return a checkpoint, and its numbers and strings, which are then not among the arrays."""
    found = sharded.read(path)
    array = found.arrays.pop(NAME, None)
    found.entries.pop(NAME, None)
    with checked(path):
        values = {} if array is None else parsed(array)
        return found, {name: shown(value) for name, value in values.items()}


def _counted(found: Contents) -> str:
    """Return how many arrays there are, and the name of that which has numbers and strings."""
    count = len(found.arrays.keys() - {NAME})
    return f"{count} array{'s' * (count != 1)}{f' and {NAME}' * (NAME in found.arrays)}"


def _not_finite(array: Array) -> int:
    if not is_inexact(array.dtype):
        return 0
    return int(array.size - np.isfinite(array).sum())


def verify_of(given: str) -> Told:
    """Read all bytes of a checkpoint, or of all in a directory, and tell what is damaged."""
    path = Path(given)
    several = path.is_dir() and not path.name.endswith(files.FOLDER)
    paths = _found(path) if several else [files.found(given)]
    wrong = {one: _damage(one, everything=True) for one in paths}
    if not paths:
        raise FileNotFoundError(f"there is no checkpoint in {path}.")
    return [f"{one.name}: {text or 'ok'}" for one, text in wrong.items()], int(any(wrong.values()))


def diff_of(given: str, other: str) -> Told:
    """Tell which arrays two checkpoints do not have alike, bit by bit.

    Parts of metrics are compared where as many replicas have saved both.
    """
    (one, mine), (two, theirs) = (_read(files.found(word)) for word in (given, other))
    lines = []
    for sign, first, second in ("-", one.entries, two.entries), ("+", two.entries, one.entries):
        only = [name for name in first if name not in second and not is_part(name, first)]
        lines += [f"{sign} {readable(name)} {first[name]}" for name in only]
    for name in sorted(mine.keys() | theirs):
        here, there = mine.get(name, "absent"), theirs.get(name, "absent")
        if here != there:
            lines.append(
                f"! {readable(name)} is {here:.40} in the first and {there:.40} in the second"
            )
    for name in filter(two.entries.__contains__, one.entries):
        part = is_part(name, one.entries) and is_part(name, two.entries)
        if part and one.entries[name] != two.entries[name]:
            continue  # of other numbers of replicas
        if text := difference(one.arrays[name], two.arrays[name]):
            lines.append(f"! {readable(name)} {text}")
    return lines or ["no difference"], int(bool(lines))


def export_of(given: str, out: str) -> Told:
    """Write the arrays to a file that other libraries read."""
    path, target = files.found(given), Path(out)
    found = sharded.read(path)
    if target.suffix == ".npz":
        with parts.whole(target, replace=False) as file:
            format.write(file, found.arrays, found.counter)
        return [f"{target}: {_counted(found)}"], 0
    if target.suffix != ".safetensors":
        raise CheckpointError(f"{out}: expected a name that ends with .safetensors or .npz.")
    try:
        library: Any = importlib.import_module("safetensors.numpy")
    except ImportError:
        raise ImportError(
            "writing .safetensors needs its package: pip install 'mpistrat[export]'"
        ) from None
    odd = [f"{name} {one}" for name, one in found.entries.items() if one.dtype not in _SAFETENSORS]
    if odd:
        raise CheckpointError(f"{out}: safetensors has no such dtype: {', '.join(odd)}. Use .npz.")
    with parts.whole(target, replace=False) as file:
        file.write(library.save(dict(found.arrays), metadata={"save_counter": str(found.counter)}))
    return [f"{target}: {_counted(found)}"], 0

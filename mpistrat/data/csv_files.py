"""Columns of CSV files as arrays, with the place of what cannot be read."""

from __future__ import annotations

import contextlib
import csv
import itertools
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.errors import DataError

_TRUTHS = {"true": True, "1": True, "false": False, "0": False}


@final
class _Column(NamedTuple):
    """The cells of a column, with what errors say of them.

    Attributes:
      path: The file.
      name: The name of the column.
      cells: The texts.
      line_numbers: The line of the file in which each row begins.
    """

    path: str
    name: str
    cells: list[str]
    line_numbers: Sequence[int]

    def fail(self, index: int, expected: str) -> NoReturn:
        """Raise DataError for one cell."""
        cell = self.cells[index]
        cell_text = f"{cell!r:.60}" if cell.strip() else "an empty cell"
        raise DataError(
            f"{self.path}, line {self.line_numbers[index]}, column {self.name!r}: "
            f"{cell_text}; expected {expected}."
        )

    def parse_cells(self, parse: Callable[[str], Any], expected: str) -> list[Any]:
        """Return what `parse` makes of each cell; of the first that it cannot read, an error."""
        try:
            return list(map(parse, self.cells))
        except (ValueError, KeyError):
            for index, cell in enumerate(self.cells):
                try:
                    parse(cell)
                except (ValueError, KeyError):
                    self.fail(index, expected)
            raise

    def infer_array(self) -> Array:
        """Return int64 if all cells are such numbers, else float64, else texts.

        Integers that are too large for int64 stay texts, since float64 would round them.
        """
        if any(map(str.strip, self.cells)):
            try:
                return np.array(list(map(_parse_integer, self.cells)), np.int64)
            except OverflowError:
                pass
            except ValueError:
                with contextlib.suppress(ValueError):
                    return np.array(list(map(_parse_float, self.cells)), np.float64)
        return np.array(self.cells, np.str_)

    def convert_cells(self, dtype: np.dtype[Any]) -> Array:
        """Return the cells as an array of a dtype.

        Raises:
          DataError: A cell is no such value; names file, line and column.
        """
        if dtype.kind == "U":
            texts = np.array(self.cells, np.str_)
            return texts if not dtype.itemsize else self._limit_lengths(texts, dtype)
        if dtype.kind == "b":
            values = self.parse_cells(
                lambda cell: _TRUTHS[cell.strip().lower()], "true, false, 1 or 0"
            )
            return np.array(values, dtype)
        if dtype.kind in "iu":
            return self._convert_integers(dtype)
        values = self.parse_cells(_parse_float, f"a {dtype} number, or nothing for NaN")
        with np.errstate(over="ignore"):
            return np.array(values, np.float64).astype(dtype)

    def _limit_lengths(self, texts: Array, dtype: np.dtype[Any]) -> Array:
        limit = dtype.itemsize // 4
        for index, cell in enumerate(self.cells):
            if len(cell) > limit:
                self.fail(index, f"at most {limit} characters")
        return texts.astype(dtype)

    def _convert_integers(self, dtype: np.dtype[Any]) -> Array:
        limits = np.iinfo(dtype)
        expected = f"an integer of {dtype}"
        values = self.parse_cells(_parse_integer, expected)
        if values and not limits.min <= min(values) <= max(values) <= limits.max:
            is_outside = (not limits.min <= value <= limits.max for value in values)
            self.fail(next(itertools.compress(itertools.count(), is_outside)), expected)
        return np.array(values, dtype)


def _parse_integer(cell: str) -> int:
    if "_" in cell:  # Python's own form of 1000
        raise ValueError(cell)
    return int(cell)


def _parse_float(cell: str) -> float:
    if "_" in cell:
        raise ValueError(cell)
    return float(cell) if cell.strip() else np.nan


def _check_dtype(path: str, name: str, dtype: Any) -> np.dtype[Any]:
    checked_dtype: np.dtype[Any] = np.dtype(dtype)
    if checked_dtype.kind not in "biufU":
        raise DataError(
            f"{path}: dtypes has {checked_dtype} for column {name!r}; expected integers, floats, "
            "bool or str. Read others as str, and convert the array or use Dataset.map."
        )
    return checked_dtype


def _iterate_records(path: str, delimiter: str, encoding: str) -> Iterator[tuple[int, list[str]]]:
    """Iterate over the records that are not empty, each with the line in which it begins."""
    line = 1
    with Path(path).open(newline="", encoding=encoding) as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        while True:
            try:
                record = next(reader, None)
            except csv.Error as error:
                raise DataError(f"{path}, line {reader.line_num}: {error}.") from error
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}, after line {reader.line_num}: {error}. Give the encoding=, such as "
                    "'latin-1'."
                ) from error
            if record is None:
                return
            if record:
                yield line, record
            line = reader.line_num + 1


def _find_column_indices(
    path: str, header: Sequence[str], columns: Sequence[str] | None, dtypes: Mapping[str, Any]
) -> dict[str, int]:
    """Return the numbers of the columns that are asked for, by name."""
    duplicate_names = sorted({name for name in header if list(header).count(name) > 1})
    if duplicate_names:
        raise DataError(f"{path}: the column {duplicate_names[0]!r} appears twice; rename one.")
    chosen_names = header if columns is None else columns
    missing_names = [name for name in (*chosen_names, *dtypes) if name not in header]
    if missing_names:
        raise DataError(
            f"{path} has no column {missing_names[0]!r}; it has {', '.join(map(repr, header))}."
        )
    if not chosen_names:
        raise DataError(f"{path}: columns=[] names no column.")
    return {name: list(header).index(name) for name in chosen_names}


def read_csv(
    path: str,
    *,
    dtypes: Mapping[str, Any],
    columns: Sequence[str] | None,
    names: Sequence[str] | None,
    delimiter: str,
    encoding: str,
) -> dict[str, Array]:
    """Return the columns of a file by name; see `Dataset.from_csv`, also for errors."""
    records = _iterate_records(path, delimiter, encoding)
    header = [cell.strip() for cell in next(records, (0, []))[1]] if names is None else [*names]
    if not header:
        raise DataError(f"{path} is empty: it has no line with the names of columns.")
    column_indices = _find_column_indices(path, header, columns, dtypes)
    checked_dtypes = {name: _check_dtype(path, name, dtype) for name, dtype in dtypes.items()}
    cells: dict[str, list[str]] = {name: [] for name in column_indices}
    targets = [(cells[name].append, column_index) for name, column_index in column_indices.items()]
    line_numbers = array("q")
    for line, record in records:
        if len(record) != len(header):
            raise DataError(
                f"{path}, line {line}: {len(record)} cells; expected {len(header)}, one for "
                f"each of the columns {', '.join(map(repr, header))}. The delimiter is "
                f"{delimiter!r}."
            )
        line_numbers.append(line)
        for append, column_index in targets:
            append(record[column_index])
    arrays = {}
    for name in column_indices:
        column = _Column(path, name, cells.pop(name), line_numbers)
        arrays[name] = (
            column.convert_cells(checked_dtypes[name])
            if name in checked_dtypes
            else column.infer_array()
        )
    return arrays

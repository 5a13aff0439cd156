"""What each verb of a variable, such as ``assign_add``, does to an array."""

from __future__ import annotations

import functools

import numpy as np

from mpistrat.arena.storage import Write
from mpistrat.arrays import Array, quiet
from mpistrat.kernels.scaling import usual_nan


def _put(array: Array, values: Array, rows: Array | None) -> None:
    array[... if rows is None else rows] = values


def _combine(ufunc: np.ufunc, array: Array, values: Array, rows: Array | None) -> None:
    if rows is None:
        quiet().run(ufunc, array, values, array)
    else:
        with np.errstate(all="ignore"):
            if ufunc is np.divide and array.dtype.kind in "iu":
                _divide(array, values, rows)
            else:
                ufunc.at(array, rows, values)
                if array.dtype.kind == "c":  # where its loop depends on addresses, so NaN bits do
                    touched = array[rows]
                    usual_nan(touched)
                    array[rows] = touched


def _divide(array: Array, values: Array, rows: Array) -> None:
    # Integers divide towards zero, as in C: magnitudes and signs apart.
    touched, where = np.unique(rows, return_inverse=True)
    part = array[touched]
    if array.dtype.kind == "u":
        np.floor_divide.at(part, where, values)
        array[touched] = part
        return
    unsigned = np.dtype(f"u{array.dtype.itemsize}")
    sizes, signs = np.abs(part).view(unsigned), np.where(part < 0, -1, 1).astype(array.dtype)
    np.floor_divide.at(sizes, where, np.abs(values).view(unsigned))
    np.multiply.at(signs, where, np.where(values < 0, -1, 1).astype(array.dtype))
    array[touched] = sizes.view(array.dtype) * signs


# How to write values to all of an array, or to some rows, in place and without warnings. At a row
# that appears several times it is done several times; of several updates the last one stays.
WRITES: dict[str, Write] = {
    "assign": _put,
    "assign_add": functools.partial(_combine, np.add),
    "assign_sub": functools.partial(_combine, np.subtract),
    "scatter_add": functools.partial(_combine, np.add),
    "scatter_sub": functools.partial(_combine, np.subtract),
    "scatter_mul": functools.partial(_combine, np.multiply),
    "scatter_div": functools.partial(_combine, np.divide),
    "scatter_min": functools.partial(_combine, np.minimum),
    "scatter_max": functools.partial(_combine, np.maximum),
    "scatter_update": _put,
}

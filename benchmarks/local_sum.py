"""Time `local_sum` beside the NumPy sequence that it replaces.

Run it with ``python benchmarks/local_sum.py``; ``MPISTRAT_NUMBA=0`` shows the NumPy twin instead. A
ratio above 1 means that `local_sum` is faster. Each figure is the best of some runs.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistrat.kernels import jit
from mpistrat.kernels.local_sums import local_sum

SUM_DTYPES = {"f": np.float64, "c": np.complex128, "i": np.int64}


def inputs(dtype: str) -> dict[str, NDArray[Any]]:
    """Return arrays of the shapes and layouts that batches have."""
    table = np.random.default_rng(0).integers(-99, 99, (4000, 1000)).astype(dtype)
    return {
        "rows": table,
        "fortran": np.asfortranarray(table),
        "every other column": table[:, ::2],
        "images": table.reshape(40, 100, 1000),
        "10 columns": table.reshape(-1, 10),
        "a batch of 64": table[:64, :10].copy(),
    }


def best(call: Callable[[], object], seconds: float = 0.1) -> float:
    """Return the shortest time of a call, in seconds."""
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def numpy_sum(
    x: NDArray[Any], axes: tuple[int, ...], dtype: np.dtype[Any]
) -> tuple[NDArray[Any], int]:
    """Sum and count as one would without `local_sum`."""
    total = x.sum(axes, dtype=SUM_DTYPES[dtype.kind]).astype(dtype)
    return total, math.prod(x.shape[axis] for axis in axes)


def main() -> None:
    """Print one line per dtype, input and axes."""
    path = "compiled by Numba" if jit.is_compiling() else "NumPy twin"
    print(f"path: {path}; times in microseconds")
    print(f"{'dtype':10} {'input':20} {'axes':10} {'local_sum':>10} {'NumPy':>10} {'ratio':>6}")
    for name in ("float32", "float64", "complex64", "int32"):
        dtype = np.dtype(name)
        for label, x in inputs(name).items():
            for axes in [*((axis,) for axis in range(x.ndim)), tuple(range(x.ndim))]:
                local_sum(x, axes, dtype)  # compiles
                ours = best(functools.partial(local_sum, x, axes, dtype))
                theirs = best(functools.partial(numpy_sum, x, axes, dtype))
                print(
                    f"{name:10} {label:20} {axes!s:10} {ours * 1e6:10.1f} {theirs * 1e6:10.1f}"
                    f" {theirs / ours:6.2f}"
                )


if __name__ == "__main__":
    main()

"""Compile kernels and modules once, so that programs start faster.

Run it after installation, as the user who installed the package, on a compute node:
`srun -n 1 mpistrat warm`. The files are stored next to the package; if that is not writable,
kernels are stored for this user only.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import mpistrat as ms
from mpistrat import bytecode
from mpistrat.kernels.jit import is_compiling
from mpistrat.testing import run_ranks

_COMPILE_SECONDS = 1800.0  # seconds; compiling takes one processor a minute
_LARGE_SIZE = 2**18  # elements: enough to be shared among ranks and cut into blocks


def _take_steps(comm: object) -> None:
    """Take a step with each optimizer, and do the usual reductions, as one of two ranks."""
    strategy = ms.MirroredStrategy()
    for dtype in ("float32", "float64"):
        start = np.linspace(-1.0, 1.0, _LARGE_SIZE, dtype=dtype)
        for name, optimizer in ms.optim.OPTIMIZERS.items():
            with strategy.scope():
                weights = ms.Variable(start, name=f"{name} {dtype}")
            gradient_buffer = strategy.gradient_buffers([weights])[0]
            gradient_buffer[...] = 1e-3
            for gradient in (gradient_buffer, start):
                strategy.run(optimizer(0.01).apply_gradients, args=([(gradient, weights)],))
        for op_name in ("sum", "mean", "min", "max"):
            strategy.run(
                lambda op_name=op_name, x=start: ms.get_replica_context().all_reduce(op_name, x)
            )
        losses = ms.PerReplica(start)
        for op_name in ("sum", "mean"):
            strategy.reduce(op_name, losses, axis=0)


def pack_modules() -> str:
    """Put the package's compiled modules into one file; return the result in words."""
    package = str(Path(bytecode.__file__).parent)
    try:
        file_path = Path(bytecode.write_bundle(package))
    except OSError as error:
        return f"not put into one file, as {package} cannot be written: {error.strerror}"
    return f"all in {file_path} ({file_path.stat().st_size / 2**20:.1f} MiB)"


def compile_kernels() -> str:
    """Compile the kernels that training uses; return the result in words.

    Cost: A minute with an empty cache, some seconds with a full one.
    """
    if not is_compiling():
        return "not compiled: Numba is disabled or not installed"
    begin = time.perf_counter()
    run_ranks(_take_steps, 2, timeout=_COMPILE_SECONDS)
    return f"compiled, or found, in {time.perf_counter() - begin:.1f} s"


def warm_caches() -> Iterator[tuple[str, str]]:
    """Warm all caches; yield the name of each and the result in words."""
    yield "modules", pack_modules()
    yield "kernels", compile_kernels()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments: there are none."""


def main(args: argparse.Namespace) -> int:
    """Warm the caches, and print the results."""
    for name, text in warm_caches():
        print(f"{name}: {text}", flush=True)
    return 0

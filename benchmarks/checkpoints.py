"""How long does a large checkpoint take to save and to restore, beside plain files?

    python benchmarks/checkpoints.py [--megabytes N] [--ranks 1,2,4] [--repetitions 7]
                                     [--directory D]

It starts its ranks itself, one job for each number of them. Ways take turns; rows show medians.

``plain write``  rank 0 writes the same bytes to one file, 4 MB at a time, and forces it to the disk
``save``         ``Checkpoint.save``: a directory, with checksums, forced to the disk and named
``copy``         rank 0 copies the same bytes to memory that is there
``background``   ``CheckpointManager.save`` with ``background=True``: until it returns
``plain read``   rank 0 reads the files of the directory into fresh memory
``restore``      ``Checkpoint.restore`` into variables; all bytes are checked first

Reads are ``cold`` (each rank has asked the system to forget the files) and ``warm``. ``ratio`` is
the median of a way's times, each over that of the plain way in the same turn.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ARRAYS = 16
PIECE = 1 << 22
PAIRS = {
    "save": "plain write",
    "background": "copy",
    "restore cold": "plain read cold",
    "restore warm": "plain read warm",
}


def forget(path: Path) -> None:
    """Have the system forget what it has of the files in a directory."""
    for file in path.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def plain_write(path: Path, arrays: list[np.ndarray]) -> None:
    with path.open("wb", buffering=0) as file:
        for array in arrays:
            data = array.view(np.uint8).data
            for start in range(0, len(data), PIECE):
                file.write(data[start : start + PIECE])
        os.fsync(file.fileno())


def plain_read(path: Path) -> None:
    for file in sorted(path.glob("data-*.bin")):
        memory = np.empty(file.stat().st_size, np.uint8)
        with file.open("rb", buffering=0) as opened:
            at = 0
            while got := opened.readinto(memory.data[at : at + PIECE]):
                at += got


def work(megabytes: int, repetitions: int, directory: Path) -> None:
    """Time all ways on the ranks of this job; rank 0 prints the times as JSON."""
    from mpi4py import MPI

    import mpistrat as ms

    world = MPI.COMM_WORLD
    count = megabytes * (1 << 20) // 4 // ARRAYS
    rng = np.random.default_rng(0)
    with ms.MirroredStrategy().scope():
        variables = [ms.Variable(rng.random(count, np.float32)) for _ in range(ARRAYS)]
    checkpoint = ms.Checkpoint(model=variables)
    values = [np.asarray(v) for v in variables]
    manager = ms.CheckpointManager(checkpoint, directory / "later", 1, background=True)
    room = [np.zeros_like(v) for v in values] if world.rank == 0 else []
    times: dict[str, list[float]] = {}

    def timed(name: str, act: Callable[[], Any], only_rank0: bool = False) -> Any:
        world.Barrier()
        begin = time.perf_counter()
        result = act() if world.rank == 0 or not only_rank0 else None
        world.Barrier()
        times.setdefault(name, []).append(time.perf_counter() - begin)
        return result

    def copy() -> None:
        for target, value in zip(room, values, strict=True):
            np.copyto(target, value)

    for _ in range(repetitions):
        timed("plain write", lambda: plain_write(directory / "plain", values), only_rank0=True)
        path = Path(timed("save", lambda: checkpoint.save(directory / "now")))
        for kind in ("cold", "warm"):
            if kind == "cold":
                forget(path)
            timed(f"plain read {kind}", lambda path=path: plain_read(path), only_rank0=True)
            if kind == "cold":
                world.Barrier()
                forget(path)
            timed(f"restore {kind}", lambda path=path: checkpoint.restore(path))
        timed("copy", copy, only_rank0=True)
        timed("background", manager.save)
        manager.wait()
        if world.rank == 0:
            shutil.rmtree(path)
    if world.rank == 0:
        print(json.dumps(times), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1024, help="of the state, at least 64")
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--directory", type=Path, help="on the disk that is timed")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.megabytes < 64:
        parser.error("--megabytes: below 64 a checkpoint is one file, which is another question")
    if args.directory is not None and not args.directory.is_dir():
        parser.error(f"--directory: there is no directory {args.directory}")
    if args.worker:
        work(args.megabytes, args.repetitions, args.directory)
        return 0
    print(f"{args.megabytes} MiB, medians of {args.repetitions}\n")
    print(f"{'ranks':>5}  {'way':16} {'seconds':>8}  {'GB/s':>6}  {'ratio':>6}")
    for ranks in args.ranks.split(","):
        with tempfile.TemporaryDirectory(dir=args.directory) as directory:
            words = ["--worker", "--megabytes", args.megabytes, "--repetitions", args.repetitions]
            words += ["--directory", directory]
            call = [sys.executable, "-m", "mpistrat", "run", "-n", ranks, __file__]
            finished = subprocess.run(
                [*call, *map(str, words)], stdout=subprocess.PIPE, text=True, check=False
            )
        if finished.returncode:
            print(finished.stdout)
            return finished.returncode
        times = json.loads(finished.stdout.splitlines()[-1])
        for name, seconds in times.items():
            median_seconds = statistics.median(seconds)
            ratio_text = ""
            if name in PAIRS:
                turns = zip(seconds, times[PAIRS[name]], strict=True)
                ratio_text = (
                    f"{statistics.median(ours / reference for ours, reference in turns):6.2f}"
                )
            speed = args.megabytes * (1 << 20) / median_seconds / 1e9
            print(
                f"{ranks:>5}  {name:16} {median_seconds:8.3f}  {speed:6.2f}  {ratio_text:>6}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())

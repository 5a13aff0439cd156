"""How long does an all-gather take when ranks have different numbers of rows?

    mpiexec -n 2 python benchmarks/gathers.py [--quick] [--json PATH] [--plot PATH]

Rows of 16 float32 (64 bytes) of all ranks are put one after another, on every rank. All peers run
in one job and take turns; rows are written again before each repetition; a time is that of the
slowest rank, and a row shows the median. Results are checked. The path that our call takes is
looked at, and the benchmark fails if it is not the one that belongs to the size.

``even``    every rank has as many rows
``linear``  rank r has r + 1 times as many as rank 0
``one``     rank 0 has all of them
``few``     every fourth rank, and the last, has some; the others have none

``ours``          ``ctx.all_gather(rows, axis=0)``: a new array, nobody knows the counts
``raw known``     mpi4py, ``Allgatherv`` into an array that is there, with counts that all know
``raw counts``    mpi4py, ``allgather`` of the counts, a new array, ``Allgatherv``
``raw pickled``   mpi4py, ``allgather`` of the arrays as objects, ``np.concatenate``
``gloo``          torch.distributed, where torch can be imported: counts, then all padded to the
                  longest, since gloo gathers only what is equally long, then cut

Columns: ``bytes`` is what all ranks have together; ``algbw`` is that / time; ``busbw`` is algbw
times (n - 1) / n; ``speed`` is the time of ``raw counts`` / this time.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from common import (
    Peer,
    arguments,
    contains_result,
    count_repetitions,
    gloo,
    measure,
    print_introduction,
    take,
    write_json,
)
from mpi4py import MPI
from pictures import Panel, curves, points

import mpistrat

ROW_WIDTH = 16  # numbers in a row
ROWS = tuple(4**k for k in range(0, 11, 2))  # of all ranks: 64 B to 64 MiB
QUICK = ROWS[:5:2]
LAYOUTS = ("even", "linear", "one", "few")
BUDGET = 0.5  # seconds for one case and one peer

HEADER = (
    f"{'layout':8} {'bytes':>10} {'way':12} {'path':7} {'reps':>5} {'time us':>11} "
    f"{'algbw GB/s':>10} {'busbw GB/s':>10} {'speed':>6}"
)


def share_out(layout: str, total: int, size: int) -> list[int]:
    """Return how many rows each rank has; `total` together."""
    weights = {
        "even": [1] * size,
        "linear": list(range(1, size + 1)),
        "one": [1] + [0] * (size - 1),
        "few": [int(rank % 4 == 3 or rank == size - 1) for rank in range(size)],
    }[layout]
    ends = [total * sum(weights[: rank + 1]) // sum(weights) for rank in range(size)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def contestants(comm: MPI.Intracomm, counts: list[int]) -> dict[str, Peer]:
    """Return every way to gather; to be called in replica code. Collective."""
    local_rows = np.zeros((counts[comm.rank], ROW_WIDTH), np.float32)
    gathered_rows = np.empty((sum(counts), ROW_WIDTH), np.float32)
    numbers = [count * ROW_WIDTH for count in counts]
    ctx = mpistrat.get_replica_context()

    def right(result: Any, number: int) -> bool:
        result = gathered_rows if result is None else result
        parts = np.split(result, np.cumsum(counts)[:-1])
        return result.shape == gathered_rows.shape and all(
            contains_result(part, rank + number, number) for rank, part in enumerate(parts)
        )

    def gather_known_counts() -> None:
        comm.Allgatherv(local_rows, [gathered_rows, numbers])

    def gather_exchanged_counts() -> Any:
        counts_of_ranks = comm.allgather(len(local_rows))
        room = np.empty((sum(counts_of_ranks), ROW_WIDTH), np.float32)
        comm.Allgatherv(local_rows, [room, [count * ROW_WIDTH for count in counts_of_ranks]])
        return room

    calls = {
        "ours": lambda: ctx.all_gather(local_rows, axis=0),
        "raw known": gather_known_counts,
        "raw counts": gather_exchanged_counts,
        "raw pickled": lambda: np.concatenate(comm.allgather(local_rows)),
    }
    padded = with_gloo(comm, local_rows)
    calls |= {} if padded is None else {"gloo": padded}
    return {name: Peer([local_rows], call, right) for name, call in calls.items()}


def with_gloo(comm: MPI.Intracomm, local_rows: np.ndarray) -> Any:
    """Return torch.distributed's way, or None without torch. Collective."""
    torch = gloo(comm)
    if torch is None:
        return None

    def padded() -> Any:
        count_tensors = [torch.empty(1, dtype=torch.int64) for _ in range(comm.size)]
        torch.distributed.all_gather(count_tensors, torch.tensor([len(local_rows)]))
        counts = [int(count) for count in count_tensors]
        send = torch.zeros((max(counts), ROW_WIDTH))
        send[: len(local_rows)] = torch.from_numpy(local_rows)
        padded_parts = [torch.empty_like(send) for _ in counts]
        torch.distributed.all_gather(padded_parts, send)
        parts = [part[:count] for part, count in zip(padded_parts, counts, strict=True)]
        return torch.cat(parts).numpy()

    return padded


def expected(strategy: mpistrat.Strategy, counts: list[int]) -> str:
    """Return the path that a gather should take: the handshake, if the data of all ranks fit."""
    fits = strategy._replicas.lockstep.can_carry
    return "small" if all(fits(8 + count * ROW_WIDTH * 4) for count in counts) else "native"


def rows(
    comm: MPI.Intracomm, strategy: mpistrat.Strategy, layout: str, total: int, budget: float
) -> list[dict[str, Any]]:
    """Return one row for each way to gather so many rows. Collective; in replica code."""
    counts = share_out(layout, total, comm.size)
    peers = contestants(comm, counts)
    repetitions = count_repetitions(comm, peers, budget)
    path = take(comm, f"{layout}, {total} rows", peers["ours"].call, expected(strategy, counts))
    median_seconds = measure(comm, peers, repetitions)
    nbytes = total * ROW_WIDTH * 4
    return [
        {
            "layout": layout,
            "counts": counts,
            "bytes": nbytes,
            "way": peer_name,
            "path": path if peer_name == "ours" else "",
            "repetitions": repetitions,
            "time_us": seconds * 1e6,
            "algbw_gbps": nbytes / seconds / 1e9,
            "busbw_gbps": nbytes / seconds / 1e9 * (comm.size - 1) / comm.size,
            "speed": median_seconds["raw counts"] / seconds,
        }
        for peer_name, seconds in median_seconds.items()
    ]


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['layout']:8} {row['bytes']:10d} {row['way']:12} {row['path']:7} "
        f"{row['repetitions']:5d} {row['time_us']:11.1f} {row['algbw_gbps']:10.3f} "
        f"{row['busbw_gbps']:10.3f} {row['speed']:6.2f}"
    )


def plot(path: str | None, facts: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    by_layout = {layout: [row for row in rows if row["layout"] == layout] for layout in LAYOUTS}
    panels = [
        Panel(layout, "median of the slowest rank, us", points(layout_rows, "time_us"))
        for layout, layout_rows in by_layout.items()
    ]
    curves(path, facts, "All-gather of rows", panels, ("ours",))


def main() -> int:
    options = arguments(__doc__, "every other size to 4 MiB, few repetitions").parse_args()
    comm = MPI.COMM_WORLD.Dup()
    strategy = mpistrat.MirroredStrategy()
    facts = print_introduction(comm, HEADER)
    all_rows: list[dict[str, Any]] = []
    budget = BUDGET / 20 if options.quick else BUDGET
    for layout in LAYOUTS:
        for total in QUICK if options.quick else ROWS:

            def case(layout: str = layout, total: int = total) -> None:
                all_rows.extend(rows(comm, strategy, layout, total, budget))

            previous_count = len(all_rows)
            strategy.run(case)
            if comm.rank == 0:
                print("\n".join(line(row) for row in all_rows[previous_count:]), flush=True)
    if comm.rank == 0:
        write_json(options.json, {**facts, "rows": all_rows})
        plot(options.plot, facts, all_rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())

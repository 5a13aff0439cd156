"""What it costs to say where a rank is: ``python benchmarks/board_cost.py``.

Prints one JSON object with nanoseconds per call: the median and the best of some runs, on private
memory, on shared memory, and on shared memory while the watchdog of this process runs; then
microseconds per look of the watchdog at itself, at one slot, and at a page of 128 ranks.
To reach: ``enter`` and ``leave`` at most 1000 ns each.
"""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
from collections.abc import Callable

from mpistrat.shm.segments import shared_memory
from mpistrat.watchdog.observer import Limits, Observer
from mpistrat.watchdog.processes import read_process
from mpistrat.watchdog.status_board import NodeBoard, Reporter, node_board_nbytes
from mpistrat.watchdog.watchdog import Watchdog, WatchedBoard

TEXT = "all_reduce(SUM, {'b': float32[10], 'w': float32[128,10]})"
CALLS, RUNS = 20_000, 15


def nanoseconds(call: Callable[[int], object]) -> dict[str, float]:
    """Return ns per call, without those of the loop."""
    times = []
    for _ in range(RUNS):
        start = time.perf_counter_ns()
        for number in range(CALLS):
            call(number)
        middle = time.perf_counter_ns()
        for number in range(CALLS):
            _no_operation(number)
        end = time.perf_counter_ns()
        times.append((2 * middle - start - end) / CALLS)
    return {"median": round(statistics.median(times)), "best": round(min(times))}


def _no_operation(number: int) -> None:
    pass


def calls(board: WatchedBoard) -> dict[str, dict[str, float]]:
    # The wrapper's own call is as dear as that of `_nothing`, which is taken off.
    return {
        "enter": nanoseconds(lambda number: board.enter(number, TEXT)),
        "leave": nanoseconds(lambda number: board.leave()),
        "resume": nanoseconds(lambda number: board.resume()),
    }


def microseconds(call: Callable[[], object], repeats: int = 200) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return round((time.perf_counter() - start) / repeats * 1e6, 1)


def main() -> None:
    """Print the figures."""
    memory = shared_memory(lambda data: [data], True, node_board_nbytes(128), "board")
    if memory is None:
        raise SystemExit("memory cannot be shared here")
    node_board = NodeBoard(memory, 128)
    figures: dict[str, object] = {
        "private": calls(WatchedBoard()),
        "shared": calls(WatchedBoard(node_board)),
    }
    own_process = read_process(os.getpid())
    for index in range(128):
        slot = node_board.slot(index)
        slot.open(index, os.getpid(), own_process.start_ticks if own_process else 0, 0)
        slot.write_texts("train.py:88")
    limits = Limits()
    reporter = Reporter(node_board.slot(0), 0, threading.get_ident())
    observer = Observer(node_board, 128, "node", limits, print, lambda code: None, os.kill)
    watchdog = Watchdog(0, reporter, observer)
    watchdog.start()
    figures["shared, watched"] = calls(WatchedBoard(node_board))
    watchdog.stop(5.0)
    time.sleep(1.0)  # ranks that have not moved for a while are looked up in /proc
    now_ns = time.monotonic_ns()
    figures["microseconds"] = {
        "own look": microseconds(lambda: reporter.report(now_ns, False)),
        "one slot": microseconds(lambda: node_board.read(5)),
        "128 ranks that move": microseconds(lambda: observer.read_statuses(now_ns - 10**9), 50),
        "128 ranks that wait": microseconds(lambda: observer.read_statuses(now_ns + 10**9), 50),
    }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()

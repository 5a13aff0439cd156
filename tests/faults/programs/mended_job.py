"""Faults that a program can catch, one after the other in one job; prints one JSON line per rank.

Each case is made on rank 1, or beside the call of every rank. A line has, per case, what this rank
raised, its text, when it was raised and when the fault was.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
import time
import warnings

import numpy as np

import mpistrat as ms
from mpistrat.data.dataset import Dataset

CALLS = 200
ctx = ms.get_replica_context


class Case:
    """What came of one case on this rank."""

    def __init__(self) -> None:
        self.fault = 0.0

    def raising(self) -> None:
        self.fault = time.time()
        raise ValueError("mine")  # raising


def in_fn(strategy: ms.Strategy, case: Case, culprit: bool) -> None:
    def fn() -> None:
        if culprit:
            case.raising()
        ctx().all_reduce("sum", np.ones(9000))

    strategy.run(fn)


def in_merge_fn(strategy: ms.Strategy, case: Case, culprit: bool) -> None:
    variable = VARIABLES[0]

    def merge_fn(strategy: ms.Strategy) -> None:
        variable.assign(np.full(9000, 7.0))
        if culprit:
            case.raising()

    strategy.run(lambda: ctx().merge_call(merge_fn))


def in_a_dataset(strategy: ms.Strategy, case: Case, culprit: bool) -> None:
    def rows() -> object:
        for number in range(8):
            if number == 6 and culprit:
                case.raising()
            yield np.full(4, float(number))

    for batch in strategy.experimental_distribute_dataset(Dataset.from_batches(rows)):
        strategy.run(lambda x: ctx().all_reduce("sum", np.sum(x)), args=(batch,))


def recursion(strategy: ms.Strategy, case: Case, culprit: bool) -> None:
    def fn() -> None:
        if culprit:
            case.fault = time.time()
            strategy.reduce("sum", ms.PerReplica(1.0), None)
        ctx().all_reduce("sum", np.ones(3))

    strategy.run(fn)


def recursion_everywhere(strategy: ms.Strategy, case: Case, culprit: bool) -> None:
    case.fault = time.time()
    strategy.run(lambda: strategy.reduce("sum", ms.PerReplica(1.0), None))


def total(strategy: ms.Strategy) -> float:
    return float(strategy.reduce("sum", ms.PerReplica(1.0), None))


def threads(strategy: ms.Strategy, case: Case, culprit: bool) -> None:
    """Another thread calls beside the owner; nothing of what it does is sent."""
    refused: list[str] = []

    def stranger() -> None:
        for _ in range(CALLS):
            try:
                total(strategy)
            except ms.StrategyError as error:
                refused.append(str(error))

    thread = threading.Thread(target=stranger, name="stranger")
    thread.start()
    sums = {total(strategy) for _ in range(CALLS)}
    thread.join()
    NOTES["threads"] = [len(refused), sorted(sums), refused[0]]


def child(strategy: ms.Strategy) -> None:
    try:
        total(strategy)
    except ms.StrategyError as error:
        sys.exit(41 if "forked" in str(error) else 42)
    sys.exit(43)


def nothing() -> None:
    pass


def forks(strategy: ms.Strategy, case: Case, culprit: bool) -> None:
    codes = []
    if culprit:
        # Newer Pythons warn of a fork beside threads, which MPI has.
        warnings.simplefilter("ignore", DeprecationWarning)
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            child(strategy)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        for kind in ("fork", "spawn"):
            target = multiprocessing.get_context(kind).Process(target=nothing)
            target.start()
            target.join(30)
            codes.append(target.exitcode)
    NOTES["forks"] = codes
    NOTES["after forks"] = total(strategy)


CASES = {
    "fn": in_fn,
    "merge_fn": in_merge_fn,
    "dataset": in_a_dataset,
    "recursion": recursion,
    "recursion everywhere": recursion_everywhere,
    "threads": threads,
    "forks": forks,
}
VARIABLES: list[ms.Variable] = []
NOTES: dict[str, object] = {}


def main() -> None:
    strategy = ms.MirroredStrategy()
    rank = int(strategy.run(lambda: ctx().replica_id_in_sync_group).local)
    with strategy.scope():
        VARIABLES.append(ms.Variable(np.zeros(9000)))
    found = {}
    for name, make in CASES.items():
        case, error = Case(), None
        try:
            make(strategy, case, rank == 1)
        except Exception as raised:
            error = raised
        end = time.time()
        found[name] = {
            "kinds": [] if error is None else [kind.__name__ for kind in type(error).__mro__],
            "text": str(error),
            "end": end,
            "fault": case.fault,
            "total": total(strategy),
            "variable": [float(f(VARIABLES[0].numpy())) for f in (np.min, np.max)],
        }
    os.write(1, (json.dumps({"rank": rank, "found": found, "notes": NOTES}) + "\n").encode())


if __name__ == "__main__":
    main()

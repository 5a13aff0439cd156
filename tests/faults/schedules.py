"""Random programs with faults on seeded schedules of thread ranks; prints counts.

``python tests/faults/schedules.py --count 100000 --seed 0`` prints how many schedules ran, with
which faults, and what was wrong with how many of them; the first that was wrong is printed with its
trace, and the exit code is 1. ``--replay SEED`` plays one seed again and prints its trace.

What is asked of every seed:

* No deadlock: nobody waits for a rank that waits for something else, or has left.
* No lost update: in the end all copies of the variables have the bits that a model in plain NumPy
  has, with every write that was checked before the fault and no other.
* No wrong result: every call before the fault gives on every rank what the model gives, no rank
  gets past it, and a program without a fault that follows on the same ranks gives what it should,
  unless a rank has left.
* No wrong error: without a fault none; with one, on every rank that stays, at the faulty call or
  its next one, and of the class that says whose fault it was.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from schedule_model import Expected, after
from schedule_programs import DTYPES, FAILING, Program, draw
from schedule_ranks import Record, play

import mpistrat as ms
from mpistrat.comm.loopback import Event
from mpistrat.testing import RanksFailed, run_ranks

PATIENCE = 60.0
# Every so many seeds are played twice, and must give the same trace.
TWICE = 20
DEADLOCK, LOST, RESULT, ERROR = "deadlocks", "lost updates", "wrong results", "wrong errors"
REPLAY = "replays that differ"


class Problem(NamedTuple):
    """What is wrong, and in which way."""

    kind: str
    text: str


class Played(NamedTuple):
    """One seed: its program, what each rank saw, what is wrong with that, and its trace."""

    program: Program
    records: dict[int, Record]
    problems: list[Problem]
    trace: tuple[Event, ...]


def run(seed: int) -> Played:
    """Play the program of a seed in its schedule, and look for problems."""
    program = draw(seed)
    records: dict[int, Record] = {}
    errors: dict[int, BaseException] = {}
    try:
        worlds = run_ranks(play, program.size, program, records, timeout=PATIENCE, seed=seed)
        trace = tuple(worlds[0].trace)
    except RanksFailed as failed:
        trace, errors = failed.trace, failed.errors
    problems = list(_hangs(program, records, errors))
    if not problems:
        problems += _updates(program, records)
        problems += _results(program, records)
        problems += _errors(program, records, errors)
    return Played(program, records, problems, trace)


def _hangs(program: Program, records: dict[int, Record], errors: dict[int, Any]) -> Iterator[Any]:
    if len(records) < program.size or any(not record.bits for record in records.values()):
        yield Problem(DEADLOCK, f"only ranks {sorted(records)} came to their end")
    told = [error for x in records.values() for error in (x.error, x.probe)]
    for error in [*errors.values(), *told]:
        # The loopback ranks raise these where ranks under MPI would wait forever.
        if type(error) in (RuntimeError, TimeoutError):
            yield Problem(DEADLOCK, str(error))


def _updates(program: Program, records: dict[int, Record]) -> Iterator[Problem]:
    wanted = Expected(program).bits
    for rank, record in records.items():
        for name, bits in record.bits.items():
            if bits != wanted[name]:
                dtype = DTYPES.get(name, np.int64)
                copies = f"{np.frombuffer(bits, dtype)}, not {np.frombuffer(wanted[name], dtype)}"
                yield Problem(LOST, f"variable {name!r} of rank {rank} holds {copies}")


def _results(program: Program, records: dict[int, Record]) -> Iterator[Problem]:
    expected = Expected(program)
    follows = program.fault is not None and not program.leavers
    later = after(program) if follows else {}
    for rank, record in records.items():
        # What a rank does for itself after the fault is its own matter.
        seen = [
            (key, got)
            for key, got in record.seen
            if key in expected.results or key not in expected.loose
        ]
        yield from _wrong(seen, expected.results, rank)
        yield from _wrong(record.later, later, rank)


def _wrong(seen: Any, wanted: dict[int, Any], rank: int) -> Iterator[Problem]:
    for key, got in seen:
        if key not in wanted:
            yield Problem(RESULT, f"rank {rank} did call {key}, which it could not")
            continue
        right = wanted[key][rank]
        alike = len(got) == len(right) and all(
            g.dtype == w.dtype and np.array_equal(g, w) for g, w in zip(got, right, strict=True)
        )
        if not alike:
            yield Problem(RESULT, f"rank {rank} got {got} from call {key}, not {right}")
    missing = sorted(wanted.keys() - {key for key, _ in seen})
    if missing:
        yield Problem(RESULT, f"rank {rank} did not do calls {missing}")


def _errors(program: Program, records: dict[int, Record], errors: Any) -> Iterator[Problem]:
    fault = program.fault
    for rank in errors.keys() - program.leavers:
        yield Problem(ERROR, f"rank {rank} ended with {errors[rank]!r}")
    if fault is None:
        raised = ((rank, x.error) for rank, x in records.items() if x.error is not None)
        yield from (Problem(ERROR, f"rank {r} raised {error!r}") for r, error in raised)
        return
    step = next(i for i, s in enumerate(program.steps) if fault.key in {o.key for o in s.ops})
    # The strategy that sees one replica proves less of the end of run: one step more.
    latest = step + (2 if program.local else 1)
    known = set(fault.kinds.values()) <= FAILING and not fault.leavers
    told = ms.RemoteError if known else (ms.RemoteError, ms.LockstepError)
    for rank in records.keys() - fault.leavers:
        record = records[rank]
        innocent = rank not in fault.kinds and rank not in fault.swallow
        if record.error is None or not step <= record.at <= latest:
            text = f"rank {rank}: {record.error!r} in step {record.at}; the fault is in {step}"
            yield Problem(ERROR, text)
        elif innocent and not isinstance(record.error, told):
            yield Problem(ERROR, f"rank {rank}, without a fault, raised {record.error!r}")
        if fault.leavers and not isinstance(record.probe, ms.LockstepError):
            yield Problem(ERROR, f"rank {rank} called after ranks had left: {record.probe!r}")


def count(played: Played, counts: Counter[tuple[str, str]]) -> None:
    """Add what a schedule had in it."""
    program = played.program
    counts["schedules", f"of {program.size} ranks"] += 1
    counts["schedules", "with a fault" if program.fault else "without a fault"] += 1
    for _, op in program.ops():
        done = program.fault is None or op.key < program.fault.key
        counts["calls before the fault", op.kind] += done
    counts["turns", "of a rank"] += sum(event.action == "continues" for event in played.trace)
    for kind in program.fault.kinds.values() if program.fault else ():
        counts["faults injected", kind] += 1
    for record in played.records.values():
        if record.error is not None:
            counts["exceptions", type(record.error).__name__] += 1


def show(seed: int) -> int:
    """Print program, trace and problems of one seed; return the exit code."""
    played = run(seed)
    print(f"seed {seed}: {played.program}")
    for event in played.trace:
        print(f"  rank {event.rank}: {event.action}")
    for rank, record in sorted(played.records.items()):
        print(f"rank {rank} ended in step {record.at} with {type(record.error).__name__}")
    for problem in played.problems:
        print(f"WRONG ({problem.kind}): {problem.text}")
    return 1 if played.problems else 0


def figure(number: int, first: int) -> int:
    """Run the schedules, print the counts, and return the exit code."""
    began = time.monotonic()
    counts: Counter[tuple[str, str]] = Counter()
    wrong = dict.fromkeys((DEADLOCK, LOST, RESULT, ERROR, REPLAY), 0)
    bad = []
    for seed in range(first, first + number):
        played = run(seed)
        count(played, counts)
        kinds = {problem.kind for problem in played.problems}
        if seed % TWICE == 0:
            counts["schedules", "played twice"] += 1
            kinds |= {REPLAY} if run(seed).trace != played.trace else set()
        for kind in kinds:
            wrong[kind] += 1
        if kinds:
            bad.append(seed)
    print(f"{'schedules, seeds from ' + str(first):46}{number:12,}")
    for (what, name), times in sorted(counts.items()):
        print(f"{what:24}{name:22}{times:12,}")
    for kind, times in wrong.items():
        print(f"{kind:46}{times:12,}")
    print(f"{'seconds':46}{time.monotonic() - began:12.1f}")
    if bad:
        print(f"wrong seeds: {bad[:200]}; python {Path(sys.argv[0])} --replay {bad[0]} gives:")
        show(bad[0])
    return 1 if bad else 0


def main() -> int:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replay", type=int, metavar="SEED")
    asked = parser.parse_args()
    # Copies of a variable are compared after every third step, so that all programs do it.
    os.environ["MPISTRAT_CHECK_EVERY"] = "3"
    if hasattr(os, "sched_setaffinity"):
        # Ranks hand over to one another; that is cheapest on one processor.
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    return figure(asked.count, asked.seed) if asked.replay is None else show(asked.replay)


if __name__ == "__main__":
    sys.exit(main())

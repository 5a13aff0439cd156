"""Tell a batch script whether to start its job again, depending on how it ended.

Prints "yes: REASON" and exits with 0, or "no: REASON" and exits with 1. Yes after exit code 42
(preempted, and saved), and at most twice after 75 (a hang). No after any other code, when the job
was cancelled, and after 3 restarts without a new step. The history of exit codes is kept in
FILE.ends, for one job id, or for the id given by --job.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mpistrat.watchdog.observer import HUNG

PREEMPTED = 42
_HANGS = 2  # restarts after ranks that waited for one another
_STUCK = 3  # restarts without a new step
_MAX_ENDS = 100  # ends that are remembered
_CANCELLED = ("CANCELLED", "TIMEOUT", "DEADLINE")


class End(NamedTuple):
    """How one start of the job has ended.

    Attributes:
      code: Its exit code.
      step: The step of the newest checkpoint; -1 if nobody knows.
    """

    code: int
    step: int


def decide(ends: Sequence[End], state: str = "") -> tuple[bool, str]:
    """Return whether to start the job again, and why.

    Args:
      ends: Of all starts of this job, the last one last.
      state: What Slurm says of the job, such as ``RUNNING``; empty if nobody knows.

    Example:
      >>> decide([End(42, 10)])
      (True, 'it left with 42 after saving')
      >>> decide([End(1, 10)])
      (False, 'exit code 1 would occur again')
      >>> decide([End(42, 10)], "CANCELLED")
      (False, 'the job is CANCELLED')
    """
    last = ends[-1]
    if state in _CANCELLED:
        return False, f"the job is {state}"
    if last.code == 0:
        return False, "it is done"
    if last.code not in (PREEMPTED, HUNG):
        return False, f"exit code {last.code} would occur again"
    recent_steps = [end.step for end in ends[-_STUCK - 1 :]]
    if last.step >= 0 and len(recent_steps) > _STUCK and max(recent_steps) <= recent_steps[0]:
        return False, f"{_STUCK} restarts made no progress beyond step {last.step}"
    if last.code == PREEMPTED:
        return True, "it left with 42 after saving"
    hangs = sum(end.code == HUNG for end in ends)
    if hangs > _HANGS:
        return False, f"its ranks have waited for one another {hangs} times (exit code 75)"
    return True, f"its ranks waited for one another (exit code 75), {hangs} of at most {_HANGS}"


def remember(record: Path, code: int, job: str, step: int) -> list[End]:
    """Note how a start of a job has ended, beside its record, and return all of its ends.

    Args:
      record: The file that ``MPISTRAT_RECORD`` names. What it says goes before `code`; it is
        removed, so that the next start does not find it.
      code: What the launcher ended with.
      job: The id of the batch job; ends of another one are forgotten.
      step: The step of the newest checkpoint; -1 if nobody knows.

    Raises:
      OSError: The notes cannot be written.
    """
    with contextlib.suppress(OSError, ValueError):
        code = int(record.read_text("ascii"))
    notes = record.with_name(f"{record.name}.ends")
    ends: list[End] = []
    damaged = ValueError, TypeError, KeyError, OverflowError, RecursionError
    with contextlib.suppress(OSError, *damaged):
        saved_notes = json.loads(notes.read_text("ascii"))
        if isinstance(saved_notes, dict) and saved_notes.get("job") == job:
            ends = [End(int(end_code), int(end_step)) for end_code, end_step in saved_notes["ends"]]
    ends = [*ends, End(code, step)][-_MAX_ENDS:]
    part = notes.with_name(f".{notes.name}.{os.getpid()}")
    part.write_text(json.dumps({"job": job, "ends": ends}), "ascii")
    part.replace(notes)
    record.unlink(missing_ok=True)
    return ends


def options(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    text = "the file named by MPISTRAT_RECORD, on a file system that all nodes see"
    parser.add_argument("--record", metavar="FILE", type=Path, required=True, help=text)
    text = "what the launcher ended with; what the record says goes before it"
    parser.add_argument("--code", metavar="N", type=int, required=True, help=text)
    text = "where the job saves; tells whether it comes on"
    parser.add_argument("--checkpoint", metavar="DIR", type=Path, help=text)
    text = "the id to count by, if not that of this job: the first one's, in a chain of jobs"
    parser.add_argument("--job", metavar="ID", help=text)


def main(args: argparse.Namespace) -> int:
    """Print the answer."""
    from mpistrat.checkpoint.claim import read_saved_step
    from mpistrat.cluster.batch_job import get_job_id, get_job_state

    step = -1 if args.checkpoint is None else read_saved_step(args.checkpoint)
    try:
        job_state = get_job_state()
        ends = remember(args.record, args.code, args.job or get_job_id(), step)
    except (OSError, ValueError) as error:  # a record that cannot be a file
        print(f"no: {error}")
        return 1
    yes, reason = decide(ends, job_state)
    print(f"{'yes' if yes else 'no'}: {reason}")
    return 0 if yes else 1

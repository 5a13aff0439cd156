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

from mpistrat.watchdog.status_board import HUNG

PREEMPTED = 42
_MAX_HANGS = 2  # restarts after ranks that waited for one another
_MAX_RESTARTS_WITHOUT_STEP = 3  # restarts without a new step
_MAX_ENDS = 100  # ends that are remembered
_CANCELLED = ("CANCELLED", "TIMEOUT", "DEADLINE")


class End(NamedTuple):
    """The end of one start of the job.

    Attributes:
      code: Its exit code.
      step: The step of the newest checkpoint; -1 if it is unknown.
    """

    code: int
    step: int


def decide_restart(ends: Sequence[End], job_state: str = "") -> tuple[bool, str]:
    """Return whether to start the job again, and why.

    Args:
      ends: The ends of all starts of this job, the last one last.
      job_state: The state of the job in Slurm, such as ``RUNNING``; empty if it is unknown.

    Example:
      >>> decide_restart([End(42, 10)])
      (True, 'it left with 42 after saving')
      >>> decide_restart([End(1, 10)])
      (False, 'exit code 1 would occur again')
      >>> decide_restart([End(42, 10)], "CANCELLED")
      (False, 'the job is CANCELLED')
    """
    last_end = ends[-1]
    if job_state in _CANCELLED:
        return False, f"the job is {job_state}"
    if last_end.code == 0:
        return False, "it is done"
    if last_end.code not in (PREEMPTED, HUNG):
        return False, f"exit code {last_end.code} would occur again"
    recent_steps = [end.step for end in ends[-_MAX_RESTARTS_WITHOUT_STEP - 1 :]]
    if (
        last_end.step >= 0
        and len(recent_steps) > _MAX_RESTARTS_WITHOUT_STEP
        and max(recent_steps) <= recent_steps[0]
    ):
        return (
            False,
            f"{_MAX_RESTARTS_WITHOUT_STEP} restarts made no progress beyond step {last_end.step}",
        )
    if last_end.code == PREEMPTED:
        return True, "it left with 42 after saving"
    hangs = sum(end.code == HUNG for end in ends)
    if hangs > _MAX_HANGS:
        return False, f"its ranks have waited for one another {hangs} times (exit code 75)"
    return True, f"its ranks waited for one another (exit code 75), {hangs} of at most {_MAX_HANGS}"


def record_end(record_path: Path, code: int, get_job_id: str, step: int) -> list[End]:
    """Note the end of a start of a job beside its record, and return all of its ends.

    Args:
      record_path: The file that ``MPISTRAT_RECORD`` names. The code in it replaces `code`; it is
        removed, so that the next start does not find it.
      code: The exit code of the launcher.
      get_job_id: The id of the batch job; ends of another job are forgotten.
      step: The step of the newest checkpoint; -1 if it is unknown.

    Raises:
      OSError: The notes cannot be written.
    """
    with contextlib.suppress(OSError, ValueError):
        code = int(record_path.read_text("ascii"))
    history_path = record_path.with_name(f"{record_path.name}.ends")
    ends: list[End] = []
    damage_errors = ValueError, TypeError, KeyError, OverflowError, RecursionError
    with contextlib.suppress(OSError, *damage_errors):
        history = json.loads(history_path.read_text("ascii"))
        if isinstance(history, dict) and history.get("job") == get_job_id:
            ends = [End(int(end_code), int(end_step)) for end_code, end_step in history["ends"]]
    ends = [*ends, End(code, step)][-_MAX_ENDS:]
    temporary_path = history_path.with_name(f".{history_path.name}.{os.getpid()}")
    temporary_path.write_text(json.dumps({"job": get_job_id, "ends": ends}), "ascii")
    temporary_path.replace(history_path)
    record_path.unlink(missing_ok=True)
    return ends


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
        ends = record_end(args.record, args.code, args.job or get_job_id(), step)
    except (OSError, ValueError) as error:  # a record that cannot be a file
        print(f"no: {error}")
        return 1
    is_restart, reason = decide_restart(ends, job_state)
    print(f"{'yes' if is_restart else 'no'}: {reason}")
    return 0 if is_restart else 1

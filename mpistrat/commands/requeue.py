"""Tell a batch script whether to start its job again, depending on how it ended.

Prints "yes: REASON" and exits with 0, or "no: REASON" and exits with 1. Yes after exit code 42
(preempted, and saved), and at most twice after 75 (a hang). No after any other code, when the job
was cancelled, and after 3 restarts without a new step. The history of exit codes is kept in
FILE.ends, for one job id, or for the id given by --job.
"""

from __future__ import annotations

import argparse
from pathlib import Path


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
    from mpistrat.checkpoint.claim import progress_of
    from mpistrat.cluster.job import job_id, state
    from mpistrat.launch.requeue import decide, remember

    step = -1 if args.checkpoint is None else progress_of(args.checkpoint)
    try:
        job_state = state()
        ends = remember(args.record, args.code, args.job or job_id(), step)
    except (OSError, ValueError) as error:  # a record that cannot be a file
        print(f"no: {error}")
        return 1
    yes, reason = decide(ends, job_state)
    print(f"{'yes' if yes else 'no'}: {reason}")
    return 0 if yes else 1

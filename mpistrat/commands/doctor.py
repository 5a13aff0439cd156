"""Check whether Python, MPI and the launcher fit together, here or on all nodes of an allocation.

Starts ranks as a program would be started, and reports what is wrong and the command that fixes it.
The exit code is 1 if programs would not run. Findings that only cost speed or safety are notes.
"""

from __future__ import annotations

import argparse
import shlex

from mpistrat.commands.arguments import positive


def options(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    text = "number of ranks; default: that of the allocation, or 2"
    add("-n", dest="ranks", metavar="N", type=positive, help=text)
    text = "a launcher and its options, as 'srun -K1 --mpi=pmix'; else that of `mpistrat run`"
    add("--launcher", metavar="WORDS", type=shlex.split, default=[], help=text)
    text = "a directory for checkpoints: check that every node sees it"
    add("directories", metavar="DIRECTORY", nargs="*", help=text)
    add("--json", action="store_true", help="print the full report as JSON")


def main(args: argparse.Namespace) -> int:
    """Print what was found."""
    from mpistrat.launch.checks import BAD, examine
    from mpistrat.launch.doctor import gather

    job = gather(args.ranks, args.launcher, args.directories)
    findings = list(examine(job))
    if args.json:
        import json

        report = job._asdict() | {"ranks": [rank._asdict() for rank in job.ranks]}
        report["findings"] = [finding._asdict() for finding in findings]
        print(json.dumps(report, indent=1))
    else:
        for finding in findings:
            print(f"{finding.level:<5}{finding.name + ':':<19}{finding.text}")
            if finding.mend:
                print(f"{'':24}-> {finding.mend}")
    return int(any(finding.level == BAD for finding in findings))

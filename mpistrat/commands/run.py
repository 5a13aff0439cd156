"""Run a Python program on N ranks with the MPI of this environment.

Inside a Slurm allocation it calls srun with the PMI of this MPI library, elsewhere the mpiexec that
belongs to the MPI library of mpi4py. It prints the command first. The default numbers of ranks,
nodes and cores are those of the allocation. Options of Python come after its name: mpistrat run
-n 4 python -u train.py. Arguments after the last -- go to the launcher: mpistrat run train.py
--epochs 3 -- --cpu-bind=cores. A failure on one rank ends the whole job. The exit code is the
launcher's.
"""

from __future__ import annotations

import argparse

from mpistrat.commands.arguments import positive, seconds
from mpistrat.errors import LaunchError


def options(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    rest, add = argparse.REMAINDER, parser.add_argument
    text = "number of ranks; default in an allocation: its number of tasks"
    add("-n", "-np", dest="ranks", metavar="N", type=positive, help=text)
    text = "use N nodes of the allocation or the hostfile"
    add("--nodes", metavar="N", type=positive, help=text)
    add("--per-node", metavar="N", type=positive, help="start N ranks on each node")
    # As `mpistrat.launch.flavours.BINDINGS`, which --help is not to wait for.
    bindings = ("none", "core", "socket", "numa")
    add("--bind", choices=bindings, help="bind each rank to this unit")
    add("--hostfile", metavar="FILE", help="a file with one HOST or HOST:RANKS per line")
    add("--launcher", choices=("srun", "mpiexec"), help="take this one")
    add("--label", action="store_true", help="begin each line of output with [rank@host]")
    text = "write each rank's output to DIR/rank-N.txt; only rank 0 is on the terminal too"
    add("--output-dir", metavar="DIR", default="", help=text)
    add("--dry-run", action="store_true", help="print the launcher command and do not run it")
    add("--timeout", metavar="S", type=seconds, help="end the job after S seconds")
    text = "a module and its arguments, as after python -m"
    add("-m", dest="module", metavar="MODULE ...", nargs=rest, help=text)
    add("-c", dest="code", nargs=rest, help=argparse.SUPPRESS)  # of python
    add("script", metavar="SCRIPT ...", nargs=rest, help="a script and its arguments")


def main(args: argparse.Namespace) -> int:
    """Run the program."""
    from mpistrat.launch.output import Output
    from mpistrat.launch.plan import Wishes
    from mpistrat.launch.run import run

    if args.code is not None:
        raise LaunchError("-c: write the code to a file, and give its name.")
    program, extra = _split([*(args.module or []), *args.script])
    if not program:
        raise LaunchError("give a SCRIPT or -m MODULE to run")
    return run(
        Wishes(args.ranks, args.nodes, args.per_node, args.bind, args.launcher, tuple(extra)),
        program,
        module=bool(args.module),
        timeout=args.timeout,
        hostfile=args.hostfile,
        output=Output(args.output_dir, args.label),
        dry_run=args.dry_run,
    )


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Return what stands before the last ``--``, and what stands after it.

    Example:
      >>> _split(["train.py", "-v", "--", "--cpu-bind=cores"])
      (['train.py', '-v'], ['--cpu-bind=cores'])
    """
    if words[:1] == ["--"]:
        words = words[1:]
    if "--" not in words:
        return words, []
    end = len(words) - 1 - words[::-1].index("--")
    return words[:end], words[end + 1 :]

"""Write a job script for Slurm or PBS, and submit it.

The script goes to stdout, or with -o to a file, from which --submit submits it. Options may stand
in a file, one in a line below [job], by their names: "nodes = 2"; those that may be given several
times have a line for each value; "program" is the program and its words, if none are given here.

The program is started on each rank. With --checkpoint DIR it is given those words, told by SIGUSR1
before the time ends, and started again when it has left with code 42, as `ms.preemption` does.
Standing in the program's words, {task} is the number of the task of an array, and {local} the
directory on the node's own disk that --stage copies files to.
"""

from __future__ import annotations

import argparse
import configparser
import dataclasses
import shlex
from pathlib import Path
from typing import Any

from mpistrat.commands.arguments import positive
from mpistrat.errors import OptionError

__all__ = ["main", "options"]

# Field of a job -> what stands for its value, and its help.
_TEXTS = {
    "name": ("NAME", "the name of the job"),
    "time": ("[D-]H:M:S", "the limit; 01:00:00"),
    "account": ("NAME", "whom the time is charged to"),
    "partition": ("NAME", "the partition of Slurm, the queue of PBS"),
    "venv": ("DIR", "a virtual environment"),
    "conda": ("NAME", "a conda environment"),
    "container": ("IMAGE", "run the program in this image, by apptainer"),
    "archive": ("TAR", "an environment in one file, which nodes unpack on their own disks (Slurm)"),
    "launcher": ("HOW", "srun; run: mpistrat run; none: the program starts ranks itself"),
    "pmi": ("KIND", "how srun tells ranks of each other: pmi2 (MPICH, Intel), pmix (Open MPI)"),
    "checkpoint": ("DIR", "save here before the time ends, and go on from here"),
    "requeue": ("HOW", "after a planned leave: yes, chain (submit the next job), no"),
    "array": ("TASKS", "tasks of an array, as 0-7 or 0-7%%2"),
}
_LISTS = {
    "module": ("NAME", "an environment module to load"),
    "each": ("WORDS", "the words of one task of an array"),
    "after": ("JOB", "begin when this job has ended well"),
    "stage": ("FILE", "copy to the disk of each node; archives are unpacked (Slurm)"),
    "directive": ("WORD", "a further word for the scheduler, as --directive=--constraint=fast"),
}
_NUMBERS = {
    "nodes": "nodes; 1",
    "per_node": "ranks on each node; 1",
    "cores": "cores of each rank; 1",
}


def options(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    kinds, absent = ("slurm", "pbs"), argparse.SUPPRESS
    parser.add_argument("--for", dest="scheduler", choices=kinds, default=absent, help="slurm")
    parser.add_argument("--file", dest="config", metavar="INI", type=Path, help="read options")
    for name, text in _NUMBERS.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, metavar="N", type=positive, default=absent, help=text)
    for name, (metavar, text) in _TEXTS.items():
        parser.add_argument(f"--{name}", metavar=metavar, default=absent, help=text)
    for name, (metavar, text) in _LISTS.items():
        text += "; may be given several times"
        parser.add_argument(
            f"--{name}", metavar=metavar, action="append", default=absent, help=text
        )
    text = "SIGUSR1 so long before the end of the time; 120, 0 for none"
    parser.add_argument("--notice", metavar="S", type=int, default=absent, help=text)
    names, text = ("-o", "--output"), "the file to write"
    parser.add_argument(*names, dest="file", metavar="FILE", default=absent, help=text)
    parser.add_argument("--submit", action="store_true", help="submit the script")
    text = "-- and the program: a script, or -m and a module, then its arguments"
    parser.add_argument("program", metavar="PROGRAM ...", nargs=argparse.REMAINDER, help=text)


def main(args: argparse.Namespace) -> int:
    """Write the script."""
    from mpistrat.launch.batch import BatchJob, submit, words
    from mpistrat.launch.batch_script import render

    given = _given(args)
    if args.submit:
        ending = "pbs" if given.get("scheduler") == "pbs" else "sbatch"
        given.setdefault("file", f"{given.get('name', BatchJob.name)}.{ending}")
    job = BatchJob(**given)
    text = render(job, ["mpistrat", "batch", *words(job)])
    if not job.file:
        print(text, end="")
        return 0
    Path(job.file).write_text(text, encoding="utf-8")
    Path(job.file).chmod(0o755)
    if args.submit:
        print(submit(job.scheduler, job.file), flush=True)
    return 0


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of the job: those of the file, overridden by those of the command."""
    given: dict[str, Any] = {} if args.config is None else _read(args.config)
    given |= {name: value for name, value in vars(args).items() if name in _fields() and value}
    program = list(given.pop("program", ()))
    program = program[1:] if program[:1] == ["--"] else program
    if program[:1] in (["python"], ["python3"]):
        program = program[1:]
    given["program"] = program
    if "notice" in args:
        given["notice"] = args.notice
    for name in ("venv", "checkpoint", "container", "archive"):
        if given.get(name, "").startswith("~"):
            given[name] = str(Path(given[name]).expanduser())
    return {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}


def _fields() -> set[str]:
    from mpistrat.launch.batch import BatchJob

    return {field.name for field in dataclasses.fields(BatchJob)}


def _read(path: Path) -> dict[str, Any]:
    """Return the fields that a file gives."""
    ini = configparser.ConfigParser(interpolation=None, delimiters=("=",))
    try:
        ini.read_string(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError, configparser.Error) as error:
        raise OptionError(f"{path} cannot be read: {error}") from None
    if ini.sections() != ["job"]:
        raise OptionError(f"{path} has to have one section, [job]; it has {ini.sections()}.")
    parser = argparse.ArgumentParser(prog=str(path), add_help=False, allow_abbrev=False)
    options(parser)
    words: list[str] = []
    program: list[str] = []
    for name, text in ini["job"].items():
        if name == "program":
            program = shlex.split(text)
            continue
        values = [line for line in text.splitlines() if line.strip()]
        words += [f"--{name}={value}" for value in values]
    found = vars(parser.parse_args([*words, "--", *program]))
    return {name: value for name, value in found.items() if name in _fields()}

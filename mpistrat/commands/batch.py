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

# Field of a job -> what stands for its value, its type (list: it may be given several times), help.
_OPTIONS: dict[str, tuple[str, Any, str]] = {
    "nodes": ("N", positive, "nodes; 1"),
    "per_node": ("N", positive, "ranks on each node; 1"),
    "cores": ("N", positive, "cores of each rank; 1"),
    "name": ("NAME", str, "the name of the job"),
    "time": ("[D-]H:M:S", str, "the limit; 01:00:00"),
    "account": ("NAME", str, "whom the time is charged to"),
    "partition": ("NAME", str, "the partition of Slurm, the queue of PBS"),
    "venv": ("DIR", str, "a virtual environment"),
    "conda": ("NAME", str, "a conda environment"),
    "container": ("IMAGE", str, "run the program in this image, by apptainer"),
    "archive": (
        "TAR",
        str,
        "an environment in one file, which nodes unpack on their disks (Slurm)",
    ),
    "launcher": ("HOW", str, "srun; run: mpistrat run; none: the program starts ranks itself"),
    "pmi": (
        "KIND",
        str,
        "how srun tells ranks of each other: pmi2 (MPICH, Intel), pmix (Open MPI)",
    ),
    "checkpoint": ("DIR", str, "save here before the time ends, and go on from here"),
    "notice": ("S", int, "SIGUSR1 so long before the end of the time; 120, 0 for none"),
    "requeue": ("HOW", str, "after a planned leave: yes, chain (submit the next job), no"),
    "array": ("TASKS", str, "tasks of an array, as 0-7 or 0-7%%2"),
    "module": ("NAME", list, "an environment module to load"),
    "each": ("WORDS", list, "the words of one task of an array"),
    "after": ("JOB", list, "begin when this job has ended well"),
    "stage": ("FILE", list, "copy to the disk of each node; archives are unpacked (Slurm)"),
    "directive": ("WORD", list, "a further word for the scheduler: --directive=--constraint=fast"),
}


def options(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    kinds, absent, add = ("slurm", "pbs"), argparse.SUPPRESS, parser.add_argument
    add("--for", dest="scheduler", choices=kinds, default=absent, help="slurm")
    add("--file", dest="config", metavar="INI", type=Path, help="read options")
    for name, (metavar, kind, text) in _OPTIONS.items():
        how: dict[str, Any] = {"type": kind}
        if kind is list:
            how, text = {"action": "append"}, f"{text}; may be given several times"
        add(f"--{name.replace('_', '-')}", metavar=metavar, default=absent, help=text, **how)
    names, text = ("-o", "--output"), "the file to write"
    add(*names, dest="file", metavar="FILE", default=absent, help=text)
    add("--submit", action="store_true", help="submit the script")
    text = "-- and the program: a script, or -m and a module, then its arguments"
    add("program", metavar="PROGRAM ...", nargs=argparse.REMAINDER, help=text)


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
    given |= {
        name: value for name, value in vars(args).items() if name in _fields() and value != []
    }
    program = list(given.pop("program", ()))
    program = program[1:] if program[:1] == ["--"] else program
    if program[:1] in (["python"], ["python3"]):
        program = program[1:]
    given["program"] = program
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

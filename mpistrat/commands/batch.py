"""Write a job script for Slurm or PBS, and submit it.

The script is printed on stdout, or written to a file with -o; --submit then submits that file. An
INI file may hold the options, one per line in its section [job], such as "nodes = 2"; an option
that may be given several times has one line for each value; "program" is the program and its
arguments, if they are not given on the command line.

The program is started on each rank. With --checkpoint DIR it gets those arguments too, is sent
SIGUSR1 before its time ends, and is started again if it exits with code 42, as `ms.preemption`
does. In the arguments of the program, {task} stands for the number of the array task, and {local}
for the directory on the local disk of the node to which --stage copies files.
"""

from __future__ import annotations

import argparse
import configparser
import dataclasses
import shlex
from pathlib import Path
from typing import Any

from mpistrat.board.reporter import say
from mpistrat.errors import OptionError
from mpistrat.launch.batch import BatchJob, submit

_FIELDS = {field.name: field for field in dataclasses.fields(BatchJob)}


def options(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    kinds, absent, add = ("slurm", "pbs"), argparse.SUPPRESS, parser.add_argument
    add("--for", dest="scheduler", choices=kinds, default=absent, help="slurm")
    add("--file", dest="config", metavar="INI", type=Path, help="read options")
    for name, field in _FIELDS.items():
        metavar, text = field.metadata["metavar"], field.metadata["help"]
        argument_options: dict[str, Any] = {"type": type(field.default)}
        if field.default == ():
            argument_options, text = {"action": "append"}, f"{text}; may be given several times"
        if metavar:
            add(
                f"--{name.replace('_', '-')}",
                metavar=metavar,
                default=absent,
                help=text,
                **argument_options,
            )
    names, text = ("-o", "--output"), "the file to write"
    add(*names, dest="file", metavar="FILE", default=absent, help=text)
    add("--submit", action="store_true", help="submit the script")
    text = "-- and the program: a script, or -m and a module, then its arguments"
    add("program", metavar="PROGRAM ...", nargs=argparse.REMAINDER, help=text)


def main(args: argparse.Namespace) -> int:
    """Write the script."""
    from mpistrat.launch.batch_script import render

    job_fields = _given(args)
    if args.submit:
        ending = "pbs" if job_fields.get("scheduler") == "pbs" else "sbatch"
        job_fields.setdefault("file", f"{job_fields.get('name', BatchJob.name)}.{ending}")
    job = BatchJob(**job_fields)
    text = render(job)
    if job.starts == "srun" and not job.pmi:
        say(
            "mpistrat: note: without --pmi srun takes the site's default, and where that is none, "
            "each rank is a job of its own. Give --pmi pmi2 for MPICH and Intel MPI, --pmi pmix "
            "for Open MPI; srun --mpi=list shows what there is."
        )
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
    sources = [args] if args.config is None else [_read(args.config), args]
    fields: dict[str, Any] = {
        name: value
        for source in sources
        for name, value in vars(source).items()
        if name in _FIELDS and value != []
    }
    program = list(fields.pop("program", ()))
    program = program[1:] if program[:1] == ["--"] else program
    if program[:1] in (["python"], ["python3"]):
        program = program[1:]
    fields["program"] = program
    for name in ("venv", "checkpoint", "container", "archive"):
        if fields.get(name, "").startswith("~"):
            fields[name] = str(Path(fields[name]).expanduser())
    return {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}


def _read(path: Path) -> argparse.Namespace:
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
            try:
                program = shlex.split(text)
            except ValueError as error:
                raise OptionError(f"{path}: program = {text}: {error}.") from None
            continue
        values = [line for line in text.splitlines() if line.strip()]
        words += [f"--{name}={value}" for value in values]
    return parser.parse_args([*words, "--", *program])

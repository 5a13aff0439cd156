"""The program of a job: what a user wrote, and what is started on each rank for it."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from mpistrat.errors import LaunchError
from mpistrat.launch.output import TERMINAL, Output


def python_program(
    program: Sequence[str], module: bool, output: Output = TERMINAL, options: Sequence[str] = ()
) -> list[str]:
    """Return the command that runs a Python program so that a failure on one rank ends the job.

    Args:
      program: A module or a script, then its arguments.
      module: Whether the first is a module.
      output: Where the output of each rank goes.
      options: Those of Python.

    Example:
      >>> python_program(["train.py", "--fast"], module=False)[1:]
      ['-m', 'mpistrat.launch.rank', 'train.py', '--fast']
    """
    words = [sys.executable, *options, "-m", "mpistrat.launch.rank"]
    words += ["--label"] if output.label else []
    words += ["--output-dir", str(Path(output.directory).resolve())] if output.directory else []
    return [*words, *(["-m"] if module else []), *program]


def without_python(program: Sequence[str]) -> tuple[list[str], Sequence[str], bool]:
    """Return the options of the ``python`` that ``mpiexec`` wants, the rest, and if it is a module.

    Example:
      >>> without_python(["python", "-u", "-m", "train", "--fast"])
      (['-u'], ['train', '--fast'], True)
    """
    if len(program) < 2 or not _is_python(program[0]):
        return [], program, False
    first = 1
    last = len(program) - 1
    while first < last and program[first][:1] == "-" and program[first] not in ("-m", "-"):
        if program[first] == "-c":
            raise LaunchError("python -c: write the code to a file, and give its name.")
        first += 2 if program[first] in ("-W", "-X") else 1
    module = program[first] == "-m" and len(program) > first + 1
    return list(program[1:first]), program[first + module :], module


def _is_python(word: str) -> bool:
    """Tell whether a word is Python's name, or the path of the one that runs here."""
    if not re.fullmatch(r"python[\d.]*", Path(word).name) or Path(word).is_dir():
        return False
    if word in ("python", "python3"):
        return not Path(word).exists()
    if Path(shutil.which(word) or "").parent.resolve() == Path(sys.executable).parent.resolve():
        return True
    raise LaunchError(
        f"the ranks run {sys.executable}, as this command does, and not {word}. Leave it out, or "
        f"write {word} -m mpistrat run ... if mpistrat is installed there."
    )

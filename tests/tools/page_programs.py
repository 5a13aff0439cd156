"""The programs of the pages in ``docs``: what they need, how they run, and what they print.

    python tests/tools/page_programs.py start train     runs those of two pages

Examples run on two ranks, and programs in files on one. They need mpistrat, and what the pages name
in the line that `read_requirements` reads. A ``text`` block directly below a program is its output
on rank 0; without one a program prints nothing there. A ``diff`` block shows two whole programs.
``...`` stands for text that differs from run to run, and for lines that the page leaves out. Blocks
that begin with ``$`` show what a command has printed once; they are not compared.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import shlex
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import numpy as np

import mpistrat as ms
from mpistrat.testing import run_ranks

DOCS = Path(__file__).parents[2] / "docs"
PROGRAMS = DOCS / "programs"
_REQUIREMENTS = re.compile(r"\AThis page needs `(pip install .+)` in a checkout", re.MULTILINE)
_PROGRAM = re.compile(
    r"^```(?P<language>python|diff)\n"
    r"(?P<source>.*?)^```$"
    r"(?:\n\n```text\n(?P<output>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)


class Program(NamedTuple):
    """A program of a page.

    Attributes:
      page: The name of the page.
      line: The line of the page in which the program begins.
      source: Its text.
      code: Its code, whose tracebacks show lines of the page.
      shown_output: The output that the page shows; empty for none.
      is_file: It is a file of `PROGRAMS` too, which may seed generators that threads share.
    """

    page: str
    line: int
    source: str
    code: CodeType
    shown_output: str
    is_file: bool = False


def read_page(page: str) -> str:
    """Return the text of a page."""
    return (DOCS / f"{page}.md").read_text(encoding="utf-8")


def read_requirements(page: str) -> list[str]:
    """Return the words of the command that installs what a page needs; empty if it names none."""
    _, _, below_title = read_page(page).partition("\n\n")
    match = _REQUIREMENTS.match(below_title)
    return shlex.split(match[1]) if match else []


def _take_side(diff: str, sign: str) -> str:
    """Return the old (sign ``-``) or the new (``+``) text of a diff with all lines."""
    lines = diff.splitlines(keepends=True)
    return "".join(line[1:] or "\n" for line in lines if line[:1] in (sign, " ", "\n"))


def read_sources(page: str) -> Iterator[str]:
    """Yield the text of each program that a page shows."""
    for match in _PROGRAM.finditer(read_page(page)):
        if match["language"] == "diff":
            yield _take_side(match["source"], "-")
            yield _take_side(match["source"], "+")
        else:
            yield match["source"]


def read_programs(page: str) -> Iterator[Program]:
    """Yield the programs of a page; those of files only if the page shows their output."""
    text = read_page(page)
    file_texts = {path.read_text(encoding="utf-8") for path in PROGRAMS.glob("*.py")}
    for match in _PROGRAM.finditer(text):
        source, output = match["source"], match["output"]
        if match["language"] == "diff":
            source = _take_side(source, "+")
        is_file = source in file_texts
        if is_file and output is None:
            continue  # tests/docs/test_programs.py runs it
        line = text.count("\n", 0, match.start()) + 2
        code = compile("\n" * (line - 1) + source, str(DOCS / f"{page}.md"), "exec")
        shown_output = "...\n" if (output or "").startswith("$ ") else output or ""
        yield Program(page, line, source, code, shown_output, is_file)


class _Rank0Output(io.StringIO):
    """What rank 0 prints; ranks are threads, and the others write nothing here."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.local()

    def write(self, text: str) -> int:
        is_rank0 = getattr(self.thread, "rank", None) == 0
        return super().write(text) if is_rank0 else len(text)


def run_program(program: Program, size: int) -> None:
    """Run a program on as many ranks, and compare what rank 0 prints.

    Raises:
      RanksFailed: The program raised an exception.
      AssertionError: It has printed something else than the page shows.
    """
    output = _Rank0Output()

    def run_on_rank(comm: Any) -> None:
        output.thread.rank = comm.rank
        exec(program.code, {"np": np, "ms": ms, "__name__": "__main__"})

    with contextlib.redirect_stdout(output):
        run_ranks(run_on_rank, size)
    printed, shown = output.getvalue(), program.shown_output
    is_alike = doctest.OutputChecker().check_output(shown, printed, doctest.ELLIPSIS)
    assert is_alike, (
        f"docs/{program.page}.md:{program.line} on {size} ranks prints\n{printed}not\n{shown}"
    )


if __name__ == "__main__":
    for page_name in sys.argv[1:]:
        for page_program in read_programs(page_name):
            run_program(page_program, 1 if page_program.is_file else 2)
            print(f"docs/{page_name}.md:{page_program.line}")

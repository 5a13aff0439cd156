"""Who shows what, and where no bar may be."""

from __future__ import annotations

import io
import sys

import pytest

from mpistrat.training.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self):
        return True


def use():
    with ProgressBar(2, is_shown=True) as progress:
        progress.advance()
        progress.print_line("one line")
        progress.advance()


def test_without_a_terminal_there_are_lines_alone(capsys):
    use()
    assert tuple(capsys.readouterr()) == ("one line\n", "")


def test_on_a_terminal_the_bar_goes_to_stderr_and_the_lines_to_stdout(capsys, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    use()
    assert capsys.readouterr().out == "one line\n"
    assert "1/2" in terminal.getvalue() or "2/2" in terminal.getvalue()
    # It is wiped out in the end.
    assert terminal.getvalue().rpartition("\r")[0].rpartition("\r")[2].strip() == ""


@pytest.mark.parametrize("stderr", [io.StringIO, Terminal])
def test_ranks_that_show_nothing_show_nothing(stderr, capsys, monkeypatch):
    screen = stderr()
    monkeypatch.setattr(sys, "stderr", screen)
    with ProgressBar(2, is_shown=False) as progress:
        progress.advance()
        progress.print_line("one line")
    assert capsys.readouterr().out == ""
    assert screen.getvalue() == ""

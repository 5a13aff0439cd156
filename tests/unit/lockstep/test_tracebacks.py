"""Tracebacks without the frames of the library, and the line that says what has failed."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.comm.callsite import is_package_file
from mpistrat.lockstep import mismatch, tracebacks
from mpistrat.lockstep.ending import LastLine
from mpistrat.lockstep.exits import Exits
from mpistrat.lockstep.tracebacks import (
    describe_failure,
    format_traceback,
    locate_failure,
    shortened,
)
from mpistrat.testing import RanksFailed, run_ranks


def missing():
    return {}["missing"]


def in_run(strategy):
    strategy.run(missing)


def in_merge(strategy):
    strategy.run(lambda: ms.get_replica_context().merge_call(lambda _, value: missing(), args=(1,)))


def in_update(strategy):
    with strategy.scope():
        variable = ms.Variable(np.ones(2))
    strategy.extended.update(variable, lambda variable: missing())


def in_map(strategy):
    list(ms.Dataset(np.arange(4)).map(lambda x: missing()).batch(2).prefetch(1))


def in_once(strategy):
    ms.once(missing)


def in_scope(strategy):
    with strategy.scope():
        missing()


def raised_by(call, *args):
    with pytest.raises(Exception) as caught:
        call(*args)
    return caught.value


def library_frames(text):
    names = [line.split('"')[1] for line in text.splitlines() if line.startswith("  File ")]
    return [name for name in names if is_package_file(name)]


WAYS = [in_run, in_merge, in_update, in_map, in_once, in_scope]


@pytest.mark.parametrize("way", WAYS)
def test_only_frames_of_the_program_are_shown_of_its_exceptions(way):
    error = raised_by(way, ms.MirroredStrategy())
    text = format_traceback(error)
    assert not library_frames(text)
    assert text.count(f"in {missing.__name__}\n") == 1
    assert f"in {way.__name__}\n" in text
    assert text.endswith("KeyError: 'missing'\n")
    line = missing.__code__.co_firstlineno + 1
    assert locate_failure(error) == f"test_tracebacks.py:{line} (missing)"


@pytest.mark.parametrize("way", WAYS)
def test_the_other_ranks_are_told_the_same(way):
    def program(comm):
        strategy = ms.MirroredStrategy()
        return format_traceback(raised_by(way, strategy))

    for text in run_ranks(program, 2):
        assert len(library_frames(text)) <= 1  # none, or where a RemoteError is raised


def test_what_another_rank_is_told_of_a_function_that_failed():
    def program(comm):
        strategy = ms.MirroredStrategy()
        return raised_by(strategy.run, missing if comm.rank == 1 else int)

    told = run_ranks(program, 2)[0]
    assert isinstance(told, ms.RemoteError)
    assert not library_frames(told.remote_traceback)
    assert "in missing\n" in told.remote_traceback


def test_of_what_the_library_raises_its_last_frame_is_shown():
    error = raised_by(ms.MirroredStrategy().all_reduce, "sum", object())
    text = format_traceback(error)
    assert len(library_frames(text)) == 1
    assert "raise LeafTypeError" in text


def test_at_most_two_frames_of_all_exceptions_in_a_chain():
    strategy = ms.MirroredStrategy()

    def chained(depth):
        try:
            if depth:
                chained(depth - 1)
        finally:
            strategy.all_reduce("sum", object())

    error = raised_by(chained, 4)
    whole = "".join(traceback.format_exception(error))
    assert len(library_frames(whole)) > 10
    text = format_traceback(error)
    assert len(library_frames(text)) == 2
    assert text.count("in chained\n") == whole.count("in chained\n")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups came with Python 3.11")
def test_exceptions_of_a_group_are_shortened_too():
    strategy = ms.MirroredStrategy()
    group = ExceptionGroup("two", [raised_by(in_run, strategy), raised_by(in_once, strategy)])  # noqa: F821
    text = format_traceback(group)
    assert text.count("in missing\n") == 2
    assert "mpistrat/strategy" not in text


def test_a_cycle_of_causes_ends():
    first, second = KeyError(1), KeyError(2)
    first.__cause__, second.__cause__ = second, first
    assert tracebacks.list_exceptions(first) == [first, second]


def test_all_frames_are_shown_on_request(monkeypatch):
    error = raised_by(in_run, ms.MirroredStrategy())
    monkeypatch.setenv("MPISTRAT_TRACEBACK", "full")
    assert len(library_frames(format_traceback(error))) > 2
    monkeypatch.setenv("MPISTRAT_TRACEBACK", "long")
    with pytest.raises(ms.errors.OptionError, match="it must be short or full"):
        ms.config.read_options()
    assert not library_frames(
        format_traceback(error)
    )  # what cannot be read is told by the first call


def test_the_exception_itself_keeps_its_frames():
    error = raised_by(in_run, ms.MirroredStrategy())
    before = traceback.format_tb(error.__traceback__)
    with shortened(error):
        assert len(traceback.format_tb(error.__traceback__)) < len(before)
    json.loads(mismatch.encode_report(error))
    assert traceback.format_tb(error.__traceback__) == before


class Stubborn(Exception):
    """An exception that nobody may change."""

    def __setattr__(self, name, value):
        raise AttributeError(name)

    def with_traceback(self, trace):
        raise AttributeError


def test_a_class_that_refuses_changes_is_shortened():
    def fail():
        raise Stubborn

    text = format_traceback(raised_by(ms.MirroredStrategy().run, fail))
    assert not library_frames(text)
    assert "in fail\n" in text


def test_context_managers_of_the_program_are_shown():
    @contextlib.contextmanager
    def opened():
        yield missing()

    def fail():
        with opened():
            pass

    text = format_traceback(raised_by(ms.MirroredStrategy().run, fail))
    assert contextlib.__file__ in text
    assert not library_frames(text)


def test_a_hook_that_the_system_has_set_shows_the_frames_of_the_program_only(capsys):
    ways = Exits()
    ways._excepthook = lambda *failure: sys.__excepthook__(*failure)
    ways.failure = raised_by(in_run, ms.MirroredStrategy())
    ways._print_failure()
    text = capsys.readouterr().err
    assert "in missing\n" in text
    assert not library_frames(text)


def test_the_line_names_the_program_where_an_installed_package_has_raised():
    def solve():
        np.linalg.inv(np.zeros((2, 2)))

    error = raised_by(ms.MirroredStrategy().run, solve)
    line = solve.__code__.co_firstlineno + 1
    place = f"test_tracebacks.py:{line} (solve)"
    assert (
        describe_failure(3, error)
        == f"mpistrat: rank 3 raised LinAlgError in {place}: Singular matrix"
    )
    assert describe_failure(3, SystemExit(2)) == ""


def test_the_line_is_one_line():
    text = describe_failure(
        0, raised_by(ms.MirroredStrategy().run, lambda: [].index("x" * 10**4 + "\ny"))
    )
    assert "\n" not in text
    assert len(text) < 500


def test_who_prints_the_last_line(capfd):
    line, taken = LastLine(), []
    line.print_line()
    line.text = "mpistrat: rank 1 raised KeyError"
    line.printers = [lambda text: taken.append(text)]
    line.print_line()
    assert capfd.readouterr().err == "mpistrat: rank 1 raised KeyError\n"
    line.printers.append(lambda text: True)
    line.print_line()
    assert capfd.readouterr().err == ""
    assert taken == [line.text] * 2


def cause_of(program, size):
    """Return the line that each rank knows when all have left."""
    sessions = {}

    def ranks(comm):
        sessions[comm.rank] = ms.MirroredStrategy()._replicas.lockstep
        program(comm.rank)

    with contextlib.suppress(RanksFailed):
        run_ranks(ranks, size)
    return [sessions[rank].state.cause_text for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_ranks_know_what_has_ended_the_program(size):
    def program(rank):
        ms.MirroredStrategy().run(missing if rank == size - 1 else int)

    place = f"test_tracebacks.py:{missing.__code__.co_firstlineno + 1} (missing)"
    text = f"mpistrat: rank {size - 1} raised KeyError in {place}: 'missing'"
    assert cause_of(program, size) == [text] * size


def test_all_ranks_know_who_has_left_while_others_were_in_a_call():
    def left(rank):
        if rank == 1:
            missing()
        ms.MirroredStrategy().run(int)

    [text] = set(cause_of(left, 3))
    assert text.startswith("mpistrat: rank 1 raised KeyError in test_tracebacks.py")

    def early(rank):
        if rank != 1:
            ms.MirroredStrategy().run(int)

    [text] = set(cause_of(early, 3))
    assert text.startswith("mpistrat: ranks 0, 2 raised LockstepError in test_tracebacks.py")
    assert ": rank 1 has left the program" in text
    assert set(cause_of(int, 3)) == {""}


def test_all_that_failed_alike_are_named():
    [text] = set(cause_of(lambda rank: missing(), 3))
    assert text.startswith("mpistrat: ranks 0-2 raised KeyError in test_tracebacks.py")


def test_a_package_behind_a_link_is_the_library_too(tmp_path):
    """As where a home directory is a link."""
    (tmp_path / "linked").symlink_to(Path(ms.__file__).parent.parent)
    text = "import mpistrat as ms; ms.MirroredStrategy().run(lambda: {}['missing'])"
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "linked")}
    command = [sys.executable, "-c", text]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stderr.count("  File ") == 2, done.stderr  # of the program
    assert "mpistrat: rank 0 raised KeyError in <string>:1 (<lambda>)" in done.stderr


def test_generated_code_is_not_the_line_of_the_program():
    """`dataclasses` makes ``__init__`` and ``__setattr__`` in a file named <string>."""
    with pytest.raises(ValueError, match="learning_rate") as caught:
        ms.optim.Adam(-1)
    assert locate_failure(caught.value).startswith("test_tracebacks.py:")


def test_a_program_that_cannot_be_parsed_is_named(tmp_path):
    program = tmp_path / "broken.py"
    program.write_text("x = 1\ndef f(:\n")
    with pytest.raises(SyntaxError) as caught:
        compile(program.read_text(), str(program), "exec")
    error = caught.value.with_traceback(None)
    assert locate_failure(error) == "broken.py:2 (<module>)"

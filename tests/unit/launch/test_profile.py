"""`mpistrat run --profile`: a file for each rank, and one table of all."""

from __future__ import annotations

import marshal
import os
import pstats
import threading
import time
from pathlib import Path

import pytest

from mpistrat.errors import LaunchError
from mpistrat.launch import cli
from mpistrat.launch.mpi_libraries import find_launcher
from mpistrat.launch.plan import LaunchOptions
from mpistrat.launch.profile import (
    _LIBRARY,
    classify_function,
    format_function,
    profiling_rank,
    read_profiles,
    report_job,
)
from mpistrat.launch.run import run

STANDARD = str(Path(os.__file__).parent / "json" / "decoder.py")
MATRIX = str(Path(os.__file__).parent / "site-packages" / "matrices" / "product.py")
PROGRAM, WAITING = "/far/away/train.py", str(_LIBRARY / "comm" / "mpi.py")


def write(directory, times_of_ranks):
    """Write profiles: for each rank its functions, with calls, own and cumulative seconds."""
    directory.mkdir()
    for rank, times in enumerate(times_of_ranks):
        stats = {name: (calls, calls, own, all_, {}) for name, (calls, own, all_) in times.items()}
        (directory / f"rank-{rank}.prof").write_bytes(marshal.dumps(stats))


def rows(text):
    """The rows of a table by their titles, with single blanks."""
    lines = [line for line in text.splitlines() if line.startswith("  ")]
    return {line[:46].strip(): " ".join(line[46:].split()) for line in lines}


def compute(count):
    return sum(i * i for i in range(count))


class TestRank:
    @pytest.mark.parametrize("failure", [None, ValueError("here"), SystemExit(3)], ids=repr)
    def test_however_the_program_ends_there_is_a_file(self, failure, tmp_path):
        caught = None
        try:
            with profiling_rank(str(tmp_path / "new"), 1, 2):
                compute(10)
                if failure is not None:
                    raise failure
        except (ValueError, SystemExit) as error:
            caught = error
        assert caught is failure
        assert [path.name for path in (tmp_path / "new").iterdir()] == ["rank-1.prof"]
        stats = pstats.Stats(str(tmp_path / "new" / "rank-1.prof")).stats
        [calls] = [row[1] for (_, _, name), row in stats.items() if name == "compute"]
        assert calls == 1

    def test_other_threads_are_not_taken_for_this_one(self, tmp_path):
        def work_elsewhere():
            while not has_ended.wait(0.0001):
                compute_elsewhere()

        def compute_elsewhere():
            return compute(10)

        def compute_here():
            end = time.monotonic() + 0.05
            while time.monotonic() < end:
                compute(1000)

        has_ended = threading.Event()
        thread = threading.Thread(target=work_elsewhere)
        thread.start()
        with profiling_rank(str(tmp_path), 0, 1):
            for _ in range(5):
                compute_here()
        has_ended.set()
        thread.join()
        times = {name: row for (_, _, name), row in read_profiles(tmp_path)[0].items()}
        assert not {"work_elsewhere", "compute_elsewhere"} & set(times)
        assert times["compute_here"].call_count == 5
        assert times["compute_here"].cumulative_seconds >= 5 * 0.05

    def test_a_forked_child_leaves_no_file(self, tmp_path):
        parent_pid = os.getpid()
        try:
            with profiling_rank(str(tmp_path), 0, 1):
                pid = os.fork()
                if pid == 0:
                    raise SystemExit
                status = os.waitpid(pid, 0)[1]
        finally:
            if os.getpid() != parent_pid:
                os._exit(len(list(tmp_path.iterdir())))
        assert os.waitstatus_to_exitcode(status) == 0  # files that the child saw at its end
        assert len(list(tmp_path.iterdir())) == 1

    def test_files_of_an_earlier_job_are_removed(self, tmp_path):
        for name in ("rank-0.prof", "rank-1.prof", "rank-2.prof", "rank-x.prof", "notes"):
            (tmp_path / name).touch()
        with profiling_rank(str(tmp_path), 0, 2):
            left = sorted(path.name for path in tmp_path.iterdir())
        assert left == ["notes", "rank-1.prof", "rank-x.prof"]

    def test_a_file_that_cannot_be_written_changes_nothing_else(self, tmp_path, capfd):
        directory = tmp_path / "gone"
        with profiling_rank(str(directory), 1, 2):
            directory.rmdir()
        error = capfd.readouterr().err
        assert error.startswith(f"mpistrat: rank 1: the profile {directory}/rank-1.prof cannot be")
        assert "No such file or directory" in error

    def test_a_directory_that_cannot_be_made_is_an_error_at_once(self, tmp_path):
        (tmp_path / "file").touch()
        with (
            pytest.raises(LaunchError, match=r"rank 1: the directory .*file cannot be used: File"),
            profiling_rank(str(tmp_path / "file"), 1, 2),
        ):
            raise AssertionError("the program has begun")


class TestTable:
    def test_means_and_the_slowest_rank(self, tmp_path, capfd):
        main, load = (PROGRAM, 1, "main"), (PROGRAM, 9, "load")
        product, sleep = (MATRIX, 3, "dot"), ("~", 0, "<built-in method time.sleep>")
        gather = (WAITING, 270, "allgather")
        write(
            tmp_path / "three",
            [
                {main: (1, 0.5, 9.0), load: (10, 1.0, 2.0), gather: (4, 3.0, 3.0)},
                {main: (1, 0.5, 9.0), load: (10, 2.0, 5.0), gather: (4, 1.0, 1.0)},
                {main: (1, 0.5, 9.0), product: (7, 6.0, 6.0), sleep: (1, 1.5, 1.5)},
            ],
        )
        report_job(tmp_path / "three", 3)
        text = capfd.readouterr().err
        table = rows(text)
        assert "profile of ranks 0-2, in seconds" in text
        assert table["/far/away/train.py:1 main"] == "1 0.500 0.500 (0) 9.000 9.000 (0)"
        assert table["/far/away/train.py:9 load"] == "7 1.000 2.000 (1) 2.333 5.000 (1)"
        assert table["matrices/product.py:3 dot"] == "2 2.000 6.000 (2) 2.000 6.000 (2)"
        assert table["the program itself"] == "8 1.500 2.500 (1)"
        assert table["waiting for ranks, moving data"] == "3 1.333 3.000 (0)"
        assert table["packages and Python"] == "3 2.500 7.500 (2)"
        titles = list(table)
        assert titles.index("/far/away/train.py:1 main") < titles.index("/far/away/train.py:9 load")
        assert titles.index("/far/away/train.py:9 load") < titles.index("the program itself")

    def test_one_rank_has_no_slowest(self, tmp_path, capsys):
        write(tmp_path / "one", [{(PROGRAM, n, f"f{n}"): (n, 0.5, n) for n in range(1, 9)}])
        assert cli.main(["profile", str(tmp_path / "one"), "--rows", "2"]) == 0
        table = rows(capsys.readouterr().out)
        assert list(table)[:3] == [f"{PROGRAM}:8 f8", f"{PROGRAM}:7 f7", "the program itself"]
        assert table[f"{PROGRAM}:8 f8"] == "8 0.500 8.000"

    def test_ranks_without_a_file_are_named(self, tmp_path, capfd):
        write(tmp_path / "some", [{(PROGRAM, 1, "main"): (1, 1.0, 1.0)}])
        report_job(tmp_path / "some", 3)
        error = capfd.readouterr().err
        assert "profile of rank 0, in seconds" in error
        assert f"no profile of ranks 1, 2 in {tmp_path}/some: a rank that a signal" in error

    @pytest.mark.parametrize(
        ("function", "kind", "text"),
        [
            (("train.py", 1, "main"), "program", "train.py:1 main"),
            ((str(Path.cwd() / "a" / "b.py"), 1, "main"), "program", "a/b.py:1 main"),
            ((PROGRAM, 1, "main"), "program", f"{PROGRAM}:1 main"),
            ((MATRIX, 1, "dot"), "other", "matrices/product.py:1 dot"),
            ((f"/other{MATRIX}", 1, "dot"), "other", "matrices/product.py:1 dot"),
            ((STANDARD, 1, "decode"), "other", "json/decoder.py:1 decode"),
            ((WAITING, 1, "barrier"), "waiting", "mpistrat/comm/mpi.py:1 barrier"),
            ((str(_LIBRARY / "pytree.py"), 1, "f"), "mpistrat", "mpistrat/pytree.py:1 f"),
            (
                (str(_LIBRARY / "examples" / "digits.py"), 1, "train"),
                "program",
                "mpistrat/examples/digits.py:1 train",
            ),
            (("<frozen importlib>", 1, "find"), "other", "<frozen importlib>:1 find"),
            (("~", 0, "<method 'f' of 'a'>"), "other", "<method 'f' of 'a'>"),
        ],
    )
    def test_kinds_and_names_of_functions(self, function, kind, text):
        assert (classify_function(function), format_function(function)) == (kind, text)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (None, "cannot be read: No such file or directory. To profile a program: mpistrat"),
            ({}, "holds no rank-N.prof. To profile a program: mpistrat run --profile-dir"),
            ({"rank-0.prof": b""}, r"rank-0.prof is no profile"),
            ({"rank-0.prof": b"text"}, r"rank-0.prof is no profile"),
        ],
        ids=["absent", "empty", "cut off", "text"],
    )
    def test_directories_that_are_no_profile(self, content, message, tmp_path, capfd):
        directory = tmp_path / "profile"
        if content is not None:
            directory.mkdir()
            for name, text in content.items():
                (directory / name).write_bytes(text)
        assert cli.main(["profile", str(directory)]) == 2
        assert message in capfd.readouterr().err
        report_job(directory, 1)  # nothing is raised: the exit code of the job stays
        assert "profile" in capfd.readouterr().err


CODE = """
import os, signal, sys, time
from mpi4py import MPI
import mpistrat as ms

rank = MPI.COMM_WORLD.rank

def load_slowly():
    time.sleep(0.05 * rank)

def step():
    return ms.get_replica_context().all_reduce("sum", 1.0)

def main():
    strategy = ms.MirroredStrategy()
    for _ in range(3):
        load_slowly()
        strategy.run(step)

os.chdir("/")
main()
{ending}
"""


def test_two_ranks_whose_program_exits(tmp_path, capfd, monkeypatch):
    assert find_launcher()
    (tmp_path / "train.py").write_text(CODE.format(ending="sys.exit(5)"))
    monkeypatch.chdir(tmp_path)
    for name in ("rank-1.prof", "rank-7.prof"):
        Path("profile").mkdir(exist_ok=True)
        Path("profile", name).touch()
    code = run(LaunchOptions(2), ["train.py"], profile_directory="profile", timeout=240)
    error = capfd.readouterr().err
    assert code == 5, error
    table = rows(error)
    line = next(i for i, text in enumerate(CODE.splitlines(), 1) if "def load_slowly" in text)
    load = table[f"train.py:{line} load_slowly"].split()
    assert load[0] == "3"
    assert load[-1] == "(1)" and float(load[-2]) >= 0.15
    assert float(table["waiting for ranks, moving data"].split()[-2]) >= 0.1  # rank 0, for rank 1
    assert sorted(path.name for path in Path("profile").iterdir()) == ["rank-0.prof", "rank-1.prof"]


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks", "ending", "code"),
    [(1, "", 0), (3, "if rank == 1: raise ValueError('here')", 1), (2, "sys.exit('text')", 1)],
)
def test_modules_end_as_without_a_profile(ranks, ending, code, tmp_path, capfd, monkeypatch):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(CODE.format(ending=ending))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPISTRAT_PROFILE", "from/environment")
    assert run(LaunchOptions(ranks), ["package.train"], is_module=True, timeout=240) == code
    error = capfd.readouterr().err
    assert any(title.startswith("package/train.py:14 main") for title in rows(error)), error
    assert len(list(Path("from/environment").iterdir())) == ranks


@pytest.mark.mpi
def test_a_rank_that_is_killed_has_no_file(tmp_path, capfd, monkeypatch):
    ending = "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(240)"
    (tmp_path / "train.py").write_text(CODE.format(ending=ending))
    monkeypatch.chdir(tmp_path)
    assert run(LaunchOptions(2), ["train.py"], profile_directory="profile", timeout=200) != 0
    assert "no profile of ranks 0, 1" in capfd.readouterr().err


@pytest.mark.mpi
def test_without_the_option_nothing_is_loaded(tmp_path, capfd):
    program = tmp_path / "looks.py"
    program.write_text(
        "import sys\n"
        "names = {'cProfile', '_lsprof', 'pstats', 'mpistrat.launch.profile'} & set(sys.modules)\n"
        "assert not names, names\n"
    )
    assert run(LaunchOptions(1), [str(program)], timeout=240) == 0, capfd.readouterr().err


@pytest.mark.parametrize("origin", ["--profile-dir", "MPISTRAT_PROFILE"])
def test_a_directory_that_cannot_be_made(origin, tmp_path, monkeypatch):
    program = tmp_path / "x.py"
    program.touch()
    monkeypatch.setenv("MPISTRAT_PROFILE", str(program))
    option = str(program) if origin == "--profile-dir" else ""
    text = rf"{origin} .*x\.py cannot be made: File exists\. Give one that this host can write"
    with pytest.raises(LaunchError, match=text):
        run(LaunchOptions(1), [str(program)], profile_directory=option)

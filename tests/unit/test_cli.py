"""The words after `mpistrat`: what is taken, what is refused, what is handed on."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

import mpistrat
from mpistrat.errors import LaunchError
from mpistrat.launch import cli
from mpistrat.launch.plan import LaunchOptions
from mpistrat.launch.streams import Output

options = {}  # of the last call


@pytest.fixture
def calls(monkeypatch):
    """Record what `run` was asked for instead of starting it."""
    recorded = []
    options.clear()

    def launch(launch_options, program, is_module=False, timeout=None, **others):
        recorded.append((launch_options.ranks, list(program), is_module, timeout))
        options.update(others, launch_options=launch_options)
        return 17

    monkeypatch.setattr("mpistrat.launch.run.run", launch)
    return recorded


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("-n 2 train.py", (2, ["train.py"], False, None)),
        ("-np 2 train.py", (2, ["train.py"], False, None)),
        ("-n 2 train.py -n 5 -m x", (2, ["train.py", "-n", "5", "-m", "x"], False, None)),
        ("-n 2 train.py --timeout 1", (2, ["train.py", "--timeout", "1"], False, None)),
        ("-n 2 -m pkg.mod --epochs 3", (2, ["pkg.mod", "--epochs", "3"], True, None)),
        ("-n 2 -m pkg.mod -n 7", (2, ["pkg.mod", "-n", "7"], True, None)),
        ("--timeout 1.5 -n 1 -m pkg", (1, ["pkg"], True, 1.5)),
        ("train.py", (None, ["train.py"], False, None)),
        ("-n 2 -- train.py", (2, ["train.py"], False, None)),
        ("-n 2 train.py -v -- --cpu-bind=cores", (2, ["train.py", "-v"], False, None)),
        ("-n 2 -m pkg -- -x -- --cpu-bind=cores", (2, ["pkg", "--", "-x"], True, None)),
    ],
)
def test_program_and_its_arguments_are_handed_on(words, call, calls):
    assert cli.main(["run", *words.split()]) == 17
    assert calls == [call]
    assert options["launch_options"].extra == (("--cpu-bind=cores",) if "cpu-bind" in words else ())


def test_launch_options_are_handed_on(calls):
    words = "run --nodes 2 --per-node 4 --bind core --launcher srun --hostfile h --label"
    assert cli.main([*words.split(), "--output-dir", "out", "--dry-run", "x.py"]) == 17
    assert options == {
        "launch_options": LaunchOptions(None, 2, 4, "core", "srun"),
        "hostfile": "h",
        "output": Output("out", True),
        "profile_directory": "",
        "dry_run": True,
    }


@pytest.mark.parametrize(
    ("words", "directory"),
    [
        ("--profile train.py", "profile"),
        ("--profile-dir out train.py", "out"),
        ("--profile --profile-dir out train.py", "out"),
        ("train.py --profile", ""),
    ],
)
def test_where_profiles_are_written(words, directory, calls):
    assert cli.main(["run", *words.split()]) == 17
    assert options["profile_directory"] == directory
    assert calls == [(None, ["train.py", *(() if directory else ("--profile",))], False, None)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-n 0 x.py", "at least 1, got '0'"),
        ("-n -1 x.py", "-n"),
        ("-n two x.py", "at least 1, got 'two'"),
        ("-n ² x.py", "at least 1, got '²'"),
        ("-n 1.5 x.py", "at least 1, got '1.5'"),
        ("--bind gpu x.py", "gpu"),
        ("--nodes 0 x.py", "at least 1, got '0'"),
        ("-n 1 --timeout 0 x.py", "greater than 0, got '0'"),
        ("-n 1 --timeout nan x.py", "greater than 0, got 'nan'"),
        ("-n 1 --timeout soon x.py", "greater than 0, got 'soon'"),
        ("-n 1 --speed 3 x.py", "--speed"),
        ("--n 2 x.py", "--n"),  # and not --nodes
        ("-n 1 --time 60 x.py", "--time"),  # and not --timeout
    ],
)
def test_words_that_cannot_be_used_are_refused(words, message, calls, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["run", *words.split()])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
    assert not calls


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["drill", "-n", "2", "--tolerance", "nan", "x.py"], "at least 0, got 'nan'"),
        (["drill", "-n", "2", "--tolerance", "-1", "x.py"], "at least 0, got '-1'"),
        (["scaling", "--output", ".", "--", "x.py"], "the name of a file, got '.'"),
    ],
)
def test_words_that_other_commands_refuse(words, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(words)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", ["-n 2", "-n 2 -m"])
def test_no_program_is_refused(words, calls, capsys):
    assert cli.main(["run", *words.split()]) == 2
    assert "give a SCRIPT or -m MODULE" in capsys.readouterr().err
    assert not calls


def test_code_is_refused(calls, capsys):
    assert cli.main(["run", "-n", "2", "-c", "print(1)", "-x"]) == 2
    assert "-c: write the code to a file" in capsys.readouterr().err
    assert not calls


def test_without_words_the_help_is_printed(capsys):
    assert cli.main([]) == 2
    output = capsys.readouterr()
    assert not output.out
    assert all(f"\n    {name}" in output.err for name in cli.COMMANDS)
    examples = output.err.partition("examples:\n")[2].splitlines()
    parser = cli._build_parser()
    for line in filter(str.strip, examples[: examples.index("")]):
        parser.parse_args(re.split("  +", line.strip())[0].split()[1:])


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"mpistrat {mpistrat.__version__}\n"


def test_errors_of_mpistrat_are_told_without_a_traceback(monkeypatch, capsys):
    def launch(*args, **kwargs):
        raise LaunchError("no launcher")

    monkeypatch.setattr("mpistrat.launch.run.run", launch)
    assert cli.main(["run", "-n", "1", "x.py"]) == 2
    assert capsys.readouterr().err == "mpistrat run: error: no launcher\n"


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_help_of_a_command_is_its_docstring(name, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main([name, "--help"])
    assert exit_.value.code == 0
    assert cli.COMMANDS[name].__doc__.splitlines()[0] in capsys.readouterr().out


def test_help_without_docstrings(monkeypatch, capsys):
    monkeypatch.setattr(cli.COMMANDS["run"], "__doc__", None)  # python -OO
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    assert "python -OO" in capsys.readouterr().out


def test_module_is_the_command():
    got = subprocess.run(
        [sys.executable, "-m", "mpistrat", "--help"], capture_output=True, text=True, check=True
    )
    assert all(name in got.stdout for name in cli.COMMANDS)


def test_output_that_nobody_reads_to_its_end_is_no_error(tmp_path):
    reads, writes = os.pipe()
    os.close(reads)  # as `| head` does
    words = [sys.executable, "-m", "mpistrat", "checkpoint", "list", str(tmp_path)]
    done = subprocess.run(words, stdout=writes, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writes)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_limit_of_processes_is_told_and_no_other_error_is_hidden(monkeypatch, capsys):
    def launch(*args, **others):
        raise RuntimeError(why)

    monkeypatch.setattr("mpistrat.launch.run.run", launch)
    why = "can't start new thread"
    assert cli.main(["run", "-n", "2", "train.py"]) == 2
    assert "can't start new thread. Raise `ulimit -u`" in capsys.readouterr().err
    why = "something else"
    with pytest.raises(RuntimeError, match=why):
        cli.main(["run", "-n", "2", "train.py"])

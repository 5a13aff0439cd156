"""What a job prints of an exception: frames of the program, and what ended it as the last line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mpistrat
from mpistrat.config import launched_by
from mpistrat.launch.mpi_libraries import find_launcher

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(launched_by() is not None, reason="this process is itself a rank of a job"),
]

PROGRAM = """
import sys
import numpy as np
import mpistrat as ms

way = sys.argv[1]


def missing(*_):
    return {}["missing"]  # here


def wrong():
    return strategy.rank == strategy.num_replicas_in_sync - 1


def maybe(x):
    return missing() if wrong() else x


def step():
    if way == "run":
        maybe(1)
    if way == "merge":
        return ms.get_replica_context().merge_call(lambda _, x: maybe(x), args=(1,))
    return ms.get_replica_context().all_reduce("sum", 1)


if way == "early":
    missing()
strategy = ms.MirroredStrategy()
if way == "update":
    with strategy.scope():
        variable = ms.Variable(np.ones(3))
    strategy.extended.update(variable, lambda variable: maybe(None))
if way == "map":
    dataset = ms.Dataset(np.arange(8)).map(maybe).batch(4).prefetch(1)
    for batch in strategy.experimental_distribute_dataset(dataset):
        strategy.run(step)
if way == "source":

    def rows():
        yield np.ones(2)
        yield maybe(np.ones(2))

    for batch in strategy.experimental_distribute_dataset(ms.Dataset(rows).batch(2)):
        strategy.run(step)
if way == "late":
    try:
        maybe(1)
    finally:
        print("tidy")
if way == "other":
    if wrong():
        sys.exit(0)
strategy.run(step)
"""
LINE = next(n for n, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# here"))
WHAT = f"KeyError in train.py:{LINE} (missing): 'missing'"


def ended(tmp_path: Path, way: str, command: list[str], environment=os.environ) -> list[str]:
    """Return the lines on standard error of a program that must fail."""
    (tmp_path / "train.py").write_text(PROGRAM)
    words = [*command, "train.py", way]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode, done.stderr
    return done.stderr.splitlines()


def runner(ranks: int) -> list[str]:
    return [sys.executable, "-m", "mpistrat", "run", "-n", str(ranks)]


def check(lines: list[str], rank: int) -> None:
    library = str(Path(mpistrat.__file__).parent)
    text = "\n".join(lines)
    assert not [line for line in lines if line.startswith(f'  File "{library}')], text
    assert text.count(", in missing") == 1, text
    assert lines[-1] == f"mpistrat: rank {rank} raised {WHAT}"
    assert sum(line.startswith("mpistrat: rank") for line in lines) == 1, text


WAYS = ["run", "merge", "update", "map", "source", "late"]


@pytest.mark.parametrize(
    "way", [way if way == "run" else pytest.param(way, marks=pytest.mark.mpi) for way in WAYS]
)
def test_the_last_line_under_the_runner(way, tmp_path):
    check(ended(tmp_path, way, runner(2)), 1)


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [1, 3])
def test_any_number_of_ranks(ranks, tmp_path):
    check(ended(tmp_path, "merge", runner(ranks)), ranks - 1)


@pytest.mark.mpi
def test_before_the_first_strategy_under_the_runner(tmp_path):
    lines = ended(tmp_path, "early", runner(2))
    assert lines[-1] == f"mpistrat: ranks 0, 1 raised {WHAT}"


@pytest.mark.mpi
def test_the_last_line_is_not_labelled(tmp_path):
    lines = ended(tmp_path, "run", [*runner(2), "--label"])
    assert lines[-1].startswith("mpistrat: rank 1 raised KeyError in train.py")


@pytest.mark.mpi
def test_a_rank_that_left_early(tmp_path):
    lines = ended(tmp_path, "other", runner(2))
    text = r"mpistrat: rank 0 raised LockstepError in train.py:\d+: rank 1 has left the program"
    assert re.match(text, lines[-1]), lines


@pytest.mark.mpi
def test_without_a_launcher(tmp_path):
    check(ended(tmp_path, "map", [sys.executable]), 0)


def test_under_the_launcher_alone(tmp_path):
    """MPICH's line about the abort is left out; Open MPI's launcher has its own last words."""
    launcher, _ = find_launcher()
    command = launcher.build_command(2, [sys.executable])
    lines = ended(tmp_path, "merge", [*command.argv], command.build_environment())
    first = next(n for n, line in enumerate(lines) if line.startswith("mpistrat: rank"))
    check(lines[: first + 1], 1)
    if launcher.flavour.name == "MPICH":
        assert lines[first + 1 :] == []


ALONE = """
import mpistrat as ms


def missing():
    return {}["missing"]


ms.STRATEGY.run(missing)
"""


@pytest.mark.parametrize("made", ["get_strategy()", "OneDeviceStrategy('/cpu:0')"])
def test_strategies_that_do_not_communicate(made, tmp_path):
    (tmp_path / "train.py").write_text(ALONE.replace("STRATEGY", made))
    command = [sys.executable, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr.count("  File ") == 2, done.stderr
    line = "mpistrat: rank 0 raised KeyError in train.py:6 (missing): 'missing'"
    assert done.stderr.splitlines()[-1] == line
    assert done.returncode == 1

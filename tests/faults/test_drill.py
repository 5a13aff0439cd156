"""Programs that are killed at random times and continue to the same result."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

import mpistrat as ms
from mpistrat.config import launched_by
from mpistrat.launch.drill import Drill, play_drill

JOB = str(Path(__file__).parent / "programs" / "drilled_job.py")

pytestmark = [
    pytest.mark.job,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(sys.platform != "linux", reason="processes are found by /proc"),
    pytest.mark.skipif(launched_by() is not None, reason="this process is itself a rank of a job"),
]


def drill(*words, kills=3, sizes=(2,), number=signal.SIGKILL, seed=1, tolerance=0.0):
    return Drill(words, 2, sizes, kills, number, seed, tolerance, timeout=120.0)


def codes(lines):
    """The exit codes of the runs of a table."""
    return [int(line.split("code ")[1].split()[0]) for line in lines if "code " in line]


def test_a_program_that_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("MPISTRAT_NUMBA", "0")  # six processes that need not import it
    lines = list(play_drill(drill(JOB, kills=1, seed=2), tmp_path))
    first, killed, last = codes(lines)
    assert (first, last) == (0, 0), lines
    assert killed in (9, 137), lines
    assert (
        lines[-1] == "after 1 interruption equal to the reference run to the bit: 4 arrays of ckpt"
    )


@pytest.mark.nightly
def test_a_program_that_forgets_something(tmp_path):
    lines = []
    with pytest.raises(ms.CheckpointError, match=r"1 of 3 arrays differ .*\n  ckpt: weights"):
        lines += play_drill(drill(JOB, "--forget", "--steps", "60"), tmp_path)


@pytest.mark.nightly
def test_other_numbers_of_ranks(tmp_path):
    *_, last = play_drill(drill(JOB, sizes=(3, 1, 2), tolerance=1e-12), tmp_path)
    assert last.endswith("equal to the reference run within 1e-12: 4 arrays of ckpt")


@pytest.mark.nightly
def test_planned_leaves(tmp_path):
    lines = list(
        play_drill(drill(JOB, "--leave", "--steps", "90", number=signal.SIGUSR1), tmp_path)
    )
    assert 42 in codes(lines), lines
    assert lines[-1].endswith("equal to the reference run to the bit: 5 arrays of begun, last")


@pytest.mark.nightly
def test_a_program_that_does_not_save_or_fails(tmp_path):
    script = tmp_path / "script.py"
    for number, (text, words) in enumerate(
        [
            ("", r"has left no checkpoint in .*\n.*--checkpoint"),
            ("raise SystemExit(3)", "fails without interruptions too"),
        ]
    ):
        script.write_text(text)
        place = tmp_path / str(number)
        place.mkdir()
        with pytest.raises(ms.LaunchError, match=words):
            list(play_drill(drill(str(script)), place))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGKILL, ["--steps", "300"]), (signal.SIGUSR1, ["--leave", "--steps", "1000"])],
    ids=["SIGKILL", "SIGUSR1"],
)
def test_twenty_interruptions(number, words, tmp_path):
    lines = list(play_drill(drill(JOB, *words, kills=20, number=number), tmp_path))
    print("\n".join(lines))
    assert "equal to the reference run to the bit" in lines[-1]
    assert sum(code != 0 for code in codes(lines)) >= 15


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(2))
def test_digits_after_twenty_kills(seed, tmp_path):
    words = ("-m", "mpistrat.examples.digits", "--epochs", "30", "--checkpoint", "{dir}")
    program = (*words, "--output", str(tmp_path / "curves.png"))
    place = tmp_path / "drill"
    place.mkdir()
    one = drill(*program, kills=20, seed=seed)._replace(ignore=("*history*", "*seconds*"))
    *_, last = play_drill(one, place)
    assert "equal to the reference run to the bit" in last

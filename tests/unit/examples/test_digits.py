"""The digits program: the same answer at any number of ranks, and what it prints."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import runpy
import shlex
import statistics
import struct
import subprocess
import sys
import termios
import threading
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

import mpistrat
from mpistrat.config import launched_by
from mpistrat.examples import digits, mlp
from mpistrat.examples.digits import DigitsSettings
from mpistrat.examples.settings import collect_fixed_settings, parse_settings
from mpistrat.launch.mpi_libraries import find_launcher
from mpistrat.testing import run_ranks

PLAIN = runpy.run_path(str(Path(__file__).with_name("plain_digits.py")))
SHORT = DigitsSettings(epochs=3, seed=1, hidden=32)
CURVES = ("loss", "accuracy", "validation/accuracy")
CONTROL = re.compile(r"[^\n\x20-\x7e]")


def orders(settings):
    """For every epoch the batches, as numbers of images."""
    images = mpistrat.Dataset(np.arange(1409)).shuffle(seed=settings.seed).batch(settings.batch)
    return [list(images) for _ in range(settings.epochs)]


class Result(NamedTuple):
    """The weights and the curves of a rank."""

    parameters: mlp.Parameters
    history: mpistrat.History


def train(strategy, settings):
    model, history = digits.train(strategy, settings, verbose=False)
    return Result(mlp.Parameters(*(variable.numpy().copy() for variable in model)), history)


@pytest.fixture(scope="module", autouse=True)
def _one_thread_for_each_rank():
    """Threads of the linear algebra library that wait for a core would make these tests slow."""
    with threadpool_limits(1):
        yield


@pytest.fixture(scope="module")
def plain():
    chosen = {name: getattr(SHORT, name) for name in ("seed", "epochs", "lr", "hidden")}
    return PLAIN["simulate"](orders(SHORT), **chosen)


@pytest.fixture(scope="module")
def results():
    """What each rank got, for every number of ranks."""
    return {
        size: run_ranks(lambda comm: train(mpistrat.MirroredStrategy(), SHORT), size)
        for size in (1, 2, 3, 4)
    }


def test_batches_are_22_of_64_and_one_of_one():
    for epoch in orders(SHORT):
        assert [len(batch) for batch in epoch] == [64] * 22 + [1]
        assert sorted(np.concatenate(epoch)) == list(range(1409))


def test_every_digit_has_its_share_of_the_training_images():
    (x, y), (x_test, y_test) = digits.load_images(seed=0)
    assert x.shape == (1409, 64)
    assert x_test.shape == (388, 64)
    assert x.dtype == np.float64
    assert (x.min(), x.max()) == (0.0, 1.0)
    every = np.bincount(np.concatenate([y, y_test]))
    assert np.abs(np.bincount(y) - every * 1409 / 1797).max() < 1


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_parameters_are_those_of_plain_numpy(size, results, plain):
    values, _ = plain
    for result in results[size]:
        for got, want in zip(result.parameters, values, strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-11)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_parameters_are_those_of_one_rank(size, results):
    [alone] = results[1]
    for result in results[size]:
        for got, want in zip(result.parameters, alone.parameters, strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-11)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_ranks_hold_the_same_bits(size, results):
    first = results[size][0]
    for result in results[size][1:]:
        for got, want in zip(result.parameters, first.parameters, strict=True):
            assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_figures_of_an_epoch_count_every_example_once(size, results, plain):
    _, history = plain
    for result in results[size]:
        got = result.history.table(*CURVES)
        assert got[:, 0].tolist() == [1, 2, 3]
        np.testing.assert_allclose(got[:, 1:], history, rtol=0, atol=1e-11)


def test_all_replicas_but_one_meet_an_empty_batch_in_every_epoch(monkeypatch):
    seen = defaultdict(list)
    real = mlp.compute_gradients

    def noted(parameters, x, y):
        seen[threading.current_thread().name].append(len(y))
        return real(parameters, x, y)

    monkeypatch.setattr(mlp, "compute_gradients", noted)
    run_ranks(lambda comm: train(mpistrat.MirroredStrategy(), replace(SHORT, epochs=2)), 3)
    assert seen == {
        "rank 0": ([22] * 22 + [1]) * 2,
        "rank 1": ([22] * 22 + [0]) * 2,
        "rank 2": ([20] * 22 + [0]) * 2,
    }


@pytest.mark.parametrize(
    "make",
    [mpistrat.MultiWorkerMirroredStrategy, lambda: mpistrat.OneDeviceStrategy("cpu")],
    ids=["multi-worker", "one device"],
)
def test_other_strategies_train_the_same_model(make, plain):
    def program(comm):
        return train(make(), SHORT)

    values, history = plain
    for result in run_ranks(program, 2):
        for got, want in zip(result.parameters, values, strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-11)
        assert result.history.last("validation/accuracy") == history[-1][2]


def test_the_report_is_about_the_median_epoch():
    history = mpistrat.History()
    for epoch, seconds in enumerate([9.0, 1.0, 2.0]):
        times = {"seconds": seconds, "waiting": seconds / 4, "communicating": seconds / 10}
        history.append(epoch, **times, **{"validation/accuracy": 0.9 + epoch / 100})
    lines = digits.format_report(history, 3, "there.png").splitlines()
    assert [re.split("  +", line)[1] for line in lines[:7]] == [
        *("0.9200", "704 (median epoch)", "65% of a step (rank 0)", "25%, for other ranks", "10%"),
        *("3", "there.png"),
    ]


def test_median_accuracy_over_five_seeds_is_97_percent():
    strategy = mpistrat.OneDeviceStrategy("cpu")
    histories = [train(strategy, DigitsSettings(seed=seed)).history for seed in range(5)]
    accuracies = [history.last("validation/accuracy") for history in histories]
    assert statistics.median(accuracies) >= 0.97, accuracies


def of(settings, size=2, **more):
    """The result of the last rank."""
    chosen = replace(settings, **more)
    return run_ranks(lambda comm: train(mpistrat.MirroredStrategy(), chosen), size)[-1]


@pytest.mark.beside
@pytest.mark.parametrize(("first", "second"), [(2, 2), (2, 1), (1, 3)])
def test_a_run_goes_on_where_it_was_stopped_and_is_lengthened(
    first, second, results, tmp_path, monkeypatch
):
    settings = replace(SHORT, checkpoint=str(tmp_path))
    real, step_counts = digits.train_step, defaultdict(int)

    def step(*args):
        step_counts[threading.current_thread().name] += 1
        if step_counts[threading.current_thread().name] == 40:  # in the second epoch
            raise KeyboardInterrupt
        return real(*args)

    def stopped(comm):
        with pytest.raises(KeyboardInterrupt):
            train(mpistrat.MirroredStrategy(), settings)

    monkeypatch.setattr(digits, "train_step", step)
    run_ranks(stopped, first)
    monkeypatch.setattr(digits, "train_step", real)
    wanted = results[first][0]
    for _ in range(2):  # the second time nothing is left to do
        continued = of(settings, second)
        curves = [result.history.table(*CURVES) for result in (continued, wanted)]
        np.testing.assert_allclose(*curves, rtol=0, atol=1e-11)
        for got, want in zip(continued.parameters, wanted.parameters, strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-11)
            assert first != second or got.tobytes() == want.tobytes()
    longer = of(settings, second, epochs=4)
    assert longer.history["loss"][0].tolist() == [1, 2, 3, 4]


@pytest.mark.beside
def test_another_seed_in_a_used_directory_is_told(tmp_path):
    settings = DigitsSettings(epochs=1, hidden=8, checkpoint=str(tmp_path))
    of(settings)

    def other(comm):
        with pytest.raises(ValueError, match=r"begun with lr=0\.15, not 0\.3, seed=0, not 1\."):
            train(mpistrat.MirroredStrategy(), replace(settings, seed=1, lr=0.3))
        with pytest.raises(mpistrat.StructureError, match=r"float64\[64,8\] there"):
            train(mpistrat.MirroredStrategy(), replace(settings, hidden=9))

    run_ranks(other, 2)


@pytest.mark.parametrize("words", [["--epochs", "0"], ["--batch", "-1"], ["--hidden", "x"]])
def test_numbers_that_make_no_sense_are_refused(words, capsys):
    with pytest.raises(SystemExit) as exit_:
        digits.main(words)
    assert exit_.value.code == 2
    assert words[0] in capsys.readouterr().err


# The program as a user starts it.

PROGRAM = (sys.executable, "-m", "mpistrat.examples.digits", "--epochs", "2", "--hidden", "16")
LACKING = """
import runpy, sys
import mpistrat
me = mpistrat.MirroredStrategy().run(
    lambda: mpistrat.get_replica_context().replica_id_in_sync_group)
if me.local == {rank}:
    sys.modules["matplotlib"] = None
runpy.run_module("mpistrat.examples.digits", run_name="__main__")
"""
no_job_in_a_job = pytest.mark.skipif(
    launched_by() is not None, reason="this process is itself a rank of a job"
)


def start(ranks, program, directory, stderr=subprocess.PIPE):
    """Run a program on some ranks, or plainly if None is given."""
    env = dict(os.environ)
    if ranks is not None:
        program, more = find_launcher()[0].build_command(ranks, program)[:2]
        env.update(more)
    root = str(Path(mpistrat.__file__).parents[1])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (root, env.get("PYTHONPATH"))))
    return subprocess.run(
        program,
        cwd=directory,
        env=env,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        timeout=240,
        check=False,
    )


def printed(done, ranks, directory):
    """Check what a run has said on stdout, and that it has drawn the picture."""
    lines = done.stdout.splitlines()
    assert [line.split("   ")[0] for line in lines[:2]] == ["epoch 1 of 2", "epoch 2 of 2"]
    assert [re.split("  +", line)[0] for line in lines[2:9]] == [
        *("test accuracy", "examples per second", "computing", "waiting", "communicating"),
        *("ranks", "picture"),
    ]
    shares = [int(re.search(r" (\d+)%", line)[1]) for line in lines[4:7]]
    assert sum(shares) in range(98, 103)
    assert (shares == [100, 0, 0]) == (ranks == 1)
    assert lines[7].split() == ["ranks", str(ranks)]
    assert lines[9:11] == ["", "Try next:"]
    assert len(lines) == 17
    assert not CONTROL.search(done.stdout)
    assert [path.name for path in directory.iterdir()] == ["digits.png"]
    return lines[11:]


@pytest.mark.parametrize("text", ["abc", "0", "-3", "1.5"])
def test_a_count_that_is_none(text, capsys):
    with pytest.raises(SystemExit):
        parse_settings(DigitsSettings, "", "digits", [f"--epochs={text}"])
    assert f"must be an integer of at least 1, got '{text}'" in capsys.readouterr().err


def test_the_settings_that_a_run_keeps():
    kept_settings = {"batch": 64, "seed": 1, "lr": 0.15, "hidden": 32}
    assert collect_fixed_settings(SHORT) == kept_settings


@no_job_in_a_job
def test_one_rank_prints_plain_lines_and_writes_the_picture(tmp_path):
    done = start(2, PROGRAM, tmp_path)
    assert done.returncode == 0, done.stderr
    advice = printed(done, 2, tmp_path)
    for line in advice[0], advice[2]:  # words of a shell, which work in this directory
        python, *words = shlex.split(line)
        assert (tmp_path / python).samefile(sys.executable)
        assert words[:5] == ["-m", "mpistrat", "run", "-n", "2"]
        settings = words[words.index("mpistrat.examples.digits") + 1 :]
        assert parse_settings(DigitsSettings, "", "digits", settings) != DigitsSettings()
    assert (Path(mpistrat.__file__).parents[1] / advice[4].strip()).is_file()
    assert not CONTROL.search(done.stderr)
    assert "step" not in done.stderr  # the bar's unit


@no_job_in_a_job
@pytest.mark.beside
def test_on_a_terminal_a_bar_is_shown_and_stdout_stays_plain(tmp_path):
    ours, theirs = pty.openpty()
    # 24 lines of 80 columns; a bar has no room on the 0 columns of a new one.
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    os.set_blocking(ours, False)
    with os.fdopen(ours, "rb") as screen, os.fdopen(theirs, "wb") as stderr:
        done = start(None, PROGRAM, tmp_path, stderr)
        shown = (screen.read() or b"").decode()
    assert done.returncode == 0, shown
    assert re.search(r"\r.*/46 .*step/s", shown)
    printed(done, 1, tmp_path)


@no_job_in_a_job
@pytest.mark.parametrize(
    ("ranks", "rank"), [pytest.param(None, 0, marks=pytest.mark.beside), (2, 1)]
)
def test_what_is_missing_on_one_rank_ends_the_program_with_one_sentence(ranks, rank, tmp_path):
    done = start(ranks, (sys.executable, "-c", LACKING.format(rank=rank)), tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    last_line = [line for line in done.stderr.splitlines() if line.startswith("mpistrat: rank")][-1]
    assert last_line.endswith(
        "pip install 'mpistrat[examples]'"
    )  # below it writes Open MPI's mpirun
    assert not list(tmp_path.iterdir())


@pytest.mark.beside
def test_picture_that_cannot_be_written_ends_every_rank_with_an_error(tmp_path):
    (tmp_path / "absent").touch()  # where the directory would be made
    picture = str(tmp_path / "absent" / "digits.png")

    def rank(comm):
        with pytest.raises(OSError, match="absent"):
            digits.main(["--epochs", "1", "--hidden", "8", "--output", picture])

    run_ranks(rank, 2)

"""`fit` in the main thread: Ctrl-C saves before it ends the run; what is said of signals."""

from __future__ import annotations

import signal

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.checkpoint import notice


@pytest.fixture(autouse=True)
def _handlers_of_a_new_process():
    handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGUSR1: signal.SIG_DFL,
        signal.SIGTERM: signal.SIG_DFL,
    }
    previous_handlers = {number: signal.signal(number, handlers[number]) for number in handlers}
    yield
    for number, handler in previous_handlers.items():
        signal.signal(number, handler)


class Signals:
    """A callback that sends signals to its own process after a step, or at the end."""

    def __init__(self, count=0, step=None):
        self.count, self.step, self.last_step = count, step, 0

    def send(self):
        for _ in range(self.count):
            signal.raise_signal(signal.SIGINT)

    def on_step(self, run):
        self.last_step = run.step
        if run.step == self.step:
            self.send()

    def on_end(self, run):
        if self.step is None:
            self.send()


def train(directory, signals, epochs=2):
    w = ms.Variable(0.0)

    def step(batch):
        w.assign_add(1.0)
        return {"loss": (1.0, 1)}

    ms.fit(
        step,
        ms.Dataset(np.arange(4.0)).batch(1),
        state={"w": w},
        epochs=epochs,
        directory=directory,
        callbacks=[signals],
        verbose=False,
    )
    return w.numpy()


def test_ctrl_c_saves_and_is_raised(tmp_path, capfd):
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, Signals(1, step=6))
    lines = [line for line in capfd.readouterr().err.splitlines() if "Ctrl-C" in line]
    assert lines == [
        "mpistrat: Ctrl-C: saves after this step; a second one ends at once, unsaved.",
        f"mpistrat: Ctrl-C: saved as {tmp_path}/ckpt-2.npz; start again to continue.",
    ]
    assert signal.getsignal(signal.SIGINT) != signal.SIG_IGN
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    signals = Signals()
    assert train(tmp_path, signals) == 8.0
    assert signals.last_step == 8


def test_a_second_one_is_raised_at_once(tmp_path):
    signals = Signals(2, step=6)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, signals)
    assert [path.name for path in tmp_path.glob("ckpt-*")] == ["ckpt-1.npz"]  # of the first epoch


def test_one_after_the_last_step_is_not_lost(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, Signals(1))
    assert train(tmp_path, Signals()) == 8.0


def test_without_a_directory_it_is_raised_at_once():
    signals = Signals(1, step=3)
    with pytest.raises(KeyboardInterrupt):
        train(None, signals)
    assert signals.last_step == 3


def test_a_handler_of_the_programs_own_stays_alone(tmp_path):
    received = []
    signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    assert train(tmp_path, Signals(1, step=3)) == 8.0
    assert received == [signal.SIGINT]


def test_with_a_signal_of_the_batch_system_the_exit_code_is_42(tmp_path):
    class Both(Signals):
        def send(self):
            signal.raise_signal(signal.SIGUSR1)
            super().send()

    with pytest.raises(SystemExit) as leaving:
        train(tmp_path, Both(1, step=3))
    assert leaving.value.code == 42


@pytest.mark.parametrize("job_id", ["", "7"])
def test_open_mpis_sigterm_is_named_in_a_batch_job_or_where_signals_are_chosen(
    job_id, monkeypatch, tmp_path, capfd
):
    monkeypatch.setattr(notice, "launched_by", lambda: "mpiexec of Open MPI")
    for name in ("SLURM_JOB_ID", "PBS_JOBID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LSB_JOBID", job_id)
    train(tmp_path / "fit", Signals())
    assert ("0.25 s after SIGTERM" in capfd.readouterr().err) == bool(job_id)
    checkpoint = ms.Checkpoint(v=ms.Variable(0.0))
    with ms.preemption(ms.CheckpointManager(checkpoint, tmp_path / "hand", 1), ends=None):
        assert "0.25 s after SIGTERM" in capfd.readouterr().err

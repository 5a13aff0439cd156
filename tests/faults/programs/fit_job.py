"""A job of `fit`; a rank gets a signal, or dies in a step, as its arguments say."""

from __future__ import annotations

import os
import signal
import sys

import numpy as np

import mpistrat as ms

directory, event, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have begun the tests deaf
x = np.random.default_rng(0).standard_normal((41, 3))
y = x @ np.array([1.0, -2.0, 0.5])
strategy = ms.MirroredStrategy()
last_rank = strategy.num_replicas_in_sync - 1
with strategy.scope():
    w = ms.Variable(np.zeros(3), name="w")
    optimizer = ms.optim.Adam(0.05)
    optimizer.build([w])
validated = 0


def step(batch):
    rows, wanted = batch
    error = rows @ np.asarray(w) - wanted
    gradient = 2 * rows.T @ error / max(len(wanted), 1)
    optimizer.apply_gradients([(gradient, w)], weight=len(wanted))
    return {"loss": error**2}


def score(batch):
    global validated
    validated += 1
    if event == "signal" and validated == number and strategy.rank == last_rank:
        os.kill(os.getpid(), signal.SIGUSR1)
    rows, wanted = batch
    return {"loss": (rows @ np.asarray(w) - wanted) ** 2}


class Fault:
    def on_step(self, run):
        if run.step != number:
            return
        if event == "die" and strategy.rank == 0:
            os._exit(9)
        if event == "interrupt" and strategy.rank == 0:  # the last rank may wait in a call
            os.kill(last_pid, signal.SIGINT)
        if event == "two interrupts" and strategy.rank == last_rank:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)


last_pid = int(strategy.gather(strategy.run(lambda: np.array([os.getpid()])), axis=0)[-1])
with strategy.scope():
    history = ms.fit(
        step,
        ms.Dataset((x, y)).shuffle(seed=0).batch(8),
        epochs=4,
        state={"w": w, "optimizer": optimizer},
        validate=score,
        validation_data=ms.Dataset((x, y)).batch(10),
        directory=directory,
        every="4 steps",
        callbacks=[Fault()],
        verbose=False,
    )
if strategy.rank == 0:
    curves = [history[name][1].tobytes().hex() for name in ("loss", "validation/loss")]
    print(w.numpy().tobytes().hex(), *curves, validated)

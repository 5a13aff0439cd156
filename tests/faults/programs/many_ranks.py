"""One job of many ranks that goes through all that differs above 64 ranks; prints each case.

    many_ranks.py DIRECTORY

Each rank checks what it gets. At the end the last rank leaves with exit code 7, which all others
hear of.
"""

from __future__ import annotations

import sys

import numpy as np

import mpistrat as ms
from mpistrat.examples import digits

strategy = ms.MirroredStrategy()
RANK, SIZE = strategy.rank, strategy.size
LAST = SIZE - 1
DIRECTORY = sys.argv[1]


def check_numbers():
    """Numbers that `run` returns are there on every rank."""
    values = strategy.run(lambda: float(RANK)).values
    assert [float(value) for value in values] == [float(rank) for rank in range(SIZE)]
    result = strategy.run(lambda: {"rank": RANK, "is_last": RANK == LAST, "same": 2.5})
    assert list(result["rank"].values) == list(range(SIZE))
    assert [bool(value) for value in result["is_last"].values] == [False] * LAST + [True]
    assert strategy.reduce("sum", result["same"], axis=None) == 2.5 * SIZE


def check_uneven_batches():
    """Batches that leave some ranks without rows; then one that leaves most of them so."""
    x = np.random.default_rng(0).standard_normal((SIZE + 13, 3))
    sums, row_counts = np.zeros(3), []
    for batch in strategy.distribute(ms.Dataset(x).batch(SIZE + 5)):

        def step(rows):
            row_counts.append(len(rows))
            mean = rows.mean(axis=0) if len(rows) else np.full(3, np.nan)
            return ms.get_replica_context().all_reduce("mean", mean, weight=len(rows))

        mean = strategy.run(step, args=(batch,))
        sums += np.asarray(mean.local) * (SIZE + 5 if len(row_counts) == 1 else 8)
    assert len(row_counts) == 2
    np.testing.assert_allclose(sums, x.sum(axis=0), rtol=1e-12)
    total = strategy.all_reduce("sum", np.array(row_counts))
    assert total.tolist() == [SIZE + 5, 8]


def check_mismatch():
    """One rank makes another call; every rank hears which one, and all continue."""
    try:
        if RANK == LAST:
            strategy.all_reduce("max", np.zeros(2))
        else:
            strategy.all_reduce("sum", np.zeros(3))
    except ms.LockstepError as error:
        text = str(error)
        assert f"rank {LAST}:" in text and "float64[2]" in text and "float64[3]" in text, text
        assert len(text) < 3000, len(text)
    else:
        raise AssertionError("nothing was raised")
    assert strategy.all_reduce("sum", 1) == SIZE


def check_failure():
    """One rank raises in its step; the others get its error, and all continue."""

    def step():
        if RANK == 1:
            raise ValueError("rank 1 has read a bad row")

    try:
        strategy.run(step)
    except ValueError as error:
        assert "rank 1 has read a bad row" in str(error)
        assert (RANK == 1) == (not isinstance(error, ms.RemoteError))
    else:
        raise AssertionError("nothing was raised")
    assert strategy.all_reduce("sum", 1) == SIZE


def check_same_failure():
    """All ranks raise the same."""

    def step():
        raise KeyError("loss")

    try:
        strategy.run(step)
    except KeyError as error:
        assert not isinstance(error, ms.RemoteError)
    else:
        raise AssertionError("nothing was raised")


def check_checkpoint():
    """A save and a restore; one copy of the state on the node."""
    with strategy.scope():
        w = ms.Variable(np.arange(20_000.0), name="w")
    path = ms.Checkpoint(w=w).save(f"{DIRECTORY}/ckpt")
    w.assign(np.zeros(20_000))
    ms.Checkpoint(w=w).restore(path)
    np.testing.assert_array_equal(w.numpy(), np.arange(20_000.0))


def check_digits():
    """The example; the test compares its losses with those of one rank."""
    choices = digits.DigitsSettings(epochs=2, batch=512)
    _, history = digits.train(strategy, choices, verbose=False)
    strategy.print("digits", *history["loss"][1].tolist(), history.last("validation/accuracy"))


for check in (
    check_numbers,
    check_uneven_batches,
    check_mismatch,
    check_failure,
    check_same_failure,
    check_checkpoint,
    check_digits,
):
    check()
    strategy.run(lambda: None)
    strategy.print("passed", check.__name__)
if RANK == LAST:
    sys.exit(7)
strategy.run(lambda: None)

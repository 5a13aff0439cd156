"""The digits program over again, in one process, example by example and without mpistrat."""

from __future__ import annotations

import numpy as np


def split(seed):
    # Two seconds, which not every process that collects the tests should spend.
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    return train_test_split(
        digits.data / 16, digits.target, train_size=1409, stratify=digits.target, random_state=seed
    )


def probabilities(w1, b1, w2, b2, images):
    inner = np.einsum("ni,ih->nh", images, w1) + b1
    inner[inner < 0] = 0
    powers = np.exp(np.einsum("nh,hk->nk", inner, w2) + b2)
    return inner, powers / powers.sum(axis=1)[:, None]


def simulate(orders, *, seed, epochs, lr, hidden):
    """Train with the examples in a given order.

    Args:
      orders: For every epoch a list of batches, each the numbers of its training images.
      seed, epochs, lr, hidden: As in the settings of the program.

    Returns:
      The final parameters; for every epoch mean loss and accuracy of the training images at their
      turn and accuracy on the test images.
    """
    x, x_test, y, y_test = split(seed)
    rng = np.random.default_rng(seed)
    w1 = rng.normal(0, (2 / 64) ** 0.5, (64, hidden))
    w2 = rng.normal(0, (2 / hidden) ** 0.5, (hidden, 10))
    values = [w1, np.zeros(hidden), w2, np.zeros(10)]
    speeds = [0 * value for value in values]
    history = []
    for epoch, batches in enumerate(orders):
        rate = lr * (epochs - epoch) / epochs
        losses, hits = np.empty(1409), np.empty(1409)
        for rows in batches:
            inner, chances = probabilities(*values, x[rows])
            losses[rows] = -np.log(chances[range(len(rows)), y[rows]])
            hits[rows] = chances.argmax(axis=1) == y[rows]
            error = chances - np.eye(10)[y[rows]]
            back = np.einsum("nk,hk->nh", error, values[2]) * np.sign(inner)
            each = (
                np.einsum("ni,nh->nih", x[rows], back),
                back,
                np.einsum("nh,nk->nhk", inner, error),
                error,
            )
            speeds = [0.9 * speed + e.mean(axis=0) for speed, e in zip(speeds, each, strict=True)]
            values = [value - rate * speed for value, speed in zip(values, speeds, strict=True)]
        tested = probabilities(*values, x_test)[1].argmax(axis=1) == y_test
        history.append((losses.mean(), hits.mean(), tested.mean()))
    return values, history

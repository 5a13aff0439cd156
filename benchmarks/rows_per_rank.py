"""How much of a training step is arithmetic, with fewer and fewer rows on a rank?

Run it with ``python benchmarks/rows_per_rank.py``. It trains the language model of the examples on
one rank, and gives the CPU time of forward and backward pass, and of all else: handshakes, metric,
and the update. More ranks have fewer rows each, and the same `all else` with its waiting on top, so
the last column is the most that so many ranks can gain.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mpistrat as ms
from mpistrat.examples import text, text_data, text_model

PIECE_COUNT = 32  # pieces of 128 symbols


def measured(
    strategy: ms.Strategy, step: Callable[[Any], None], pieces: Any, rows: int, count: int
) -> tuple[float, float]:
    """Return the CPU time of the arithmetic of a step and of all else, as medians of `count`."""
    arithmetic, step_seconds = [], []
    real = text_model.compute_gradients

    def timed(*args: Any) -> Any:
        begin = time.process_time()
        losses = real(*args)
        arithmetic.append(time.process_time() - begin)
        return losses

    dataset = ms.Dataset(pieces).batch(rows).take(count)
    text_model.compute_gradients = timed
    try:
        for batch in strategy.experimental_distribute_dataset(dataset):
            begin = time.process_time()
            strategy.run(step, args=(batch,))
            step_seconds.append(time.process_time() - begin)
    finally:
        text_model.compute_gradients = real
    remaining_seconds = [w - a for w, a in zip(step_seconds, arithmetic, strict=True)]
    return statistics.median(arithmetic), statistics.median(remaining_seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model, a few steps")
    quick = parser.parse_args().quick
    settings = text.TextSettings(accumulate=1)
    if quick:
        settings = replace(settings, channels=8, layers=2, length=16)
    strategy = ms.OneDeviceStrategy("cpu")
    pieces = text_data.read_pieces(strategy, ["argparse", "typing"], settings.length)
    model, optimizer = text.create_model(strategy, settings)
    gradients = strategy.gradient_buffers(model)
    with strategy.scope():
        loss = ms.metrics.Mean("loss")

    def step(batch: Any) -> None:
        loss.update_state(text.train_step(model, optimizer, gradients, batch)["loss"])

    measured(strategy, step, pieces, 1, 2)  # compiles what is compiled
    print(f"{'pieces':>6} {'ranks':>5} {'arithmetic ms':>13} {'all else ms':>11} {'at most x':>9}")
    base_seconds = 0.0
    for ranks in (1, 2, 4, 8, 16, 32):
        cpu_seconds = measured(strategy, step, pieces, PIECE_COUNT // ranks, 2 if quick else 16)
        base_seconds = base_seconds or sum(cpu_seconds)
        gain = base_seconds / sum(cpu_seconds)
        figures_text = f"{1e3 * cpu_seconds[0]:13.1f} {1e3 * cpu_seconds[1]:11.1f} {gain:9.1f}"
        print(f"{PIECE_COUNT // ranks:6} {ranks:5} {figures_text}", flush=True)


if __name__ == "__main__":
    main()

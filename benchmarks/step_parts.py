"""Where does a step of the digits job go, beside the same mathematics as a NumPy loop?

    python benchmarks/step_parts.py
    mpiexec -n 2 python benchmarks/step_parts.py --batch 512

Three columns of microseconds of rank 0, medians: of a part in the job, between all the others; of
the same part on its own, many times in a row; and, on one rank, of what the plain loop does in its
place, in its loop.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import common
import numpy as np
from mpi4py import MPI

import mpistrat as ms
from mpistrat.examples import digits, mlp
from mpistrat.feed.distributed import DistributedIterator
from mpistrat.metrics import Mean
from mpistrat.optim import SGD

RATE, MOMENTUM = 0.15, 0.9
PARTS = {"next": 1, "enter": 1, "gradients": 1, "apply": 1, "metric": 2, "leave": 1}  # of a step

Times = defaultdict[str, list[float]]


@contextmanager
def watched(times: Times) -> Iterator[None]:
    """Note in the body how long each part of each step takes."""
    places: list[tuple[Any, str, str]] = [
        (mlp, "gradients", "gradients"),
        (SGD, "apply_gradients", "apply"),
        (Mean, "update_state", "metric"),
        (DistributedIterator, "__next__", "next"),
    ]
    step, run, began = digits.step, ms.Strategy.run, [0.0]

    def stepped(*args: Any) -> None:
        times["enter"].append(time.perf_counter() - began[0])
        step(*args)
        began[0] = time.perf_counter()

    def ran(self: Any, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        began[0] = time.perf_counter()
        found = run(self, fn, *args, **kwargs)
        if fn is stepped:
            times["leave"].append(time.perf_counter() - began[0])
        return found

    watchers = [(owner, name, noted(getattr(owner, name), times[to])) for owner, name, to in places]
    watchers += [(digits, "step", stepped), (ms.Strategy, "run", ran)]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in watchers]
    try:
        for owner, name, fn in watchers:
            setattr(owner, name, fn)
        yield
    finally:
        for owner, name, fn in before:
            setattr(owner, name, fn)


def noted(fn: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """Return a function that also notes how long it took."""

    @functools.wraps(fn)
    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        found = fn(*args, **kwargs)
        seconds.append(time.perf_counter() - begin)
        return found

    return timed


def on_their_own(strategy: ms.Strategy, batch: int, repeats: int) -> Times:
    """Return how long each part takes, many times in a row. Collective."""
    times: Times = defaultdict(list)
    (x, y), _ = digits.load(0)
    shuffled = ms.Dataset((x, y)).shuffle(seed=0).batch(batch)
    epochs = itertools.repeat(strategy.experimental_distribute_dataset(shuffled))
    optimizer = SGD(RATE, momentum=MOMENTUM)
    with strategy.scope():
        model = mlp.Parameters(*map(ms.Variable, mlp.initial(64, 128, 10, 0)))
        metric = Mean("loss")
    optimizer.build(model)
    rows = batch // strategy.num_replicas_in_sync

    def all_of_them() -> None:
        weights = mlp.Parameters(*(variable.numpy() for variable in model))
        step = noted(mlp.gradients, times["gradients"])
        for _ in range(repeats):
            gradient, losses, _ = step(weights, x[:rows], y[:rows])
        apply = noted(optimizer.apply_gradients, times["apply"])
        for _ in range(repeats):
            apply(zip(gradient, model, strict=True), weight=rows)
        update = noted(metric.update_state, times["metric"])
        for _ in range(repeats):
            update(losses)

    strategy.run(all_of_them)
    batches = itertools.chain.from_iterable(epochs)
    following = noted(functools.partial(next, batches), times["next"])
    for _ in range(repeats):
        element = following()
    marks = []

    def empty(*_: Any) -> None:
        marks.append(time.perf_counter())

    for _ in range(repeats):
        begin = time.perf_counter()
        strategy.run(empty, args=(model, optimizer, [metric, metric], *element))
        end = time.perf_counter()
        times["enter"].append(marks[-1] - begin)
        times["leave"].append(end - marks[-1])
    return times


def plain(batch: int, epochs: int) -> Times:
    """Return how long the parts of the plain loop take, in the loop."""
    times: Times = defaultdict(list)
    (x, y), _ = digits.load(0)
    model = [np.array(value) for value in mlp.initial(64, 128, 10, 0)]
    velocity = [np.zeros_like(value) for value in model]
    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(len(x))
        for first in range(0, len(x), batch):
            marks = [time.perf_counter()]
            rows = order[first : first + batch]
            xs, ys = x[rows], y[rows]
            marks.append(time.perf_counter())
            gradient, *_ = mlp.gradients(mlp.Parameters(*model), xs, ys)
            marks.append(time.perf_counter())
            for value, speed, slope in zip(model, velocity, gradient, strict=True):
                speed *= MOMENTUM
                speed += slope
                value -= RATE * speed
            marks.append(time.perf_counter())
            for part, seconds in zip(("next", "gradients", "apply"), np.diff(marks), strict=True):
                times[part].append(float(seconds))
    return times


def main() -> None:
    """Print the table."""
    parser = common.arguments(__doc__, "fewer steps")
    parser.add_argument("--batch", type=int, default=64, help="images of a step; 64")
    options = parser.parse_args()
    comm, epochs = MPI.COMM_WORLD, 3 if options.quick else 40
    known = common.introduced(comm)
    strategy = ms.MirroredStrategy()
    digits.train(strategy, digits.Settings(epochs=2, batch=options.batch))
    times: Times = defaultdict(list)
    with watched(times):
        digits.train(strategy, digits.Settings(epochs=epochs, batch=options.batch))
    own = on_their_own(strategy, options.batch, 20 * epochs)
    if strategy.rank:
        return
    # Beside it the other ranks would wait at the end of the program, and wait by polling.
    loop, rows = plain(options.batch, epochs) if comm.size == 1 else Times(list), []
    print(f"{'part':<12}{'in a step':>12}{'on its own':>12}{'plain loop':>12}")
    for part, count in PARTS.items():
        row: list[float] = [
            1e6 * count * statistics.median(found[part]) if found[part] else 0.0
            for found in (times, own, loop)
        ]
        rows.append({"part": part, "step_us": row[0], "own_us": row[1], "plain_us": row[2]})
        print(f"{part:<12}" + "".join(f"{us:>12.1f}" for us in row))
    sums = [sum(row[key] for row in rows) for key in ("step_us", "own_us", "plain_us")]
    print(f"{'sum':<12}" + "".join(f"{us:>12.1f}" for us in sums))
    common.write_json(options.json, known | {"rows": rows})


if __name__ == "__main__":
    main()

"""Where does a step of the digits job go, beside the same mathematics as a NumPy loop?

    python benchmarks/step_parts.py
    mpiexec -n 2 python benchmarks/step_parts.py --batch 512

Three columns of microseconds of rank 0, medians: of a part in the job, between all the others; of
the same part on its own, many times in a row; and, on one rank, of the same work in the plain loop.
Then how many bytecodes Python runs in each: of ours, and of the plain loop. No busy machine
disturbs these, and beyond the arithmetic they are what a step of one rank takes.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import common
import numpy as np
from mpi4py import MPI
from step_counts import counting_frames

import mpistrat as ms
from mpistrat.data.distributed import DistributedIterator
from mpistrat.examples import digits, mlp
from mpistrat.metrics import Mean
from mpistrat.optim import SGD

RATE, MOMENTUM = 0.15, 0.9
PARTS = {"next": 1, "enter": 1, "gradients": 1, "apply": 1, "metric": 2, "leave": 1}  # of a step

Times = defaultdict[str, list[float]]


class DigitsJob(NamedTuple):
    """What a step of the digits job reads and changes."""

    batches: Any
    model: mlp.Parameters
    optimizer: SGD
    metrics: list[Mean]


def create_job(strategy: ms.Strategy, batch: int) -> DigitsJob:
    """Return the job, before its first step. Collective."""
    images = ms.Dataset(digits.load_images(0)[0]).shuffle(seed=0).batch(batch)
    optimizer = SGD(RATE, momentum=MOMENTUM)
    with strategy.scope():
        model = mlp.Parameters(*map(ms.Variable, mlp.make_parameters(64, 128, 10, 0)))
        metrics = [Mean("loss"), Mean("accuracy")]
    optimizer.build(model)
    batches = strategy.experimental_distribute_dataset(images)
    return DigitsJob(batches, model, optimizer, metrics)


def time_in_steps(strategy: ms.Strategy, batch: int, epochs: int) -> Times:
    """Return how long each part of each step takes. Collective."""
    times: Times = defaultdict(list)
    job, marks = create_job(strategy, batch), [0.0, 0.0]

    def step(*images: Any) -> None:
        marks[0] = time.perf_counter()
        results = digits.train_step(job.model, job.optimizer, images)
        for metric, values in zip(job.metrics, results.values(), strict=True):
            metric.update_state(values)
        marks[1] = time.perf_counter()

    with watched(times):
        for images in itertools.chain.from_iterable(itertools.repeat(job.batches, epochs)):
            begin = time.perf_counter()
            strategy.run(step, args=images)
            times["enter"].append(marks[0] - begin)
            times["leave"].append(time.perf_counter() - marks[1])
    return times


@contextmanager
def watched(times: Times) -> Iterator[None]:
    """Note in the body how long the parts inside each step take."""
    places: list[tuple[Any, str, str]] = [
        (mlp, "compute_gradients", "gradients"),
        (SGD, "apply_gradients", "apply"),
        (Mean, "update_state", "metric"),
        (DistributedIterator, "__next__", "next"),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    try:
        for owner, name, part in places:
            setattr(owner, name, timing(getattr(owner, name), times[part]))
        yield
    finally:
        for owner, name, function in originals:
            setattr(owner, name, function)


def timing(fn: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """Return a function that also notes how long it took."""

    @functools.wraps(fn)
    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        result = fn(*args, **kwargs)
        seconds.append(time.perf_counter() - begin)
        return result

    return timed


def time_each_part(strategy: ms.Strategy, batch: int, repeats: int) -> tuple[Times, Counter[str]]:
    """Return how long each part takes, many times in a row, and its bytecodes. Collective."""
    times: Times = defaultdict(list)
    codes: Counter[str] = Counter()
    (x, y), _ = digits.load_images(0)
    all_batches, model, optimizer, (metric, _) = create_job(strategy, batch)
    epochs = itertools.repeat(all_batches)
    rows = batch // strategy.num_replicas_in_sync

    def measure(part: str, call: Callable[[], Any]) -> None:
        timed = timing(call, times[part])
        for _ in range(repeats):
            timed()
        with counting_frames() as counts:
            call()
        codes[part] = counts[1] * PARTS[part]

    def time_in_replica() -> None:
        weights = mlp.Parameters(*(variable.numpy() for variable in model))
        gradient, losses, _ = mlp.compute_gradients(weights, x[:rows], y[:rows])
        measure("gradients", lambda: mlp.compute_gradients(weights, x[:rows], y[:rows]))
        measure(
            "apply",
            lambda: optimizer.apply_gradients(zip(gradient, model, strict=True), weight=rows),
        )
        measure("metric", lambda: metric.update_state(losses))

    strategy.run(time_in_replica)
    batches = itertools.chain.from_iterable(epochs)
    measure("next", functools.partial(next, batches))
    element, marks = next(batches), []

    def empty(*_: Any) -> None:
        marks.append(time.perf_counter())

    for _ in range(repeats):
        begin = time.perf_counter()
        strategy.run(empty, args=(model, optimizer, [metric, metric], *element))
        end = time.perf_counter()
        times["enter"].append(marks[-1] - begin)
        times["leave"].append(end - marks[-1])
    with counting_frames() as counts:
        strategy.run(lambda *_: codes.update(enter=counts[1]), args=(model, optimizer, *element))
    codes["leave"] = counts[1] - codes["enter"]
    return times, codes


def time_plain_loop(batch: int, epochs: int) -> tuple[Times, Counter[str]]:
    """Return how long the parts of the plain loop take, in the loop, and their bytecodes."""
    times: Times = defaultdict(list)
    codes: Counter[str] = Counter()
    (x, y), _ = digits.load_images(0)
    model = [np.array(value) for value in mlp.make_parameters(64, 128, 10, 0)]
    velocity = [np.zeros_like(value) for value in model]

    def step(rows: Any) -> Iterator[str]:
        xs, ys = x[rows], y[rows]
        yield "next"
        gradient, *_ = mlp.compute_gradients(mlp.Parameters(*model), xs, ys)
        yield "gradients"
        for value, speed, slope in zip(model, velocity, gradient, strict=True):
            speed *= MOMENTUM
            speed += slope
            value -= RATE * speed
        yield "apply"

    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(len(x))
        for first in range(0, len(x), batch):
            begin = time.perf_counter()
            for part in step(order[first : first + batch]):
                times[part].append(time.perf_counter() - begin)
                begin = time.perf_counter()
    parts = step(order[:batch])
    for _ in range(3):
        with counting_frames() as counts:
            part = next(parts)
        codes[part] = counts[1]
    return times, codes


def main() -> None:
    """Print the table."""
    parser = common.arguments(__doc__, "fewer steps")
    parser.add_argument("--batch", type=int, default=64, help="images of a step; 64")
    options = parser.parse_args()
    comm, epochs = MPI.COMM_WORLD, 3 if options.quick else 40
    facts = common.print_introduction(comm)
    strategy = ms.MirroredStrategy()
    time_in_steps(strategy, options.batch, 2)  # compiles what is compiled
    times = time_in_steps(strategy, options.batch, epochs)
    own_times, codes = time_each_part(strategy, options.batch, 20 * epochs)
    if strategy.rank:
        return
    # Other ranks return: they would wait at the end of the program, and wait by polling.
    no_times = defaultdict(list), Counter()
    loop, loop_codes = time_plain_loop(options.batch, epochs) if comm.size == 1 else no_times
    heads = ("in a step", "on its own", "plain loop", "bytecodes", "plain's")
    print(f"{'part':<12}" + "".join(f"{head:>12}" for head in heads))
    table = []
    for part, count in PARTS.items():
        medians = (
            1e6 * count * statistics.median(t[part] or [0.0]) for t in (times, own_times, loop)
        )
        table.append([*medians, codes[part], loop_codes[part]])
    sums = [sum(column) for column in zip(*table, strict=True)]
    for part, (*us, ours, theirs) in zip([*PARTS, "sum"], [*table, sums], strict=True):
        print(f"{part:<12}" + "".join(f"{x:>12.1f}" for x in us) + f"{ours:>12}{theirs:>12}")
    keys = ("step_us", "own_us", "plain_us", "bytecodes", "plain_bytecodes")
    rows = [dict(zip(keys, row, strict=True)) for row in table]
    named = [{"part": part} | row for part, row in zip(PARTS, rows, strict=True)]
    common.write_json(options.json, facts | {"rows": named})


if __name__ == "__main__":
    main()

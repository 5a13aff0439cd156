"""How much Python runs in a step, and how often do its ranks wait for one another?

    python benchmarks/step_counts.py
    mpiexec -n 2 python benchmarks/step_counts.py

The one definition of these counts: a step begins with the call of ``next()`` that gives its batch,
and ends when `Strategy.run` (and what the program calls after it) has returned; every Python frame
counts, those of the program itself and of NumPy included. A synchronisation is a collective call of
MPI, whatever it moves. No busy machine disturbs these counts. They are those of rank 0, after steps
enough that nothing is new.

`digits` is the step of `mpistrat.examples.digits` and its metrics in a loop by hand (`fit` makes at
most 20 calls more); `readme` is README's program, its `reduce` included. Each is in
`step_counts.json` as it landed last; `--check` fails where a count has grown. The file's counts are
those of Python 3.11, and are compared on 3.11 only.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import common
import numpy as np
from mpi4py import MPI

import mpistrat as ms
from mpistrat.comm.mpi import MPIComm
from mpistrat.examples import digits, mlp
from mpistrat.metrics import Mean
from mpistrat.optim import SGD, Linear

LANDED = Path(__file__).with_suffix(".json")
STEPS_BEFORE = 12  # in the first epoch, where all batches are full
SYNCHRONISING = ("allgather", "allgatherv", "allreduce", "bcast", "barrier", "gatherv", "sendrecv")


class StepCounts(NamedTuple):
    """Counts of one step on rank 0."""

    calls: int  # of Python functions
    bytecodes: int
    synchronisations: int  # collective calls of MPI


@contextmanager
def counting_synchronisations() -> Iterator[list[int]]:
    """Give a list of one number: the collective calls of MPI in the body so far."""
    counts = [0]

    def count_calls(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: MPIComm, *args: Any) -> Any:
            counts[0] += self.size > 1
            return method(self, *args)

        return call

    methods = {name: getattr(MPIComm, name) for name in SYNCHRONISING}
    try:
        for name, method in methods.items():
            setattr(MPIComm, name, count_calls(method))
        yield counts
    finally:
        for name, method in methods.items():
            setattr(MPIComm, name, method)


def digits_step(strategy: ms.Strategy) -> Callable[[], Any]:
    """Return a function that makes the next step of the digits example."""
    images = ms.Dataset(digits.load_images(0)[0])
    batches = iter(strategy.experimental_distribute_dataset(images.shuffle(seed=0).batch(64)))
    rate = Linear(0.15, 0.0, 20)
    optimizer = SGD(lambda step: rate(step // 23), momentum=digits.MOMENTUM)
    with strategy.scope():
        model = mlp.Parameters(*map(ms.Variable, mlp.make_parameters(64, 128, 10, 0)))
        metrics = [Mean("loss"), Mean("accuracy")]
    optimizer.build(model)

    def step(*batch: Any) -> None:
        results = digits.train_step(model, optimizer, batch)
        for metric, values in zip(metrics, results.values(), strict=True):
            metric.update_state(values)

    return lambda: strategy.run(step, args=next(batches))


def readme_replica_step(w: ms.Variable) -> Callable[[Any], Any]:
    """Return the replica code of README's program, which returns the squares of its errors."""

    def step(batch: Any) -> Any:
        features, target = batch
        error = features @ w - target
        gradient = ms.get_replica_context().all_reduce(
            "mean", features.T @ error / max(len(error), 1), weight=len(error)
        )
        w.assign_sub(0.1 * gradient)
        return error**2

    return step


def readme_step(strategy: ms.Strategy) -> Callable[[], None]:
    """Return a function that makes the next step of README's program."""
    examples = np.random.default_rng(0).normal(size=(1000, 3)), np.arange(1000.0)
    dataset = ms.Dataset(examples).shuffle(seed=1).batch(64)
    batches = iter(strategy.experimental_distribute_dataset(dataset))
    with strategy.scope():
        step = readme_replica_step(ms.Variable(np.zeros(3), name="w"))

    def make_step() -> None:
        squares = strategy.run(step, args=(next(batches),))
        strategy.reduce("mean", squares, axis=0)

    return make_step


PROGRAMS = {"digits": digits_step, "readme": readme_step}


def count(make_step: Callable[[], None]) -> StepCounts:
    """Return the counts of a step, after others. Collective."""
    for _ in range(STEPS_BEFORE):
        make_step()
    with counting_synchronisations() as synchronisations:
        make_step()
    with common.counting_frames() as frames:
        make_step()
    # Those of the function above, and of what ends the counting, are no part of the step.
    return StepCounts(frames[0] - 2, frames[1], synchronisations[0])


def main() -> int:
    """Print a row for each program; with ``--check`` say which counts have grown."""
    parser = common.arguments(__doc__, "the same")
    parser.add_argument("--check", action="store_true", help="fail where a count has grown")
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    facts = common.print_introduction(comm)
    strategy = ms.MirroredStrategy()
    landed = json.loads(LANDED.read_text())
    if options.check and str(comm.size) not in landed:
        parser.error(
            f"{LANDED.name} has counts of {' and '.join(landed)} ranks, not of {comm.size}."
        )
    rows, grown = [], []
    for name, make in PROGRAMS.items():
        counts = count(make(strategy))
        rows.append({"case": name, **counts._asdict()})
        for kind, number in counts._asdict().items() if options.check else ():
            accepted_count = landed[str(comm.size)][name][kind]
            if number > accepted_count:
                grown.append(f"{name}: {kind} {accepted_count} -> {number}")
    if comm.rank == 0:
        common.write_json(options.json, facts | {"rows": rows})
        print(f"{'a step of':<12}{'calls':>8}{'bytecodes':>12}{'synchronisations':>20}")
        for row in rows:
            case, calls, bytecodes, synchronisations = row.values()
            print(f"{case:<12}{calls:>8}{bytecodes:>12}{synchronisations:>20}")
        print("\n".join(f"more than landed last: {line}" for line in grown))
    if options.check and sys.version_info[:2] != (3, 11):
        print("not compared: the counts of step_counts.json are those of Python 3.11")
        return 0
    return int(bool(comm.bcast(grown)))


if __name__ == "__main__":
    sys.exit(main())

"""Several steps in one call."""

from __future__ import annotations

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.strategy.topology import PlacedStrategy
from mpistrat.testing import run_ranks


def step_of(strategy):
    def step(context, inputs):
        sums = strategy.run(np.sum, args=(inputs,))
        context.set_last_step_output("loss", sums, reduce_op="SUM")
        context.set_last_step_output("raw", sums)
        context.set_non_tensor_output("note", "seen")
        assert ms.in_cross_replica_context()

    return step


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_so_many_steps_per_call(size, steps):
    def rank(comm):
        strategy = PlacedStrategy(steps_per_run=steps, comm=comm)
        dataset = ms.Dataset.range(12 * size).batch(2 * size)
        iterator = iter(strategy.experimental_distribute_dataset(dataset))
        run, found = strategy.extended.experimental_run_steps_on_iterator, []
        for _ in range(2):
            context = run(step_of(strategy), iterator)
            outputs = context.last_step_outputs
            found.append((int(outputs["loss"]), int(outputs["raw"].local)))
            assert context.non_tensor_outputs == {"note": "seen"}
            assert context.run_op is None
        once = run(step_of(strategy), iterator, 1) if steps < 3 else None
        return found, once and int(once.last_step_outputs["loss"])

    batches = np.arange(12 * size).reshape(6, size, 2)
    for number, (found, once) in enumerate(run_ranks(rank, size)):
        for call, (loss, raw) in enumerate(found, 1):
            last = batches[call * steps - 1]
            assert (loss, raw) == (last.sum(), last[number].sum())
        assert once is None or once == batches[2 * steps].sum()


def test_outputs_before_the_first_step():
    strategy = ms.OneDeviceStrategy("cpu")
    run = strategy.extended.experimental_run_steps_on_iterator
    seen = []

    def step(context, inputs):
        seen.append(context.last_step_outputs["total"])
        context.set_last_step_output("total", context.last_step_outputs["total"] + inputs)

    context = run(step, iter([1, 2, 3]), 3, initial_loop_values={"total": 0})
    assert (context.last_step_outputs, seen) == ({"total": 6}, [0, 1, 3])
    with pytest.raises(ms.StructureError, match="initial_loop_values are called"):
        run(lambda c, inputs: c.set_last_step_output("b", 1), iter([1]), 1, {"a": 0})


def test_what_goes_wrong():
    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        run = strategy.extended.experimental_run_steps_on_iterator
        dataset = strategy.experimental_distribute_dataset(ms.Dataset.range(4).batch(2))
        with pytest.raises(ms.OutOfRangeError, match="ended after 2 of 3 steps"):
            run(step_of(strategy), iter(dataset), 3)
        with pytest.raises(TypeError, match="iterations must be an integer"):
            run(step_of(strategy), iter(dataset), 2.5)
        with pytest.raises(ms.StructureError, match="iterations must be an integer of at least 1"):
            run(step_of(strategy), iter(dataset), 0)
        with pytest.raises(ms.ContextError):
            strategy.run(lambda: run(step_of(strategy), iter([1])))

        def inside(context, inputs):
            strategy.run(lambda: context.set_last_step_output("a", 1))

        with pytest.raises(ms.ContextError, match="without reduce_op"):
            run(inside, iter(dataset))

        def twice(context, inputs):
            context.set_last_step_output("a", inputs, "SUM")
            context.set_last_step_output("a", inputs, "MEAN")

        with pytest.raises(ms.StructureError, match="was set with"):
            run(twice, iter(dataset))
        return strategy.run(lambda: comm.rank).local

    assert run_ranks(rank, 2) == [0, 1]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("make", [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy])
def test_outputs_set_in_replica_code(make, size):
    """What the reference's merge_call keeps: the fold of all replicas, and everyone's text."""

    def rank(comm):
        strategy = make(comm=comm)

        def replica(context):
            context.set_last_step_output("loss", np.array([comm.rank, 1.0]), reduce_op="SUM")
            context.set_last_step_output("mean", float(comm.rank), "MEAN")
            context.set_non_tensor_output("name", f"replica {comm.rank}")

        def step(context, inputs):
            strategy.run(replica, (context,))

        run = strategy.extended.experimental_run_steps_on_iterator
        context = run(step, iter(range(3)), 2)
        outputs = context.last_step_outputs
        return outputs["loss"].tolist(), float(outputs["mean"]), context.non_tensor_outputs["name"]

    names = tuple(f"replica {r}" for r in range(size))
    total = sum(range(size))
    for r, (loss, mean, seen) in enumerate(run_ranks(rank, size)):
        assert (loss, mean) == ([total, size], total / size)
        assert seen == (names if make is ms.MirroredStrategy else names[r : r + 1])


WRONG = {
    "operation": lambda run, c: run(lambda k, x: k.set_last_step_output("a", x, "MEDIAN")),
    "in a replica": lambda run, c: run(
        lambda k, x: c.run(lambda: k.set_last_step_output("a", 1.0, "MEDIAN"))
    ),
    "no steps": lambda run, c: run(lambda k, x: None, 0),
    "half a step": lambda run, c: run(lambda k, x: None, 1.5),
    "ends early": lambda run, c: run(lambda k, x: None, 9),
    "other outputs": lambda run, c: run(lambda k, x: k.set_last_step_output("b", 1), 1, {"a": 1}),
    "no outputs": lambda run, c: run(lambda k, x: None, 1, 5),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_goes_wrong_on_one_rank_is_told_to_all(case):
    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)

        def run(fn, *more):
            return strategy.extended.experimental_run_steps_on_iterator(fn, iter(range(3)), *more)

        with pytest.raises((ValueError, TypeError, IndexError)) as error:
            if comm.rank == 1:
                WRONG[case](run, strategy)
            else:
                run(lambda k, x: k.set_last_step_output("a", strategy.run(lambda: 1.0), "SUM"))
        return isinstance(error.value, ms.RemoteError), strategy.run(lambda: comm.rank).local

    assert run_ranks(rank, 2) == [(True, 0), (False, 1)]


def test_one_step_unless_it_is_told():
    def rank(comm):
        count = []
        for strategy in (ms.MirroredStrategy(), PlacedStrategy(steps_per_run=2)):
            run = strategy.extended.experimental_run_steps_on_iterator
            run(lambda c, x: count.append(x), iter(range(9)))
        return count

    assert run_ranks(rank, 2) == [[0, 0, 1]] * 2

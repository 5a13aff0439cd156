"""Training that continues: every example of an epoch once, at any number of ranks."""

from __future__ import annotations

import itertools
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.checkpoint import manager as resume_module
from mpistrat.checkpoint.manager import SaveInterval
from mpistrat.testing import run_ranks

ROWS, BATCH = 46, 8  # five batches of 8, and one of 6


def arrays():
    return ms.Dataset(np.arange(ROWS))


def batches():
    return [np.arange(lo, min(lo + BATCH, ROWS)) for lo in range(0, ROWS, BATCH)]


def turned_off(dataset):
    options = ms.DatasetOptions()
    options.experimental_distribute.auto_shard_policy = ms.AutoShardPolicy.OFF
    return dataset.with_options(options)


# What gives batches of numbers of rows, and whether it draws its order again in every start.
SOURCES = {
    "in order": lambda: arrays().batch(BATCH),
    "seeded": lambda: arrays().shuffle(seed=3).batch(BATCH),
    "unseeded": lambda: arrays().shuffle().batch(BATCH),
    "two shuffles": lambda: arrays().shuffle().batch(BATCH).shuffle(),
    "repeated": lambda: arrays().shuffle(seed=1).repeat(2).batch(BATCH),
    "mapped": lambda: arrays().map(lambda i: i + 0).batch(BATCH).map(lambda x: x + 0),
    "ahead": lambda: arrays().shuffle(seed=3).batch(BATCH).prefetch(3),
    "even": lambda: arrays().batch(BATCH, drop_remainder=True),
    "generator": lambda: ms.Dataset(lambda: iter(batches())),
    "rebatched": lambda: ms.Dataset(batches).rebatch(5),
    "files": lambda: ms.Dataset.from_files("012345", lambda name: batches()[int(name)]),
    "dealt out": lambda: turned_off(arrays().shuffle(seed=2).batch(BATCH)),
}


class Ended(Exception):
    """As if the process were killed."""


def program(comm, directory, source, epochs=2, end=None, every="2 steps", seen=None):
    """Count rows, and note each batch with the number of the step before which it came."""
    strategy = ms.MirroredStrategy()
    with strategy.scope():
        total = ms.Variable(np.zeros(ROWS))
    dataset = SOURCES[source]()
    checkpoint = ms.Checkpoint(total=total, data=dataset, step=0)
    manager = ms.CheckpointManager(checkpoint, directory, 2, every=every)

    def step(rows):
        counts = np.bincount(rows, minlength=ROWS).astype(float)
        total.assign_add(ms.get_replica_context().all_reduce("sum", counts))
        return rows

    data = strategy.experimental_distribute_dataset(dataset)
    for batch in manager.resume(data, epochs=epochs):
        parts = strategy.experimental_local_results(strategy.run(step, args=(batch,)))
        if seen is not None and comm.rank == 0:
            seen[checkpoint.step] = np.concatenate(parts).tolist()
        checkpoint.step += 1
        if checkpoint.step == end:
            raise Ended
    return checkpoint.step, total.numpy()


def run(size, *args, **more):
    """Run it to its end, or to `end`."""
    try:
        return run_ranks(lambda comm: program(comm, *args, **more), size)
    except BaseException:
        if more.get("end") is None:
            raise
        return None


def once(directory, source, sizes, ends):
    """Starts on some ranks that are killed, and one to the end; all history that has continued."""
    seen = {}
    for size, end in zip(sizes, [*ends, None], strict=True):
        found = run(size, directory, source, end=end, seen=seen)
    steps, total = found[0]
    assert sorted(seen) == list(range(steps))
    return total, [seen[step] for step in range(steps)]


def assert_whole(source, total, history):
    """Every example came as often as in two epochs."""
    rows = np.concatenate(history)
    each = {"repeated": 4}.get(source, 2)
    wanted = np.full(ROWS, each)
    if source == "even":
        wanted[ROWS - ROWS % BATCH :] = 0
    assert np.bincount(rows, minlength=ROWS).tolist() == wanted.tolist()
    assert total.tolist() == wanted.tolist()


@pytest.mark.parametrize("source", SOURCES)
def test_every_example_once_and_in_the_same_order(source, tmp_path):
    whole = once(tmp_path / "whole", source, [2], [])
    parts = once(tmp_path / "parts", source, [2, 3, 1], [5, 9])
    assert_whole(source, *parts)
    if source not in ("unseeded", "two shuffles"):
        assert parts[1] == whole[1]


def pairs(most):
    return list(itertools.product(range(1, most + 1), repeat=2))


def assert_pair(directory, first, second):
    total, history = once(directory / f"{first}-{second}", "seeded", [first, second], [4])
    assert_whole("seeded", total, history)
    order = SOURCES["seeded"]()
    wanted = [batch.tolist() for _ in range(2) for batch in order]
    assert history == wanted


def test_pairs_of_numbers_of_ranks(tmp_path):
    for first, second in pairs(4):
        assert_pair(tmp_path, first, second)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_all_pairs_of_numbers_of_ranks(tmp_path):
    for first, second in pairs(6):
        assert_pair(tmp_path, first, second)


@pytest.mark.parametrize("end", range(1, 13))
def test_wherever_it_ends(end, tmp_path):
    assert_whole("unseeded", *once(tmp_path, "unseeded", [2, 2], [end]))


def test_a_run_that_has_ended_is_lengthened(tmp_path):
    assert run(2, tmp_path, "seeded", epochs=1)[0][0] == 6
    assert run(1, tmp_path, "seeded", epochs=1)[0][0] == 6  # nothing is left, and nothing saved
    assert len(list(tmp_path.glob("ckpt*"))) == 2
    seen = {}
    steps, total = run(3, tmp_path, "seeded", epochs=2, seen=seen)[1]
    assert (steps, total.tolist()) == (12, [2] * ROWS)
    assert sorted(seen) == list(range(6, 12))


def made(directory, every=None, epochs=3, **state):
    with ms.MirroredStrategy().scope():
        v = ms.Variable(0.0)
    dataset = ms.Dataset(np.arange(8)).batch(4)
    checkpoint = ms.Checkpoint(v=v, data=dataset, step=0, **state)
    manager = ms.CheckpointManager(checkpoint, directory, None, every=every)
    data = v.strategy.experimental_distribute_dataset(dataset)
    return checkpoint, manager, manager.resume(data, epochs=epochs)


def saved(directory):
    """The steps that were saved."""
    found = []
    for path in sorted(Path(directory).glob("ckpt*")):
        checkpoint = ms.Checkpoint(step=0)
        checkpoint.restore(path, partial=True)
        found.append(checkpoint.step)
    return found


@pytest.mark.parametrize(
    ("every", "wanted"),
    [
        (None, [2, 4, 6]),
        ("2 steps", [2, 4, 6]),
        ("3 steps", [3, 6]),
        (1e9, [6]),
        (1e-9, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_when_it_saves(every, wanted, tmp_path):
    def steps(comm):
        checkpoint, _, left = made(tmp_path, every)
        for _ in left:
            checkpoint.step += 1

    run_ranks(steps, 2)
    assert saved(tmp_path) == wanted


def test_the_clock_is_that_of_rank_0(tmp_path, monkeypatch):
    monkeypatch.setattr(resume_module.time, "monotonic", lambda: 0.0)

    def steps(comm):
        checkpoint, manager, left = made(tmp_path, 60)
        manager._save_interval._begin_time = -59.0 if comm.rank else -61.0
        for _ in left:
            checkpoint.step += 1
        manager._save_interval._begin_time = -61.0 if comm.rank else -59.0
        told = [manager.due()]
        manager._save_interval._begin_time = -60.0
        return [*told, manager.due()]

    assert run_ranks(steps, 2) == [[False, True]] * 2
    assert saved(tmp_path) == [1, 6]  # after the first body; the clock stands still; at the end


def test_break_exceptions_and_saving_in_the_body(tmp_path):
    """The batch of a body that has not ended comes again."""

    def steps(comm, how):
        checkpoint, manager, left = made(tmp_path / how)
        seen = []
        try:
            for batch in left:
                seen.append(int(np.min(np.concatenate(every(batch)))))
                if checkpoint.step == 3:
                    if how == "save":
                        manager.save()
                    if how != "break":
                        raise Ended
                    break
                checkpoint.step += 1
        except Ended:
            pass
        if how != "save":
            manager.save()
        again, manager, left = made(tmp_path / how)
        return seen, again.step, [int(np.min(np.concatenate(every(batch)))) for batch in left]

    def every(batch):
        return [part for part in ms.MirroredStrategy().experimental_local_results(batch)]

    for how in ("break", "raise", "save"):
        for seen, step, rest in run_ranks(steps, 2, how):
            assert (seen, step, rest) == ([0, 4, 0, 4], 3, [4, 0, 4])


@pytest.mark.parametrize("how", ["save", "break", "raise"])
@pytest.mark.parametrize("last", [1, 2, 6])  # of three epochs of two batches
def test_a_batch_counts_once_a_step_was_run_on_it(tmp_path, how, last):
    """A program that saves, or leaves, after its step sees that batch no more."""

    def steps(comm):
        checkpoint, manager, left = made(tmp_path)
        with suppress(Ended):
            for _ in left:
                checkpoint.v.strategy.run(lambda: checkpoint.v.assign_add(1))
                checkpoint.step += 1
                if checkpoint.step == last:
                    if how == "save":
                        manager.save()
                    if how == "break":
                        break
                    raise Ended
        if how != "save":
            manager.save()
        again, manager, left = made(tmp_path)
        return again.step, sum(1 for _ in left)

    assert run_ranks(steps, 2) == [(last, 6 - last)] * 2


def test_a_second_resume_goes_on_and_restores_nothing(tmp_path):
    def steps(comm):
        checkpoint, manager, left = made(tmp_path, "100 steps", epochs=1)
        for _ in left:
            checkpoint.step += 1
        checkpoint.step += 10
        data = checkpoint.v.strategy.experimental_distribute_dataset(checkpoint.data)
        for _ in manager.resume(data, epochs=3):
            checkpoint.step += 1
        return checkpoint.step

    assert run_ranks(steps, 2) == [16, 16]


def test_the_checkpoint_has_to_hold_the_data(tmp_path):
    def steps(comm):
        checkpoint, manager, _ = made(tmp_path)
        strategy = checkpoint.v.strategy
        other = strategy.experimental_distribute_dataset(ms.Dataset(np.arange(4)).batch(2))
        with pytest.raises(ms.StructureError, match=r"Checkpoint\(\.\.\., data=dataset\)"):
            manager.resume(other)
        with pytest.raises(
            TypeError, match=r"expected what strategy\.experimental_distribute_dataset"
        ):
            manager.resume([1, 2])
        with pytest.raises(ValueError, match="resume\\(epochs\\) must be an integer of at least 0"):
            manager.resume(strategy.experimental_distribute_dataset(checkpoint.data), epochs=-1)
        checkpoint.data = other  # what was distributed is as good as the dataset
        for _ in manager.resume(other):
            checkpoint.step += 1
        return checkpoint.step

    assert run_ranks(steps, 2) == [2, 2]


def test_another_dataset_amid_an_epoch_is_told(tmp_path):
    run(2, tmp_path, "seeded", end=5)

    def other(comm, source):
        with pytest.raises(ms.DataError, match=r"after 4 batches of epoch 0 .*seed=3.* It is: "):
            program(comm, tmp_path, source)

    for source in ("in order", "generator", "even"):
        run_ranks(other, 1, source)


def test_data_of_each_rank_have_no_place(tmp_path):
    def steps(comm):
        checkpoint, manager, _ = made(tmp_path)
        strategy = checkpoint.v.strategy
        data = strategy.distribute_datasets_from_function(lambda context: checkpoint.data)
        checkpoint.data = data
        with pytest.raises(ms.DataError, match="it is a dataset of each rank"):
            next(manager.resume(data))

    run_ranks(steps, 2)


def test_without_ranks_it_is_the_same(tmp_path):
    """Where a strategy of one device divides nothing, and on another number of ranks."""
    seen = {}

    def alone(comm, end, epochs):
        dataset = SOURCES["unseeded"]().prefetch(2)
        checkpoint = ms.Checkpoint(total=ms.Variable(np.zeros(ROWS)), data=dataset, step=0)
        manager = ms.CheckpointManager(checkpoint, tmp_path, 2, every="2 steps")
        data = ms.OneDeviceStrategy("cpu").experimental_distribute_dataset(dataset)
        for batch in manager.resume(data, epochs):
            if checkpoint.step == end:
                break
            seen[checkpoint.step] = batch.tolist()
            checkpoint.total.assign_add(np.bincount(batch, minlength=ROWS))
            checkpoint.step += 1

    run_ranks(alone, 1, 5, 2)
    total = run(2, tmp_path, "unseeded", seen=seen, end=9)
    run_ranks(alone, 1, None, 2)
    history = [seen[step] for step in range(12)]
    assert_whole("unseeded", np.bincount(np.concatenate(history)), history)
    assert total is None


def test_single_examples_and_what_is_not_divided(tmp_path):
    def steps(comm):
        checkpoint, manager, _ = made(tmp_path)
        with pytest.raises(TypeError, match="every rank would see all of it"):
            manager.resume(checkpoint.data)
        checkpoint.data = ms.Dataset(np.arange(4))
        distribute = checkpoint.v.strategy.experimental_distribute_dataset
        data = distribute(checkpoint.data, unbatched=True)
        with pytest.raises(ms.DataError, match="single examples cannot be resumed"):
            next(manager.resume(data))

    run_ranks(steps, 2)


class Told:
    """What stands for a notice that the job is to end."""

    def __init__(self, at):
        self.at, self.left = at, False

    def _read_reason(self):
        self.at -= 1
        return "SIGUSR1" if self.at == 0 else ""

    def _leave(self):
        self.left = True
        raise Ended


def test_a_notice_of_one_rank_saves_on_all_and_leaves(tmp_path):
    def steps(comm):
        checkpoint, manager, left = made(tmp_path)
        manager._preemption = Told(5 if comm.rank else 100)
        with pytest.raises(Ended):
            for _ in left:
                checkpoint.step += 1
        return checkpoint.step

    assert run_ranks(steps, 3) == [3] * 3  # the end of an epoch is a question too
    assert saved(tmp_path) == [2, 3]


@pytest.mark.parametrize(
    ("every", "seconds", "steps"),
    [
        *((90, 90, None), ("30s", 30, None), ("10 min", 600, None), ("1.5 hours", 5400, None)),
        *(("2 d", 172800, None), ("500 steps", None, 500), ("1 step", None, 1)),
        (None, None, None),
    ],
)
def test_what_every_means(every, seconds, steps):
    pace = SaveInterval(every)
    assert (pace._seconds, pace._steps, pace.is_never_due) == (seconds, steps, every is None)


@pytest.mark.parametrize("every", [0, -1, "", "10", "0 steps", "1.5 steps", "5 years", "inf s"])
def test_what_every_cannot_be(every):
    with pytest.raises(ValueError, match="every must be seconds, or as '10 min'"):
        SaveInterval(every)


@pytest.mark.parametrize("every", [True, [1], b"1 s"])
def test_what_every_is_of_no_kind(every):
    with pytest.raises(TypeError, match="every must be seconds"):
        SaveInterval(every)


def test_it_claims_the_directory_before_the_first_step(tmp_path):
    def inside(comm):
        strategy, rows = ms.MirroredStrategy(), arrays().batch(BATCH)
        with strategy.scope():
            manager = ms.CheckpointManager(ms.Checkpoint(data=rows), tmp_path, 2)
        data = strategy.experimental_distribute_dataset(rows)
        return next((tmp_path / "job.json").exists() for _ in manager.resume(data))

    assert run_ranks(inside, 2) == [True, True]


@pytest.mark.parametrize("size", [1, 2])
def test_it_says_from_what_it_continues(size, tmp_path, capfd):
    def program(comm):
        strategy = ms.MirroredStrategy()
        dataset = ms.Dataset(np.arange(4.0)).batch(2)
        with strategy.scope():
            checkpoint = ms.Checkpoint(v=ms.Variable(0.0), data=dataset)
        manager = ms.CheckpointManager(checkpoint, tmp_path, max_to_keep=3)
        for _ in manager.resume(strategy.experimental_distribute_dataset(dataset), epochs=2):
            strategy.run(int)

    run_ranks(program, size)
    assert "continues" not in capfd.readouterr().err
    run_ranks(program, size)
    text = f"mpistrat: resume continues from {tmp_path}/ckpt-2.npz, in epoch 3.\n"
    assert capfd.readouterr().err.count(text) == 1

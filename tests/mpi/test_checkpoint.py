"""Checkpoints of ranks that are processes, with variables that are in memory once."""

from __future__ import annotations

import errno
import os
import resource
import signal
import warnings
from pathlib import Path

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.checkpoint import sharded

LARGE = 50_000  # elements; shared by the ranks of a node


@pytest.fixture
def directory(world, tmp_path):
    """One directory for all ranks."""
    return world.bcast(str(tmp_path) if world.rank == 0 else None)


def made(start):
    strategy = ms.MirroredStrategy()
    with strategy.scope():
        w = ms.Variable(np.full(LARGE, start), name="w")
        n = ms.Variable(
            0,
            synchronization=ms.VariableSynchronization.ON_READ,
            aggregation=ms.VariableAggregation.SUM,
        )
    return strategy, w, n, ms.Checkpoint(w=w, n=n)


def test_what_was_saved_is_what_reads(world, directory):
    strategy, w, n, checkpoint = made(1.0)
    strategy.run(lambda: n.assign(7 + world.rank))
    strategy.run(lambda: w.assign_add(np.arange(float(LARGE))))
    path = checkpoint.save(f"{directory}/x")
    wanted = 1.0 + np.arange(float(LARGE))
    w.assign(np.zeros(LARGE))
    n.assign(0)
    view = np.asarray(w)
    checkpoint.restore(path).assert_consumed()
    np.testing.assert_array_equal(view, wanted)
    assert n.numpy() == sum(range(7, 7 + world.size))
    if world.rank == 0:
        with np.load(path) as found:
            np.testing.assert_array_equal(found["w"], wanted)
            assert found["n"] == sum(range(7, 7 + world.size))


def test_a_sum_of_floats_reads_the_same_to_the_last_bit(world, directory):
    """Whatever adds it up: the handshake, shared memory, or MPI itself."""
    strategy = ms.MirroredStrategy()
    of_sums = {
        "synchronization": ms.VariableSynchronization.ON_READ,
        "aggregation": ms.VariableAggregation.SUM,
    }
    wanted = {str(size): np.random.default_rng(size).normal(size=size) for size in (5, LARGE)}
    ops = ms.HierarchicalCopyAllReduce(num_packs=1), ms.NcclAllReduce()
    for each in (strategy, *(ms.MirroredStrategy(cross_device_ops=one) for one in ops)):
        with each.scope():
            sums = {name: ms.Variable(np.zeros_like(x), **of_sums) for name, x in wanted.items()}
            for name, v in sums.items():
                each.run(lambda v=v, x=wanted[name]: v.assign(x if world.rank == 0 else x * 0))
            checkpoint = ms.Checkpoint(v=sums)
            path = checkpoint.save(f"{directory}/sums")
            checkpoint.restore(path)
            for name, v in sums.items():
                assert v.numpy().tobytes() == wanted[name].tobytes()
                assert (np.asarray(v._component()) == wanted[name] / world.size).any()


def test_a_directory_that_only_rank_0_sees(world, tmp_path, monkeypatch):
    _, w, _, checkpoint = made(2.0)
    shared = world.bcast(str(tmp_path) if world.rank == 0 else None)
    if world.rank:

        def unseen(*args, **kwargs):
            raise OSError(errno.EIO, "another node looks at the directory")

        monkeypatch.setattr(os, "open", unseen)
    manager = ms.CheckpointManager(checkpoint, shared, 1)
    for _ in range(2):
        manager.save()
    w.assign(np.zeros(LARGE))
    assert manager.restore_or_initialize() == f"{shared}/ckpt-2.npz"
    assert w[LARGE - 1] == 2.0


def test_a_disk_that_is_full(world, directory):
    """A limit on the size of files, which is told as a full disk is: by an OSError of rank 0."""
    _, w, _, checkpoint = made(3.0)
    path = checkpoint.save(f"{directory}/x")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if world.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGE, before[1]))
    try:
        with pytest.raises(OSError, match=r"x-2\.npz was not written"):
            checkpoint.save(f"{directory}/x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    if world.rank == 0:
        assert not [path for path in Path(directory).iterdir() if "x-2" in path.name]
    w.assign(np.zeros(LARGE))
    checkpoint.restore(path)
    assert w[0] == 3.0


def test_what_others_do_in_the_directory_is_told_on_all_ranks(world, directory):
    with ms.MirroredStrategy().scope():
        v = ms.Variable(0)
    manager = ms.CheckpointManager(ms.Checkpoint(v=v), directory, max_to_keep=2)
    for step in (1, 2):
        v.assign(step)
        manager.save()
    there = Path(directory)
    one, two = (there / f"ckpt-{number}.npz" for number in (1, 2))
    if world.rank == 0:  # as another job would
        (there / "ckpt-3.npz").write_bytes(two.read_bytes())
    with pytest.raises(FileExistsError, match="give each job its own directory"):
        manager.save()
    if world.rank == 0:
        (there / "ckpt-3.npz").unlink()
        data = one.read_bytes()
        one.write_bytes(two.read_bytes())
        two.write_bytes(data)
    v.assign(7)
    with pytest.raises(ms.CheckpointError, match=r"ckpt-2\.npz holds checkpoint number 1, not 2"):
        manager.restore_or_initialize()
    assert int(v.numpy()) == 7


def test_strategies_of_other_first_ranks_save_in_one_directory(world, directory):
    backwards = world.Split(0, -world.rank)
    every = [ms.MirroredStrategy(), ms.MirroredStrategy(comm=backwards)]
    paths = []
    for strategy in every * 2:
        with strategy.scope():
            checkpoint = ms.Checkpoint(v=ms.Variable(0.0, name="v"))
        paths.append(checkpoint.save(f"{directory}/x"))
    assert paths == [f"{directory}/x-{number}.npz" for number in range(1, 5)]
    backwards.Free()


@pytest.mark.parametrize("per_node", [0, 1])
@pytest.mark.parametrize("background", [False, True])
def test_a_large_one_is_written_and_read_by_all_ranks(
    world, directory, background, per_node, monkeypatch
):
    monkeypatch.setattr(sharded, "MIN_DIRECTORY_NBYTES", 1 << 17)
    monkeypatch.setattr(sharded, "CHUNK_NBYTES", 1 << 14)
    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", str(per_node))
    comm = world.Dup()  # a session of its own, which reads that
    strategy = ms.MirroredStrategy(comm=comm)
    wanted = [np.arange(LARGE) + 0.5, np.arange(LARGE) * 2.0, np.arange(3)]
    with strategy.scope():
        held = [ms.Variable(value) for value in wanted]
    manager = ms.CheckpointManager(ms.Checkpoint(held=held), directory, 1, background=background)
    for _ in range(2):
        path = manager.save()
    manager.wait()
    for v in held:
        v.assign(np.zeros_like(v))
    assert manager.restore_or_initialize() == path == f"{directory}/ckpt-2.arrays"
    for v, value in zip(held, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(v), value)
    if world.rank == 0:
        found = sorted(one.name for one in Path(path).iterdir())
        assert found[:-1] == [f"data-{n}.bin" for n in range(len(found) - 1)]
        assert len(found) == (1 + min(3, world.size) if per_node else 2)
        assert [one.name for one in Path(directory).glob("ckpt*")] == ["ckpt-2.arrays"]
    del manager, held, strategy
    comm.Free()


@pytest.mark.filterwarnings("ignore:Checkpoint.(save|write). on rank")
def test_variables_of_each_rank_alone(world, directory):
    epoch = ms.Variable(world.rank + 5, name="epoch")
    strategy, w, _, checkpoint = made(1.0)
    checkpoint.epoch = epoch
    manager = ms.CheckpointManager(checkpoint, directory, 2)
    path = manager.save()
    epoch.assign(0)
    w.assign(np.zeros(LARGE))
    assert manager.restore_or_initialize() == path
    assert (epoch.numpy(), w.numpy().min()) == (5, 1.0)
    alone = ms.Checkpoint(epoch=epoch)
    epoch.assign(world.rank + 7)
    with strategy.scope():
        path = alone.write(f"{directory}/alone")
        alone.read(path)
    assert epoch.numpy() == 7


@pytest.mark.parametrize("large", [False, True])
def test_what_is_attached_after_restore(world, directory, large, monkeypatch):
    monkeypatch.setattr(
        sharded, "MIN_DIRECTORY_NBYTES", 1 if large else sharded.MIN_DIRECTORY_NBYTES
    )
    strategy, w, n, checkpoint = made(3.0)
    strategy.run(lambda: n.assign(7 + world.rank))
    path = checkpoint.save(f"{directory}/x")
    with strategy.scope():
        later = ms.Checkpoint()
    status = later.restore(path)
    w.assign(np.zeros(LARGE))
    n.assign(0)
    later.w = w
    later.n = n
    status.assert_consumed()
    np.testing.assert_array_equal(w.numpy(), np.full(LARGE, 3.0))
    assert n.numpy() == sum(range(7, 7 + world.size))


@pytest.mark.parametrize("shape", [(4,), (LARGE,)])
def test_state_that_a_file_lacks_begins_afresh(world, directory, shape):
    def made_by(optimizer, start):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            variables = [ms.Variable(np.full(shape, start)) for _ in range(2)]
        optimizer.build(variables)
        pairs = [(np.full(shape, 2.0 + i), v) for i, v in enumerate(variables)]
        strategy.run(lambda: optimizer.apply_gradients(pairs) and None)
        model = {"a": variables[0], "b": variables[1]}
        return variables, ms.Checkpoint(model=model, opt=optimizer)

    old, checkpoint = made_by(ms.optim.SGD(0.5, momentum=0.5), 1.0)
    path = checkpoint.save(f"{directory}/c")
    optimizer = ms.optim.SGD(0.5, momentum=0.5, ema=0.5)
    new, checkpoint = made_by(optimizer, -7.0)
    with pytest.raises(ms.StructureError, match=r"ema=0\.5.*, was saved without ema"):
        checkpoint.restore(path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoint.restore(path, partial=True)
    assert len(caught) == (world.rank == 0)
    for i, (v, w) in enumerate(zip(new, old, strict=True)):
        np.testing.assert_array_equal(v.numpy(), w.numpy())
        np.testing.assert_array_equal(optimizer.average(v).numpy(), w.numpy())
        np.testing.assert_array_equal(
            optimizer.slot(v, "momentum").numpy(), np.full(shape, 2.0 + i)
        )

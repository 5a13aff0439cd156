"""Large checkpoints: directories that the ranks write and read together."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat.checkpoint import background, sharded, shares
from mpistrat.checkpoint.cells import Cell
from mpistrat.compat import tf
from mpistrat.testing import run_ranks

ON_READ = ms.VariableSynchronization.ON_READ
KINDS = ms.VariableAggregation
RNG = np.random.default_rng(5)
W, B = RNG.normal(size=(40, 33)), RNG.integers(0, 99, 700).astype(np.int16)
HALF = np.arange(65.0).astype(ml_dtypes.bfloat16)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Let what is large be small, so that a test costs little."""
    monkeypatch.setattr(sharded, "LEAST", 1 << 10)
    monkeypatch.setattr(sharded, "CHUNK", 1 << 9)
    monkeypatch.setattr(background, "_LOOKS", 0.001)


def made(comm, scale=1):
    """Variables of all kinds, and a cell that each rank has of its own."""
    with ms.MirroredStrategy().scope():
        checkpoint = ms.Checkpoint(
            w=ms.Variable(W * scale),
            b=ms.Variable((B * scale).astype(B.dtype)),
            half=ms.Variable(HALF * HALF.dtype.type(scale)),
            sum=ms.Variable(0.0, synchronization=ON_READ, aggregation=KINDS.SUM),
            empty=ms.Variable(np.zeros((0, 2), np.float32)),
        )
    held = {"x": np.full(200, (10.0 + comm.rank) * scale)}
    checkpoint.cell = Cell("x", lambda: held["x"], lambda new: held.update(x=new.copy()))
    return checkpoint


def values(checkpoint):
    with checkpoint.strategy.scope():
        return {name: np.asarray(v).tobytes() for name, v in checkpoint.variables().items()}


WANTED = {
    "b": B.tobytes(),
    "cell": np.full(200, 10.0).tobytes(),
    "empty": b"",
    "half": HALF.tobytes(),
    "sum": np.float64(0).tobytes(),
    "w": W.tobytes(),
}


def there(directory):
    return sorted(path.name for path in directory.iterdir())


@every("restored_on", [(1, 0), (2, 0), (3, 0), (4, 2), (3, 1)])
@every("saved_on", [(1, 0), (2, 0), (3, 0), (4, 2), (3, 1), (5, 2)])
@every("background", [False, True])
def test_what_was_saved_is_what_reads(background, saved_on, restored_on, tmp_path, monkeypatch):
    directory = tmp_path / f"{saved_on}-{background}"

    def save(comm):
        manager = ms.CheckpointManager(made(comm), directory, 2, background=background)
        path = manager.save()
        manager.checkpoint.w.assign(W * 0)  # too late for what is written
        if background:
            assert manager.wait() == path
        assert path == str(directory / "ckpt-1.arrays")
        return manager.checkpoints

    if not directory.exists():
        monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", str(saved_on[1]))
        assert run_ranks(save, saved_on[0])[0] == [str(directory / "ckpt-1.arrays")]
        assert there(directory) == ["ckpt-1.arrays"]
        names = there(directory / "ckpt-1.arrays")
        nodes = saved_on[0] // saved_on[1] + bool(saved_on[0] % saved_on[1]) if saved_on[1] else 1
        assert names == [*(f"data-{n}.bin" for n in range(min(nodes, 2))), "manifest.json"]
        sizes = [(directory / "ckpt-1.arrays" / name).stat().st_size for name in names[:-2]]
        assert all(size >= sharded.LEAST for size in sizes)

    def restore(comm):
        checkpoint = made(comm, scale=0)
        found = checkpoint.restore(directory / "ckpt-1").assert_consumed()
        assert found.path == str(directory / "ckpt-1.arrays")
        assert checkpoint.save_counter == 1
        return values(checkpoint)

    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", str(restored_on[1]))
    for found in run_ranks(restore, restored_on[0]):
        assert found == WANTED


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Three checkpoints, whose values are 1, 2 and 3 times those above, in two files each."""
    directory = tmp_path_factory.mktemp("three")

    def save(comm):
        checkpoint = made(comm)
        manager = ms.CheckpointManager(checkpoint, directory, None)
        for scale in (1, 2, 3):
            checkpoint.w.assign(W * scale)
            checkpoint.b.assign(B * B.dtype.type(scale))
            manager.save()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded, "LEAST", 1 << 10)
        patch.setattr(sharded, "CHUNK", 1 << 9)
        patch.setenv("MPISTRAT_RANKS_PER_NODE", "1")
        run_ranks(save, 2)
    return directory


def test_five_lines_of_numpy_read_an_array(three):
    path = three / "ckpt-3.arrays"
    for name, wanted in {"w": W * 3, "b": B * 3, "sum": 0.0}.items():
        told = json.loads((path / "manifest.json").read_text())["arrays"][name]
        file, shape = path / told["file"], tuple(told["shape"])
        array = np.memmap(file, told["dtype"], "r", told["offset"], shape)
        np.testing.assert_array_equal(array, wanted)
    reader = tf.train.load_checkpoint(path)
    np.testing.assert_array_equal(reader.get_tensor("w"), W * 3)
    assert reader.get_tensor("half").dtype == HALF.dtype
    newest = tf.train.load_checkpoint(three).get_tensor("w")
    np.testing.assert_array_equal(newest, W * 3)


def test_where_arrays_lie():
    rng = np.random.default_rng(2)
    for _ in range(200):
        sizes = rng.integers(0, 3000, rng.integers(1, 20)).tolist()
        entries = {str(n): sharded.Entry("int8", (size,)) for n, size in enumerate(sizes)}
        together, nodes = int(rng.integers(0, len(sizes) + 1)), int(rng.integers(1, 9))
        regions = sharded.plan(entries, together, nodes)
        found = sharded.sizes_of(regions)
        assert len(found) <= nodes
        assert all(size >= sharded.LEAST for size in found[:-1])
        assert {region.file for region in regions[:together]} <= {0}
        assert sum(found) == sum(-(-size // 64) * 64 for size in sizes)


DAMAGE = ["erase", "corrupt", "truncate", "swap"]
OBJECTS = ["data-0.bin", "data-1.bin", "manifest.json", "."]
VICTIMS = [(3,), (2, 3), (1, 2, 3)]


def damage(directory, how, what, victims):
    """Do that to each of the victims; of a directory, to all of its files, or to its name.

    Returns:
      Which are not as they were.
    """
    paths = [directory / f"ckpt-{number}.arrays" for number in victims]
    if how == "swap":  # each goes one on
        ring = [directory / f"ckpt-{number}.arrays" / what for number in {1, *victims}]
        for path in ring:
            path.rename(f"{path.resolve()}.away")
        for path, following in zip(ring, [*ring[1:], ring[0]], strict=True):
            Path(f"{path.resolve()}.away").rename(following.resolve())
        return {1, *victims}
    for path in paths:
        if what == "." and how == "erase":
            shutil.rmtree(path)
            path.mkdir()  # its name is there, and nothing in it
            continue
        for file in sorted(path.iterdir()) if what == "." else [path / what]:
            data = file.read_bytes()
            if how == "erase":
                file.unlink()
            elif how == "truncate":
                file.write_bytes(data[: len(data) // 2])
            else:
                middle = len(data) // 2
                file.write_bytes(data[:middle] + bytes([data[middle] ^ 16]) + data[middle + 1 :])
    return set(victims)


@every("size", [1, 2, 3])
@every("victims", VICTIMS)
@every("what", OBJECTS)
@every("how", DAMAGE)
def test_the_newest_good_one_is_restored_or_none(how, what, victims, size, three, tmp_path, capfd):
    """144 cases."""
    directory = tmp_path / f"{how}-{what}-{len(victims)}-{size}"
    shutil.copytree(three, directory)
    broken = damage(directory, how, what, victims)
    names_exchanged = how == "swap" and what == "."
    good = [number for number in (1, 2, 3) if number not in broken]

    def program(comm):
        checkpoint = made(comm, scale=7)
        manager = ms.CheckpointManager(checkpoint, directory, None)
        begun = []
        manager._init_fn = lambda: begun.append(1)
        try:
            path = manager.restore_or_initialize()
        except ms.CheckpointError as error:
            assert not begun
            np.testing.assert_array_equal(np.asarray(checkpoint.w), W * 7)
            return str(error)
        assert not begun
        return Path(path).name, np.asarray(checkpoint.w).tobytes()

    for found in run_ranks(program, size, timeout=20):
        if names_exchanged and isinstance(found, str):
            assert "Give each file" in found
        elif good:
            newest = max(good)
            assert found == (f"ckpt-{newest}.arrays", (W * newest).tobytes())
        else:
            assert "none of the 3 checkpoints" in found
            assert all(f"ckpt-{number}.arrays is damaged" in found for number in victims)
    said = capfd.readouterr().err
    if good and 3 in broken and not names_exchanged:
        assert "ckpt-3.arrays is damaged" in said


@pytest.mark.parametrize(
    "step", [pytest.param(1, marks=pytest.mark.nightly), pytest.param(641, id="some")]
)
def test_every_flip_and_truncation_is_found(step, three, tmp_path):
    shutil.copytree(three / "ckpt-1.arrays", tmp_path / "x.arrays")
    for file in sorted((tmp_path / "x.arrays").iterdir()):
        whole = file.read_bytes()
        for bit in range(0, len(whole) * 8, step):
            bad = bytearray(whole)
            bad[bit // 8] ^= 1 << bit % 8
            file.write_bytes(bad)
            with pytest.raises(ms.CheckpointError, match="damaged"):
                sharded.read_all(tmp_path / "x.arrays")
        for size in [*range(0, len(whole), step)]:
            file.write_bytes(whole[:size])
            with pytest.raises(ms.CheckpointError, match="damaged"):
                sharded.read_all(tmp_path / "x.arrays")
        file.write_bytes(whole)
    assert sharded.read_all(tmp_path / "x.arrays").counter == 1


def test_what_does_not_belong_there_is_found(three, tmp_path):
    path = tmp_path / "x.arrays"
    shutil.copytree(three / "ckpt-1.arrays", path)
    (path / ".nfs0001").touch()  # of a file system
    sharded.read_all(path)
    (path / "data-2.bin").touch()
    with pytest.raises(ms.CheckpointError, match=r"data-2\.bin is not of this one"):
        sharded.read_all(path)
    (path / "data-2.bin").unlink()
    (path / "data-0.bin").unlink()
    os.mkfifo(path / "data-0.bin")
    with pytest.raises(ms.CheckpointError, match=r"data-0\.bin in it is not a regular file"):
        sharded.read_all(path)

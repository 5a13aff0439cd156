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
from forked import code, fork
from patched import patch_os

import mpistrat as ms
from mpistrat.checkpoint import atomic, files, restoring, saving, sharded, shares
from mpistrat.checkpoint.format import Entry, explaining_read_errors
from mpistrat.checkpoint.values import Cell
from mpistrat.compat import tf
from mpistrat.shm import storage
from mpistrat.testing import run_ranks

ON_READ = ms.VariableSynchronization.ON_READ
KINDS = ms.VariableAggregation
RNG = np.random.default_rng(5)
W, B = RNG.normal(size=(40, 33)), RNG.integers(0, 99, 700).astype(np.int16)
HALF = np.arange(65.0).astype(ml_dtypes.bfloat16)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Let what is large be small, so that a test costs little."""
    monkeypatch.setattr(sharded, "MIN_DIRECTORY_NBYTES", 1 << 10)
    monkeypatch.setattr(sharded, "CHUNK_NBYTES", 1 << 9)
    monkeypatch.setattr(
        storage, "MIN_SHARED_NBYTES", 1 << 10
    )  # from here on the ranks of a node share it
    monkeypatch.setattr(shares, "_POLL_SECONDS", 0.001)


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
    checkpoint.cell = Cell(
        "x", lambda: held["x"], lambda new: held.update(x=new.copy()), can_differ=True
    )
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
    return sorted(path.name for path in directory.iterdir() if path.name != "job.json")


@every("restored_on", [(1, 0), (3, 0), (4, 2)])
@every("saved_on", [(1, 0), (3, 0), (5, 2)])
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
        assert all(size >= sharded.MIN_DIRECTORY_NBYTES for size in sizes)

    def restore(comm):
        checkpoint = made(comm, scale=0)
        found = checkpoint.restore(directory / "ckpt-1").assert_consumed()
        assert found.path == str(directory / "ckpt-1.arrays")
        assert checkpoint.save_counter == 1
        return values(checkpoint)

    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", str(restored_on[1]))
    for found in run_ranks(restore, restored_on[0]):
        assert found == WANTED


def mixed(comm, saved):
    """Much that is not a variable, and of which each rank has its own until it is restored."""
    with ms.MirroredStrategy().scope():
        w = ms.Variable(W * saved)
    mine = 0 if saved else 10 + comm.rank
    rng = np.random.default_rng(0 if saved else 9 + comm.rank)
    large = np.arange(2000.0) + (comm.rank if saved else mine)
    numbers = {"rate": 0.5 * saved, "names": ["a", "b"] * saved, "seen": (3 * saved, None)}
    return ms.Checkpoint(w=w, rng=rng, large=[large], n=numbers, step=7 * saved)


@pytest.mark.filterwarnings("ignore:Checkpoint.save. on rank")
@pytest.mark.parametrize("background", [False, True])
def test_values_and_large_arrays_of_each_rank_in_directories(background, tmp_path, monkeypatch):
    """Of what each rank has of its own, replica 0's is saved."""
    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", "2")

    def save(comm):
        manager = ms.CheckpointManager(mixed(comm, 1), tmp_path, 2, background=background)
        path = manager.save()
        manager.wait()
        manager.checkpoint.step += comm.rank
        with pytest.raises(ms.LockstepError, match=r"step=7(.|\n)*step=8"):
            manager.save()
        return path

    def restore(comm):
        checkpoint = mixed(comm, 0)
        checkpoint.restore(path).assert_consumed()
        assert checkpoint.n == {"rate": 0.5, "names": ["a", "b"], "seen": (3, None)}
        np.testing.assert_array_equal(checkpoint.w, W)
        np.testing.assert_array_equal(checkpoint.large[0], np.arange(2000.0))
        return checkpoint.step, checkpoint.rng.random()

    path = run_ranks(save, 3)[0]
    assert path.endswith(".arrays")
    wanted = 7, np.random.default_rng(0).random()
    for size in (1, 2, 5):
        assert run_ranks(restore, size) == [wanted] * size


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
        patch.setattr(sharded, "MIN_DIRECTORY_NBYTES", 1 << 10)
        patch.setattr(sharded, "CHUNK_NBYTES", 1 << 9)
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


@every(("ranks", "per_node"), [(1, 0), (3, 0), (4, 2), (3, 1)])
def test_each_node_reads_each_byte_once(ranks, per_node, three, monkeypatch):
    path, real, got = three / "ckpt-1.arrays", os.preadv, []

    def counted(descriptor, buffers, offset):
        got.append(real(descriptor, buffers, offset))
        return got[-1]

    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", str(per_node))
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", counted)
        run_ranks(lambda comm: made(comm, scale=0).restore(path), ranks)
    nbytes = sum(file.stat().st_size for file in path.glob("data-*.bin"))
    nodes = -(-ranks // per_node) if per_node else 1
    assert sum(got) == nodes * nbytes


def test_where_arrays_lie():
    rng = np.random.default_rng(2)
    for _ in range(200):
        sizes = rng.integers(0, 3000, rng.integers(1, 20)).tolist()
        entries = {str(n): Entry("int8", (size,)) for n, size in enumerate(sizes)}
        together, nodes = int(rng.integers(0, len(sizes) + 1)), int(rng.integers(1, 9))
        regions = sharded.plan_regions(entries, together, nodes)
        found = sharded.compute_file_sizes(regions)
        assert len(found) <= nodes
        assert all(size >= sharded.MIN_DIRECTORY_NBYTES for size in found[:-1])
        assert {region.file_number for region in regions[:together]} <= {0}
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


@pytest.mark.parametrize("sizes", [(2,), pytest.param((1, 3), marks=pytest.mark.nightly)])
@every("victims", VICTIMS)
@every("what", OBJECTS)
@every("how", DAMAGE)
def test_the_newest_good_one_is_restored_or_none(how, what, victims, sizes, three, tmp_path, capfd):
    """48 cases for each number of ranks."""
    directory = tmp_path / f"{how}-{what}-{len(victims)}"
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

    for found in (one for size in sizes for one in run_ranks(program, size)):
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


def leading_nowhere(path):
    path.unlink()
    path.symlink_to(path.parent / "gone")


def leading_to_itself(path):
    path.unlink()
    path.symlink_to(path)


def a_file(path):
    shutil.rmtree(path.parent)
    path.parent.write_text("x")


@pytest.mark.parametrize("what", ["data-0.bin", "manifest.json"])
@pytest.mark.parametrize("harm", [leading_nowhere, leading_to_itself, a_file])
def test_what_is_no_file_or_no_directory_is_passed_over(harm, what, three, tmp_path):
    directory = tmp_path / "saved"
    shutil.copytree(three, directory)
    harm(directory / "ckpt-3.arrays" / what)

    def program(comm):
        manager = ms.CheckpointManager(made(comm, scale=7), directory, None)
        return Path(manager.restore_or_initialize()).name

    assert run_ranks(program, 2) == ["ckpt-2.arrays"] * 2


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
                sharded.read_checkpoint(tmp_path / "x.arrays")
        for size in [*range(0, len(whole), step)]:
            file.write_bytes(whole[:size])
            with pytest.raises(ms.CheckpointError, match="damaged"):
                sharded.read_checkpoint(tmp_path / "x.arrays")
        file.write_bytes(whole)
    assert sharded.read_checkpoint(tmp_path / "x.arrays").counter == 1


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_node_without_shared_memory_reads_all_the_same(ranks, three, monkeypatch):
    monkeypatch.setattr(restoring, "populate", lambda *_: False)

    def restore(comm):
        checkpoint = made(comm, scale=0)
        checkpoint.restore(three / "ckpt-1").assert_consumed()
        return values(checkpoint)

    assert run_ranks(restore, ranks) == [WANTED] * ranks


@every("per_node", [0, 1])
def test_too_little_memory_on_one_rank_is_told_on_all(per_node, three, monkeypatch):
    own = threading.local()

    class Poor:
        def __getattr__(self, name):
            return getattr(np, name)

        def empty(self, count, dtype):
            if getattr(own, "poor", False) and count > 999:
                raise MemoryError(f"no {count} bytes")
            return np.empty(count, dtype)

    def program(comm):
        checkpoint = made(comm, scale=7)
        own.poor = comm.rank == 1
        with pytest.raises(MemoryError, match=r"no \d+ bytes"):
            checkpoint.restore(three / "ckpt-1.arrays")
        own.poor = False
        assert values(checkpoint)["w"] == (W * 7).tobytes()
        checkpoint.restore(three / "ckpt-1.arrays")

    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", str(per_node))
    with monkeypatch.context() as patch:
        patch.setattr(restoring, "np", Poor())
        run_ranks(program, 2)


@every("background", [False, True])
@every("least", [1 << 26, 1 << 10])
@every("at", [1, 4, 6])
def test_too_little_memory_in_a_save_is_told_on_all(at, least, background, tmp_path, monkeypatch):
    """For the values that one rank looks at, one after the other, before anything is written."""
    own = threading.local()

    class Poor:
        def __getattr__(self, name):
            return getattr(np, name)

        def asarray(self, value):
            own.count = getattr(own, "count", 0) - 1
            if not own.count:
                raise MemoryError("too little")
            return np.asarray(value)

    def program(comm):
        manager = ms.CheckpointManager(made(comm), tmp_path, 2, background=background)
        own.count = at if comm.rank == 0 else 0
        with pytest.raises(MemoryError, match="too little"):
            manager.save()
        assert manager.wait() is None
        path = manager.save()
        assert manager.wait() == path

    monkeypatch.setattr(sharded, "MIN_DIRECTORY_NBYTES", least)
    monkeypatch.setattr(saving, "np", Poor())
    monkeypatch.setattr(shares, "np", Poor())
    run_ranks(program, 2)
    assert hidden(tmp_path) == []


def test_a_newer_format_is_named(three, tmp_path):
    path = tmp_path / "x.arrays"
    shutil.copytree(three / "ckpt-1.arrays", path)
    data = (path / "manifest.json").read_bytes().replace(b'"format": 1', b'"format": 2')
    body = data[: data.rindex(b',\n "checksum"')]
    sealed = sharded.compute_checksum(body).hex().encode()
    (path / "manifest.json").write_bytes(body + b',\n "checksum": "%s"\n}\n' % sealed)
    with pytest.raises(ms.DataError, match="is of format 2, and this version of mpistrat reads"):
        sharded.read_checkpoint(path)


def test_what_was_copied_in_part_is_no_checkpoint(three, tmp_path):
    """As a copy that was interrupted leaves it, or a file system that made it in another order."""
    names = there(three / "ckpt-1.arrays")
    for count in range(len(names)):
        path = tmp_path / f"{count}.arrays"
        path.mkdir()
        for name in names[:count]:
            shutil.copy(three / "ckpt-1.arrays" / name, path)
        with pytest.raises(ms.CheckpointError, match="damaged"):
            sharded.read_checkpoint(path)


def test_what_does_not_belong_there_is_found(three, tmp_path):
    path = tmp_path / "x.arrays"
    shutil.copytree(three / "ckpt-1.arrays", path)
    (path / ".nfs0001").touch()  # of a file system
    sharded.read_checkpoint(path)
    (path / "data-2.bin").touch()
    with pytest.raises(ms.CheckpointError, match=r"data-2\.bin is not of this one"):
        sharded.read_checkpoint(path)
    (path / "data-2.bin").unlink()
    (path / "data-0.bin").unlink()
    os.mkfifo(path / "data-0.bin")
    with pytest.raises(ms.CheckpointError, match=r"data-0\.bin in it is not a regular file"):
        sharded.read_checkpoint(path)


STEPS = ("open", "fsync", "mkdir", "rename", "pwrite", "unlink", "rmdir", "preadv")


def steps(patch, act):
    """Call ``act(n)`` before the n-th step that any rank takes; return the count."""
    count, lock = [0], threading.Lock()

    def watched(real):
        def step(*args, **kwargs):
            with lock:
                count[0] += 1
                number = count[0]
            act(number)
            return real(*args, **kwargs)

        return step

    for name in STEPS:
        patch.setattr(os, name, watched(getattr(os, name)))
    patch.setattr(atomic, "_exchange_names", watched(atomic._exchange_names))
    return count


def saves(directory, scale, number, background=False):
    """A program that saves once; returns what it was told."""

    def program(comm):
        checkpoint = made(comm, scale)
        manager = ms.CheckpointManager(checkpoint, directory, 1, background=background)
        try:
            manager.save(number)
            manager.wait()
        except OSError as error:
            return str(error)
        return ""

    return program


def scales(directory):
    """By number, what the values of each checkpoint that is there are times those above."""
    found = {}
    for number, path in files.list_numbered_paths(directory, "ckpt").items():
        arrays = sharded.read_checkpoint(path).arrays
        found[number] = round(arrays["w"][0, 0] / W[0, 0])
        np.testing.assert_array_equal(arrays["b"], B * found[number])
    return found


def hidden(directory):
    return [path.name for path in directory.iterdir() if path.name.startswith(".")]


OLD = {1: 1}
NIGHTLY = [(2, False, 1), (1, False, None)]
WAYS = [
    (2, False, None),  # ranks, in the background, number
    (2, True, None),
    *(pytest.param(way, marks=pytest.mark.nightly) for way in NIGHTLY),
]
CODES = [errno.EIO, pytest.param(errno.ENOSPC, marks=pytest.mark.nightly)]


@pytest.fixture
def coarse(monkeypatch):
    """Have fewer steps."""
    monkeypatch.setattr(sharded, "CHUNK_NBYTES", 1 << 13)
    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", "1")


def swept(directory, old, way, act):
    """Count the steps of a save, and do it once for each, with ``act(step)`` at that."""
    size, background, number = way
    with pytest.MonkeyPatch.context() as patch:
        shutil.copytree(old, directory / "count")
        count = steps(patch, lambda n: None)
        run_ranks(saves(directory / "count", 2, number, background), size)
    for last in range(1, count[0] + 2):
        here = directory / str(last)
        shutil.copytree(old, here)
        yield here, last, lambda n, last=last: act() if n == last else None
    assert count[0] > 12


@pytest.fixture
def old(tmp_path, coarse):
    run_ranks(saves(tmp_path / "old", 1, None), 2)
    assert scales(tmp_path / "old") == OLD
    return tmp_path / "old"


@pytest.mark.parametrize("way", WAYS)
def test_a_process_that_ends_at_any_step_leaves_old_and_new_whole(way, old, tmp_path):
    size, background, number = way
    new, seen = ([{1: 2}] if number else [{1: 1, 2: 2}, {2: 2}]), []
    for directory, _, act in swept(tmp_path, old, way, lambda: os._exit(9)):

        def save(directory=directory, act=act):
            steps(pytest.MonkeyPatch(), act)
            run_ranks(saves(directory, 2, number, background), size)

        assert code(fork(save)) in (0, 9)
        found = scales(directory)
        assert found in [OLD, *new]
        seen.append(found in new)
        run_ranks(saves(directory, 3, None), 1)  # the next one clears up
        assert not hidden(directory)
    assert True in seen
    assert False in seen


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("code", CODES)
def test_an_error_at_any_step_is_raised_on_all_ranks_or_does_no_harm(code, way, old, tmp_path):
    size, background, number = way
    new, failed = ([{1: 2}] if number else [{1: 1, 2: 2}, {2: 2}]), 0

    def fail():
        raise OSError(code, os.strerror(code))

    for directory, last, act in swept(tmp_path, old, way, fail):
        with pytest.MonkeyPatch.context() as patch:
            steps(patch, act)
            told = run_ranks(saves(directory, 2, number, background), size)
        assert all(told) or not any(told), told
        failed += bool(told[0])
        found = scales(directory)
        assert found in ([OLD] if told[0] else new) or (number and found in [OLD, *new]), last
        assert not told[0] or "was not written" in told[0]
    assert failed > 5


# A rank that is not the first of its node may be in a container of its own.
@pytest.mark.parametrize(("per_node", "ways"), [(3, [False]), (1, [False, True])])
def test_who_does_not_see_the_directory_is_named(tmp_path, coarse, monkeypatch, per_node, ways):
    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", str(per_node))
    blind, real = set(), Path.is_dir

    def is_dir(path):
        return not (threading.get_ident() in blind and path.name.endswith(".part")) and real(path)

    monkeypatch.setattr(Path, "is_dir", is_dir)

    def program(comm):
        if comm.rank == 2:
            blind.add(threading.get_ident())
        for later in ways:
            manager = ms.CheckpointManager(made(comm), tmp_path, 2, background=later)
            with pytest.raises(OSError, match=r"Node .* \(rank 2\) does not see .*ckpt-\d"):
                manager.save()

    run_ranks(program, 3)
    assert there(tmp_path) == []


def test_who_has_made_the_directory_is_not_said_not_to_see_it(tmp_path, coarse, monkeypatch):
    real = shares._DirectorySave._prepare_share

    def prepare(self, mine):
        if not self._rank:
            shutil.rmtree(self._staging_path)
        real(self, mine)

    monkeypatch.setattr(shares._DirectorySave, "_prepare_share", prepare)

    def program(comm):
        with pytest.raises(FileNotFoundError, match=r"\] No such file or directory: .*ckpt-1.arr"):
            ms.CheckpointManager(made(comm), tmp_path, 2).save()

    run_ranks(program, 1)
    assert there(tmp_path) == []


def test_what_is_all_old_or_new_reaches_the_disk_before_its_name(tmp_path, coarse, monkeypatch):
    """A loss of power: all that is named has been forced to the disk before, and the name after."""
    events = []
    fsync, rename = os.fsync, os.rename

    def forced(descriptor):
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def named(one, two, **more):
        events.append(f"named {Path(two).name}")
        rename(one, two, **more)

    monkeypatch.setattr(os, "fsync", forced)
    patch_os(monkeypatch, "rename", named)
    run_ranks(saves(tmp_path, 1, None), 2)
    name = events.index("named ckpt-1.arrays")
    before = {event for event in events[:name] if not event.endswith(".part")}
    assert {"data-0.bin", "data-1.bin", "manifest.json"} <= before
    assert events[name - 1].endswith(".part")
    assert tmp_path.name in events[name + 1 :]


@every("size", [1, 2, 3])
@every("large", [False, True])
def test_an_error_in_the_background_is_raised_by_the_next_call(large, size, tmp_path, capfd):
    directory = tmp_path / f"{large}-{size}"

    def program(comm):
        with ms.MirroredStrategy().scope():
            v = ms.Variable(np.ones(1000 if large else 2))
        manager = ms.CheckpointManager(ms.Checkpoint(v=v), directory, 2, background=True)
        assert manager.wait() is None
        first = manager.save()
        assert manager.latest_checkpoint in (None, first)
        manager.wait()
        if comm.rank == 0:
            directory.rename(f"{directory}.away")
            directory.touch()  # a file: nothing can be written into it
        comm.barrier()
        told = []
        for _ in range(2):
            try:
                manager.save()
                manager.wait()
            except OSError as error:
                told.append(str(error))
        if comm.rank == 0:
            directory.unlink()
            Path(f"{directory}.away").rename(directory)
        comm.barrier()
        assert manager.restore_or_initialize() == first
        manager.save()
        assert len(told) == 2
        assert all("was not written" in text for text in told)
        return Path(manager.wait()).name

    end = "arrays" if large else "npz"
    found = run_ranks(program, size)
    assert len(set(found)) == 1
    assert found[0].endswith(end)


@every("large", [False, True])
def test_where_no_thread_can_be_started_the_program_waits_for_the_save(
    large, tmp_path, monkeypatch
):
    start = threading.Thread.start

    def started(self):
        if self.name == "mpistrat save":
            raise RuntimeError("can't start new thread")
        start(self)

    def program(comm):
        with ms.MirroredStrategy().scope():
            v = ms.Variable(np.ones(1000 if large else 2))
        manager = ms.CheckpointManager(ms.Checkpoint(v=v), tmp_path, 2, background=True)
        manager.save()
        return Path(manager.wait()).stem

    monkeypatch.setattr(threading.Thread, "start", started)
    assert run_ranks(program, 2) == ["ckpt-1"] * 2


def test_an_error_of_the_disk_names_the_file(three, monkeypatch):
    def fails(*args):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(OSError, match=r"Stale file handle.*ckpt-\d\.arrays/data-0\.bin"):
        sharded.read_checkpoint(next(three.glob("*.arrays")))


def test_a_file_that_cannot_be_closed_is_closed_once(tmp_path, monkeypatch):
    """Linux has closed it all the same, and another thread may have got the number meanwhile."""
    closed, close = [], os.close

    def fails(descriptor):
        close(descriptor)
        if descriptor == mine:
            closed.append(descriptor)
            raise OSError(errno.EIO, "Input/output error")

    part = atomic.StagedPath(tmp_path / "ckpt-1.npz")
    mine = part.descriptor
    monkeypatch.setattr(os, "close", fails)
    part.discard()
    part.discard()
    assert closed == [mine]


SLOW = """
import sys, threading, time
import numpy as np, mpistrat as ms
from mpistrat.checkpoint import atomic
whole, gate = atomic.open_atomically, threading.Event()
def slow(path, replace):
    assert gate.wait(200)  # or the test would take its time: save() has waited for it
    time.sleep(0.3)  # the program comes to its end first
    return whole(path, replace)
atomic.open_atomically = slow
v = ms.Variable(np.arange(5.0))
manager = ms.CheckpointManager(ms.Checkpoint(v=v), sys.argv[1], 2, background=True)
manager.save()
v.assign(np.zeros(5))
assert manager.checkpoints == []
gate.set()
"""


def test_the_process_waits_for_what_is_on_its_way(tmp_path):
    subprocess.run([sys.executable, "-c", SLOW, str(tmp_path)], check=True)
    with np.load(tmp_path / "ckpt-1.npz") as found:
        np.testing.assert_array_equal(found["v"], np.arange(5.0))


MILLION = pytest.param(1_000_000, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])


@pytest.mark.parametrize("count", [10_000, MILLION])
def test_whatever_a_manifest_says_is_read_or_refused(count, three, tmp_path):
    """Texts that are damaged and, with a right checksum, values that make no sense."""
    whole = (three / "ckpt-1.arrays" / "manifest.json").read_bytes()
    rng = np.random.default_rng(count)
    odd = [None, -1, 0, 3.5, 1 << 62, 10**30, "", "x", "../w", [], [1], {}, {"a": 1}, "0" * 32]
    body = whole[: whole.rindex(b',\n "checksum"')]
    tail = len(whole) - len(body)
    for number in range(count):
        if number % 2:
            bad = bytearray(body)
            for at in rng.integers(len(bad), size=rng.integers(1, 4)):
                bad[at] = rng.integers(256)
        else:
            row = json.loads(body + b"}")
            every = [row, row["arrays"], *row["arrays"].values()]
            where = every[rng.integers(len(every))]
            key = list(where)[rng.integers(len(where))]
            where[key] = odd[rng.integers(len(odd))]
            bad = bytearray(json.dumps(row)[:-1].encode())
        sealed = sharded.compute_checksum(bytes(bad)).hex().encode()
        data = bytes(bad) + b',\n "checksum": "%s"\n}\n' % sealed
        assert len(data) - len(bad) == tail
        begin = time.process_time()
        with (
            contextlib.suppress(ms.CheckpointError, ms.DataError),
            explaining_read_errors(tmp_path),
        ):
            sharded.parse_manifest(data)
        assert time.process_time() - begin < 1


def trained(comm, directory, end=None):
    """Train in the background of its saves, and return all that is then known."""
    strategy = ms.MirroredStrategy()
    rows, rng = ms.Dataset(np.arange(12)).shuffle(seed=1).batch(4), np.random.default_rng(3)
    with strategy.scope():
        w, history = ms.Variable(np.zeros(300)), ms.History()
    checkpoint = ms.Checkpoint(w=w, data=rows, rng=rng, history=history, step=0)
    manager = ms.CheckpointManager(checkpoint, directory, 2, every="2 steps", background=True)
    for batch in manager.resume(strategy.experimental_distribute_dataset(rows), epochs=3):
        drawn = rng.random()
        total = strategy.reduce("SUM", strategy.run(np.sum, args=(batch,)), axis=None)
        w.assign_add(np.full(300, drawn * total))
        checkpoint.step += 1
        history.append(checkpoint.step, drawn=drawn)
        if checkpoint.step == end:
            break
    path = manager.wait()
    return path, checkpoint.step, rng.random(), w.numpy().tobytes(), history.table().tobytes()


def test_resuming_from_directories_that_were_written_in_the_background(tmp_path):
    wanted = run_ranks(lambda comm: trained(comm, tmp_path / "peace"), 1)[0][1:]
    for one, two in ((1, 2), (2, 3), (3, 1)):
        directory = tmp_path / f"{one}-{two}"
        path = run_ranks(lambda comm, to=directory: trained(comm, to, end=5), one)[0][0]
        assert path.endswith("ckpt-2.arrays")
        for found in run_ranks(lambda comm, to=directory: trained(comm, to), two):
            assert found[1:] == wanted


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_boundary_of_small_and_large(size, tmp_path):
    def program(comm):
        found = []
        for extra in (-1, 0, 1):
            with ms.MirroredStrategy().scope():
                v = ms.Variable(np.arange(sharded.MIN_DIRECTORY_NBYTES + extra).astype(np.uint8))
                checkpoint = ms.Checkpoint(v=v)
                checkpoint.save(tmp_path / "ckpt")
                wanted = v.numpy().copy()
                v.assign(np.zeros_like(wanted))
                checkpoint.restore(ms.latest_checkpoint(tmp_path))
                np.testing.assert_array_equal(v.numpy(), wanted)
            found.append(Path(ms.latest_checkpoint(tmp_path)).suffix)
        return found

    assert run_ranks(program, size) == [[".npz", ".arrays", ".arrays"]] * size

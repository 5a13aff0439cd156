"""A directory that other jobs, people or the system have been at."""

from __future__ import annotations

import errno
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from patched import patch_os

import mpistrat as ms
from mpistrat.checkpoint import atomic, files, saving
from mpistrat.testing import run_ranks

SIZES = pytest.mark.parametrize("size", [1, 2, 3, 4])


def made(directory, keep=2):
    with ms.MirroredStrategy().scope():
        v = ms.Variable(0)
    return v, ms.CheckpointManager(ms.Checkpoint(v=v), directory, keep)


def saves(directory, times, keep=None):
    def program(comm):
        v, manager = made(directory, keep)
        for _ in range(times):
            v.assign_add(1)
            manager.save()
        return [path.rpartition("/")[2] for path in manager.checkpoints]

    return program


def there(directory):
    return sorted(path.name for path in directory.iterdir() if path.name != "job.json")


@SIZES
def test_what_cannot_be_removed_stops_nothing_and_is_told_once(size, tmp_path, monkeypatch, capfd):
    """A directory, and a file that may not be removed, as an immutable one or another user's."""
    (tmp_path / "ckpt-1.npz").mkdir()
    (tmp_path / "ckpt-2.npz").touch()
    unlink = os.unlink

    def denied(path, **more):
        if str(path).endswith("ckpt-2.npz"):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        unlink(path, **more)

    patch_os(monkeypatch, "unlink", denied)
    wanted = ["ckpt-1.npz", "ckpt-2.npz", "ckpt-6.npz", "ckpt-7.npz"]
    assert run_ranks(saves(tmp_path, 5, keep=2), size) == [wanted] * size
    assert there(tmp_path) == wanted
    said = capfd.readouterr().err
    assert said.count("ckpt-1.npz is beyond max_to_keep, but cannot be removed: ") == 1
    assert said.count("cannot be removed: Operation not permitted") == 1


def test_what_somebody_else_has_removed_is_gone(tmp_path, monkeypatch, capfd):
    real = files.list_numbered_paths
    monkeypatch.setattr(
        files, "list_numbered_paths", lambda *args: {0: tmp_path / "ckpt-0.npz", **real(*args)}
    )
    assert run_ranks(saves(tmp_path, 2, keep=1), 2) == [["ckpt-2.npz"]] * 2
    assert capfd.readouterr().err == ""


@SIZES
def test_names_that_were_exchanged_are_told_and_nothing_is_restored(size, tmp_path):
    run_ranks(saves(tmp_path, 3), 1)
    (tmp_path / "ckpt-1.npz").rename(tmp_path / "x")
    (tmp_path / "ckpt-3.npz").rename(tmp_path / "ckpt-1.npz")
    (tmp_path / "x").rename(tmp_path / "ckpt-3.npz")

    def program(comm):
        v, manager = made(tmp_path)
        v.assign(7)
        with pytest.raises(ms.CheckpointError, match=r"ckpt-3\.npz holds .* 1, .*ckpt-1\.npz"):
            manager.restore_or_initialize()
        untouched = int(v.numpy())
        manager.checkpoint.restore(manager.latest_checkpoint)  # takes any name
        return untouched, int(v.numpy()), manager.checkpoint.save_counter

    assert run_ranks(program, size) == [(7, 1, 1)] * size


def another_job(comm, directory, number):
    """Save a checkpoint as another program does, behind the back of this one."""
    comm.barrier()
    if comm.rank == 0:
        newest = max(files.list_numbered_paths(directory, "ckpt"))
        taken = files.make_numbered_path(directory, "ckpt", newest).read_bytes()
        files.make_numbered_path(directory, "ckpt", number).write_bytes(taken)
    comm.barrier()


@SIZES
def test_another_job_that_saved_in_between_is_told(size, tmp_path):
    def program(comm):
        _, manager = made(tmp_path, None)
        manager.save()
        another_job(comm, tmp_path, 2)
        for save in (manager.save, lambda: manager.checkpoint.save(tmp_path / "ckpt")):
            with pytest.raises(
                FileExistsError, match=r"There is ckpt-2, which this program has ne"
            ):
                save()
        # Who takes what is there over, continues; also who has seen it, and goes back.
        manager.checkpoint.restore(tmp_path / "ckpt-2")
        done = [manager.save(3)]
        another_job(comm, tmp_path, 7)
        manager.checkpoint.restore(tmp_path / "ckpt-1")
        done.append(manager.save())
        return [path.rpartition("/")[2] for path in done]

    assert run_ranks(program, size) == [["ckpt-3.npz", "ckpt-8.npz"]] * size


def numbers(directory):
    """Save in all the ways that one program may mix; return the numbers."""
    with ms.MirroredStrategy().scope():
        v = ms.Variable(0.0)
    one, two = ms.Checkpoint(v=v), ms.Checkpoint(v=v)
    prefix = directory / "ckpt"
    saves = [ms.CheckpointManager(one, directory, None).save for _ in range(2)]
    saves += [functools.partial(checkpoint.save, prefix) for checkpoint in (one, two)]
    done = [save() for save in (*saves, *reversed(saves))]
    one.restore(prefix.with_name("ckpt-1"))
    done += [save() for save in saves]
    two.write(prefix.with_name("ckpt-40"))
    done += [save() for save in saves]
    return [files.split_numbered_path(Path(path))[1] for path in done]


@SIZES
def test_one_program_may_mix_what_saves_in_a_directory(size, tmp_path):
    """Managers, checkpoints, and an older one restored; and again, as a job that is restarted."""
    first = [*range(1, 13), *range(41, 45)]
    assert run_ranks(lambda comm: numbers(tmp_path), size) == [first] * size
    again = [list(range(45, 61))] * size
    assert run_ranks(lambda comm: numbers(tmp_path), size) == again


def swept(path):
    """What a job on another node does, which does not see the lock."""
    for part in path.parent.glob(f".{path.name}.*"):
        part.unlink()


@SIZES
@pytest.mark.parametrize("number", [None, 1])
def test_a_file_that_goes_while_it_is_written_is_no_missing_file(size, number, tmp_path):
    def program(comm):
        _, manager = made(tmp_path)
        with pytest.raises(FileExistsError, match="Another job saves here; give each job") as error:
            manager.save(number)
        assert "No such file" not in str(error.value)
        assert str(tmp_path / "ckpt-1.npz") in str(error.value)

    write = saving.format.write_archive

    def writing(file, values, counter, metrics):
        write(file, values, counter, metrics)
        swept(tmp_path / "ckpt-1.npz")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving.format, "write_archive", writing)
        run_ranks(program, size)
    assert there(tmp_path) == []


def test_a_file_that_is_removed_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    real, calls = atomic.fcntl.flock, []

    def flock(descriptor, how):
        calls.append(1)
        if len(calls) == 1:
            swept(tmp_path / "x.npz")
        elif len(calls) == 2:
            raise BlockingIOError(errno.EWOULDBLOCK, "locked")
        return real(descriptor, how)

    monkeypatch.setattr(atomic.fcntl, "flock", flock)
    with atomic.open_atomically(tmp_path / "x.npz", should_replace=False) as file:
        file.write(b"new")
    assert len(calls) == 3
    assert there(tmp_path) == ["x.npz"]


JOB = """
import json, pathlib, sys
import mpistrat as ms
directory, me, times = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
v = ms.Variable(0)
checkpoint = ms.Checkpoint(v=v)
done, failed = {}, []
print("ready", flush=True)
sys.stdin.readline()
for step in range(times):
    v.assign(1000 * me + step)
    try:
        done[checkpoint.save(directory + "/ckpt")] = 1000 * me + step
    except Exception as error:
        failed.append([type(error).__name__, str(error)])
print(json.dumps([done, failed]))
"""


def test_four_jobs_lose_no_save_without_a_word(tmp_path):
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", JOB, str(tmp_path), str(me), "20"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for me in range(4)
    ]
    for job in jobs:
        assert job.stdout.readline() == "ready\n"
    for job in jobs:
        job.stdin.write("\n")
        job.stdin.flush()
    told = [json.loads(job.communicate()[0]) for job in jobs]
    done = [pair for ok, _ in told for pair in ok.items()]
    assert len(dict(done)) == len(done)  # nobody wrote over another's
    w = ms.Variable(0)
    for path, value in done:
        ms.Checkpoint(v=w).restore(path)
        assert int(w.numpy()) == value
    assert len(done) == len(list(Path(tmp_path).iterdir()))
    assert sum(len(failed) for _, failed in told) == 80 - len(done) > 0
    for _, failed in told:
        for kind, text in failed:
            assert (kind, "give each job its own directory" in text) == ("FileExistsError", True)
            assert "No such file" not in text
            assert str(tmp_path) in text

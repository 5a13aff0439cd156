"""Files that are there whole or not at all, at whatever step a process ends."""

from __future__ import annotations

import errno
import os
import shutil
import stat

import pytest
from forked import code, fork

import mpistrat as ms
from mpistrat import CheckpointError, latest_checkpoint
from mpistrat.checkpoint import atomic, files

OLD, NEW = b"old" * 1000, b"new" * 2000


def put(path, data=NEW, replace=False):
    with atomic.open_atomically(path, replace) as file:
        for start in range(0, len(data), 1000):
            file.write(data[start : start + 1000])
            file.flush()


def hidden(directory):
    return [path.name for path in directory.iterdir() if path.name.startswith(".")]


def test_it_is_there_and_nothing_else(tmp_path):
    put(tmp_path / "a" / "b" / "x.npz")
    assert (tmp_path / "a" / "b" / "x.npz").read_bytes() == NEW
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["x.npz"]


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077, 0o002])
def test_the_umask_says_who_may_read(tmp_path, umask):
    before = os.umask(umask)
    try:
        put(tmp_path / "x.npz")
        folder = atomic.StagedPath(tmp_path / "x-1.arrays", is_directory=True)
        folder.commit(should_replace=False)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x.npz").stat().st_mode) == 0o666 & ~umask
    assert stat.S_IMODE((tmp_path / "x-1.arrays").stat().st_mode) == 0o777 & ~umask


def test_what_is_there_is_replaced_only_if_that_was_said(tmp_path):
    put(tmp_path / "x", OLD)
    with pytest.raises(FileExistsError):
        put(tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == OLD
    put(tmp_path / "x", replace=True)
    assert (tmp_path / "x").read_bytes() == NEW
    assert not hidden(tmp_path)


def steps(monkeypatch, act):
    """Call ``act(n)`` before the n-th step that `files` takes."""
    count = [0]

    def watched(real):
        def step(*args, **kwargs):
            count[0] += 1
            act(count[0])
            return real(*args, **kwargs)

        return step

    for name in ("open", "fsync", "link", "replace", "rename", "unlink"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    monkeypatch.setattr(atomic.fcntl, "flock", watched(atomic.fcntl.flock))
    return count


@pytest.mark.parametrize("replace", [False, True])
def test_an_error_at_any_step_leaves_what_was(tmp_path, monkeypatch, replace):
    path, failed = tmp_path / "x", 0
    with monkeypatch.context() as patch:
        count = steps(patch, lambda n: None)
        put(path, OLD)
    for bad in range(1, count[0] + 1):
        path.unlink()
        if replace:
            path.write_bytes(OLD)

        def fail(n, bad=bad):
            if n == bad:
                raise OSError(errno.EIO, "the disk")

        with monkeypatch.context() as patch:
            steps(patch, fail)
            told = False
            try:
                put(path, NEW, replace)
            except OSError:
                told = True
                failed += 1
        there = path.read_bytes() if path.exists() else None
        # After a failed save of a new name there is none; of an old one, the file is whole.
        assert there == (None if told else NEW) or (replace and there in (OLD, NEW))
        if not path.exists():
            path.write_bytes(OLD)
    assert failed >= 3


@pytest.mark.parametrize("replace", [False, True])
def test_a_process_that_ends_at_any_step_leaves_the_old_or_the_new(tmp_path, monkeypatch, replace):
    with monkeypatch.context() as patch:
        count = steps(patch, lambda n: None)
        put(tmp_path / "first", OLD)
    seen = set()
    for last in range(1, count[0] + 2):
        directory = tmp_path / str(last)
        directory.mkdir()
        path = directory / "x"
        if replace:
            path.write_bytes(OLD)

        def write(path=path, last=last):
            steps(monkeypatch, lambda n: os._exit(9) if n == last else None)
            put(path, NEW, replace)

        assert code(fork(write)) in (0, 9)
        there = path.read_bytes() if path.exists() else None
        assert there in (OLD if replace else None, NEW)
        seen.add(there)
        # The next one to write clears up.
        put(path, NEW, replace=True)
        assert path.read_bytes() == NEW
        assert not hidden(directory)
    assert seen == {OLD if replace else None, NEW}


def test_what_another_process_is_writing_is_left_alone(tmp_path):
    path = tmp_path / "x"
    with atomic.open_atomically(path, should_replace=True) as slow:
        slow.write(OLD)
        put(path, NEW)
        assert len(hidden(tmp_path)) == 1
    assert path.read_bytes() == OLD
    assert not hidden(tmp_path)


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP])
def test_where_there_are_no_links(tmp_path, monkeypatch, code):
    def link(*args, **kwargs):
        raise OSError(code, "no links here")

    monkeypatch.setattr(os, "link", link)
    put(tmp_path / "x", OLD)
    assert (tmp_path / "x").read_bytes() == OLD
    with pytest.raises(FileExistsError):
        put(tmp_path / "x", NEW)
    assert (tmp_path / "x").read_bytes() == OLD
    assert not hidden(tmp_path)


def test_a_body_that_fails_leaves_nothing(tmp_path):
    with (
        pytest.raises(ZeroDivisionError),
        atomic.open_atomically(tmp_path / "x", should_replace=False) as file,
    ):
        file.write(NEW)
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_numbers_are_ordered_as_numbers(tmp_path):
    for name in ("ckpt-9.npz", "ckpt-10.npz", "ckpt-2.npz", "ckpt-011.npz", "ckpt-x.npz"):
        (tmp_path / name).touch()
    for name in (".ckpt-99.npz.part", "ckpt-99.npz.part", "other-7.npz", "ckpt-98", "ckpt--1.npz"):
        (tmp_path / name).touch()
    assert list(files.list_numbered_paths(tmp_path, "ckpt")) == [2, 9, 10]
    assert latest_checkpoint(tmp_path, "ckpt") == str(tmp_path / "ckpt-10.npz")
    assert latest_checkpoint(tmp_path, "other") == str(tmp_path / "other-7.npz")
    assert latest_checkpoint(tmp_path, "none") is None


def test_several_names_are_not_guessed_between(tmp_path):
    (tmp_path / "a-1.npz").touch()
    assert latest_checkpoint(tmp_path) == str(tmp_path / "a-1.npz")
    (tmp_path / "b-2.npz").touch()
    with pytest.raises(CheckpointError, match=r"\['a', 'b'\]"):
        latest_checkpoint(tmp_path)


def test_what_is_no_directory_is_told_with_call_and_argument():
    text = r"^latest_checkpoint: checkpoint_dir must be a str or a path, not 3 \(int\)\.$"
    with pytest.raises(TypeError, match=text):
        latest_checkpoint(3)


def test_a_current_directory_that_is_gone_is_told(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    checkpoint = ms.Checkpoint(v=ms.Variable(1.0))
    with pytest.raises(FileNotFoundError, match=r"save: The current directory .* absolute path"):
        checkpoint.save("run/ckpt")
    assert checkpoint.save(tmp_path / "ckpt") == str(tmp_path / "ckpt-1.npz")


def test_no_directory_is_no_checkpoint(tmp_path):
    assert latest_checkpoint(tmp_path / "none") is None
    shutil.rmtree(tmp_path)
    assert files.list_numbered_paths(tmp_path, "x") == {}


def test_left_overs_of_other_numbers_go_and_what_is_no_file_stays(tmp_path):
    for name in ("ckpt-7", "ckpt-9"):
        (tmp_path / f".{name}.npz.abc.part").touch()
    (tmp_path / ".other-7.npz.abc.part").touch()
    os.mkfifo(tmp_path / ".ckpt-8.npz.abc.part")
    (tmp_path / ".ckpt-6.npz.abc.part").mkdir()
    put(tmp_path / "ckpt-9.npz")
    assert sorted(hidden(tmp_path)) == [
        ".ckpt-6.npz.abc.part",
        ".ckpt-8.npz.abc.part",
        ".other-7.npz.abc.part",
    ]


def test_a_link_that_leads_nowhere_is_not_a_checkpoint(tmp_path):
    v = ms.Variable(1.0)
    path = ms.Checkpoint(v=v).save(tmp_path / "ckpt")
    (tmp_path / "ckpt-2.npz").symlink_to(tmp_path / "gone")
    assert latest_checkpoint(tmp_path) == path
    manager = ms.CheckpointManager(ms.Checkpoint(v=v), tmp_path, max_to_keep=None)
    assert manager.checkpoints == [path]
    assert manager.restore_or_initialize() == path
    assert manager.save() == str(tmp_path / "ckpt-3.npz")


@pytest.mark.parametrize("below", [".", "deeper"])
def test_a_directory_that_is_a_link_to_nowhere_is_no_other_job(tmp_path, below):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(NotADirectoryError, match=r"a link that leads nowhere: .*ckpt-1.npz was"):
        ms.Checkpoint(v=ms.Variable(1.0)).save(tmp_path / "link" / below / "ckpt")


def test_the_newest_is_named_without_a_look_into_it(tmp_path):
    v = ms.Variable(1.0)
    checkpoint = ms.Checkpoint(v=v)
    paths = [checkpoint.save(tmp_path / "ckpt") for _ in range(2)]
    (tmp_path / "ckpt-2.npz").write_bytes(b"torn")
    assert latest_checkpoint(tmp_path) == paths[1]
    with pytest.raises(CheckpointError):
        checkpoint.restore(paths[1])
    manager = ms.CheckpointManager(checkpoint, tmp_path, max_to_keep=None)
    assert manager.restore_or_initialize() == paths[0]

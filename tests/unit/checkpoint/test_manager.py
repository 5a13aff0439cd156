"""The newest few checkpoints of a directory."""

from __future__ import annotations

import json

import pytest

import mpistrat as ms
from mpistrat.checkpoint import format
from mpistrat.checkpoint import manager as manager_module
from mpistrat.testing import run_ranks

SIZES = pytest.mark.parametrize("size", [1, 2, 3])


def made(directory, keep=2, **more):
    with ms.MirroredStrategy().scope():
        v = ms.Variable(0)
    return v, ms.CheckpointManager(ms.Checkpoint(v=v), directory, keep, **more)


def names(manager):
    return [path.rpartition("/")[2] for path in manager.checkpoints]


def there(directory):
    return sorted(path.name for path in directory.iterdir() if path.name != "job.json")


@SIZES
@pytest.mark.parametrize("keep", [1, 2, 3, None])
def test_the_oldest_go(size, keep, tmp_path):
    def program(comm):
        v, manager = made(tmp_path, keep)
        assert manager.latest_checkpoint is None
        for _ in range(4):
            v.assign_add(1)
            assert manager.save() == manager.latest_checkpoint
        # One that is made later sees those that are there, and continues.
        w, later = made(tmp_path, keep)
        assert names(later) == names(manager)
        assert later.restore_or_initialize() == manager.latest_checkpoint
        assert w.numpy() == 4
        later.save()
        return names(manager), names(later)

    expected = [f"ckpt-{n}.npz" for n in range(1, 6)]
    for before, after in run_ranks(program, size):
        assert before == expected[:4][-(keep or 4) :]
        assert after == expected[-(keep or 5) :]
    assert there(tmp_path) == after


def test_files_of_others_are_left_alone(tmp_path):
    for name in ("ckpt-x.npz", "other-1.npz", "ckpt-1.txt", "data.npz"):
        (tmp_path / name).touch()

    def program(comm):
        _, manager = made(tmp_path, 1)
        for _ in range(3):
            manager.save()
        return names(manager)

    assert run_ranks(program, 2) == [["ckpt-3.npz"]] * 2
    assert there(tmp_path) == sorted(
        ["ckpt-x.npz", "other-1.npz", "ckpt-1.txt", "data.npz", "ckpt-3.npz"]
    )


def test_numbers_of_the_program(tmp_path):
    def program(comm):
        v, manager = made(tmp_path, checkpoint_name="step")
        assert manager.save(checkpoint_number=100).endswith("step-100.npz")
        v.assign(5)
        assert manager.save(100).endswith("step-100.npz")  # the same step once more
        with pytest.raises(ValueError, match=r"number 99 is not the newest: .* has step-100"):
            manager.save(99)
        manager.save(ms.Variable(200))
        for bad in (-1, 1.5, True, "7", 10**18):
            with pytest.raises(ValueError, match="checkpoint_number must be an integer"):
                manager.save(bad)
        v.assign(0)
        manager.checkpoint.restore(manager.checkpoints[0])
        return names(manager), int(v.numpy()), manager.checkpoint.save_counter

    assert run_ranks(program, 2) == [(["step-100.npz", "step-200.npz"], 5, 100)] * 2


@SIZES
def test_damage_is_passed_over_and_told(size, tmp_path, capfd):
    def save(comm):
        v, manager = made(tmp_path, None)
        for _ in range(3):
            v.assign_add(1)
            manager.save()

    def restore(comm):
        v, manager = made(tmp_path, None)
        return manager.restore_or_initialize().rpartition("/")[2], int(v.numpy())

    run_ranks(save, 1)
    (tmp_path / "ckpt-3.npz").write_bytes(b"")
    assert run_ranks(restore, size) == [("ckpt-2.npz", 2)] * size
    said = capfd.readouterr().err
    assert said.count("ckpt-2.npz was restored, because newer ones cannot be read") == 1
    assert "ckpt-3.npz is damaged" in said


@SIZES
def test_damaged_ones_take_no_place_of_good_ones(size, tmp_path):
    def save(comm):
        _, manager = made(tmp_path, None)
        for _ in range(4):
            manager.save()

    def go_on(comm):
        _, manager = made(tmp_path, 2)
        assert manager.restore_or_initialize().endswith("ckpt-2.npz")
        found = []
        for _ in range(3):
            manager.save()
            found.append(names(manager))
        return found

    run_ranks(save, 1)
    for number in (3, 4):
        (tmp_path / f"ckpt-{number}.npz").write_bytes(b"")
    left = [[2, 3, 4, 5], [5, 6], [6, 7]]
    wanted = [[f"ckpt-{number}.npz" for number in each] for each in left]
    assert run_ranks(go_on, size) == [wanted] * size
    assert there(tmp_path) == wanted[-1]


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), MemoryError("too little")])
def test_what_is_no_damage_is_not_passed_over(error, tmp_path, monkeypatch):
    def read(*args):
        raise error

    def save(comm):
        _, manager = made(tmp_path, None)
        manager.save()
        manager.save()

    def restore(comm):
        v, manager = made(tmp_path, None)
        v.assign(7)
        with pytest.raises(type(error)):
            manager.restore_or_initialize()
        return int(v.numpy())

    run_ranks(save, 2)
    monkeypatch.setattr(format, "_read_array", read)
    assert run_ranks(restore, 2) == [7, 7]
    assert there(tmp_path) == ["ckpt-1.npz", "ckpt-2.npz"]


def test_another_format_is_not_passed_over(tmp_path, monkeypatch):
    def save(comm):
        made(tmp_path, None)[1].save()

    def restore(comm):
        with pytest.raises(ms.DataError, match="of format 2, and this version of mpistrat reads"):
            made(tmp_path, None)[1].restore_or_initialize()

    run_ranks(save, 1)
    with monkeypatch.context() as patch:
        patch.setattr(format, "FORMAT_NUMBER", 2)
        run_ranks(save, 1)
    run_ranks(restore, 2)


def test_a_listing_that_fails_after_the_save_fails_nothing(tmp_path, monkeypatch):
    real, calls = manager_module.files.list_numbered_paths, []

    def saved(directory, name):
        calls.append(1)
        if len(calls) == 3:
            raise OSError(116, "Stale file handle")
        return real(directory, name)

    monkeypatch.setattr(manager_module.files, "list_numbered_paths", saved)

    def program(comm):
        _, manager = made(tmp_path)
        return manager.save(), manager.checkpoint.save_counter, names(manager)

    path = str(tmp_path / "ckpt-1.npz")
    assert run_ranks(program, 2) == [(path, 1, ["ckpt-1.npz"])] * 2


@SIZES
def test_nothing_begins_anew_where_all_are_damaged(size, tmp_path):
    for number in (1, 2):
        (tmp_path / f"ckpt-{number}.npz").write_bytes(b"hello")

    def program(comm):
        _, manager = made(tmp_path)
        with pytest.raises(ms.CheckpointError) as error:
            manager.restore_or_initialize()
        return str(error.value)

    for text in run_ranks(program, size):
        assert "none of the 2 checkpoints" in text
        assert "ckpt-1.npz is damaged" in text
        assert "ckpt-2.npz is damaged" in text
    assert there(tmp_path) == ["ckpt-1.npz", "ckpt-2.npz"]


def test_another_model_is_no_damage(tmp_path):
    def program(comm):
        _, manager = made(tmp_path)
        manager.save()
        with ms.MirroredStrategy().scope():
            other = ms.Checkpoint(w=ms.Variable(0))
        with pytest.raises(ms.StructureError, match="'w' is not in the file"):
            ms.CheckpointManager(other, tmp_path, 1).restore_or_initialize()

    run_ranks(program, 2)


def test_init_fn_is_called_where_there_is_nothing(tmp_path):
    def program(comm):
        called = []
        v, manager = made(tmp_path, init_fn=lambda: called.append(v.assign(3)))
        assert manager.restore_or_initialize() is None
        manager.save()
        assert manager.restore_or_initialize() == manager.latest_checkpoint
        return len(called), int(v.numpy())

    assert run_ranks(program, 2) == [(1, 3)] * 2


@SIZES
def test_an_init_fn_that_fails_on_one_rank_fails_on_all(size, tmp_path):
    def program(comm):
        def fails():
            if comm.rank == size - 1:
                raise ValueError("no weights")

        _, manager = made(tmp_path, init_fn=fails)
        with pytest.raises(ValueError, match="no weights"):
            manager.restore_or_initialize()
        manager._init_fn = lambda: ms.once(int)  # it may communicate
        assert manager.restore_or_initialize() is None

    run_ranks(program, size)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"keep": 0}, ValueError),
        ({"keep": -1}, ValueError),
        ({"keep": True}, ValueError),
        ({"keep": 1.5}, ValueError),
        ({"checkpoint_name": ""}, ValueError),
        ({"checkpoint_name": "a/b"}, ValueError),
        ({"checkpoint_name": ".x"}, ValueError),
        ({"init_fn": 3}, TypeError),
        ({"directory": 3}, TypeError),
    ],
)
def test_arguments(arguments, error, tmp_path):
    def program(comm):
        with pytest.raises(error):
            made(**{"directory": tmp_path, **arguments})

    run_ranks(program, 2)


def test_a_directory_that_is_none_is_told_with_call_and_argument():
    text = r"^CheckpointManager: directory must be a str or a path, not 3 \(int\)\.$"
    with pytest.raises(TypeError, match=text):
        ms.CheckpointManager(ms.Checkpoint(v=ms.Variable(0)), 3, 2)


def test_a_checkpoint_is_wanted(tmp_path):
    with pytest.raises(TypeError, match="checkpoint must be a Checkpoint, got"):
        ms.CheckpointManager(ms.Variable(0), tmp_path, 1)


def test_other_directories_on_other_ranks(tmp_path):
    def program(comm):
        with pytest.raises(ms.LockstepError, match="must name the same path, as replica 0 writes"):
            made(tmp_path / str(comm.rank))

    run_ranks(program, 2)


def test_only_replica_0_looks(tmp_path, monkeypatch):
    """The others may be on nodes that do not see the directory."""
    looked = []
    real = manager_module.files.list_numbered_paths

    def saved(directory, name):
        looked.append(1)
        return real(directory, name)

    monkeypatch.setattr(manager_module.files, "list_numbered_paths", saved)
    assert len(run_ranks(lambda comm: made(tmp_path)[1].checkpoints, 3)) == 3
    assert len(looked) == 1


def test_the_claim_tells_which_rank_the_others_wait_for(tmp_path):
    waited = [5.0, 0.5, 3.0], [6.0, 4.5, 3.25]  # seconds, since the job began

    def program(comm):
        with ms.MirroredStrategy().scope():
            manager = ms.CheckpointManager(ms.Checkpoint(v=ms.Variable(0)), tmp_path, 2)
        found = []
        for seconds in waited:
            manager._lockstep.session.board.spent = lambda now=seconds: (now[comm.rank], 0.0)
            manager.save()
            if manager._claim is not None:
                told = json.loads((tmp_path / "job.json").read_text())
                found.append((told["slowest_rank"], told["seconds_behind"]))
        return found

    assert run_ranks(program, 3)[0] == [(1, 4.5), (2, 3.75)]

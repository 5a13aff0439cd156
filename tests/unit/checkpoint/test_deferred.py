"""An empty checkpoint that has restored gives values to what is attached to it later."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.checkpoint import sharded
from mpistrat.testing import run_ranks


def saved(directory):
    """Save a model, an optimizer, a number and a generator; return the path."""
    with ms.get_strategy().scope():
        w, b = ms.Variable(np.arange(3.0), name="w"), ms.Variable(2.0, name="b")
        momentum = ms.optim.SGD(0.5, momentum=0.9)
        momentum.build([w, b])
    ms.get_strategy().extended.update(w, lambda w: w.assign(w.read_value() + 1))
    tree = ms.Checkpoint(model={"w": w, "b": b}, optimizer=momentum, step=7, rng=drawn(3))
    return tree.save(directory / "ckpt")


def drawn(count):
    generator = np.random.default_rng(1)
    generator.random(count)
    return generator


def on_ranks(size, program):
    """Run a program in the scope of a strategy of that many ranks."""

    def ranks(comm):
        with ms.MirroredStrategy().scope():
            return program(comm)

    return run_ranks(ranks, size)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("large", [False, True])
def test_what_is_attached_later_has_the_values_of_the_file(size, large, tmp_path, monkeypatch):
    monkeypatch.setattr(
        sharded, "MIN_DIRECTORY_NBYTES", 1 if large else sharded.MIN_DIRECTORY_NBYTES
    )

    def program(comm):
        path = saved(tmp_path)
        assert path.endswith(".arrays") is large
        later = ms.Checkpoint()
        status = later.restore(path)
        assert (later.save_counter, status.matched, status.missing) == (1, (), ())
        assert {"model/w", "model/b", "step", "rng"} < set(status.unused)
        w, b = ms.Variable(np.zeros(3), name="w"), ms.Variable(0.0, name="b")
        later.model = {"w": w, "b": b}
        later.step, later.rng = 0, np.random.default_rng(5)
        optimizer = ms.optim.SGD(0.5, momentum=0.9)
        optimizer.build([w, b])
        with pytest.raises(AssertionError, match="also has"):
            status.assert_consumed()
        later.optimizer = optimizer
        assert status.assert_consumed() is status
        later.step += 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            later.save(tmp_path / "next")
        return w.numpy().tolist(), float(b.numpy()), later.step, later.rng.random()

    want = ([1.0, 2.0, 3.0], 2.0, 8, drawn(3).random())
    assert on_ranks(size, program) == [want] * size


def test_a_manager_defers_too(tmp_path):
    def program(comm):
        ms.CheckpointManager(ms.Checkpoint(v=ms.Variable(4.0)), tmp_path, 3).save()
        later = ms.Checkpoint()
        assert ms.CheckpointManager(later, tmp_path, 3).restore_or_initialize()
        later.v = ms.Variable(0.0)
        return float(later.v.numpy())

    assert on_ranks(2, program) == [4.0] * 2


@pytest.mark.parametrize("size", [1, 2])
def test_what_does_not_fit_is_not_attached(size, tmp_path):
    def program(comm):
        path = ms.Checkpoint(v=ms.Variable(np.ones(3)), n=1).save(tmp_path / "c")
        later = ms.Checkpoint()
        status = later.restore(path)
        with pytest.raises(ms.StructureError, match=r"'v' is float64\[3\] there and float64\[4\]"):
            later.v = ms.Variable(np.zeros(4))
        assert not hasattr(later, "v")
        later.v = ms.Variable(np.zeros(3))
        later.other = ms.Variable(np.zeros(3))  # of which the file has nothing
        assert (status.missing, status.expect_partial().unused) == (("other",), ("n",))
        with pytest.raises(AssertionError, match="does not have other"):
            status.assert_existing_objects_matched()
        return later.v.numpy().tolist(), later.other.numpy().tolist()

    assert on_ranks(size, program) == [([1.0] * 3, [0.0] * 3)] * size


def test_a_tree_of_which_the_file_has_a_part(tmp_path):
    def program(comm):
        path = ms.Checkpoint(m=[ms.Variable(1.0), ms.Variable(2.0)]).save(tmp_path / "c")
        later = ms.Checkpoint()
        status = later.restore(path)
        a, b, c = (ms.Variable(0.0) for _ in range(3))
        later.m = [a]
        a.assign(5.0)  # trained meanwhile: it is not restored again
        later.m = [a, b, c]
        assert (status.matched, status.missing) == (("m/0", "m/1"), ("m/2",))
        return [float(v.numpy()) for v in (a, b, c)]

    assert on_ranks(2, program) == [[5.0, 2.0, 0.0]] * 2


def test_ranks_that_attach_different_trees_are_told(tmp_path):
    def program(comm):
        path = ms.Checkpoint(a=ms.Variable(1.0), b=ms.Variable(1.0)).save(tmp_path / "c")
        later, v = ms.Checkpoint(), ms.Variable(0.0)
        later.restore(path).expect_partial()
        with pytest.raises(ms.LockstepError, match=r"Checkpoint\.restore"):
            setattr(later, "ab"[comm.rank], v)
        assert not later._trees()

    on_ranks(2, program)


def test_replica_code_cannot_attach(tmp_path):
    def program(comm):
        path = ms.Checkpoint(v=ms.Variable(1.0)).save(tmp_path / "c")
        later, v = ms.Checkpoint(), ms.Variable(0.0)
        later.restore(path).expect_partial()
        with pytest.raises(ms.ContextError):
            ms.get_strategy().run(lambda: setattr(later, "v", v))
        later.v = v
        return float(v.numpy())

    assert on_ranks(2, program) == [1.0] * 2


@pytest.mark.parametrize("call", ["save", "write"])
def test_the_next_save_names_what_was_never_attached(call, tmp_path):
    def program(comm):
        path = ms.Checkpoint(v=ms.Variable(1.0), lost=ms.Variable(2.0)).save(tmp_path / "c")
        later = ms.Checkpoint()
        later.restore(path)
        later.v = ms.Variable(0.0)
        text = r"c-1\.npz has 'lost', and nothing was attached"
        with pytest.warns(UserWarning, match=text) as told:
            getattr(later, call)(tmp_path / "d")
        assert len(told) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            getattr(later, call)(tmp_path / "d")  # it is told once

    on_ranks(1, program)


def test_a_warning_that_is_an_error_is_one_on_all_ranks(tmp_path):
    def program(comm):
        path = ms.Checkpoint(v=ms.Variable(1.0), lost=ms.Variable(2.0)).save(tmp_path / "c")
        later = ms.Checkpoint()
        later.restore(path)
        later.v = ms.Variable(0.0)
        with pytest.raises(UserWarning if comm.rank == 0 else ms.RemoteError, match="'lost'"):
            later.save(tmp_path / "d")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_ranks(2, program)
    assert not list(tmp_path.glob("d-*"))


def test_a_partial_restore_is_expected_on_request(tmp_path):
    def program(comm):
        path = ms.Checkpoint(v=ms.Variable(1.0), lost=ms.Variable(2.0)).save(tmp_path / "c")
        later = ms.Checkpoint()
        status = later.restore(path)
        assert status.expect_partial() is status
        later.v = ms.Variable(0.0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            later.save(tmp_path / "d")

    on_ranks(1, program)


END = """
import mpistrat as ms
v = ms.Variable(1.0)
path = ms.Checkpoint(v=v, lost=ms.Variable(2.0)).save("c")
later = ms.Checkpoint()
status = later.restore(path)
later.v = v
{}
"""


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("", 1),
        ("del later", 1),
        ("later.lost = ms.Variable(0.0)", 0),
        ("status.expect_partial()", 0),
        ("later.restore(path, partial=True)", 0),
        ("later.save('d')", 1),
        ("raise KeyError", 0),
    ],
)
def test_the_end_of_the_program_names_it(more, named, tmp_path):
    command = [sys.executable, "-c", END.format(more)]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True)
    assert (done.stderr.count("'lost'")) == named, done.stderr
    assert done.returncode == ("raise" in more)


def test_a_checkpoint_that_is_not_empty_says_to_attach_before(tmp_path):
    path = ms.Checkpoint(a=1, b=2).save(tmp_path / "c")
    with pytest.raises(ms.StructureError, match="Attach all variables before restore") as caught:
        ms.Checkpoint(a=1).restore(path)
    assert "another shape" not in str(caught.value)


@pytest.mark.parametrize("partial", [False, True])
def test_another_shape_says_what_helps(partial, tmp_path):
    path = ms.Checkpoint(a=ms.Variable(np.ones(3)), b=1).save(tmp_path / "c")
    large = ms.Variable(np.ones(4))
    with pytest.raises(
        ms.StructureError, match=r"leave it out .*, or rename it, and call"
    ) as caught:
        ms.Checkpoint(a=large, b=0).restore(path, partial=partial)
    assert "only one side" not in str(caught.value)
    ms.Checkpoint(b=0).restore(path, partial=True)
    ms.Checkpoint(large=large, b=0).restore(path, partial=True)


def test_damage_is_told_when_an_empty_checkpoint_restores(tmp_path):
    path = tmp_path / "c-1.npz"
    path.write_bytes(b"no file of ours")
    with pytest.raises(ms.CheckpointError):
        ms.Checkpoint().restore(path)
    with pytest.raises(FileNotFoundError):
        ms.Checkpoint().restore(tmp_path / "d-1.npz")
    assert ms.Checkpoint().restore(None).path is None


@pytest.mark.parametrize("size", [1, 2])
def test_an_optimizer_is_attached_after_its_variables(tmp_path, size):
    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        with strategy.scope():
            w = ms.Variable(np.zeros(2), name="w")
        optimizer = ms.optim.Adam(0.1)
        optimizer.build([w])
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(2), w)]) and None)
        path = ms.Checkpoint(m={"w": w}, o=optimizer).save(tmp_path / f"{size}")
        moment = optimizer.slot(w, "m").numpy()
        with strategy.scope():
            other = ms.Variable(np.zeros(2), name="w")
            checkpoint = ms.Checkpoint()
        fresh = ms.optim.Adam(0.1)
        fresh.build([other])
        status = checkpoint.restore(path)
        with pytest.raises(ms.StructureError, match=r"before its variables.*'?o/slots/m/w/m"):
            checkpoint.o = fresh
        checkpoint.m = {"w": other}
        checkpoint.o = fresh
        status.assert_consumed()
        return fresh.slot(other, "m").numpy().tolist() == moment.tolist()

    assert run_ranks(rank, size) == [True] * size

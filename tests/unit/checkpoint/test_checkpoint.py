"""All ranks save and restore together; what they are told is the same on each."""

from __future__ import annotations

import contextlib
import errno
import os
import warnings

import ml_dtypes
import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat.checkpoint import format, saving, sharded
from mpistrat.testing import run_ranks

SIZES = [1, 2, 3, 4]
KINDS = ms.VariableAggregation
ON_READ = ms.VariableSynchronization.ON_READ
STRATEGIES = [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy]


def made(strategy, start=0.0):
    """A checkpoint of variables of all kinds."""
    with strategy.scope():
        return ms.Checkpoint(
            w=ms.Variable(np.full((3, 5), start), name="w"),
            counts={
                "seen": ms.Variable(0, synchronization=ON_READ, aggregation=KINDS.SUM),
                "loss": ms.Variable(start, synchronization=ON_READ, aggregation=KINDS.MEAN),
                "first": ms.Variable(
                    start, synchronization=ON_READ, aggregation=KINDS.ONLY_FIRST_REPLICA
                ),
            },
            empty=ms.Variable(np.zeros((0, 2), np.float32)),
        )


def in_scope(strategy, call):
    def called(*args):
        with strategy.scope():
            return call(*args)

    return called


def trained(strategy, checkpoint):
    """Write something of one's own to each; return what cross-replica code reads."""

    def step():
        me = ms.get_replica_context().replica_id_in_sync_group
        checkpoint.w.assign_add(np.arange(15.0).reshape(3, 5))
        checkpoint.counts["seen"].assign_add(5 + me)
        checkpoint.counts["loss"].assign(2.0)
        checkpoint.counts["first"].assign(me + 0.5)

    strategy.run(step)
    return read(strategy, checkpoint)


def read(strategy, checkpoint):
    with strategy.scope():
        return {name: v.numpy() for name, v in checkpoint.variables().items()}


@every("strategy_class", STRATEGIES)
@every("restored_on", SIZES)
@every("saved_on", [1, 3])
def test_what_was_saved_is_what_reads(saved_on, restored_on, strategy_class, tmp_path, kept):
    def save(comm):
        strategy = strategy_class()
        checkpoint = made(strategy)
        wanted = trained(strategy, checkpoint)
        path = checkpoint.save(tmp_path / "run" / "ckpt")
        assert path == str(tmp_path / "run" / "ckpt-1.npz")
        assert checkpoint.save_counter == 1
        return wanted

    def restore(comm):
        strategy = strategy_class()
        checkpoint = made(strategy, start=-1.0)
        status = checkpoint.restore(tmp_path / "run" / "ckpt-1")
        assert status.assert_consumed() is status
        assert status.path == str(tmp_path / "run" / "ckpt-1.npz")
        assert checkpoint.save_counter == 1
        return read(strategy, checkpoint)

    wanted = run_ranks(save, saved_on)[0]
    # 3 replicas: 5 + 6 + 7, which three equal parts would not give for every number.
    assert wanted["counts/seen"] == sum(range(5, 5 + saved_on))
    assert wanted["counts/first"] == 0.5
    for found in run_ranks(restore, restored_on):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert found[name].dtype == value.dtype
            np.testing.assert_array_equal(found[name], value)


def numbers(dtype):
    """Numbers of all sizes, and those at the edges."""
    rng = np.random.default_rng(7)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        edges = [info.min, info.min + 1, 0, 1, 2, 3, 7, info.max - 1, info.max]
        drawn = rng.integers(info.min, info.max, 40, dtype, endpoint=True)
        return np.concatenate([np.array(edges, dtype), drawn])
    if dtype.kind == "c":
        parts = numbers(dtype.type(0).real.dtype)
        made = np.empty((2, len(parts)), dtype)
        made.real, made.imag = parts, [np.roll(parts, 1), parts[::-1]]
        return made
    info = ml_dtypes.finfo(dtype)
    edges = [0.0, -0.0, 1.0, 0.1, -7.0, info.max, info.min, info.tiny, info.smallest_subnormal]
    with np.errstate(all="ignore"):
        drawn = [(rng.normal(size=40) * scale).astype(dtype) for scale in (1.0, 1e-30, 1e4)]
    return np.concatenate([np.array([*edges, np.inf, -np.inf, np.nan], dtype), *drawn])


def bits(array):
    if array.dtype.char in "gG":  # bytes of padding say nothing
        return repr(array.tolist())
    return array.tobytes()


def part_of(saved, rank, size):
    """What replica `rank` holds of a sum, by Python's integers or NumPy's floats."""
    if saved.dtype.kind in "iu":
        halves = [divmod(abs(x), size) for x in saved.tolist()]
        parts = [quotient + (rank < rest) for quotient, rest in halves]
        return np.array(parts, object) * np.where(saved < 0, -1, 1)
    with np.errstate(all="ignore"):
        part = (saved / size).astype(saved.dtype)
        wide = part.astype(np.float32) if saved.dtype.itemsize == 2 else part
        total = wide.copy()
        for _ in range(size - 1):
            total = total + wide
        exact = (total.astype(saved.dtype) == saved) | ~np.isfinite(saved)
    parts = np.where(exact, part, saved if rank == 0 else np.zeros_like(saved))
    return parts.astype(np.longdouble)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_a_sum_that_was_saved_reads_the_same_to_the_last_bit(size, tmp_path):
    dtypes = [np.dtype(code) for code in "bBhHiIlLefdgFDG"] + [np.dtype(ml_dtypes.bfloat16)]
    wanted = {f"{x.name}-{x.char}": numbers(x) for x in dtypes}
    wanted["large"] = np.random.default_rng(3).normal(size=9000)

    def save(comm):
        ms.Checkpoint(v={k: ms.Variable(x) for k, x in wanted.items()}).save(tmp_path / "x")

    def restore(comm):
        strategy = ms.MirroredStrategy()
        of_sums = {"synchronization": ON_READ, "aggregation": KINDS.SUM}
        with strategy.scope():
            made = {k: ms.Variable(np.ones_like(x), **of_sums) for k, x in wanted.items()}
        ms.Checkpoint(v=made).restore(tmp_path / "x-1")
        for name, v in made.items():
            assert bits(v.numpy()) == bits(wanted[name]), name
            if v.dtype.kind != "c":
                part = part_of(wanted[name], comm.rank, size)
                np.testing.assert_array_equal(v._component().astype(part.dtype), part, name)

    run_ranks(save, 1)
    run_ranks(restore, size)


def test_numbers_go_on(tmp_path):
    def program(comm):
        checkpoint = made(ms.MirroredStrategy())
        first = [checkpoint.save(tmp_path / "x") for _ in range(2)]
        anew = made(ms.MirroredStrategy())
        # Nothing was restored, and still nothing is written over.
        third = anew.save(tmp_path / "x")
        return [path.rpartition("/")[2] for path in (*first, third)], anew.save_counter

    for names, counter in run_ranks(program, 2):
        assert names == ["x-1.npz", "x-2.npz", "x-3.npz"]
        assert counter == 3


def test_write_and_read_count_nothing(tmp_path):
    def program(comm):
        checkpoint = made(ms.MirroredStrategy())
        path = checkpoint.write(tmp_path / "best")
        again = checkpoint.write(tmp_path / "best.npz")
        checkpoint.w.assign(np.ones((3, 5)))
        checkpoint.read(path).assert_consumed()
        return path, again, checkpoint.save_counter, checkpoint.w.numpy().sum()

    for path, again, counter, total in run_ranks(program, 2):
        assert path == again == str(tmp_path / "best.npz")
        assert (counter, total) == (0, 0.0)


def test_none_restores_nothing():
    def program(comm):
        checkpoint = made(ms.MirroredStrategy(), start=4.0)
        status = checkpoint.restore(None)
        with pytest.raises(AssertionError, match="there was no checkpoint"):
            status.assert_consumed()
        assert status.expect_partial() is status
        return checkpoint.w.numpy()[0, 0]

    assert run_ranks(program, 2) == [4.0, 4.0]


def fails(program, size, error):
    """Run a program that raises on every rank; return the texts."""

    def guarded(comm):
        with pytest.raises(error) as caught:
            program(comm)
        # The ranks are still together.
        total = ms.MirroredStrategy().reduce("SUM", ms.MirroredStrategy().run(lambda: 1), axis=None)
        assert total == size
        return str(caught.value)

    return run_ranks(guarded, size)


@pytest.mark.parametrize("size", [1, 3])
def test_another_model_is_told_what_differs_and_nothing_is_written(size, tmp_path):
    def program(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            a, b, c = ms.Variable([1.0, 2.0]), ms.Variable(3), ms.Variable(np.float32(4))
            path = ms.Checkpoint(a=a, b=b, c=c).save(tmp_path / "x")
            other = ms.Checkpoint(
                a=ms.Variable([0.0, 0.0, 0.0]), b=ms.Variable(0.0), d=ms.Variable(9), c=c
            )
        c.assign(0)
        try:
            other.restore(path)
        finally:
            assert c.numpy() == 0

    for text in fails(program, size, ms.StructureError):
        assert "'a' is float64[2] there and float64[3] here" in text
        assert "'b' is int64[] there and float64[] here" in text
        assert "'d' is not in the file" in text
        assert "restore(path, partial=True)" in text


def test_a_part_may_be_restored(tmp_path):
    def program(comm):
        with ms.MirroredStrategy().scope():
            a, b = ms.Variable(1.0), ms.Variable(2.0)
            path = ms.Checkpoint(a=a, b=b).save(tmp_path / "x")
            other = ms.Checkpoint(b=ms.Variable(0.0), c=ms.Variable(7.0))
        with pytest.raises(ms.StructureError, match="'a' is only in the file"):
            other.restore(path)
        status = other.restore(path, partial=True)
        assert (status.missing, status.unused) == (("c",), ("a",))
        for method in (status.assert_consumed, status.assert_existing_objects_matched):
            with pytest.raises(AssertionError):
                method()
        return float(other.b.numpy()), float(other.c.numpy())

    assert run_ranks(program, 2) == [(2.0, 7.0)] * 2


@pytest.mark.parametrize("size", [1, 2])
def test_damage_is_told_on_all_ranks_and_nothing_is_written(size, tmp_path):
    def program(comm):
        checkpoint = made(ms.MirroredStrategy(), start=1.0)
        path = checkpoint.save(tmp_path / "x")
        checkpoint.w.assign(np.zeros((3, 5)))
        if comm.rank == 0:
            data = bytearray((tmp_path / "x-1.npz").read_bytes())
            data[data.find(np.float64(1).tobytes() * 2)] ^= 1
            (tmp_path / "x-1.npz").write_bytes(data)
        try:
            checkpoint.restore(path)
        finally:
            assert not checkpoint.w.numpy().any()

    for text in fails(program, size, ms.CheckpointError):
        assert "x-1.npz is damaged" in text


def test_a_file_that_is_not_there(tmp_path):
    def program(comm):
        made(ms.MirroredStrategy()).restore(tmp_path / "none")

    for text in fails(program, 2, FileNotFoundError):
        assert "none.npz" in text


def test_a_disk_that_is_full_is_told_on_all_ranks(tmp_path, monkeypatch):
    real = format.write_archive

    def full(file, arrays, counter, metrics):
        if counter == 1:
            return real(file, arrays, counter, metrics)
        file.write(b"x" * 100)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(saving.format, "write_archive", full)

    def program(comm):
        checkpoint = made(ms.MirroredStrategy())
        checkpoint.save(tmp_path / "x")
        try:
            checkpoint.save(tmp_path / "x")
        finally:
            assert checkpoint.save_counter == 1

    for text in fails(program, 2, OSError):
        assert "No space left on device" in text
        assert "x-2.npz was not written; earlier checkpoints are unchanged" in text
    assert [path.name for path in tmp_path.iterdir()] == ["x-1.npz"]
    assert format.read_archive(tmp_path / "x-1.npz", {}).counter == 1


@pytest.mark.skipif(not os.getuid(), reason="root may write anywhere")
def test_a_directory_that_may_not_be_written(tmp_path):
    tmp_path.chmod(0o500)
    for text in fails(lambda comm: made(ms.MirroredStrategy()).save(tmp_path / "x"), 2, OSError):
        assert "Permission denied" in text


def test_a_path_below_a_file(tmp_path):
    (tmp_path / "file").touch()

    def program(comm):
        made(ms.MirroredStrategy()).save(tmp_path / "file" / "x")

    for text in fails(program, 2, OSError):
        assert "Not a directory" in text
        assert "Another job" not in text


def differing(comm, tmp_path):
    made(ms.MirroredStrategy()).save(tmp_path / f"x{comm.rank}")


def other_variables(comm, tmp_path):
    checkpoint = made(ms.MirroredStrategy())
    if comm.rank:
        checkpoint.w2 = checkpoint.w
    checkpoint.save(tmp_path / "x")


def save_and_restore(comm, tmp_path):
    checkpoint = made(ms.MirroredStrategy())
    if comm.rank:
        checkpoint.restore(tmp_path / "x-1")
    else:
        checkpoint.save(tmp_path / "x")


def some_none(comm, tmp_path):
    made(ms.MirroredStrategy()).restore(tmp_path / "x" if comm.rank else None)


@pytest.mark.parametrize("program", [differing, other_variables, save_and_restore, some_none])
def test_ranks_that_differ_are_told_and_nothing_is_written(program, tmp_path):
    errors = (ms.LockstepError, OSError)
    fails(lambda comm: program(comm, tmp_path), 2, errors)
    assert list(tmp_path.iterdir()) == []


def test_replica_code_may_not_save(tmp_path):
    def program(comm):
        strategy = ms.MirroredStrategy()
        checkpoint = made(strategy)
        strategy.run(lambda: checkpoint.save(tmp_path / "x"))

    for text in fails(program, 2, ms.ContextError):
        assert "Checkpoint.save is cross-replica code" in text


def test_the_function_of_update_may_not(tmp_path):
    def program(comm):
        strategy = ms.MirroredStrategy()
        checkpoint = made(strategy)
        with strategy.scope():
            strategy.extended.update(checkpoint.w, lambda v: checkpoint.save(tmp_path / "x"))

    for text in fails(program, 2, ms.ContextError):
        assert "in the function of update" in text


def test_variables_of_several_strategies_are_refused(tmp_path):
    def program(comm):
        with ms.MirroredStrategy().scope():
            a = ms.Variable(0)
        with ms.MultiWorkerMirroredStrategy().scope():
            b = ms.Variable(0)
        ms.Checkpoint(a=a, b=b, c=ms.Variable(0)).save(tmp_path / "x")

    for text in fails(program, 2, ms.StrategyError):
        assert "belong to several strategies: 'a' to MirroredStrategy(2 replicas); 'b' to" in text
        assert "'c'" not in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:Checkpoint.(save|write). on rank")
@every("strategy_class", STRATEGIES)
@every("size", [1, 2, 3])
def test_variables_of_each_rank_alone_are_saved_with_the_others(size, strategy_class, tmp_path):
    """As TensorFlow's multi-worker tutorial does: its epoch is made outside of the scope."""

    def program(comm):
        epoch = ms.Variable(comm.rank + 5, name="epoch")
        with ms.OneDeviceStrategy("cpu").scope():
            step = ms.Variable([comm.rank + 7.0], synchronization=ON_READ)
        strategy = strategy_class()
        with strategy.scope():
            w = ms.Variable([1.0, 2.0])
        checkpoint = ms.Checkpoint(model={"w": w}, epoch=epoch, step=step)
        assert checkpoint.strategy is strategy
        path = checkpoint.save(tmp_path / "x")
        for call in (checkpoint.restore, in_scope(strategy, checkpoint.restore)):
            w.assign([0.0, 0.0])
            epoch.assign(0)
            step.assign([comm.rank + 1.0])
            call(path).assert_consumed()
            assert (epoch.numpy(), step.numpy()) == (5, 7.0)
            assert w.numpy().tolist() == [1.0, 2.0]
        with pytest.raises(ms.ContextError, match="cross-replica code"):
            strategy.run(lambda: checkpoint.save(tmp_path / "x"))
        with ms.OneDeviceStrategy("cpu").scope(), pytest.raises(ms.StrategyError, match="Mixing"):
            checkpoint.save(tmp_path / "x")
        return path

    (path,) = set(run_ranks(program, size))
    with np.load(path) as found:
        assert (found["epoch"], found["step"]) == (5, 7.0)
        assert found["model/w"].tolist() == [1.0, 2.0]


@pytest.mark.filterwarnings("ignore:Checkpoint.(save|write). on rank")
@every("size", [1, 2, 3])
def test_variables_of_each_rank_alone_belong_to_the_scope_they_are_saved_in(size, tmp_path):
    def program(comm):
        strategy = ms.MirroredStrategy()
        v = ms.Variable([comm.rank + 5.0])
        checkpoint = ms.Checkpoint(v=v)
        with strategy.scope():
            manager = ms.CheckpointManager(checkpoint, tmp_path, 2)
            path = manager.save()
            written = checkpoint.write(tmp_path / "other")
            v.assign([0.0])
            assert manager.restore_or_initialize() == path
            assert v.numpy() == 5.0
        v.assign([0.0])
        checkpoint.read(written)  # reading alone is harmless, as each rank may
        return float(v.numpy()[0])

    assert run_ranks(program, size) == [5.0] * size


@pytest.mark.parametrize("own", [np.ones, lambda n: ms.Variable(np.ones(n))])
def test_a_manager_made_outside_of_the_scope_does_not_claim_for_each_rank(own, tmp_path):
    def program(comm):
        strategy = ms.MirroredStrategy()
        manager = ms.CheckpointManager(ms.Checkpoint(v=own(2)), tmp_path, 2)
        wanted = "CheckpointManager: .* has only one of the 2 ranks"
        with strategy.scope(), pytest.raises(ms.StrategyError, match=wanted):
            manager.save()

    run_ranks(program, 2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("made", ["checkpoint", "manager", "both"])
def test_arrays_belong_to_the_scope_in_which_their_checkpoint_was_made(made, tmp_path):
    def program(comm):
        scope, w = ms.MirroredStrategy().scope, np.zeros(2)
        with scope() if made != "manager" else contextlib.nullcontext():
            checkpoint = ms.Checkpoint(w=w)
        with scope() if made != "checkpoint" else contextlib.nullcontext():
            manager = ms.CheckpointManager(checkpoint, tmp_path, 2)
        manager.save()
        w[:] = comm.rank
        checkpoint.restore(manager.latest_checkpoint)
        return w.tolist()

    assert run_ranks(program, 2) == [[0.0, 0.0]] * 2


@pytest.mark.filterwarnings("ignore:Checkpoint.(save|write). on rank")
def test_large_variables_of_each_rank_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(sharded, "MIN_DIRECTORY_NBYTES", 1)

    def program(comm):
        own = ms.Variable(np.arange(1000.0) + comm.rank)
        with ms.MirroredStrategy().scope():
            w = ms.Variable(np.ones(3))
        checkpoint = ms.Checkpoint(own=own, w=w)
        path = checkpoint.save(tmp_path / "x")
        assert path.endswith(".arrays")
        own.assign(np.zeros(1000))
        w.assign(np.zeros(3))
        checkpoint.restore(path)
        assert w.numpy().tolist() == [1.0, 1.0, 1.0]
        return own.numpy()

    for found in run_ranks(program, 3):
        np.testing.assert_array_equal(found, np.arange(1000.0))


class TestValuesThatDifferBetweenRanks:
    """Replica 0's are saved, so a model that each rank trains alone would be lost."""

    def warnings_of(self, size, save, tmp_path):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run_ranks(save, size, tmp_path / "x")
        return [str(warning.message) for warning in caught]

    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_each_is_named_once(self, size, tmp_path):
        def save(comm, prefix):
            model = {"w": np.zeros(3), "b": np.zeros(2), "none": np.zeros(0)}
            with ms.MirroredStrategy().scope():
                checkpoint = ms.Checkpoint(model=model)
            for last in ("w", "w", "b"):
                model[last][-1] += comm.rank == size - 1
                checkpoint.save(prefix)

        texts = self.warnings_of(size, save, tmp_path)
        assert len(texts) == (2 if size > 1 else 0)
        for name, text in zip("wb", texts, strict=False):
            assert text.startswith(
                f"Checkpoint.save: on rank {size - 1} 'model/{name}' differs from rank 0"
            )
            assert "strategy.broadcast" in text
            assert "mpistrat.torch.replicate" in text

    def test_each_is_named_once_for_each_checkpoint(self, tmp_path):
        def save(comm, prefix):
            with ms.MirroredStrategy().scope():
                checkpoint = ms.Checkpoint(w=np.full(3, comm.rank))
            for name in ("a", "b", "a"):
                checkpoint.save(f"{prefix}-{name}")
                checkpoint.write(f"{prefix}-{name}-whole")

        texts = self.warnings_of(2, save, tmp_path)
        calls = [text.partition(": on rank 1 'w' differs from rank 0")[0] for text in texts]
        assert calls == ["Checkpoint.save", "Checkpoint.write"] * 2

    def test_it_is_an_error_on_all_ranks_where_warnings_are(self, tmp_path):
        def save(comm):
            with ms.MirroredStrategy().scope():
                checkpoint = ms.Checkpoint(w=np.full(3, comm.rank))
            checkpoint.save(tmp_path / "x")

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for text in fails(save, 2, UserWarning):
                assert "'w' differs from rank 0" in text
        assert list(tmp_path.iterdir()) == []

    def test_times_in_a_history_and_own_sums_may_differ(self, tmp_path):
        def save(comm, prefix):
            own = ms.Variable(float(comm.rank), synchronization=ON_READ)
            with ms.MirroredStrategy().scope():
                history = ms.History()
                history.append(1, seconds=comm.rank)
                ms.Checkpoint(history=history, own=own).save(prefix)

        assert self.warnings_of(2, save, tmp_path) == []


def test_on_read_without_aggregation_has_no_value(tmp_path):
    def program(comm):
        with ms.MirroredStrategy().scope():
            v = ms.Variable(0, synchronization=ON_READ)
        ms.Checkpoint(v=v).save(tmp_path / "x")

    for text in fails(program, 2, ValueError):
        assert "'v' is ON_READ with aggregation NONE" in text


@pytest.mark.parametrize("prefix", ["", ".", "run/", "..", "run/.x"])
def test_a_prefix_that_names_no_file(prefix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text in fails(lambda comm: made(ms.MirroredStrategy()).save(prefix), 2, ValueError):
        assert "expected a directory and a name" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["", ".", "..", "run/.."])
@pytest.mark.parametrize(
    ("call", "argument"),
    [("restore", "save_path"), ("read", "save_path"), ("write", "file_prefix")],
)
def test_a_path_that_names_no_file(call, argument, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wanted = f"Checkpoint.{call}({path!r}): {argument} names no file; expected a directory and a"
    for text in fails(lambda comm: getattr(made(ms.MirroredStrategy()), call)(path), 2, ValueError):
        assert wanted in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("given", [3, b"run/x", ["x"]])
@pytest.mark.parametrize("call", ["restore", "read", "write", "save"])
def test_what_is_no_path_is_told_with_call_and_argument(call, given):
    argument = "save_path" if call in ("restore", "read") else "file_prefix"
    kind = type(given).__name__
    wanted = f"Checkpoint.{call}: {argument} must be a str or a path, not {given!r} ({kind})."
    for text in fails(lambda comm: getattr(made(ms.MirroredStrategy()), call)(given), 2, TypeError):
        assert wanted in text


def test_nothing_to_save(tmp_path):
    for text in fails(lambda comm: ms.Checkpoint().save(tmp_path / "x"), 2, ms.StructureError):
        assert "holds no variables" in text


@pytest.mark.parametrize("name", ["save", "_w", "variables", "strategy"])
def test_names_that_are_taken(name):
    with pytest.raises(ValueError, match="this name is reserved"):
        ms.Checkpoint(**{name: ms.Variable(0)})


def test_replicas_in_another_order(tmp_path):
    """Replica 0 writes and reads, whichever rank it is."""

    def program(comm):
        order = ms.DeviceAssignment(ms.Topology.read(comm), (2, 0, 1))
        strategy = ms.TPUStrategy(None, order, comm=comm)
        with strategy.scope():
            v = ms.Variable(0, synchronization=ON_READ, aggregation=KINDS.ONLY_FIRST_REPLICA)
        strategy.run(lambda: v.assign(10 + comm.rank))
        path = ms.Checkpoint(v=v).save(tmp_path / "x")
        v.assign(0)
        ms.Checkpoint(v=v).restore(path)
        return int(v.numpy())

    assert run_ranks(program, 3) == [12, 12, 12]


def test_a_tree_that_is_wrong_on_one_rank_is_told_on_all(tmp_path):
    """At once, and outside of a scope: the others wait for the strategy of its variables."""

    def program(comm):
        checkpoint = made(ms.MirroredStrategy())
        if comm.rank == 1:
            checkpoint.log = {3}
        checkpoint.save(tmp_path / "x")

    for text in fails(program, 3, ms.StructureError):
        assert "'log' of the checkpoint is {3} (set), which cannot be saved" in text


@pytest.mark.parametrize("call", ["save", "write"])
def test_variables_of_one_rank_alone_are_not_saved_in_a_job_of_several(call, tmp_path):
    def program(comm):
        checkpoint = ms.Checkpoint(v=ms.Variable(0))
        with pytest.raises(ms.StrategyError, match="which has only one of the 2 ranks"):
            getattr(checkpoint, call)(tmp_path / "x")

    run_ranks(program, 2)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_is_told_where_a_file_is_wanted(tmp_path):
    def program(comm):
        made(ms.MirroredStrategy()).restore(tmp_path)

    for text in fails(program, 2, OSError):
        assert f"latest_checkpoint returns the newest checkpoint in it): '{tmp_path}'" in text


@pytest.mark.parametrize("before", [0, 300])
def test_variables_that_differ_are_named(before, tmp_path):
    """As long as the text is not too long for it; then there is a hash."""

    def program(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            many = [ms.Variable(0.0, name=f"v{i}") for i in range(before + 2)]
        ms.Checkpoint(v=[*many[:-2], many[-1 - comm.rank]]).save(tmp_path / "x")

    for text in fails(program, 2, ms.LockstepError):
        if before:
            assert "its hash is shown" in text
        else:
            assert "of 1 variables: v/0 'v1:0'" in text
            assert "of 1 variables: v/0 'v0:0'" in text

"""State that is not a variable: numbers, strings, arrays, generators, and classes that join."""

from __future__ import annotations

import dataclasses
import json
import random
from collections import OrderedDict, namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat.checkpoint import format, sharded
from mpistrat.checkpoint.values import decode_value, encode_value
from mpistrat.shm import storage
from mpistrat.testing import run_ranks

Pair = namedtuple("Pair", "left right")
GENERATORS = ("PCG64", "PCG64DXSM", "SFC64", "MT19937", "Philox")


def same(one, two):
    """Equal in type and bits."""
    return type(one) is type(two) and repr(one) == repr(two)


VALUES = [
    *(0, -(10**40), True, 0.1, -0.0, float("inf"), float("-inf"), float("nan"), 1e-320, 3 - 0.5j),
    *("", "naïve\n\ud800", None, [], {}, (), [1, (2.5, [None])], {"a": {3: (1,), (1, 2): "x"}}),
    *(np.float32(0.1), np.int8(-3), np.bool_(True), np.complex64(1 - 2j), np.float64("nan")),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back_as_it_was(value):
    assert same(decode_value(json.loads(json.dumps(encode_value(value), allow_nan=False))), value)


@pytest.mark.parametrize(
    "value", [b"", {1}, object(), np.zeros(2), np.datetime64(0, "s"), [object()], OrderedDict()]
)
def test_other_things_are_no_values(value):
    with pytest.raises(TypeError):
        encode_value(value)


def test_what_holds_itself_is_no_value():
    value = []
    value.append(value)
    with pytest.raises(TypeError):
        encode_value(value)


@pytest.mark.parametrize(
    "told",
    [
        *({}, {"a": 1}, {"a": 1, "b": 2}, {"tuple": 3}, {"dict": [1]}, {"dict": [[[], 1]]}),
        *({"float": "1"}, {"complex": [1]}, {"numpy": ["object", 1]}, {"numpy": ["int8", 999]}),
        *({"numpy": ["float64", [1, 2]]}, {"numpy": ["float64", "1"]}, {"numpy": ["int8", None]}),
    ],
)
def test_what_no_program_wrote_is_refused(told):
    with pytest.raises((ValueError, TypeError, OverflowError)):
        decode_value(told)


class Counter:
    """A third party's class."""

    def __init__(self, start):
        self.seen, self.calls = np.arange(start), 0

    def checkpoint_state(self):
        return {"seen": self.seen, "calls": self.calls, "more": [{"x": np.zeros(2)}]}

    def restore_state(self, state):
        self.seen, self.calls = state["seen"], state["calls"]
        self.more = state["more"][0]["x"]


def of_all_kinds(start):
    """A checkpoint of everything, which holds `start` wherever it can."""
    x = float(start)
    rng = {name: np.random.Generator(getattr(np.random, name)(start)) for name in GENERATORS}
    rng["old"] = np.random.RandomState(start)
    rng["bits"] = np.random.PCG64(start)
    for each in list(rng.values())[:-1]:
        each.normal(size=start % 7)
    with ms.MirroredStrategy().scope():
        v = ms.Variable(x)
        loss = ms.metrics.Mean("loss")
    loss.update_state([x])
    return ms.Checkpoint(
        model={"v": v, "scale": x, "sizes": [start, 1], "x": np.full(3, x)},
        metric=loss,
        rng=rng,
        pair=Pair(start, np.full(2, start)),
        mixed=(v, start, [np.full(1, x), start]),
        counter=Counter(start),
        trainer=SimpleNamespace(counter=Counter(start + 1), rate=start, w=v),
        step=start,
        name=f"run {start}",
        best=None if start < 5 else x,
        losses=[x] * start,
        table={"a": {start: (x, None)}},
        ordered=OrderedDict(x=start, y=v),
    )


def drawn(checkpoint):
    draws = {name: each.random() for name, each in list(checkpoint.rng.items())[:-1]}
    return draws | {"bits": int(checkpoint.rng["bits"].random_raw())}


def shown(checkpoint):
    """All that it holds, as text."""
    trees = dict(checkpoint._trees())
    counters = [trees.pop("counter"), trees.pop("trainer").counter]
    trees["metric"] = checkpoint.metric.result()
    trees.pop("rng")
    texts = [repr(sorted(trees.items())), repr(drawn(checkpoint))]
    return texts + [repr((each.seen, each.calls)) for each in counters]


@pytest.mark.parametrize(("saved_on", "restored_on"), [(1, 3), (3, 2)])
def test_everything_reads_as_it_was_saved(saved_on, restored_on, tmp_path):
    def save(comm):
        checkpoint = of_all_kinds(7)
        path = checkpoint.save(tmp_path / "x")
        return path, shown(checkpoint)

    def restore(comm, path):
        checkpoint = of_all_kinds(2)
        losses, x = checkpoint.losses, checkpoint.model["x"]
        checkpoint.restore(path).assert_consumed()
        assert checkpoint.losses is losses  # a list or array is filled where it is
        assert checkpoint.model["x"] is x
        assert isinstance(checkpoint.pair, Pair)
        assert checkpoint.trainer.rate == 2  # of objects only variables, and what tells its state
        return shown(checkpoint)

    path, wanted = run_ranks(save, saved_on)[0]
    for found in run_ranks(restore, restored_on, path):
        assert found == wanted


def test_numbers_live_on_the_checkpoint(tmp_path):
    checkpoint = ms.Checkpoint(step=0, name="a")
    checkpoint.step += 3
    checkpoint.extra = (1, "b")
    path = checkpoint.save(tmp_path / "x")
    checkpoint.step, checkpoint.name, checkpoint.extra = 9, "c", None
    checkpoint.restore(path)
    assert (checkpoint.step, checkpoint.name, checkpoint.extra) == (3, "a", (1, "b"))
    text = np.load(path)["values.json"].tobytes()
    assert json.loads(text) == {"extra": {"tuple": [1, "b"]}, "name": "a", "step": 3}


def test_a_file_of_variables_alone_is_as_before(tmp_path):
    v = ms.Variable(1.0)
    path = ms.Checkpoint(v=v, nothing=None).write(tmp_path / "new")
    with np.load(path) as found:
        assert "v" in found.files
    with (tmp_path / "old.npz").open("w+b") as file:
        format.write_archive(file, {"v": np.asarray(2.0)}, 1)
    ms.Checkpoint(v=v, nothing=None, losses=[]).restore(tmp_path / "old").assert_consumed()
    assert v.numpy() == 2
    ms.Checkpoint(v=v).restore(path).assert_consumed()
    with pytest.raises(ms.StructureError, match="'step' is not in the file"):
        ms.Checkpoint(v=v, step=1).restore(tmp_path / "old")


def test_what_one_side_lacks(tmp_path):
    path = ms.Checkpoint(step=1, name="x").save(tmp_path / "x")
    for make, text in (
        (lambda: ms.Checkpoint(step=2), "'name' is only in the file"),
        (lambda: ms.Checkpoint(v=ms.Variable(0)), "'v' is not in the file"),
        (lambda: ms.Checkpoint(step=2, name="", rate=0.1), "'rate' is not in the file"),
    ):
        with pytest.raises(ms.StructureError, match=text):
            make().restore(path)
    checkpoint = ms.Checkpoint(step=2, rate=0.1)
    done = checkpoint.restore(path, partial=True)
    assert (done.missing, done.unused) == (("rate",), ("name",))
    assert (checkpoint.step, checkpoint.rate) == (1, 0.1)


@pytest.mark.parametrize("size", [2, 3])
def test_numbers_that_differ_between_ranks_are_told(size, tmp_path):
    def program(comm):
        checkpoint = ms.Checkpoint(v=v_of(), step=comm.rank // (size - 1), name="x")
        with pytest.raises(ms.LockstepError, match="step=1"):
            checkpoint.save(tmp_path / "x")
        checkpoint.step, checkpoint.rng = 1, np.random.default_rng(comm.rank)
        with pytest.raises(ms.LockstepError, match="rng=generator with state"):
            checkpoint.save(tmp_path / "x")

    run_ranks(program, size)
    assert not list(tmp_path.iterdir())


def v_of():
    with ms.MirroredStrategy().scope():
        return ms.Variable(0.0)


class Failing(Counter):
    def restore_state(self, state):
        raise RuntimeError("no room")


def test_a_class_that_fails_on_one_rank_fails_on_all(tmp_path):
    path = ms.Checkpoint(c=Counter(2)).save(tmp_path / "x")

    def program(comm):
        checkpoint = ms.Checkpoint(v=v_of(), c=(Failing if comm.rank else Counter)(3))
        with pytest.raises(RuntimeError, match="no room"):
            checkpoint.restore(path, partial=True)

    run_ranks(program, 2)


def test_generators_of_another_kind_are_refused_and_nothing_is_written(tmp_path):
    path = ms.Checkpoint(a=1, rng=np.random.default_rng(0)).save(tmp_path / "x")
    checkpoint = ms.Checkpoint(a=2, rng=np.random.Generator(np.random.MT19937(0)))
    with pytest.raises(ms.StructureError, match="is a PCG64 there, a MT19937 here"):
        checkpoint.restore(path)
    assert checkpoint.a == 2
    with pytest.raises(ms.StructureError, match=r"'rng' .* cannot be saved"):
        ms.Checkpoint(rng=random.Random(0)).save(tmp_path / "y")


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["dict"][1][1]["dict"].append(["pos", 10**6]),
        lambda state: state["dict"].pop(1),
        lambda state: state.clear(),
    ],
)
def test_a_state_that_no_generator_has_is_refused(change, tmp_path):
    checkpoint = ms.Checkpoint(rng=np.random.RandomState(0))
    cell = checkpoint._collect_state().entries["values.json"]
    told = json.loads(cell.array.tobytes())
    change(told["rng"]["generator"])
    array = np.frombuffer(json.dumps(told).encode(), np.uint8)
    with (tmp_path / "x.npz").open("w+b") as file:
        format.write_archive(file, {"values.json": array}, 1)
    before = checkpoint.rng.get_state()[1].tolist()
    with pytest.raises(ms.StructureError, match="'rng': "):
        checkpoint.restore(tmp_path / "x")
    assert checkpoint.rng.get_state()[1].tolist() == before


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff", b'{"step": 1}{'])
def test_bytes_that_are_no_values_are_damage(text, tmp_path):
    with (tmp_path / "x.npz").open("w+b") as file:
        format.write_archive(file, {"values.json": np.frombuffer(text, np.uint8)}, 1)
    with pytest.raises(ms.CheckpointError, match="damaged"):
        ms.Checkpoint(step=0).restore(tmp_path / "x")


@dataclasses.dataclass(frozen=True)
class Frozen:
    w: ms.Variable
    rate: float = 0.1


def test_objects_that_cannot_change_are_looked_into(tmp_path):
    held = Frozen(ms.Variable(3.0))
    path = ms.Checkpoint(held=held).save(tmp_path / "x")
    held.w.assign(0.0)
    ms.Checkpoint(held=held).restore(path).assert_consumed()
    assert held.w.numpy() == 3


def test_an_array_that_cannot_be_written_is_put_in_its_place(tmp_path):
    fixed = np.arange(3)
    fixed.flags.writeable = False
    checkpoint = ms.Checkpoint(x=fixed, y=np.zeros(2))
    path = checkpoint.save(tmp_path / "x")
    checkpoint.restore(path)
    assert checkpoint.x is not fixed
    assert checkpoint.x.tolist() == [0, 1, 2]
    with pytest.raises(ms.StructureError, match=r"'y' is float64\[2\] there and float64\[3\] here"):
        ms.Checkpoint(x=fixed, y=np.zeros(3)).restore(path)


@every("size", [1, 2, 3, 4])
def test_a_metric_goes_on_as_if_nothing_had_happened(tmp_path, size):
    """Saved amid a sum: equal bits at the same number of ranks, up to rounding at others."""
    where = tmp_path / str(size)
    rng = np.random.default_rng(size)
    given = rng.normal(size=(6, 4, 5)).astype(np.float64)

    def run(comm, first, path=None):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            loss = ms.metrics.Mean("loss")
        checkpoint = ms.Checkpoint(loss=loss)
        if path:
            checkpoint.restore(path).assert_consumed()
        saved = None
        for step in range(first, 6):
            if step == 3 and not path:
                saved = checkpoint.save(where / "half")
            strategy.run(lambda step=step: loss.update_state(given[step, comm.rank]))
        return saved, loss.result()

    [(path, whole), *_] = run_ranks(lambda comm: run(comm, 0), size)
    assert {found for _, found in run_ranks(lambda comm: run(comm, 3, path), size)} == {whole}
    other = 5 - size  # which sees other rows in the second half, so only the first one counts

    def sums(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            loss = ms.metrics.Mean("loss")
        ms.Checkpoint(loss=loss).restore(path).assert_consumed()
        return loss.result()

    half = given[:3, :size].mean()
    assert all(abs(found - half) < 1e-12 for found in run_ranks(sums, other))


@pytest.mark.parametrize("size", [1, 2])
def test_a_name_that_parts_of_a_metric_have_too(tmp_path, size):
    """A tree in the root and one beside it can make it; the program's own value is kept."""

    def program(comm):
        with ms.MirroredStrategy().scope():
            sums, w = ms.metrics.Mean().variables, ms.Variable(5.0)
        checkpoint = ms.Checkpoint({"m": sums[0]}, m={"parts": w})
        path = checkpoint.save(tmp_path / "x")
        w.assign(0.0)
        checkpoint.restore(path).assert_consumed()
        return float(w.numpy())

    assert run_ranks(program, size) == [5.0] * size


class Roomy(dict):
    """A mapping, but not one of numbers and strings alone."""


class Full(Roomy):
    def __setitem__(self, key, value):
        raise RuntimeError("no room")


@pytest.mark.parametrize("least", [1 << 26, 1 << 10])
@pytest.mark.parametrize("size", [1, 2])
def test_what_takes_no_value_fails_before_any_variable_is_written(
    size, least, tmp_path, monkeypatch
):
    monkeypatch.setattr(sharded, "MIN_DIRECTORY_NBYTES", least)
    monkeypatch.setattr(storage, "MIN_SHARED_NBYTES", 1 << 10)

    def program(comm):
        with ms.MirroredStrategy().scope():
            v = ms.Variable(np.ones(300))
        last = comm.rank == size - 1
        checkpoint = ms.Checkpoint(a=v, n=(Full if last else Roomy)(x=1))
        path = checkpoint.save(tmp_path / "x")
        v.assign(np.zeros(300))
        with pytest.raises(RuntimeError, match="no room"):
            checkpoint.restore(path)
        assert not v.numpy().any()

    run_ranks(program, size)

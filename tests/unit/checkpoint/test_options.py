"""State of optimizers in checkpoints: whose it is, and options that only one side has."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from types import SimpleNamespace

import numpy as np
import pytest

import mpistrat as ms
from mpistrat import optim
from mpistrat.checkpoint import sharded
from mpistrat.shm.storage import SpreadStorage
from mpistrat.testing import run_ranks

SIZES = [1, 2, 3]
SCALE = {"nonfinite": "skip", "loss_scale": optim.LossScale(start=1024.0)}
LARGE = 20_000


class Job:
    """Two variables of a rank, trained for some calls by gradients that tell them apart."""

    def __init__(self, optimizer, names=("a", "b"), start=1.0, turned=False, shape=(4,)):
        self.strategy, self.optimizer = ms.MirroredStrategy(), optimizer
        made = {}
        with self.strategy.scope():
            for i in (1, 0) if turned else (0, 1):
                made[i] = ms.Variable(np.full(shape, start + i), name=names[i])
        self.a, self.b = made[0], made[1]
        optimizer.build(list(made.values()))
        self.checkpoint = ms.Checkpoint(model={"a": self.a, "b": self.b}, opt=optimizer)

    def train(self, calls):
        for _ in range(calls):
            scale = self.optimizer.progress.scale
            pairs = [(np.full(v.shape, scale * g), v) for v, g in ((self.a, 1.0), (self.b, 100.0))]
            self.strategy.run(lambda pairs=pairs: self.optimizer.apply_gradients(pairs) and None)
        return self

    def slots(self, name):
        found = [self.optimizer.slot(v, name).numpy() for v in (self.a, self.b)]
        assert all((one == one.flat[0]).all() for one in found)
        return [float(one.flat[0]) for one in found]

    def weights(self):
        return [float(v.numpy().flat[0]) for v in (self.a, self.b)]


def saved(optimizer, directory, size=1, calls=3, **how):
    def rank(comm):
        return Job(optimizer(), **how).train(calls).checkpoint.save(directory / "c")

    return run_ranks(rank, size)[0]


def momentum():
    return optim.SGD(0.1, momentum=0.5)


class TestWhoseSlotsTheyAre:
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("shape", [(4,), (LARGE,)])
    @pytest.mark.parametrize(
        ("names", "others"),
        [
            ((None, None), (None, None)),
            (("w", "w"), ("w", "w")),
            # As names with numbers are where layers are made in another order.
            (("dense", "dense_1"), ("dense_1", "dense")),
            (("a", "b"), (None, None)),
        ],
    )
    def test_they_go_with_the_weights(self, names, others, shape, size, tmp_path):
        path = saved(momentum, tmp_path, 4 - size, names=names, shape=shape)

        def rank(comm):
            job = Job(momentum(), others, 0.0, turned=True, shape=shape)
            job.checkpoint.restore(path).assert_consumed()
            return job.weights(), job.slots("momentum")

        wanted = Job(momentum(), shape=shape).train(3)
        wanted = wanted.weights(), wanted.slots("momentum")
        assert wanted[1] == [1.75, 175.0]
        assert run_ranks(rank, size) == [wanted] * size

    @pytest.mark.parametrize(
        "trees",
        [
            lambda job: {"model": ms.Checkpoint(a=job.a, b=job.b)},
            lambda job: {"model": SimpleNamespace(layers=[job.a, {"b/c": job.b}])},
            lambda job: {"zz": [job.a, job.b], "also": {"b": job.b, "a": job.a}},
            lambda job: {"root": SimpleNamespace(a=job.a, b=job.b)},
        ],
        ids=["checkpoint", "objects", "two names", "root"],
    )
    def test_wherever_the_variables_are(self, trees, tmp_path):
        one, other = Job(momentum(), (None, None)).train(3), Job(momentum(), turned=True)
        path = ms.Checkpoint(opt=one.optimizer, **trees(one)).save(tmp_path / "c")
        ms.Checkpoint(opt=other.optimizer, **trees(other)).restore(path).assert_consumed()
        assert other.slots("momentum") == one.slots("momentum") == [1.75, 175.0]

    def test_a_variable_that_is_not_in_the_checkpoint_has_its_name(self, tmp_path):
        one, other = Job(momentum()).train(3), Job(momentum(), turned=True)
        path = ms.Checkpoint(opt=one.optimizer).save(tmp_path / "c")
        assert "opt/slots/a/momentum" in np.load(path).files
        ms.Checkpoint(opt=other.optimizer).restore(path).assert_consumed()
        assert other.slots("momentum") == [1.75, 175.0]

    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize(
        ("names", "shown"), [((None, None), "'Variable'"), (("w", "w"), "'w'")]
    )
    def test_those_that_nothing_tells_apart_are_refused(self, names, shown, size, tmp_path):
        def rank(comm):
            job = Job(momentum(), names)
            for call in ("save", "restore"):
                alone = ms.Checkpoint(opt=job.optimizer)
                with job.strategy.scope(), pytest.raises(ms.StructureError) as caught:
                    getattr(alone, call)(tmp_path / "c")
                assert (
                    f"'opt' of the checkpoint has state of several variables named {shown}"
                    in str(caught.value)
                )
            with pytest.raises(ms.StructureError, match="names of their own"):
                alone.variables()
            # With one of them in the checkpoint, or without slots, nothing is in doubt.
            ms.Checkpoint(opt=job.optimizer, a=job.a).save(tmp_path / "d")
            ms.Checkpoint(opt=Job(optim.SGD(0.1), names).optimizer).save(tmp_path / "e")

        run_ranks(rank, size)


SGD = {"learning_rate": 0.1}
OLD_AND_NEW = {
    "loss scale gone": ({**SGD, **SCALE}, SGD, "with loss_scale"),
    "loss scale new": (SGD, {**SGD, **SCALE}, "without loss_scale"),
    "average gone": ({**SGD, "ema": 0.5}, SGD, "with ema"),
    "average new": (SGD, {**SGD, "ema": 0.5}, "without ema"),
    "accumulation gone": ({**SGD, "accumulate": 2}, SGD, "with accumulate"),
    "accumulation new": (SGD, {**SGD, "accumulate": 2}, "without accumulate"),
    "momentum gone": ({**SGD, "momentum": 0.5}, SGD, "with slot 'momentum'"),
    "momentum new": (SGD, {**SGD, "momentum": 0.5}, "without slot 'momentum'"),
    "several": (
        {**SGD, **SCALE},
        {**SGD, "ema": 0.5, "momentum": 0.5},
        r"with loss_scale and without slot 'momentum', ema|with loss_scale and without ema, slot",
    ),
}


@contextlib.contextmanager
def warned(rank, text):
    """Check that replica 0 warns once, and other ranks do not."""
    if rank:
        yield
    else:
        with pytest.warns(UserWarning, match=text) as caught:
            yield
        assert len(caught) == 1
        assert caught[0].filename == __file__


class TestOptionsThatDiffer:
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("case", OLD_AND_NEW)
    def test_it_is_an_error_that_names_both(self, case, size, tmp_path):
        old, new, text = OLD_AND_NEW[case]
        path = saved(lambda: optim.SGD(**old), tmp_path)

        def rank(comm):
            job = Job(optim.SGD(**new), start=-7.0).train(1)
            before = [v.numpy() for v in job.checkpoint.variables().values()]
            here = re.escape(optim.SGD(**new)._describe_options())
            with pytest.raises(ms.StructureError, match=f"'opt', here {here}, was saved ({text})"):
                job.checkpoint.restore(path)
            after = [v.numpy() for v in job.checkpoint.variables().values()]
            for x, y in zip(before, after, strict=True):
                np.testing.assert_array_equal(x, y)

        run_ranks(rank, size)

    @pytest.mark.parametrize("shape", [(4,), (LARGE,)])
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("case", OLD_AND_NEW)
    def test_a_part_begins_afresh_and_is_told(self, case, size, shape, tmp_path):
        old, new, text = OLD_AND_NEW[case]
        path = saved(lambda: optim.SGD(**old), tmp_path, shape=shape)
        trained = Job(optim.SGD(**old), shape=shape).train(3)
        wanted = trained.weights()

        def rank(comm):
            # What the program has trained before is of other weights, and does not count.
            job = Job(optim.SGD(**new), start=-7.0, shape=shape).train(3)
            with warned(comm.rank, rf"was saved ({text}).*begins afresh"):
                job.checkpoint.restore(path, partial=True)
            assert job.weights() == wanted
            progress = job.optimizer.progress
            assert progress.step == trained.optimizer.progress.step
            assert (progress.calls, progress.weight) == (0, 0.0)
            assert progress.scale == (1024.0 if "loss_scale" in new else 1.0)
            assert "loss_scale" not in new or progress.good == 0
            if "ema" in new:
                assert job.slots("ema") == wanted
            for name in {"momentum", "pending"} & {*job.optimizer.slots()}:
                assert job.slots(name) == [0.0, 0.0]
            # A step is that of a new optimizer on these weights.
            job.train(job.optimizer.accumulate)
            return job.weights()

        for a, b in run_ranks(rank, size):
            np.testing.assert_allclose([a, b], [wanted[0] - 0.1, wanted[1] - 10.0], 1e-12)

    def test_slots_that_all_nodes_have_once(self, monkeypatch, tmp_path):
        monkeypatch.setattr(sharded, "MIN_DIRECTORY_NBYTES", 1)  # a directory, which all ranks read
        path = saved(lambda: optim.Adam(0.1), tmp_path, shape=(LARGE,))
        assert path.endswith(".arrays")
        wanted = Job(optim.Adam(0.1), shape=(LARGE,)).train(3).weights()
        monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", "2")

        def rank(comm):
            job = Job(optim.Adam(0.1, ema=0.9, shard="all"), start=-7.0, shape=(LARGE,)).train(1)
            assert isinstance(job.optimizer.average(job.a)._storage, SpreadStorage)
            with warned(comm.rank, "without ema"), job.strategy.scope():
                job.checkpoint.restore(path, partial=True)
            with job.strategy.scope():
                assert job.slots("ema") == wanted
            return True

        assert all(run_ranks(rank, 4))

    @pytest.mark.parametrize("size", SIZES)
    def test_an_optimizer_that_is_not_in_the_file(self, size, tmp_path):
        job = Job(optim.SGD(0.1)).train(2)
        path = ms.Checkpoint(model={"a": job.a, "b": job.b}).save(tmp_path / "c")
        wanted = job.weights()

        def rank(comm):
            job = Job(optim.Adam(0.1, ema=0.9), start=-7.0).train(3)
            with pytest.raises(
                ms.StructureError, match=r"'opt', here Adam\(.*, is not in the file"
            ):
                job.checkpoint.restore(path)
            with warned(comm.rank, r"'opt', here Adam\(.*, is not in the file"):
                job.checkpoint.restore(path, partial=True)
            assert job.optimizer.progress == optim.base.Progress()
            assert job.slots("m") == job.slots("v") == [0.0, 0.0]
            assert job.slots("ema") == job.weights() == wanted

        run_ranks(rank, size)

    def test_another_optimizer(self, tmp_path):
        path = saved(lambda: optim.Adam(0.1), tmp_path)
        job = Job(momentum()).train(1)
        text = "was saved with slot 'm', slot 'v' and without slot 'momentum'"
        with pytest.raises(ms.StructureError, match=text):
            job.checkpoint.restore(path)
        # The velocity of LARS has the learning rate in it, and the momentum of SGD has not.
        path = saved(momentum, tmp_path / "sgd")
        with pytest.raises(ms.StructureError, match="with slot 'momentum' and without slot 'veloc"):
            Job(optim.LARS(0.1)).checkpoint.restore(path)

    def test_a_group_without_momentum(self, tmp_path):
        path = saved(momentum, tmp_path)
        groups = [optim.Group("b", momentum=0.0)]
        job = Job(dataclasses.replace(momentum(), groups=groups))
        with pytest.raises(ms.StructureError, match=r"'opt/slots/model/b/momentum' is only in the"):
            job.checkpoint.restore(path)
        with warned(0, "with slot 'momentum'"):
            job.checkpoint.restore(path, partial=True)
        assert job.optimizer.slot(job.a, "momentum").numpy().tolist() == [1.75] * 4

    def test_a_variable_more_is_no_option(self, tmp_path):
        path = saved(momentum, tmp_path)
        job = Job(momentum()).train(1)
        with job.strategy.scope():
            more = ms.Variable(np.zeros(3), name="more")
        optimizer = momentum()
        optimizer.build([job.a, job.b, more])
        job.strategy.run(lambda: optimizer.apply_gradients([(np.ones(3), more)]) and None)
        checkpoint = ms.Checkpoint(model={"a": job.a, "b": job.b, "more": more}, opt=optimizer)
        done = checkpoint.restore(path, partial=True)  # without a warning
        assert done.missing == ("model/more", "opt/slots/model/more/momentum")
        assert not optimizer.slot(more, "momentum").numpy().any()
        assert optimizer.slot(job.b, "momentum").numpy().tolist() == [175.0] * 4

    @pytest.mark.parametrize("options", [SGD, *(new for _, new, _ in OLD_AND_NEW.values())])
    def test_equal_options_are_restored_amid_a_window(self, options, tmp_path):
        path = saved(lambda: optim.SGD(**options), tmp_path)
        one, other = Job(optim.SGD(**options)).train(3), Job(optim.SGD(**options), start=-7.0)
        other.checkpoint.restore(path).assert_consumed()
        assert other.optimizer.progress == one.optimizer.progress
        assert other.train(3).weights() == one.train(3).weights()

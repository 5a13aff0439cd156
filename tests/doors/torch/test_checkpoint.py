"""A checkpoint takes modules, optimizers, schedulers, tensors and generators."""

from __future__ import annotations

import contextlib
import re
import warnings

import pytest

import mpistrat as ms
from mpistrat.checkpoint.inspection import export_checkpoint
from mpistrat.testing import run_ranks

torch = pytest.importorskip("torch", reason="wants PyTorch: pip install 'mpistrat[torch]'")
import mpistrat.torch as mt  # noqa: E402

nn = torch.nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(4, 5000), nn.BatchNorm1d(5000), nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.two.weight
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))

    def forward(self, x):
        return self.norm(self.one(self.tied(self.two(x)))).mean() * self.scale.float().sum()


class Training:
    """A model on some ranks with all that its training needs."""

    def __init__(self, seed, fused):
        self.strategy = ms.MirroredStrategy()
        model = Net()
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.1 * (1 + seed))
        model.scale.requires_grad_(not fused)
        self.model = mt.replicate(model, self.strategy)
        self.generator = torch.Generator().manual_seed(seed)
        trees = {"model": self.model, "generator": self.generator}
        if fused:
            self.optimizer = mt.FusedOptimizer(self.model, ms.optim.Adam(0.01))
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
            trees["scheduler"] = self.scheduler
        self.checkpoint = ms.Checkpoint(optimizer=self.optimizer, **trees)

    def step(self):
        rank, size = self.strategy.rank, self.strategy.num_replicas_in_sync
        x = torch.rand(12, 4, generator=self.generator).chunk(size)[rank]
        self.model(x).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if hasattr(self, "scheduler"):
            self.scheduler.step()

    def state(self):
        held = self.checkpoint.variables()
        return {
            name: torch.from_numpy(one._storage.array.astype("f8")) for name, one in held.items()
        }


@pytest.mark.parametrize("fused", [False, True])
def test_training_goes_on_from_a_checkpoint_at_another_number_of_ranks(tmp_path, fused):
    def first(comm):
        training = Training(0, fused)
        for _ in range(3):
            training.step()
        path = training.checkpoint.save(tmp_path / "ckpt")
        return path, training.state()

    path, saved = run_ranks(first, 2)[0]

    def again(comm):
        training = Training(1, fused)
        training.checkpoint.restore(path).assert_consumed()
        state = training.state()
        for name, value in saved.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=0)
        if not fused:
            assert training.optimizer.param_groups[0]["lr"] == 0.005
            assert training.scheduler.last_epoch == 3
            steps = [s["step"] for s in training.optimizer.state.values()]
            assert steps and all(step == 3 for step in steps)
        training.step()
        weights = {name: x.detach() for name, x in training.model.named_parameters()}
        training.strategy.check_same(weights)

    for size in (1, 3):
        run_ranks(again, size)
    names = set(saved)
    assert {"model/one.weight", "model/two.weight", "model/norm.running_mean"} <= names
    assert "model/tied.weight" not in names  # it is two.weight
    if not fused:
        assert {"optimizer/groups/0/lr", "optimizer/state/0/exp_avg"} <= names


def test_tensors_are_saved_and_what_differs_is_told(tmp_path):
    def program(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            tree = {"a": torch.arange(3.0), "b": torch.ones(2, dtype=torch.bfloat16)}
            path = ms.Checkpoint(tree=tree).save(tmp_path / "tensors")
            tree["a"].zero_()
            ms.Checkpoint(tree=tree).restore(path)
            assert tree["a"].tolist() == [0, 1, 2]
            with pytest.raises(ms.errors.StructureError, match=r"float32.3. there and float32.4."):
                ms.Checkpoint(tree={"a": torch.zeros(4), "b": tree["b"]}).restore(path)

    run_ranks(program, 2)


OPTIMIZERS = {
    "Adam": lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.1),
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
}


def some_steps(model, optimizer, seeds=range(3)):
    for seed in seeds:
        optimizer.zero_grad()
        x = torch.rand(4, 3, generator=torch.Generator().manual_seed(seed))
        model(x).square().mean().backward()
        optimizer.step()
    return model.weight.detach().clone()


def filled(value=0.5):
    model = nn.Linear(3, 2)
    for p in model.parameters():
        nn.init.constant_(p, value)
    return model


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_a_checkpoint_before_the_first_step_changes_nothing_there_and_after_restore(tmp_path, kind):
    def made(value=0.5):
        model = filled(value)
        optimizer = OPTIMIZERS[kind](model.parameters())
        calls = []
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
        return model, optimizer, ms.Checkpoint(model=model, optimizer=optimizer), calls

    model, optimizer, _, _ = made()
    wanted = some_steps(model, optimizer)
    model, optimizer, checkpoint, calls = made()
    path = checkpoint.save(tmp_path / "start")
    assert not calls and model.weight.grad is None
    assert kind == "Adagrad" or not optimizer.state  # that one has state from the start
    assert torch.equal(some_steps(model, optimizer), wanted)
    checkpoint.restore(path)  # also of an optimizer that has made steps
    assert torch.equal(some_steps(model, optimizer), wanted)
    later = checkpoint.save(tmp_path / "later")
    model, optimizer, checkpoint, calls = made(0.25)
    checkpoint.restore(path)
    assert torch.equal(some_steps(model, optimizer), wanted)
    wanted = some_steps(model, optimizer, [3])
    model, optimizer, checkpoint, calls = made(0.25)
    checkpoint.restore(later)
    assert torch.equal(some_steps(model, optimizer, [3]), wanted)


class WithClosure(torch.optim.SGD):
    def step(self, closure):
        return closure()


def test_an_optimizer_whose_state_is_not_known_before_a_step_is_an_error_that_says_so():
    optimizer = WithClosure(filled().parameters(), 0.1)
    with pytest.raises(ms.errors.LeafTypeError, match="WithClosure cannot be saved"):
        ms.Checkpoint(optimizer=optimizer).variables()


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_the_history_of_lbfgs_goes_on(tmp_path, search):
    inputs, wanted = torch.rand(2, 8, 3, generator=torch.Generator().manual_seed(0)).unbind()

    def made():
        model = filled()
        optimizer = torch.optim.LBFGS(
            model.parameters(), lr=0.3, max_iter=2, history_size=2, line_search_fn=search
        )
        return model, optimizer, ms.Checkpoint(model=model, optimizer=optimizer)

    def steps(model, optimizer, count):
        def closure():
            optimizer.zero_grad()
            loss = (model(inputs).sin() - wanted[:, :2]).square().mean()
            loss.backward()
            return loss

        for _ in range(count):
            optimizer.step(closure)
        return model.weight.detach().clone()

    model, optimizer, checkpoint = made()
    paths = [checkpoint.save(tmp_path / "start")]
    ends = []
    for count in (1, 1, 3):  # without a history, with some of it, with all that is kept
        ends.append(steps(model, optimizer, count))
        paths.append(checkpoint.save(tmp_path / "later"))
    ends.append(steps(model, optimizer, 2))
    assert len(optimizer.state[next(iter(model.parameters()))]["old_dirs"]) == 2
    for path, count, end in zip(paths, (1, 1, 3, 2), ends, strict=True):
        for fresh in (True, False):  # also of an optimizer that has made steps
            if fresh:
                model, optimizer, checkpoint = made()
            checkpoint.restore(path).assert_consumed()
            assert torch.equal(steps(model, optimizer, count), end)


def test_a_parameter_that_was_not_used_yet_has_the_same_names_when_saved_and_restored(tmp_path):
    def made():
        model = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2)})
        optimizer = torch.optim.Adam(model.parameters())
        return model, optimizer, ms.Checkpoint(model=model, optimizer=optimizer)

    model, optimizer, checkpoint = made()
    model["used"](torch.ones(4, 3)).mean().backward()
    optimizer.step()
    path = checkpoint.save(tmp_path / "unused")
    model, optimizer, checkpoint = made()
    checkpoint.restore(path).assert_consumed()
    assert set(optimizer.state) == set(model["used"].parameters())


def schedulers():
    of = torch.optim.lr_scheduler
    return {
        "sequential": lambda o: of.SequentialLR(
            o, [of.LambdaLR(o, lambda e: (e + 1) / 4), of.CosineAnnealingLR(o, 10)], [4]
        ),
        "chained": lambda o: of.ChainedScheduler(
            [of.LinearLR(o, 0.1, 1.0, 4), of.CosineAnnealingLR(o, 10)], o
        ),
    }


@pytest.mark.filterwarnings("ignore:.*epoch parameter")
@pytest.mark.parametrize("kind", list(schedulers()))
def test_schedulers_that_are_made_of_others_go_on(tmp_path, kind):
    def made():
        model = filled()
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        scheduler = schedulers()[kind](optimizer)
        trees = {"optimizer": optimizer, "scheduler": scheduler}
        return optimizer, scheduler, ms.Checkpoint(model=model, **trees)

    def rates(optimizer, scheduler, times):
        found = []
        for _ in range(times):
            optimizer.step()
            scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    optimizer, scheduler, checkpoint = made()
    rates(optimizer, scheduler, 6)
    path = checkpoint.save(tmp_path / "schedule")
    wanted = rates(optimizer, scheduler, 8)
    optimizer, scheduler, checkpoint = made()
    checkpoint.restore(path)
    assert rates(optimizer, scheduler, 8) == wanted


@pytest.mark.parametrize("fused", [False, True])
def test_weights_that_were_channels_last_have_the_same_order_in_all_checkpoints(tmp_path, fused):
    values = torch.rand(64, 3, 3, 3, generator=torch.Generator().manual_seed(0))
    values = values.repeat(10, 1, 1, 1)  # large enough for the memory of the node

    def made(value, fused, layout):
        model = nn.Conv2d(3, 640, 3, bias=False)
        with torch.no_grad():
            model.weight.copy_(value)
        model = mt.replicate(model.to(memory_format=layout), ms.MirroredStrategy())
        optimizer = mt.FusedOptimizer(model, ms.optim.Adam(0.01)) if fused else None
        trees = {"optimizer": optimizer} if fused else {}
        return model, optimizer, ms.Checkpoint(model=model, **trees)

    def program(comm):
        model, optimizer, checkpoint = made(values, True, torch.channels_last)
        path = checkpoint.save(tmp_path / "picture")
        assert torch.equal(model.weight, values)
        for layout in (torch.contiguous_format, torch.channels_last):
            other, again, checkpoint = made(torch.zeros(()), fused, layout)
            checkpoint.restore(path, partial=not fused)
            assert torch.equal(other.weight, values)
        model.to(memory_format=torch.channels_last)
        mt.replicate(model)
        assert torch.equal(model.weight, values)
        if fused:
            for one, step in ((model, optimizer), (other, again)):
                one(torch.ones(2, 3, 4, 4)).square().mean().backward()
                step.step()
            assert torch.equal(model.weight, other.weight)

    run_ranks(program, 2)


@pytest.mark.parametrize("way", ["compiled", "inside"])
def test_the_weights_of_a_fused_optimizer_are_found_inside_of_other_modules(tmp_path, way):
    def program(comm):
        strategy = ms.MirroredStrategy()
        model = mt.replicate(nn.Linear(300, 300), strategy)
        optimizer = mt.FusedOptimizer(model, ms.optim.SGD(0.1))
        whole = nn.ModuleDict({"inner": model})
        if way == "compiled":
            whole = torch.compile(model, backend="eager")
        checkpoint = ms.Checkpoint(model=whole, optimizer=optimizer)
        path = checkpoint.save(tmp_path / way)
        before = model.weight.detach().clone()
        for _ in range(2):
            model(torch.ones(2, 300)).mean().backward()
            optimizer.step()
            assert not torch.equal(model.weight, before)
            checkpoint.restore(path)
            assert torch.equal(model.weight, before)

    run_ranks(program, 2)


def test_the_state_of_an_optimizer_that_made_no_step_is_that_of_the_start():
    model = nn.Linear(2, 1)
    before = model.weight.detach().clone()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    held = ms.Checkpoint(optimizer=optimizer).variables()
    assert held["optimizer/state/0/step"].array == 0
    assert (held["optimizer/state/0/exp_avg"].array == 0).all()
    assert held["optimizer/state/0/begun"].array == 0 and not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert torch.equal(model.weight, before) and model.weight.grad is None


def test_exported_weights_are_read_by_safetensors_tied_ones_once(tmp_path):
    library = pytest.importorskip("safetensors.torch")
    model, other = Net(), Net()
    path = ms.Checkpoint(model=model).save(tmp_path / "ckpt")
    assert export_checkpoint(path, str(tmp_path / "out.safetensors"))[1] == 0
    held = library.load_file(tmp_path / "out.safetensors")  # norm: equal by chance, and all there
    state = {name.removeprefix("model/"): tensor for name, tensor in held.items()}
    assert other.load_state_dict(state, strict=False).missing_keys == ["tied.weight"]
    for name, tensor in model.state_dict().items():
        assert other.state_dict()[name].dtype is tensor.dtype
        assert torch.equal(other.state_dict()[name], tensor)


@pytest.mark.parametrize("size", [1, 2])
def test_options_of_a_fused_optimizer_that_the_file_lacks_begin_afresh(size, tmp_path):
    def made(start, **more):
        model = nn.Sequential(nn.Linear(4, 5000), nn.Linear(5000, 1))
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(start)
        model = mt.replicate(model, ms.MirroredStrategy())
        optimizer = mt.FusedOptimizer(model, ms.optim.SGD(0.1, momentum=0.5, **more))
        return model, optimizer, ms.Checkpoint(model=model, opt=optimizer)

    def step(model, optimizer):
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def rank(comm):
        model, optimizer, checkpoint = made(0.01)
        step(model, optimizer)
        path = checkpoint.save(tmp_path / f"{size}")
        model, optimizer, checkpoint = made(0.5, ema=0.9, accumulate=2)
        assert "opt/slots/model/0.weight/momentum" in checkpoint.variables()
        step(model, optimizer)
        with pytest.raises(ms.StructureError, match="was saved without accumulate, ema"):
            checkpoint.restore(path)
        with contextlib.nullcontext() if comm.rank else pytest.warns(UserWarning, match="ema"):
            checkpoint.restore(path, partial=True)
        for name, p in model.named_parameters():
            average = optimizer.optimizer.average(optimizer.variables[name])
            assert average.numpy().tolist() == p.tolist()
        assert optimizer.optimizer.progress.calls == 0
        before = model[0].weight.clone()
        step(model, optimizer)
        assert model[0].weight.equal(before)
        optimizer.flush()
        assert not model[0].weight.equal(before)
        step(model, optimizer)
        return model[0].weight.tolist()

    found = run_ranks(rank, size)
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("is_replicated", [True, False])
def test_a_model_that_was_not_replicated_is_named(is_replicated, tmp_path):
    def program(comm):
        strategy = ms.MirroredStrategy()
        model = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
        if is_replicated:
            mt.replicate(model, strategy)
        optimizer = torch.optim.Adam(model.parameters())
        with strategy.scope():
            checkpoint = ms.Checkpoint(model=model, optimizer=optimizer)

        def step():
            x = torch.arange(4.0).reshape(2, 2) * (1 + comm.rank)
            model(x).square().mean().backward()
            optimizer.step()

        strategy.run(step)
        checkpoint.save(tmp_path / "ckpt")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(program, 2)
    texts = [str(warning.message) for warning in caught]
    if is_replicated:  # its running statistics are each rank's own
        assert texts == []
    else:
        (text,) = texts
        assert re.match(r"Checkpoint.save: on rank 1 'model/0\.bias', .* from rank 0", text)
        assert "mpistrat.torch.replicate(model, strategy)" in text

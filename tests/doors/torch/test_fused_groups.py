"""`FusedOptimizer` as an optimizer of PyTorch: groups, schedulers, state, hooks, scalers."""

from __future__ import annotations

import copy
import dataclasses
import itertools

import pytest

import mpistrat as ms
from mpistrat.testing import run_ranks

torch = pytest.importorskip("torch", reason="wants PyTorch: pip install 'mpistrat[torch]'")
import mpistrat.torch as mt  # noqa: E402

nn, schedulers = torch.nn, torch.optim.lr_scheduler
SIZES = [1, 2, 3]
ROWS = 12
EPSILON = 1e-3  # else, where a gradient is nearly 0, how its sum was rounded is learned


def net():
    """Small weights, and one that is in the memory of the node."""
    made = nn.Sequential(nn.Linear(4, 130), nn.Tanh(), nn.Linear(130, 130), nn.Linear(130, 1))
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_((torch.rand(p.shape, generator=draw) - 0.5) * 0.1)
    return made


def batch(step):
    draw = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 4, generator=draw), torch.randn(ROWS, 1, generator=draw)


def pass_(model, step, rank=0, size=1, scaler=None):
    x, y = (whole.chunk(size)[rank] for whole in batch(step))
    loss = (model(x) - y).square().mean()
    (loss if scaler is None else scaler.scale(loss)).backward()
    return loss


# By name: an optimizer of PyTorch of parameters, and that of mpistrat.
OPTIMIZERS = {
    "SGD": (lambda p: torch.optim.SGD(p, 0.05), lambda: ms.optim.SGD(0.05)),
    "momentum": (
        lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01),
        lambda: ms.optim.SGD(0.05, momentum=0.9, weight_decay=0.01),
    ),
    "AdamW": (
        lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1, eps=EPSILON),
        lambda: ms.optim.AdamW(0.01, weight_decay=0.1, epsilon=EPSILON),
    ),
    "RMSprop": (
        lambda p: torch.optim.RMSprop(p, 0.01, alpha=0.9, eps=0.1, momentum=0.5, centered=True),
        lambda: ms.optim.RMSprop(0.01, beta_2=0.9, epsilon=0.1, momentum=0.5, centered=True),
    ),
}


class Plateau(schedulers.ReduceLROnPlateau):
    def step(self):
        super().step(1.0)


SCHEDULERS = {
    "StepLR": lambda o: schedulers.StepLR(o, 2, 0.5),
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 4),
    "plateau": lambda o: Plateau(o, factor=0.5, patience=1),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.02, anneal_epochs=3),
    "warm up": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, 1.0, 2), schedulers.ExponentialLR(o, 0.5)], [2]
    ),
    "one cycle": lambda o: schedulers.OneCycleLR(
        o, 0.1, total_steps=8, cycle_momentum="betas" in o.defaults or o.defaults["momentum"] > 0
    ),
}


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def close(found, wanted):
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def trained(model, optimizer, steps, rank=0, size=1, scheduler=None):
    rates = []
    for step in steps:
        pass_(model, step, rank, size)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return weights(model), rates


def fused(kind, comm=None):
    model = mt.replicate(net(), ms.MirroredStrategy())
    return model, mt.FusedOptimizer(model, OPTIMIZERS[kind][1]())


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.nightly)])
def test_schedulers_of_pytorch_give_the_weights_of_one_process(size, kind, name):
    plain = net()
    optimizer = OPTIMIZERS[kind][0](plain.parameters())
    wanted, rates = trained(plain, optimizer, range(6), scheduler=SCHEDULERS[name](optimizer))

    def program(comm):
        model, own = fused(kind)
        found, told = trained(model, own, range(6), comm.rank, size, SCHEDULERS[name](own))
        close(found, wanted)
        assert told == pytest.approx(rates)
        assert own.optimizer.iterations == 6

    run_ranks(program, size)


def test_groups_have_pytorchs_names_and_change_alone():
    """Against an optimizer of PyTorch with the same groups, whose numbers change on the way."""

    def change(optimizer, number_of_bias):
        for i, group in enumerate(optimizer.param_groups):
            group["lr"] = 0.02 if i == number_of_bias else torch.tensor(0.005)
            group["weight_decay"] = 0.3
            group["betas"] = (0.5, 0.9)
            group["eps"] = 1e-2

    plain = net()
    biases = [p for name, p in plain.named_parameters() if "bias" in name]
    others = [p for name, p in plain.named_parameters() if "bias" not in name]
    groups = [{"params": others}, {"params": biases, "lr": 0.03, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, 0.01, weight_decay=0.1, eps=EPSILON, foreach=False)
    trained(plain, optimizer, range(2))
    change(optimizer, 1)
    wanted, _ = trained(plain, optimizer, range(2, 5))

    def program(comm):
        model = mt.replicate(net(), ms.MirroredStrategy())
        bias = ms.optim.Group("*bias*", learning_rate=0.03, weight_decay=0.0)
        own = mt.FusedOptimizer(
            model, ms.optim.AdamW(0.01, weight_decay=0.1, epsilon=EPSILON, groups=[bias])
        )
        one, two = own.param_groups
        assert {n: x for n, x in one.items() if n != "params"} == {
            "lr": 0.01,
            "betas": (0.9, 0.999),
            "eps": EPSILON,
            "weight_decay": 0.1,
        }
        assert (two["lr"], two["weight_decay"]) == (0.03, 0.0)
        names = {id(p): name for name, p in model.named_parameters()}
        assert [names[id(p)].split(".")[1] for p in two["params"]] == ["bias"] * 3
        trained(model, own, range(2), comm.rank, 2)
        change(own, 1)
        close(trained(model, own, range(2, 5), comm.rank, 2)[0], wanted)
        assert own.optimizer.learning_rate == 0.01

    run_ranks(program, 2)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("origin", ["fused", "PyTorch"])
@pytest.mark.parametrize("shard", ["node", "all"])
def test_the_state_goes_on_at_another_number_of_ranks(kind, origin, shard):
    plain = net()
    optimizer = OPTIMIZERS[kind][0](plain.parameters())
    scheduler = schedulers.StepLR(optimizer, 2, 0.5)
    begun, _ = trained(plain, optimizer, range(3), scheduler=scheduler)
    states = [copy.deepcopy((optimizer.state_dict(), plain.state_dict(), scheduler.state_dict()))]
    wanted, _ = trained(plain, optimizer, range(3, 6), scheduler=scheduler)

    def begin():
        model = mt.replicate(net(), ms.MirroredStrategy())
        rule = dataclasses.replace(OPTIMIZERS[kind][1](), shard=shard)
        own = mt.FusedOptimizer(model, rule)
        return model, own, schedulers.StepLR(own, 2, 0.5)

    def first(comm):
        model, own, scheduler = begin()
        close(trained(model, own, range(3), comm.rank, 3, scheduler)[0], begun)
        return copy.deepcopy((own.state_dict(), model.state_dict(), scheduler.state_dict()))

    def second(comm):
        model, own, scheduler = begin()
        optimizer_state, model_state, scheduler_state = states[0]
        model.load_state_dict(model_state)
        mt.replicate(model)
        scheduler.load_state_dict(scheduler_state)
        own.load_state_dict(optimizer_state)
        assert own.optimizer.iterations == (
            3 if kind in ("AdamW", "RMSprop") or origin == "fused" else 0
        )
        close(trained(model, own, range(3, 6), comm.rank, 2, scheduler)[0], wanted)

    if origin == "fused":
        states = run_ranks(first, 3)
        told = states[0][0]
        assert set(told["state"][0]) >= set(optimizer.state_dict()["state"].get(0, {})) - {
            "momentum_buffer" * (kind == "SGD")
        }
    run_ranks(second, 2)


def test_the_state_on_one_rank_alone_is_an_error_and_no_hang():
    def program(comm):
        model, own = fused("AdamW")
        trained(model, own, range(1), comm.rank, 2)
        saved = own.state_dict()
        with pytest.raises(ms.errors.LockstepError):
            if comm.rank == 0:
                own.load_state_dict(saved)
            else:
                pass_(model, 1, comm.rank, 2)
                own.step()

    run_ranks(program, 2)


def test_a_state_that_does_not_fit_is_an_error_on_all_ranks():
    def program(comm):
        _, own = fused("AdamW")
        saved = own.state_dict()
        kept = copy.deepcopy(saved)
        del saved["state"][1]["exp_avg"]
        odd = copy.deepcopy(kept)
        odd["state"][0]["exp_avg_sq"] = torch.zeros(2)
        other = copy.deepcopy(kept)
        other["param_groups"] = other["param_groups"] * 2
        for state, words in ((saved, "'exp_avg' of '0.bias"), (odd, "shape"), (other, "number of")):
            with pytest.raises(ValueError, match=words):
                own.load_state_dict(state if comm.rank == 1 else kept)
        kept["state"][0]["exp_avg"] += comm.rank
        with pytest.raises(ms.errors.LockstepError):
            own.load_state_dict(kept)
            own.optimizer.iterations.assign(0)

    run_ranks(program, 2)


def test_numbers_that_differ_between_ranks_are_an_error_before_the_update():
    def program(comm):
        for key, value, words in (
            ("lr", 0.02, r"rank 0: lr=0\.01 \(group 0\).*rank 1: lr=0\.02 \(group 0"),
            ("weight_decay", 0.2, r"weight_decay=0\.1 .*weight_decay=0\.2"),
            ("betas", (0.8, 0.999), r"rank 0: betas\[0\]=0\.9 .*rank 1: betas\[0\]=0\.8 "),
        ):
            model, own = fused("AdamW")
            trained(model, own, range(2), comm.rank, 2)
            before = weights(model)
            if comm.rank == 1:
                own.param_groups[0][key] = value
            pass_(model, 2, comm.rank, 2)
            with pytest.raises(ms.errors.LockstepError, match=f"(?s){words}.*alike on all"):
                own.step()
            assert all(map(torch.equal, before, model.parameters()))

    run_ranks(program, 2)


@pytest.mark.parametrize("size", [1, 2])
def test_numbers_that_do_not_fit_are_an_error_on_all_ranks(size):
    def program(comm):
        for kind, key, value, words in (
            ("AdamW", "lr", -1.0, "lr is -1.0"),
            ("AdamW", "lr", float("nan"), "lr is nan"),
            ("AdamW", "betas", (1.0, 0.9), "beta_1 is 1.0"),
            ("AdamW", "eps", "small", "eps is 'small'"),
            ("SGD", "momentum", 0.5, "another rule of update.*cycle_momentum=False"),
            ("momentum", "momentum", 0.0, "another rule of update"),
        ):
            model, own = fused(kind)
            pass_(model, 0, comm.rank, size)
            if comm.rank == size - 1:
                own.param_groups[0][key] = value
            for _ in range(2):  # what is refused once, is so until it is set right
                with pytest.raises(ValueError, match=f"(?s){words}"):
                    own.step()

    run_ranks(program, size)


def test_a_schedule_of_mpistrat_shows_its_rates_and_refuses_another_one():
    def program(comm):
        model = mt.replicate(net(), ms.MirroredStrategy())
        schedule = ms.optim.Linear(0.1, 0.0, 10)
        own = mt.FusedOptimizer(model, ms.optim.SGD(schedule))
        assert own.param_groups[0]["lr"] == 0.1
        _, rates = trained(model, own, range(3), comm.rank, 2)
        assert rates == [schedule(step) for step in (1, 2, 3)]
        own.load_state_dict(own.state_dict())
        assert trained(model, own, range(3, 4), comm.rank, 2)[1] == [schedule(4)]
        for spoil in (
            lambda: own.param_groups[0].update(lr=0.5),
            lambda: schedulers.LambdaLR(own, lambda epoch: 1.0),
            lambda: schedulers.StepLR(own, 1),
        ):
            saved = own.state_dict()
            spoil()
            pass_(model, 5, comm.rank, 2)
            with pytest.raises(ms.errors.ContextError, match="is a schedule of mpistrat"):
                own.step()
            own.load_state_dict(saved)
            own.zero_grad()
        trained(model, own, range(5, 6), comm.rank, 2)

    run_ranks(program, 2)


def test_closures_hooks_and_classes_are_as_of_pytorchs():
    def program(comm):
        model, own = fused("AdamW")
        assert isinstance(own, torch.optim.Optimizer)
        assert repr(own).startswith("FusedOptimizer (\nParameter Group 0")
        met = []
        own.register_step_pre_hook(lambda *_: met.append("before"))
        own.register_step_post_hook(lambda *_: met.append("after"))
        own.register_state_dict_post_hook(lambda o, state: state.update(mine=1))

        def closure():
            own.zero_grad()
            met.append("closure")
            return pass_(model, 0, comm.rank, 2)

        loss = own.step(closure)
        assert met == ["before", "closure", "after"] and float(loss.detach()) > 0
        own.zero_grad()
        assert own.step() is None
        assert own.state_dict()["mine"] == 1
        plain = net()
        trained(plain, OPTIMIZERS["AdamW"][0](plain.parameters()), [0])
        close(weights(model), weights(plain))
        with pytest.raises(ms.errors.ContextError, match=r"add_param_group.*Group"):
            own.add_param_group({"params": [nn.Parameter(torch.ones(1))]})

    run_ranks(program, 2)


@pytest.mark.parametrize("size", SIZES)
def test_a_scaler_of_the_loss_leaves_out_what_overflows_on_any_rank(size):
    plain = net()
    optimizer = OPTIMIZERS["AdamW"][0](plain.parameters())
    wanted, _ = trained(plain, optimizer, [0, 2, 3])

    def program(comm):
        model, own = fused("AdamW")
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        scales = []
        for step in range(4):
            loss = pass_(model, step, comm.rank, size, scaler)
            if step == 1 and comm.rank == size - 1:  # what overflows, overflows in the pass
                own.zero_grad()
                x, _ = batch(step)
                (model(x.chunk(size)[comm.rank]).sum() * float("inf")).backward()
            before = weights(model)
            scaler.step(own)
            assert all(map(torch.equal, before, model.parameters())) == (step == 1)
            assert not hasattr(own, "found_inf")
            scaler.update()
            own.zero_grad()
            scales.append(scaler.get_scale())
            assert torch.isfinite(loss)
        assert scales == [1024.0, 512.0, 512.0, 1024.0]
        assert own.optimizer.iterations == 3
        close(weights(model), wanted)

    run_ranks(program, size)


def test_gradients_that_a_scaler_has_divided_are_refused_with_what_to_use():
    def program(comm):
        model, own = fused("SGD")
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for clips in (True, False):
            pass_(model, 0, comm.rank, 2, scaler)
            scaler.unscale_(own)
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with pytest.raises(ms.errors.ContextError, match=r"unscale_.*ClipByGlobalNorm"):
                scaler.step(own)
            own.zero_grad()
            del own.found_inf, own.grad_scale
            scaler.update()
        pass_(model, 0, comm.rank, 2, scaler)
        next(model.parameters()).grad.data.mul_(0.5)
        with pytest.raises(ms.errors.ContextError, match=r"was changed after"):
            scaler.step(own)

    run_ranks(program, 2)


def test_a_checkpoint_has_the_numbers_of_the_groups(tmp_path):
    def begin():
        model, own = fused("AdamW")
        scheduler = schedulers.StepLR(own, 2, 0.5)
        plateau = schedulers.ReduceLROnPlateau(own, factor=0.1, patience=0)
        parts = {"optimizer": own, "scheduler": scheduler}
        return model, own, scheduler, plateau, ms.Checkpoint(model=model, **parts)

    def first(comm):
        model, own, scheduler, plateau, checkpoint = begin()
        trained(model, own, range(3), comm.rank, 2, scheduler)
        for value in (1.0, 2.0):
            plateau.step(value)
        path = checkpoint.save(tmp_path / "some")
        return path, trained(model, own, range(3, 6), comm.rank, 2, scheduler)

    path, (wanted, rates) = run_ranks(first, 2)[0]

    def second(comm):
        model, own, scheduler, _, checkpoint = begin()
        checkpoint.restore(path)
        found, told = trained(model, own, range(3, 6), comm.rank, 3, scheduler)
        close(found, wanted)
        assert told == rates

    run_ranks(second, 3)


def test_calls_of_a_step_are_as_many_with_a_scheduler_as_without():
    def program(comm):
        counts = []
        for name in (None, "StepLR", "one cycle"):
            model, own = fused("AdamW")
            scheduler = None if name is None else SCHEDULERS[name](own)
            trained(model, own, range(2), comm.rank, 2, scheduler)
            session = model._mpistrat_gradients.strategy._replicas.lockstep.session
            before = session.calls
            trained(model, own, range(2, 5), comm.rank, 2, scheduler)
            counts.append(session.calls - before)
        return counts

    for counts in run_ranks(program, 2):
        assert len(set(counts)) == 1, counts


def test_every_optimizer_of_mpistrat_has_groups_that_count():
    def program(comm):
        kinds = ("LAMB", "LARS", "Lion", "RMSprop", "Adagrad")
        for kind, key in itertools.product(kinds, ("lr", "weight_decay")):
            rule = getattr(ms.optim, kind)
            found = []
            for changed in (False, True):
                model = mt.replicate(net(), ms.MirroredStrategy())
                how = {"learning_rate": 0.02, "weight_decay": 0.3} if not changed else {}
                start = {"learning_rate": 0.01, "weight_decay": 0.1}
                name = "learning_rate" if key == "lr" else key
                own = mt.FusedOptimizer(
                    model, rule(**start | {n: x for n, x in how.items() if n == name})
                )
                if changed:
                    own.param_groups[0][key] = {"lr": 0.02, "weight_decay": 0.3}[key]
                found.append(trained(model, own, range(2), comm.rank, 2)[0])
            assert all(map(torch.equal, *found)), (kind, key)

    run_ranks(program, 2)


@pytest.mark.parametrize(
    ("option", "value"),
    [("nesterov", True), ("maximize", True), ("dampening", 0.5), ("amsgrad", True)],
)
def test_options_that_the_update_does_not_follow_are_refused(option, value):
    model = mt.replicate(torch.nn.Linear(3, 1), ms.OneDeviceStrategy("cpu"))
    optimizer = mt.FusedOptimizer(model, ms.optim.SGD(0.1, momentum=0.9))
    optimizer.param_groups[0][option] = type(value)(0)
    model(torch.ones(2, 3)).mean().backward()
    optimizer.step()
    optimizer.param_groups[0][option] = value
    before = model.weight.clone()
    model(torch.ones(2, 3)).mean().backward()
    with pytest.raises(ValueError, match=rf"param_groups\[0\]: {option} is {value}"):
        optimizer.step()
    assert model.weight.equal(before)


def test_a_state_of_something_else_is_refused():
    model = mt.replicate(torch.nn.Linear(3, 1), ms.OneDeviceStrategy("cpu"))
    optimizer = mt.FusedOptimizer(model, ms.optim.SGD(0.1, momentum=0.9))
    with pytest.raises(ValueError, match="with 'state' and 'param_groups'"):
        optimizer.load_state_dict({})
    optimizer.load_state_dict(torch.optim.Adam(model.parameters(), 0.1).state_dict())
    model(torch.ones(2, 3)).mean().backward()
    with pytest.raises(ValueError, match=r"param_groups\[0\] has no momentum"):
        optimizer.step()

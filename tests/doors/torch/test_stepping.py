"""Gradients and weights of one rank alone are never used without a word."""

from __future__ import annotations

import copy
import re

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.testing import run_ranks

torch = pytest.importorskip("torch", reason="wants PyTorch: pip install 'mpistrat[torch]'")
import mpistrat.torch as mt  # noqa: E402

nn, F = torch.nn, torch.nn.functional

Alone, Apart = ms.errors.ContextError, ms.errors.DivergenceError


def net():
    """Small weights, and one that is in the memory of the node under `FusedOptimizer`."""
    made = nn.Sequential(nn.Linear(4, 130), nn.Tanh(), nn.Linear(130, 130), nn.Linear(130, 1))
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.rand(p.shape, generator=draw) * 0.1)
    return made


def rows(rank, count=3):
    draw = torch.Generator().manual_seed(100 + rank)
    return torch.randn(count, 4, generator=draw), torch.randn(count, 1, generator=draw)


def loss(model, rank):
    x, y = rows(rank)
    return F.mse_loss(model(x), y)


def begin(fused=False):
    model = mt.replicate(net(), ms.MirroredStrategy())
    own = mt.FusedOptimizer(model, ms.optim.SGD(0.1)) if fused else None
    return model, own, torch.optim.SGD(model.parameters(), 0.1)


def another_optimizer(rank):
    model, _, optimizer = begin(fused=True)
    loss(model, rank).backward()
    optimizer.step()


def another_optimizer_with_a_closure(rank):
    model, _, optimizer = begin(fused=True)

    def closure():
        optimizer.zero_grad()
        found = loss(model, rank)
        found.backward()
        return found

    optimizer.step(closure=closure)


def passes_added_up(rank):
    model, _, optimizer = begin()
    with mt.no_sync(model):
        loss(model, rank).backward()
    optimizer.step()


def in_the_backward_pass(rank):
    model, _, _ = begin()
    for p in model.parameters():
        step = torch.optim.SGD([p], 0.1).step
        p.register_post_accumulate_grad_hook(lambda p, step=step: step())
    loss(model, rank).backward()


def set_by_the_program(rank):
    model, _, optimizer = begin()
    found = torch.autograd.grad(loss(model, rank), list(model.parameters()))
    for p, gradient in zip(model.parameters(), found, strict=True):
        p.grad = gradient
    optimizer.step()


def of_a_part_beside(rank):
    model, _, optimizer = begin()
    head = nn.Linear(1, 1)
    optimizer.add_param_group({"params": head.parameters()})
    loss(nn.Sequential(model, head), rank).backward()
    optimizer.step()


def small_weights_and_back(rank):
    """As sharpness-aware steps do: there and back, which is not where it was."""
    model, own, _ = begin(fused=True)
    loss(model, rank).backward()
    step = model[0].weight.grad * 0.05
    model[0].weight.data.add_(step)
    loss(model, rank).backward()
    model[0].weight.data.sub_(step)
    own.step()


CASES = {
    another_optimizer: (Alone, r"SGD\.step\(\) would .*FusedOptimizer.*deepcopy"),
    another_optimizer_with_a_closure: (Alone, "FusedOptimizer"),
    passes_added_up: (Alone, "added up in no_sync"),
    in_the_backward_pass: (Alone, "when the backward pass ends"),
    set_by_the_program: (Apart, "gradient of .*set by the program"),
    of_a_part_beside: (Apart, "gradient of shape .*replicate what has both"),
    small_weights_and_back: (Apart, r"'0\.weight'.*else than this FusedOptimizer"),
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_what_is_one_ranks_own_is_an_error_on_every_rank(size, case):
    kind, words = CASES[case]

    def program(comm):
        with pytest.raises(kind, match=f"(?s){words}"):
            case(comm.rank)

    run_ranks(program, size)


def test_gradients_that_the_program_makes_alike_are_taken():
    def program(comm):
        model, _, optimizer = begin()
        strategy = model._mpistrat_gradients.strategy
        for step in range(3):
            if step < 2:
                loss(model, comm.rank).backward()
                for p in model.parameters():
                    p.grad = p.grad.clone() * 0.5
            else:
                found = torch.autograd.grad(loss(model, comm.rank), list(model.parameters()))
                for p, gradient in zip(model.parameters(), found, strict=True):
                    p.grad = strategy.all_reduce("MEAN", gradient)
            optimizer.step()
            optimizer.zero_grad()
        with mt.no_sync(model):
            loss(model, comm.rank).backward()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()  # by zeros
        strategy.check_same({name: p.detach() for name, p in model.named_parameters()})

    run_ranks(program, 2)


def test_other_models_and_copies_are_left_alone():
    def program(comm):
        model, own, _ = begin(fused=True)
        average = torch.optim.swa_utils.AveragedModel(model)
        copied, other = copy.deepcopy(model), nn.Linear(4, 1)
        for one in (copied, other):
            loss(one, comm.rank).backward()
            torch.optim.SGD(one.parameters(), 0.1).step()
        loss(model, comm.rank).backward()
        own.step()
        average.update_parameters(model)
        assert type(average.module) is nn.Sequential
        # What the error advises.
        model = mt.replicate(copy.deepcopy(model), model._mpistrat_gradients.strategy)
        optimizer = torch.optim.Adam(model.parameters())
        loss(model, comm.rank).backward()
        optimizer.step()
        state = {name: p.detach() for name, p in model.named_parameters()}
        model._mpistrat_gradients.strategy.check_same(state)

    run_ranks(program, 2)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize("counts", [(3, 3), (4, 2), (6, 0)], ids=str)
def test_lbfgs_goes_by_the_loss_of_all_ranks(search, counts):
    """Each rank's own would tell each rank another length of the step.

    In float64: the line search turns rounding in float32 into other steps.
    """
    x, y = (tensor.double() for tensor in rows(0, 6))

    def train(model, x, y):
        optimizer = torch.optim.LBFGS(
            model.parameters(), 0.1, max_iter=4, line_search_fn=search, history_size=3
        )

        def closure():
            optimizer.zero_grad()
            found = F.mse_loss(model(x), y)
            found.backward()
            return found

        for _ in range(2):
            optimizer.step(closure)

    wanted = net().double()
    train(wanted, x, y)

    def program(comm):
        model = mt.replicate(net().double(), ms.MirroredStrategy())
        cut = slice(0, counts[0]) if comm.rank == 0 else slice(counts[0], 6)
        train(model, x[cut], y[cut])
        for p, one in zip(model.parameters(), wanted.parameters(), strict=True):
            torch.testing.assert_close(p.detach(), one.detach(), rtol=1e-9, atol=1e-9)
        state = {name: p.detach() for name, p in model.named_parameters()}
        model._mpistrat_gradients.strategy.check_same(state)

    run_ranks(program, 2)


def test_a_parameter_that_is_frozen_after_the_forward_pass_has_no_gradient():
    def program(comm):
        model, _, optimizer = begin()
        found = loss(model, comm.rank)
        model[0].requires_grad_(False)
        found.backward()
        optimizer.step()
        model[0].requires_grad_(True)
        assert model[0].weight.grad is None and model[3].weight.grad is not None

    run_ranks(program, 2)


def test_batches_of_batches_and_single_rows_are_refused():
    arrays = np.ones((12, 4), np.float32), np.ones(12)
    strategy = ms.OneDeviceStrategy("cpu")
    with pytest.raises(ms.errors.DataError, match="how many rows do all ranks"):
        mt.batches(ms.Dataset(arrays), strategy)
    for given in (ms.Dataset(arrays).batch(4), lambda: iter([arrays])):
        with pytest.raises(ms.errors.DataError, match="are batches already"):
            mt.batches(given, strategy, batch_size=2)
    assert len(list(mt.batches(ms.Dataset(arrays).batch(4), strategy))) == 3


CHANGES = {
    "data": lambda p: p.grad.data.clamp_(-1e-3, 1e-3),
    "data, scaled": lambda p: p.grad.data.mul_(0.5),
    "another tensor": lambda p: setattr(p, "grad", p.grad.clamp(-1e-3, 1e-3)),
    "an equal tensor": lambda p: setattr(p, "grad", p.grad.clone()),
    "numpy": lambda p: p.grad.numpy().clip(-1e-3, 1e-3, out=p.grad.numpy()),
    "detached": lambda p: p.grad.detach().mul_(0.5),
    "zeros": lambda p: p.grad.data.zero_(),
    "other memory": lambda p: setattr(p.grad, "data", p.grad.data.clamp(-1e-3, 1e-3)),
    "nan": lambda p: p.grad.data.fill_(float("nan")),
    "in place": lambda p: p.grad.clamp_(-1e-3, 1e-3),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.nightly)])
def test_a_fused_optimizer_refuses_gradients_that_were_changed_after_the_pass(size, change):
    def program(comm):
        model, own, _ = begin(fused=True)
        for which in range(len([*model.parameters()])):
            for passes in (1, 2):  # also those of an earlier pass
                loss(model, comm.rank).backward()
                if comm.rank == size - 1:
                    CHANGES[change]([*model.parameters()][which])
                if passes == 2:
                    loss(model, comm.rank).backward()
                before = [p.detach().clone() for p in model.parameters()]
                name = [name for name, _ in model.named_parameters()][which]
                with pytest.raises(Alone, match=f"'{name}' was .* after the backward.*ClipBy"):
                    own.step()
                assert all(map(torch.equal, before, model.parameters()))
                own.zero_grad()
        loss(model, comm.rank).backward()
        own.step()
        assert not torch.equal(before[0], model[0].weight)

    run_ranks(program, size)


def test_a_fused_optimizer_takes_gradients_that_the_program_has_only_dropped():
    """By None, as in one process; and what was set before the pass counts as it did."""

    def program(comm):
        model, own, _ = begin(fused=True)
        model[0].weight.grad = torch.ones_like(model[0].weight)
        for _ in range(2):
            loss(model, comm.rank).backward()
        model[0].bias.grad = None
        before = [p.detach().clone() for p in model.parameters()]
        own.step()
        same = [torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
        assert same == [name == "0.bias" for name, _ in model.named_parameters()]

    run_ranks(program, 2)


def test_samples_of_gradients_are_few_and_from_all_of_each():
    from mpistrat.torch.ddp.parameters import _SAMPLES, _take_sample

    for size in (0, 1, 31, 32, 63, 64, 65, 1000, 10**6):
        array = np.arange(size)
        sample = _take_sample(array)
        assert np.may_share_memory(sample, array) or not size
        assert min(size, _SAMPLES // 2) <= sample.size < 2 * _SAMPLES
        if size >= 64:
            assert sample[0] == 0 and sample[-1] >= size - size // _SAMPLES - 2
            assert len(set(np.diff(sample))) == 1


def grouped(model):
    first, *_, last = model.children()
    groups = [{"params": first.parameters()}, {"params": last.parameters(), "lr": 0.01}]
    return torch.optim.SGD(groups, 0.1, momentum=0.5)


def change_rate(optimizer, group=0, rate=0.05):
    optimizer.param_groups[group]["lr"] = rate


def change_momentum(optimizer):
    optimizer.param_groups[1]["momentum"] = 0.25


def plateau(optimizer, rank):
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for value in (1.0, 2.0 if rank else 0.5):
        scheduler.step(value)


def change_tensor(optimizer):
    optimizer.param_groups[0]["lr"].fill_(0.05)


def swap_rates(optimizer):
    change_rate(optimizer, 0, 0.01)
    change_rate(optimizer, 1, 0.1)


# What rank 1 does to its optimizer, and what the error says.
DIFFERENCES = {
    "rate": (change_rate, r"ranks? 0(, 2)?: lr=0\.1 \(group 0.*rank 1: lr=0\.05 \(group 0"),
    "second group": (lambda o: change_rate(o, 1, 0.02), r"lr=0\.01 \(group 1.*lr=0\.02 \(group 1"),
    "exchanged": (swap_rates, r"lr=0\.1 \(group 0.*lr=0\.01 \(group 0"),
    "momentum": (change_momentum, r"momentum=0\.5 \(group 1.*momentum=0\.25 \(group 1"),
    "plateau": (lambda o: plateau(o, 1), r"lr=0\.1 \(group 0.*lr=0\.05 \(group 0"),
}


@pytest.mark.parametrize("when", ["first", "before the pass", "before the step"])
@pytest.mark.parametrize("what", DIFFERENCES)
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_hyper_parameters_that_differ_are_named_before_weights_are_changed(size, what, when):
    change, words = DIFFERENCES[what]

    def program(comm):
        model, _, _ = begin()
        optimizer = grouped(model)
        odd = comm.rank == 1
        if what == "plateau":
            plateau(optimizer, 0)
        for _ in range(0 if when == "first" else 3):
            loss(model, comm.rank).backward()
            optimizer.step()
        before = [p.detach().clone() for p in model.parameters()]
        if odd and when != "before the step":
            change(optimizer)
        with pytest.raises(ms.errors.LockstepError, match=f"(?s){words}.*alike on all") as got:
            loss(model, comm.rank).backward()
            if odd and when == "before the step":
                change(optimizer)
            optimizer.step()
            if not odd:  # which has changed nothing, so its step had no reason to ask
                assert when == "before the step"
                loss(model, comm.rank).backward()
        assert re.search(r"ranks? 0", str(got.value)) and "rank 1" in str(got.value)
        if odd or when != "before the step":
            assert all(map(torch.equal, before, model.parameters()))

    run_ranks(program, size)


def test_rates_that_are_tensors_and_change_in_place_are_compared():
    def program(comm):
        model, _, _ = begin()
        optimizer = torch.optim.Adam(model.parameters(), torch.tensor(0.1), foreach=False)
        for _ in range(2):
            loss(model, comm.rank).backward()
            optimizer.step()
        if comm.rank:
            change_tensor(optimizer)
        with pytest.raises(ms.errors.LockstepError, match=r"(?s)lr=0\.1.*lr=0\.05"):
            loss(model, comm.rank).backward()

    run_ranks(program, 2)


def test_hyper_parameters_that_all_ranks_change_cost_no_call():
    """Of a new optimizer there is one, and where they change between the pass and the step."""

    def program(comm):
        model, _, _ = begin()
        optimizer, calls = grouped(model), []
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
        session = model._mpistrat_gradients.strategy._replicas.lockstep.session

        def step(change=lambda: None):
            before = session.calls
            loss(model, comm.rank).backward()
            change()
            optimizer.step()
            scheduler.step()
            calls.append(session.calls - before)

        for _ in range(4):
            step()
        step(lambda: change_rate(optimizer))
        step()
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        step()
        step()
        return calls

    for calls in run_ranks(program, 2):
        one = calls[1]
        assert calls == [one + 1, one, one, one, one + 1, one, one + 1, one]
    assert set(run_ranks(program, 1)[0]) == {0}


def test_optimizers_that_are_made_and_dropped_are_few():
    def program(comm):
        model, _, _ = begin()
        for _ in range(12):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            loss(model, comm.rank).backward()
            optimizer.step()
        return len(model._mpistrat_gradients.step_comparison._hyperparameters)

    assert run_ranks(program, 2) == [8, 8]

"""Models of PyTorch on processes: weights of one process; writes stay on a rank, and are found."""

from __future__ import annotations

import copy
import os

import numpy as np
import pytest

import mpistrat as ms

torch = pytest.importorskip("torch", reason="wants PyTorch: pip install 'mpistrat[torch]'")
import mpistrat.torch as mt  # noqa: E402

pytestmark = pytest.mark.mpi


def made():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(40, 600), torch.nn.Tanh(), torch.nn.Linear(600, 1))


@pytest.mark.parametrize("fused", [False, True])
def test_weights_are_those_of_one_process(world, fused):
    torch.set_num_threads(1)
    plain = made()
    data = [torch.rand(rows, 40) for rows in (2 * world.size, world.size + 1, 1)]
    # A large epsilon: else, where a gradient is nearly 0, how its sum was rounded is learned.
    rest = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.1, eps=1e-3)
    strategy = ms.MultiWorkerMirroredStrategy()
    model = mt.replicate(copy.deepcopy(plain), strategy)
    if fused:
        rule = ms.optim.AdamW(0.01, weight_decay=0.1, epsilon=1e-3)
        optimizer = mt.FusedOptimizer(model, rule)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-3)
    for x in data:
        plain(x).square().mean().backward()
        each = -(-len(x) // world.size)
        model(x[world.rank * each :][:each]).square().mean().backward()
        for one in (rest, optimizer):
            one.step()
            one.zero_grad()
    for (name, x), y in zip(model.named_parameters(), plain.parameters(), strict=True):
        np.testing.assert_allclose(x.detach(), y.detach(), rtol=1e-4, atol=1e-5, err_msg=name)
    strategy.check_same({name: x.detach() for name, x in model.named_parameters()})


@pytest.mark.mpi(min_size=2)
def test_a_write_stays_on_its_rank_and_is_found(world):
    model = mt.replicate(made(), ms.MultiWorkerMirroredStrategy())
    optimizer = mt.FusedOptimizer(model, ms.optim.SGD(0.1))
    before = model[0].weight.detach().clone()
    if world.rank == 1:
        model[0].weight.data[0, 0] = 100.0
    world.Barrier()
    assert (model[0].weight[0, 0].item() == 100.0) == (world.rank == 1)
    model(torch.ones(2, 40)).mean().backward()
    with pytest.raises(ms.errors.ContextError, match=r"'0\.weight' was written to"):
        optimizer.step()
    mt.replicate(model)
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("fused", [False, True])
def test_a_forked_process_has_no_gradients_and_makes_none(world, fused):
    torch.set_num_threads(1)
    model = mt.replicate(made(), ms.MultiWorkerMirroredStrategy())
    optimizer = mt.FusedOptimizer(model, ms.optim.SGD(0.1)) if fused else None

    def backward():
        model(torch.ones(2, 40)).mean().backward()

    backward()
    pid = os.fork()
    if not pid:
        told = 0
        for call in (backward, optimizer.step if fused else backward):
            try:
                call()
            except ms.errors.StrategyError as error:
                told += "forked" in str(error)
        with torch.no_grad():
            model(torch.ones(2, 40))
        os._exit(told)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
    backward()

"""Collective calls that gradients pass, held against one process that has all rows."""

from __future__ import annotations

import copy
import threading

import pytest

import mpistrat as ms
from mpistrat.testing import run_ranks

torch = pytest.importorskip("torch", reason="wants PyTorch: pip install 'mpistrat[torch]'")
import mpistrat.torch as mt  # noqa: E402

nn, F = torch.nn, torch.nn.functional

SIZES = [1, 2, 3, 4]


def own(rank):
    return torch.arange(3, dtype=torch.float64) * (rank + 1) + 0.5


@pytest.mark.parametrize("op", ["sum", "mean", "weighted"])
@pytest.mark.parametrize("size", SIZES)
def test_gradients_pass_an_all_reduce(size, op):
    weights = [float(rank) + (size == 1) for rank in range(size)]  # replica 0 has none
    share = {"sum": [1.0] * size, "mean": [1 / size] * size}
    share["weighted"] = [w / sum(weights) for w in weights]
    xs = [own(rank).requires_grad_() for rank in range(size)]
    total = sum(s * x.square() for s, x in zip(share[op], xs, strict=True))
    # Each rank's loss takes the total another number of times.
    sum((rank + 1) * total.sin().sum() for rank in range(size)).backward()

    def program(comm):
        strategy, rank = ms.MirroredStrategy(), comm.rank
        x = own(rank).requires_grad_()
        weight = weights[rank] if op == "weighted" else None
        name = "MEAN" if op == "weighted" else op
        with strategy.scope():
            found = mt.all_reduce(name, {"x": x.square()}, weight=weight)["x"]
        torch.testing.assert_close(found.detach(), total.detach())
        ((rank + 1) * found.sin().sum()).backward()
        torch.testing.assert_close(x.grad, xs[rank].grad)

    run_ranks(program, size)


@pytest.mark.parametrize("size", SIZES)
def test_gradients_pass_an_all_gather(size):
    xs = [torch.ones(2, rank + 1, requires_grad=True) for rank in range(size)]
    whole = torch.cat(xs, 1)
    places = torch.arange(whole.shape[1]).float()
    sum((rank + 1) * (whole * places).square().sum() for rank in range(size)).backward()

    def program(comm):
        strategy, rank = ms.MirroredStrategy(), comm.rank
        x = torch.ones(2, rank + 1, requires_grad=True)

        def step():
            found = mt.all_gather([x], axis=1)[0]
            ((rank + 1) * (found * places).square().sum()).backward()
            return found.detach()

        found = strategy.experimental_local_results(strategy.run(step))[0]
        torch.testing.assert_close(found, whole.detach())
        torch.testing.assert_close(x.grad, xs[rank].grad)

    run_ranks(program, size)


@pytest.mark.parametrize("call", ["all_reduce", "all_gather", "SyncBatchNorm"])
def test_gradients_of_gradients_are_an_error_and_not_constants(call):
    def program(comm):
        strategy = ms.MirroredStrategy()
        norm = mt.SyncBatchNorm(3).double()
        norm._use_strategy(strategy)
        do = {
            "all_reduce": lambda x: mt.all_reduce("SUM", x, strategy),
            "all_gather": lambda x: mt.all_gather(x, strategy=strategy),
            "SyncBatchNorm": norm,
        }[call]
        x = torch.stack([own(comm.rank), own(comm.rank) ** 2]).requires_grad_()
        (slope,) = torch.autograd.grad(do(x.square()).sin().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            slope.square().sum().backward()

    run_ranks(program, 2)


def test_wrong_calls_are_errors_on_all_ranks():
    def program(comm):
        strategy = ms.MirroredStrategy()
        with pytest.raises(ValueError, match="SUM and MEAN, not for MAX"):
            mt.all_reduce("max", torch.ones(2), strategy)
        with pytest.raises(ms.errors.LeafTypeError, match="expected a tensor"):
            mt.all_reduce("sum", 1.0 if comm.rank else torch.ones(()), strategy)
        with pytest.raises(ms.errors.AxisError, match="no axis 1"):
            mt.all_gather(torch.ones(2), 1, strategy)
        assert strategy.all_reduce("sum", 1) == 2

    run_ranks(program, 2)


class Far(torch.Tensor):
    """Stands in for a tensor of a GPU, whose memory NumPy does not see."""

    device = torch.device("cuda", 0)
    cpu = lambda self: self.as_subclass(torch.Tensor)  # noqa: E731


def test_tensors_of_other_devices_are_staged_in_the_host_where_that_is_asked_for(monkeypatch):
    to = torch.Tensor.to

    def there(tensor, device):
        return tensor.as_subclass(Far) if device == Far.device else to(tensor, device)

    monkeypatch.setattr(torch.Tensor, "to", there)

    def program(comm):
        strategy = ms.MirroredStrategy()
        x = torch.full((2,), comm.rank + 1.0).as_subclass(Far).requires_grad_()
        given = {"far": x, "near": torch.ones(2)}
        found = mt.all_reduce("SUM", given, strategy, stage="host")
        assert isinstance(found["far"], Far) and type(found["near"]) is torch.Tensor
        assert found["far"].tolist() == [3.0, 3.0]
        rows = mt.all_gather(x, strategy=strategy, stage="host")
        assert isinstance(rows, Far) and rows.tolist() == [1.0, 1.0, 2.0, 2.0]
        (found["far"].as_subclass(torch.Tensor).sum() * (comm.rank + 1)).backward()
        assert x.grad.tolist() == [3.0, 3.0]
        for call in (mt.all_reduce, mt.all_gather):
            value = ["SUM", given] if call is mt.all_reduce else [given]
            with pytest.raises(ms.errors.LeafTypeError, match=r"cuda:0.*cpu\(\).*stage='host'"):
                call(*value, strategy=strategy)
            with pytest.raises(ValueError, match="expected 'host'"):
                call(*value, strategy=strategy, stage="gpu")
        with pytest.raises(NotImplementedError, match="meta"):  # what has no contents
            one = torch.empty(2, device="meta") if comm.rank else torch.ones(2)
            mt.all_reduce("SUM", one, strategy, stage="host")
        assert strategy.all_reduce("sum", 1) == 2

    run_ranks(program, 2)


_lock = threading.Lock()  # ranks that are threads have one generator


def normal_net(batch_norm=nn.BatchNorm2d):
    with _lock, torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(2, 3, 2), batch_norm(3), nn.ReLU(), nn.Conv2d(3, 1, 1), nn.Flatten()
        )


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("rows", [8, 5, 2])  # of 4 ranks: 2 each; 2, 2, 1, 0; 1, 1, 0, 0
@pytest.mark.parametrize("size", SIZES)
def test_batch_normalisation_over_all_ranks_is_that_of_one_process(size, rows, fused):
    data = torch.randn(3, rows, 2, 3, 3, generator=torch.Generator().manual_seed(1)) * 3 + 1
    plain = normal_net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x in data:
        plain(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def program(comm):
        strategy, rank = ms.MirroredStrategy(), comm.rank
        model = mt.replicate(mt.SyncBatchNorm.convert(normal_net()), strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if fused:
            optimizer = mt.FusedOptimizer(model, ms.optim.SGD(0.1))
        each = -(-rows // size)
        for x in data:
            model(x[rank * each : (rank + 1) * each]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-4, atol=1e-5)
        strategy.check_same(model.state_dict())
        alone = copy.deepcopy(model).eval()
        x = data[0, :1]
        torch.testing.assert_close(alone(x), plain.eval()(x), rtol=1e-4, atol=1e-5)

    run_ranks(program, size)


@pytest.mark.parametrize("size", [2, 3])
def test_batch_normalisation_of_one_row_is_refused_on_all_ranks(size):
    def program(comm):
        norm = mt.replicate(mt.SyncBatchNorm(2), ms.MirroredStrategy())
        row_count = int(comm.rank == 0)
        text = rf"over all {size} ranks, got 1 \(rank {comm.rank} has {row_count}\)\. Give larger"
        with pytest.raises(ValueError, match=text):
            norm(torch.zeros(row_count, 2))

    run_ranks(program, size)

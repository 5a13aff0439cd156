"""Torch's own ways to train on many ranks, over the backend, against one process.

Each rank has two of the rows; one process has all of them.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import mpistrat.torch as mt

ROWS, STEPS = 2, 3


class Net(torch.nn.Module):
    """Two ways through, of which a batch may take one."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(6, 300)
        self.aside = torch.nn.Linear(300, 300)
        self.norm = torch.nn.LayerNorm(300)
        self.last = torch.nn.Linear(300, 3)

    def forward(self, x, aside=True):
        x = torch.tanh(self.first(x))
        return self.last(self.norm(self.aside(x) if aside else x))


def model():
    torch.manual_seed(7)
    return Net()


def batch(step, size):
    torch.manual_seed(100 + step)
    return torch.randn(ROWS * size, 6), torch.randn(ROWS * size, 3)


def steps(net, optimizer, rank, size, shards, aside=lambda rank, step: True):
    """Train; with `shards` on this rank's rows, else on all."""
    for step in range(STEPS):
        x, y = batch(step, size)
        if shards:
            x, y = (part.chunk(size)[rank] for part in (x, y))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x, aside(rank, step)), y).backward()
        optimizer.step()


def sgd(net):
    return torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)


@pytest.fixture
def alone(rank, size):
    """What one process comes to."""
    net = model()
    steps(net, sgd(net), rank, size, shards=False)
    return net


def same(net, wanted, rtol=2e-5, atol=2e-6):
    for (name, got), one in zip(net.named_parameters(), wanted.parameters(), strict=True):
        if isinstance(got, DTensor):
            got = got.full_tensor()
        torch.testing.assert_close(got.detach(), one.detach(), rtol=rtol, atol=atol, msg=name)


@pytest.mark.parametrize(
    "how", ["plain", "static_graph", "bucket_view", "small_buckets", "compiled"]
)
def test_ddp(rank, size, alone, how):
    options = {
        "static_graph": {"static_graph": True},
        "bucket_view": {"gradient_as_bucket_view": True},
        "small_buckets": {"bucket_cap_mb": 0.01},
    }.get(how, {})
    net = model()
    if rank:  # what differs at the start is rank 0's
        torch.nn.init.zeros_(net.first.weight)
    net = DistributedDataParallel(net, **options)
    called = torch.compile(net, backend="eager") if how == "compiled" else net
    steps(called, sgd(net), rank, size, shards=True)
    same(net.module, alone)


@pytest.mark.parametrize("hook", ["allreduce_hook", "fp16_compress_hook", "powerSGD_hook"])
def test_hooks_of_ddp(rank, size, alone, hook):
    """PowerSGD waits, in a callback of one call, for another, and with gloo forever at times."""
    net = DistributedDataParallel(model(), bucket_cap_mb=0.01)
    if hook == "powerSGD_hook":  # as many ranks of a matrix as it can have: nothing is lost
        state = PowerSGDState(None, 8, 2, min_compression_rate=1, orthogonalization_epsilon=1e-8)
        net.register_comm_hook(state, powerSGD_hook)
    else:
        net.register_comm_hook(None, getattr(default_hooks, hook))
    steps(net, sgd(net), rank, size, shards=True)
    same(net.module, alone, *(() if hook == "allreduce_hook" else (2e-3, 2e-3)))


def test_ddp_without_some_parameters(rank, size):
    """Odd ranks leave a layer out: the mean counts zeros for them."""
    net = DistributedDataParallel(model(), find_unused_parameters=True)
    steps(net, sgd(net), rank, size, True, lambda rank, step: rank % 2 == 0)
    wanted = model()
    optimizer = sgd(wanted)
    for step in range(STEPS):
        x, y = batch(step, size)
        optimizer.zero_grad()
        for other in range(size):
            own = (part.chunk(size)[other] for part in (x, y))
            out = torch.nn.functional.mse_loss(wanted(next(own), other % 2 == 0), next(own))
            (out / size).backward()
        optimizer.step()
    same(net.module, wanted)


def test_ddp_accumulates_and_joins(rank, size):
    """`no_sync` adds up; ranks with less data shadow the others."""
    net = DistributedDataParallel(model())
    x, y = (part.chunk(size)[rank] for part in batch(0, size))
    with net.no_sync():
        torch.nn.functional.mse_loss(net(x), y).backward()
    torch.nn.functional.mse_loss(net(x), y).backward()
    wanted = model()
    torch.nn.functional.mse_loss(wanted(batch(0, size)[0]), batch(0, size)[1]).mul(2).backward()
    torch.testing.assert_close(net.module.last.weight.grad, wanted.last.weight.grad)
    net.zero_grad()
    with Join([net]):
        for _ in range(rank + 1):
            torch.nn.functional.mse_loss(net(x), y).backward()
    sums = [p.detach().clone() for p in net.parameters()]
    for value in sums:
        dist.broadcast(value, src=size - 1)
    assert all(torch.equal(a, b) for a, b in zip(sums, net.parameters(), strict=True))


def test_fsdp2(rank, size, alone):
    net = model()
    fully_shard(net.aside)
    fully_shard(net)
    steps(net, sgd(net), rank, size, shards=True)
    same(net, alone)


@pytest.mark.mpi(min_size=2)
def test_fsdp1(rank, size, alone):
    net = FullyShardedDataParallel(
        model(), device_id=torch.device("cpu"), use_orig_params=True, forward_prefetch=True
    )
    steps(net, sgd(net), rank, size, shards=True)
    with FullyShardedDataParallel.summon_full_params(net):
        same(net.module, alone)


def test_zero(rank, size, alone):
    net = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    steps(net, optimizer, rank, size, shards=True)
    same(net.module, alone)
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        assert len(optimizer.state_dict()["state"]) == len(list(net.parameters()))


def test_dtensor(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(3)
    a, b = torch.randn(8, 5), torch.randn(5, 7)
    rows, whole = distribute_tensor(a, mesh, [Shard(0)]), distribute_tensor(b, mesh, [Replicate()])
    columns = distribute_tensor(b, mesh, [Shard(1)])
    for got in (rows @ whole, rows @ columns):
        torch.testing.assert_close(got.full_tensor(), a @ b)
    moved = rows.redistribute(mesh, [Shard(1)])
    torch.testing.assert_close(moved.full_tensor(), a)
    torch.testing.assert_close(rows.sum().full_tensor(), a.sum())


@pytest.mark.mpi(min_size=4)
def test_meshes_of_two_axes(rank, size):
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("outer", "inner"))
    value = torch.tensor([float(rank)])
    dist.all_reduce(value, group=mesh["inner"].get_group())
    first = rank // (size // 2) * (size // 2)
    assert value.item() == sum(range(first, first + size // 2))
    net = model()
    fully_shard(net, mesh=mesh)
    wanted = model()
    steps(net, sgd(net), rank, size, shards=True)
    steps(wanted, sgd(wanted), rank, size, shards=False)
    same(net, wanted)


@pytest.mark.parametrize("beside", [False, True], ids=["save", "async_save"])
def test_checkpoints(rank, size, tmp_path, beside):
    paths = [str(tmp_path)]
    dist.broadcast_object_list(paths, src=0)

    def trained(count):
        net = model()
        fully_shard(net)
        optimizer = torch.optim.AdamW(net.parameters(), 0.01)
        for _ in range(count):
            steps(net, optimizer, rank, size, shards=True)
        return net, optimizer

    net, optimizer = trained(1)
    wanted = [p.full_tensor().clone() for p in net.parameters()]
    state = dict(zip(("model", "optimizer"), get_state_dict(net, optimizer), strict=True))
    if beside:
        checkpoints.async_save(state, checkpoint_id=paths[0]).result()
    else:
        checkpoints.save(state, checkpoint_id=paths[0])
    dist.barrier()
    net, optimizer = trained(2)
    state = dict(zip(("model", "optimizer"), get_state_dict(net, optimizer), strict=True))
    checkpoints.load(state, checkpoint_id=paths[0])
    set_state_dict(
        net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    got = [p.full_tensor() for p in net.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


class NormNet(torch.nn.Module):
    """A model with batch normalisation over rows, and over rows and pixels."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(2, 4, 3)
        self.norm = torch.nn.BatchNorm2d(4)
        self.last = torch.nn.Linear(4, 3)
        self.last_norm = torch.nn.BatchNorm1d(3, affine=False)

    def forward(self, x):
        return self.last_norm(self.last(self.norm(self.conv(x)).mean((2, 3))))


def split_rows(row_counts, rank):
    start = sum(row_counts[:rank])
    return slice(start, start + row_counts[rank])


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP", "none"])
@pytest.mark.parametrize("rows", ["equal", "uneven", "on one rank"])
def test_batch_normalisation_is_over_the_rows_of_all_ranks(rank, size, wrapper, rows):
    row_counts = {
        "equal": [3] * size,
        "uneven": [3 + number for number in range(size)],
        "on one rank": [3 * size] + [0] * (size - 1),
    }[rows]
    torch.manual_seed(3)
    reference, x = NormNet().double(), torch.randn(sum(row_counts), 2, 5, 5).double()
    torch.manual_seed(3)
    net = mt.SyncBatchNorm.convert(NormNet().double())
    inner = net
    if wrapper == "DDP":
        net = DistributedDataParallel(net)
    elif wrapper == "FSDP":
        net = fully_shard(net)
    # A loss that is a sum over rows, times what DDP and FSDP divide by: right at uneven rows, too.
    net(x[split_rows(row_counts, rank)]).square().sum().mul(size).backward()
    reference(x).square().sum().backward()
    for name, buffer in reference.named_buffers():
        torch.testing.assert_close(inner.get_buffer(name), buffer)
    for name, parameter in reference.named_parameters():
        gradient = inner.get_parameter(name).grad
        if wrapper == "FSDP":
            gradient = gradient.full_tensor()
        elif wrapper == "none":
            dist.all_reduce(gradient)
            gradient /= size
        torch.testing.assert_close(gradient, parameter.grad)


def test_batch_normalisation_in_a_group_of_some_ranks(rank, size):
    halves = [dist.new_group([number]) for number in range(size)]
    norm = mt.SyncBatchNorm.convert(torch.nn.BatchNorm1d(2), process_group=halves[rank])
    x = torch.randn(5, 2)
    norm(x)
    torch.testing.assert_close(norm.running_mean, 0.1 * x.mean(0))


def test_batch_normalisation_of_one_row_is_refused_on_all_ranks(rank, size):
    if size == 1:
        pytest.skip("one rank has torch's own layer")
    row_count = int(rank == 0)
    text = rf"over all {size} ranks, got 1 \(rank {rank} has {row_count}\)\. Give larger batches"
    with pytest.raises(ValueError, match=text):
        mt.SyncBatchNorm(2)(torch.zeros(row_count, 2))

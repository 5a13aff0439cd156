"""Training on 1 to 4 ranks gives the weights of one process of plain PyTorch."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import pickle
import threading
import weakref

import numpy as np
import pytest
from python_calls import calls_of

import mpistrat as ms
from mpistrat.kernels import elementwise
from mpistrat.testing import run_ranks

torch = pytest.importorskip("torch", reason="wants PyTorch: pip install 'mpistrat[torch]'")
import mpistrat.torch as mt  # noqa: E402
from mpistrat.torch.ddp import parameters  # noqa: E402
from mpistrat.torch.states import find_gradients  # noqa: E402

nn, F = torch.nn, torch.nn.functional

SIZES = [1, 2, 3, 4]
# Of 4 ranks: 2 each, then 2, 2, 2, 1; then 1, 1, 1, 0; then 1, 0, 0, 0.
BATCHES = [8, 7, 3, 1]
WIDTH = 6


class Tied(nn.Module):
    """Embedding and last layer share their weight; one layer is frozen, one is never used."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.frozen, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(2, 2)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.last(torch.tanh(self.frozen(self.first(x))))[:, :1]


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.reentrant = reentrant

    def forward(self, x):
        run = torch.utils.checkpoint.checkpoint
        x = run(self.one, x.requires_grad_(), use_reentrant=self.reentrant)
        # The same weights once more: their gradients come in two parts.
        return self.two(run(lambda y: torch.tanh(self.one(y)), x, use_reentrant=self.reentrant))


class Pictures(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 1, 2))

    def forward(self, x):
        x = x[:, :, None, None] * torch.linspace(0.5, 1.5, 16).reshape(4, 4)
        x = x[:, :3].contiguous(memory_format=torch.channels_last)
        return self.net(x).flatten(1)


class Autocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.net(x).float()


MODELS = {
    "plain": lambda: nn.Sequential(nn.Linear(WIDTH, 300), nn.Tanh(), nn.Linear(300, 1)),
    "tied, frozen, unused": Tied,
    "checkpointed": lambda: Checkpointed(False),
    "checkpointed, reentrant": lambda: Checkpointed(True),
    "channels last": lambda: Pictures().to(memory_format=torch.channels_last),
    "autocast": Autocast,
}


_lock = threading.Lock()  # ranks that are threads have one generator


def made(kind, seed=0):
    with _lock, torch.random.fork_rng():
        torch.manual_seed(seed)
        return MODELS[kind]()


def batches():
    data = np.random.default_rng(1)
    return [
        (data.standard_normal((n, WIDTH)).astype("f4"), data.standard_normal((n, 1)).astype("f4"))
        for n in BATCHES
    ]


def piece(array, rank, size):
    each = -(-len(array) // size)
    return torch.from_numpy(array[rank * each : (rank + 1) * each])


def train(model, optimizer, rank=0, size=1, clip=None, sync=None):
    """A loop as anybody writes it; `sync` tells of each batch whether it is followed by a step."""
    for step, (x, y) in enumerate(batches()):
        last = sync is None or sync[step]
        with contextlib.nullcontext() if last else mt.no_sync(model):
            loss = F.mse_loss(model(piece(x, rank, size)), piece(y, rank, size))
            loss.backward()
        if last:
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()


def alone(model, clip=None, sync=None):
    """The same in one process, of plain PyTorch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step, (x, y) in enumerate(batches()):
        F.mse_loss(model(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        if sync is None or sync[step]:
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return {name: x.detach() for name, x in model.named_parameters()}


def close(model, wanted, **how):
    for name, x in model.named_parameters():
        torch.testing.assert_close(x.detach(), wanted[name], rtol=1e-4, atol=1e-5, **how)


@pytest.mark.parametrize("past_caches", [False, True])
@pytest.mark.parametrize("kind", list(MODELS))
@pytest.mark.parametrize("size", SIZES)
def test_weights_are_those_of_one_process(size, kind, past_caches, monkeypatch):
    if past_caches:  # as of models that no cache holds
        monkeypatch.setattr(parameters, "MIN_UNCACHED_NBYTES", 0)
        monkeypatch.setattr(elementwise, "_MIN_STREAMED_NBYTES", 64)
    wanted = alone(made(kind))

    def program(comm):
        strategy = ms.MirroredStrategy()
        model = mt.replicate(made(kind, seed=comm.rank), strategy)  # replica 0's weights rule
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        train(model, optimizer, comm.rank, size)
        if kind != "autocast":
            close(model, wanted)
        strategy.check_same({name: x.detach() for name, x in model.named_parameters()})

    run_ranks(program, size)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_clipping_and_accumulation_are_those_of_one_process(size, fused):
    # Batches of 8 and 7 rows are no one mean: the rows of both count alike.
    sync, kind = [False, True, True, True], "plain"

    def means():
        (x, y), (x2, y2), *rest = batches()
        model = made(kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        both = [torch.from_numpy(np.concatenate(pair)) for pair in ((x, x2), (y, y2))]
        todo = [(*both, 2)] + [(torch.from_numpy(x), torch.from_numpy(y), 1) for x, y in rest]
        for x, y, times in todo:
            (F.mse_loss(model(x), y) * times).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        return {name: x.detach() for name, x in model.named_parameters()}

    wanted = means()

    def program(comm):
        model = mt.replicate(made(kind), ms.MirroredStrategy())
        optimizer, clip = torch.optim.AdamW(model.parameters(), lr=0.05), 0.1
        if fused:
            own = ms.optim.ClipByGlobalNorm(clip)
            own = ms.optim.AdamW(0.05, weight_decay=0.01, clip=own)
            optimizer, clip = mt.FusedOptimizer(model, own), None
        train(model, optimizer, comm.rank, size, clip=clip, sync=sync)
        close(model, wanted)

    run_ranks(program, size)


@pytest.mark.parametrize("kind", ["plain", "tied, frozen, unused", "channels last"])
@pytest.mark.parametrize("size", SIZES)
def test_the_fused_optimizer_gives_the_weights_of_one_process(size, kind):
    wanted = alone(made(kind))

    def program(comm):
        strategy = ms.MirroredStrategy()
        model = mt.replicate(made(kind, seed=comm.rank), strategy)
        kept = [(p, p.shape) for p in model.parameters()]
        optimizer = mt.FusedOptimizer(model, ms.optim.AdamW(0.05, weight_decay=0.01))
        train(model, optimizer, comm.rank, size)
        close(model, wanted)
        for p, (q, shape) in zip(model.parameters(), kept, strict=True):
            assert p is q and p.shape == shape and p.is_contiguous()
        strategy.check_same({name: x.detach() for name, x in model.named_parameters()})

    run_ranks(program, size)


def wide(comm):
    """A replicated model of one large weight and small ones, and its fused optimizer."""
    model = nn.Sequential(nn.Linear(WIDTH, 4000), nn.Tanh(), nn.Linear(4000, 1))
    model = mt.replicate(model, ms.MirroredStrategy())
    return model, mt.FusedOptimizer(model, ms.optim.SGD(0.1))


def backward(model, comm):
    model(torch.ones(2, WIDTH) + comm.rank).square().mean().backward()


def hidden_writes():
    def data(model):
        model[0].weight.data.add_(1)

    def numpy(model):
        model[0].weight.detach().numpy()[-1, -1] = 3

    def elsewhere(model):
        model[0].weight.data = model[0].weight.data.clone()

    def clipped(model):
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    def assigned(model):
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)

    return {
        "data": (data, "'0.weight' was written to"),
        "numpy": (numpy, "'0.weight' was written to"),
        "elsewhere": (elsewhere, "'0.weight' was given other memory"),
        "clipped": (clipped, "'0.weight' was changed after the backward.*ClipByGlobalNorm"),
        "assigned": (assigned, "'0.weight' was replaced"),
    }


@pytest.mark.parametrize("how", list(hidden_writes()))
def test_a_weight_that_something_else_writes_to_is_named_before_the_update(how):
    write, words = hidden_writes()[how]

    def program(comm):
        model, optimizer = wide(comm)
        backward(model, comm)
        optimizer.step()
        optimizer.zero_grad()
        before = model[0].weight.detach().clone()
        backward(model, comm)
        if comm.rank == 1:
            write(model)
        with pytest.raises(Exception, match=words) as caught:
            optimizer.step()
        assert isinstance(caught.value, ms.errors.ContextError)
        if comm.rank == 0:
            assert isinstance(caught.value, ms.errors.RemoteError)
            torch.testing.assert_close(model[0].weight.detach(), before, rtol=0, atol=0)
        if how == "clipped":
            return
        assert mt.replicate(model) is model  # replica 0's weights for all
        torch.testing.assert_close(model[0].weight.detach(), before, rtol=0, atol=0)
        model.zero_grad()
        backward(model, comm)
        optimizer.step()
        state = {name: x.detach() for name, x in model.named_parameters()}
        optimizer._gradients.strategy.check_same(state)

    run_ranks(program, 2)


def test_weights_loaded_on_all_ranks_are_taken_by_replicate():
    def program(comm):
        model, optimizer = wide(comm)
        state = {name: torch.full_like(x, 0.25) for name, x in model.state_dict().items()}
        model.load_state_dict(state)
        mt.replicate(model)
        assert not optimizer.variables["0.weight"]._storage.has_private_writes()
        assert (optimizer.variables["0.weight"].numpy() == 0.25).all()
        backward(model, comm)
        optimizer.step()
        assert (model[0].weight != 0.25).any()

    run_ranks(program, 2)


def test_a_fused_optimizer_of_other_parameters_than_now_require_grad_says_so():
    def program(comm):
        model, optimizer = wide(comm)
        model[0].bias.requires_grad_(False)
        mt.replicate(model)
        backward(model, comm)
        with pytest.raises(ms.errors.ContextError, match="other parameters require grad"):
            optimizer.step()
        other = mt.FusedOptimizer(model, ms.optim.SGD(0.1))
        other.zero_grad()
        backward(model, comm)
        other.step()
        backward(model, comm)
        with pytest.raises(ms.errors.ContextError, match="another was made of it"):
            optimizer.step()

    run_ranks(program, 2)


def test_a_fused_optimizer_takes_the_gradients_of_a_pass_once():
    def program(comm):
        strategy = ms.MirroredStrategy()
        model = mt.replicate(nn.Linear(2, 1), strategy)
        optimizer = mt.FusedOptimizer(model, ms.optim.SGD(0.1))
        optimizer.step()  # without gradients nothing happens, as in one process
        model(torch.ones(3, 2)).mean().backward()
        optimizer.step()
        before = model.weight.detach().clone()
        with pytest.raises(
            ms.errors.ContextError, match=r"no backward pass .* Call loss.backward\(\)"
        ):
            optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
        assert torch.equal(model.weight, before)

    run_ranks(program, 2)


def test_a_fused_optimizer_does_not_take_apart_what_shares_memory():
    """Views of the same numbers are an error, and views of others beside them are not."""

    def program(comm):
        strategy = ms.MirroredStrategy()

        def fused(made, more):
            model = nn.Linear(2, 1)
            model.made, model.more = nn.Parameter(made), more
            return mt.FusedOptimizer(mt.replicate(model, strategy), ms.optim.SGD(0.1))

        room = torch.zeros(3, 4)
        shared = [room[1:], room.view(12), room[:, 1], room[2, 3]]
        for other in [
            *map(nn.Parameter, shared),
            nn.Parameter(room[1:], requires_grad=False),
            torch.nn.Buffer(room[1:]),
        ]:
            with pytest.raises(ms.errors.LeafTypeError, match="are views of the same memory"):
                fused(room, other)
        fused(room[:, :2], nn.Parameter(room[:, 2:]))
        fused(room[::2], nn.Parameter(room[1]))
        fused(room[:, :2].clone(), nn.Parameter(room[:0]))
        tied = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        tied[1].weight = tied[0].weight
        mt.FusedOptimizer(mt.replicate(tied, strategy), ms.optim.SGD(0.1))

    run_ranks(program, 2)


@pytest.mark.parametrize("chosen", [False, True])
def test_where_the_system_does_not_tell_of_writes_each_rank_has_its_own_copy(chosen, monkeypatch):
    def refused(*_):
        raise PermissionError(13, "Permission denied", "/proc/self/pagemap")

    if chosen:
        monkeypatch.setenv("MPISTRAT_MAP_PRIVATE", "0")
    else:
        monkeypatch.setattr("mpistrat.shm.private_mapping._read_page_table", refused)
    monkeypatch.setenv("MPISTRAT_CHECK_EVERY", "2")

    def model_of(comm, strategy):
        model = nn.Linear(300, 300)
        with torch.no_grad():
            model.weight.copy_(torch.linspace(0, 1, 90_000).reshape(300, 300))
            model.bias.zero_()
        return mt.replicate(model, strategy)

    def steps(model, optimizer, comm, count):
        for step in range(count):
            model(torch.ones(2, 300) * step + comm.rank).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.weight.detach().clone()

    def program(comm):
        strategy = ms.MirroredStrategy()
        model = model_of(comm, strategy)
        how = pytest.warns(RuntimeWarning, match=r"pagemap.*own copy")
        with how if comm.rank == 0 and not chosen else contextlib.nullcontext():
            optimizer = mt.FusedOptimizer(model, ms.optim.Adam(0.01))
        found = steps(model, optimizer, comm, 3)
        plain = model_of(comm, strategy)
        wanted = steps(plain, torch.optim.Adam(plain.parameters(), 0.01), comm, 3)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        with strategy.scope():
            large = ms.Variable(np.zeros((300, 300)))  # of others the ranks of a node have one
        assert type(large._storage) is not type(optimizer.variables["weight"]._storage)
        if comm.rank == 1:
            model.weight.data.add_(1)
        with pytest.raises(ms.errors.DivergenceError, match="weight"):
            steps(model, optimizer, comm, 300)

    run_ranks(program, 2)


def test_a_replicated_model_is_found_inside_of_others():
    def program(comm):
        model, _ = wide(comm)
        outer = nn.ModuleDict({"inner": model})
        with mt.no_sync(outer), mt.no_sync(torch.compile(model, backend="eager")):
            assert not model._mpistrat_gradients.is_syncing
        two = nn.ModuleList([model, mt.replicate(nn.Linear(2, 1), ms.MirroredStrategy())])
        with pytest.raises(TypeError, match="are 2 such models"), mt.no_sync(two):
            pass

    run_ranks(program, 1)


@pytest.mark.parametrize("size", SIZES)
def test_in_the_function_of_run_too(size):
    wanted = alone(made("plain"))

    def program(comm):
        strategy = ms.MultiWorkerMirroredStrategy()
        with strategy.scope():
            model = mt.replicate(made("plain"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        strategy.run(train, args=(model, optimizer, comm.rank, size))
        close(model, wanted)

    run_ranks(program, size)


def test_a_loop_may_leave_the_model_alone_where_it_has_no_rows():
    wanted = alone(made("plain"))

    def program(comm):
        model = mt.replicate(made("plain"), ms.MirroredStrategy())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        for x, y in batches():
            x, y = piece(x, comm.rank, 4), piece(y, comm.rank, 4)
            if len(x):
                F.mse_loss(model(x), y).backward()
            else:
                mt.take_part(model)
            optimizer.step()
            optimizer.zero_grad()
        close(model, wanted)

    run_ranks(program, 4)


def test_a_model_after_another_one_where_a_rank_has_no_rows():
    def program(comm):
        strategy = ms.MirroredStrategy()
        first, second = (mt.replicate(made("plain"), strategy) for _ in range(2))
        last = nn.Linear(1, WIDTH)
        for _ in range(2):
            second(last(first(torch.ones(comm.rank, WIDTH)))).mean().backward()
        strategy.check_same([first[0].weight.grad, second[0].weight.grad])

    run_ranks(program, 3)


def test_a_model_is_not_run_where_it_has_no_rows_and_gives_an_output_of_its_shape():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.norm, self.rows = nn.Linear(3, 5), nn.BatchNorm1d(5), []

        def forward(self, x, more=None):
            out = self.norm(self.one(x))
            return {"out": out, "loss": out.mean(), "index": out.argmax(1)}, (x.shape[1], more)

    def program(comm):
        model = mt.replicate(Counts(), ms.MirroredStrategy())
        out, rest = model(torch.ones(4, 3)[: 4 - 4 * comm.rank], more="text")
        assert out["out"].shape == (4 - 4 * comm.rank, 5) and out["index"].dtype is torch.int64
        assert rest == (3, "text")
        out["loss"].backward()
        assert (model.norm.num_batches_tracked == 1 - comm.rank).all()
        assert model.norm.running_mean.isfinite().all() and model.one.weight.grad.isfinite().all()

        class Peeks(nn.Module):
            def forward(self, x):
                return x * float(x.sum())

        strategy = model._mpistrat_gradients.strategy
        model = mt.replicate(Peeks(), strategy)
        with pytest.raises(ms.errors.ContextError, match="take_part"):
            model(torch.ones(0, 3))
        model, found = mt.replicate(nn.Sequential(nn.Linear(3, 1)), strategy), []
        model[0].register_forward_hook(lambda module, given, out: found.append(out))
        model(torch.ones(0, 3))
        with pytest.raises(ms.errors.ContextError, match=r"(?s)kept, by a hook.*take_part"):
            found[0].mean()

    run_ranks(program, 2)


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    mean: object


class Held:
    def __init__(self, mean):
        self.inside, self.own = {"mean": [mean]}, self

    @property
    def mean(self):
        return self.inside["mean"][0]


class Gives(nn.Linear):
    def __init__(self, kind):
        super().__init__(3, 2)
        self.kind = kind

    def forward(self, batch):
        return self.kind(super().forward(batch.mean))


@pytest.mark.parametrize(
    "kind",
    [
        dataclasses.make_dataclass("Record", ["mean"]),
        Slots,
        Held,
        lambda mean: torch.distributions.Normal(mean, 1.0, validate_args=False),
    ],
    ids=["dataclass", "slots", "object", "distribution"],
)
@pytest.mark.parametrize("given", [Slots, Held])
def test_models_take_and_return_objects_of_the_program(kind, given):
    def program(comm):
        model = mt.replicate(Gives(kind), ms.MirroredStrategy())
        for counts in ((3, 1), (3, 0)):
            n = counts[comm.rank]
            model.zero_grad()
            out = model(given(torch.full((n, 3), 1.0 + comm.rank)))
            assert type(out.mean) is torch.Tensor and out.mean.shape == (n, 2)
            out.mean.sum(1).mean().backward()
            assert (model.weight.grad == (1.25 if counts[1] else 1.0)).all()

    run_ranks(program, 2)


class Twice(nn.Module):
    """A module under two names, and an attribute that the first call makes."""

    def __init__(self):
        super().__init__()
        self.one = self.two = nn.Linear(WIDTH, WIDTH)
        self.scale = None

    def forward(self, x):
        if self.scale is None:
            self.scale = torch.linspace(0.5, 1.5, WIDTH)
        return self.two(torch.tanh(self.one(x))) * self.scale


def test_a_model_is_as_it_was_where_a_rank_had_no_rows():
    torch.manual_seed(0)
    batches = [torch.randn(rows, WIDTH) for rows in (1, 4, 1, 3)]
    alone = Twice()
    first = copy.deepcopy(alone)

    def steps(model, rank, size):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in batches:
            model(shards(x, rank, size)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    wanted = steps(alone, 0, 1)

    def program(comm):
        found = steps(mt.replicate(copy.deepcopy(first), ms.MirroredStrategy()), comm.rank, 2)
        torch.testing.assert_close(found, wanted)

    run_ranks(program, 2)


def shards(x, rank, size):
    """The rows of a rank: of one row the first rank has it, and the others have none."""
    return x[rank * -(-len(x) // size) :][: -(-len(x) // size)]


class Waves(nn.Module):
    """Its output is complex."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 3, dtype=torch.complex64))

    def forward(self, x):
        return x.to(self.weight.dtype) @ self.weight


def size_of(model, x):
    out = model(x)
    return (out * out.conj()).real.mean()


def penalty(model, x):
    """A slope by torch.autograd.grad, in a loss."""
    x = x.clone().requires_grad_()
    out = torch.tanh(model(x))
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.mean() + (slope.norm(dim=1) - 1).square().mean()


def beside(model, x):
    """A loss whose backward pass comes through a model that is frozen."""
    return model(x.clone().requires_grad_()).square().mean()


def slopes(model, x):
    """As of a differential equation: of slopes and their slopes alone."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
    return (slope + bend).square().mean()


def by_hand(model, x):
    """A pass of gradients that the program asks for, and has no use for, then one of its own."""
    out = size_of(model, x)
    for p, grad in zip(
        model.parameters(), torch.autograd.grad(out, model.parameters()), strict=True
    ):
        assert grad.shape == p.shape and p.grad is None
    return size_of(model, x)


def doubled(model, x):
    """A model with other weights than its own, which are made of them."""
    weights = {name: 2 * p for name, p in model.named_parameters()}
    return torch.func.functional_call(model, weights, (x,)).square().mean()


class Slopes(nn.Module):
    """A transform of torch.func in the forward of a module."""

    def __init__(self):
        super().__init__()
        self.net = bent()

    def forward(self, x):
        return torch.func.vmap(torch.func.jacrev(self.net))(x)


class Leaves(nn.Module):
    """It leaves penalties in attributes, counts its calls, and says `view(len(x), -1)`."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, 4), nn.Linear(8, 2)
        self.penalty, self.penalties, self.calls, self.seen, self.shift = None, [], 0, 0, None

    def forward(self, x):
        self.calls, self.seen = self.calls + 1, self.seen + len(x)
        if self.shift is None:
            self.shift = torch.ones(4)
        hidden = torch.tanh(self.one(x)) + self.shift
        self.penalty = hidden.square().mean()
        self.penalties.append(self.calls * hidden.mean())
        return self.two(torch.stack([hidden, -hidden], 1).view(len(x), -1))


def with_penalties(model, x):
    out = model(x)
    loss = out.square().mean() + model.penalty + sum(model.penalties)
    model.penalties.clear()
    return loss


class Penalised(nn.Linear):
    """It has a weight that only a penalty uses."""

    def __init__(self):
        super().__init__(WIDTH, 2)
        self.beside = nn.Parameter(torch.ones(3))


def after_another_look(model, x):
    """The gradient of the penalty comes first, and the last call of the model was of no rows."""
    out = model(x)
    model(x[:0])
    return out.square().mean() + model.beside.square().sum()


def bent():
    return nn.Sequential(nn.Linear(WIDTH, 3), nn.Tanh(), nn.Linear(3, 2))


@pytest.mark.parametrize(
    ("make", "loss", "given"),
    [
        (Waves, size_of, {}),
        (lambda: nn.Linear(WIDTH, 2), penalty, {}),
        (lambda: nn.Linear(WIDTH, 2).requires_grad_(False), beside, {}),
        (bent, slopes, {}),
        (bent, by_hand, {}),
        (bent, doubled, {}),
        (Slopes, size_of, {}),
        (Leaves, with_penalties, {}),
        (Penalised, after_another_look, {}),
        (bent, size_of, {"inputs": lambda model: [model[0].weight]}),
        (Tied, size_of, {"inputs": lambda model: list(model.last.parameters())}),
    ],
    ids=[
        "complex",
        "input",
        "frozen",
        "slopes",
        "by-hand",
        "doubled",
        "func",
        "leaves",
        "penalty",
        "inputs",
        "tied",
    ],
)
def test_losses_of_a_rank_without_rows_have_the_passes_of_the_others(make, loss, given):
    torch.manual_seed(0)
    batches = [torch.randn(rows, WIDTH) for rows in (4, 1, 2)]
    first = make()
    alone = copy.deepcopy(first)
    wanted = []
    for x in batches:
        alone.zero_grad()
        loss(alone, x).backward(**{key: of(alone) for key, of in given.items()})
        wanted.append([p.grad for p in alone.parameters()])

    def program(comm):
        strategy = ms.MirroredStrategy()
        model = mt.replicate(copy.deepcopy(first), strategy)
        for x, grads in zip(batches, wanted, strict=True):
            model.zero_grad()
            mine = loss(model, shards(x, comm.rank, comm.size))
            mine.backward(**{key: of(model) for key, of in given.items()})
            for p, grad in zip(model.parameters(), grads, strict=True):
                assert (p.grad is None) == (grad is None)
                assert grad is None or torch.allclose(p.grad, grad, rtol=1e-4, atol=1e-5)
        assert strategy.all_reduce("SUM", 1) == comm.size  # no rank is in a call of its own
        if make is Leaves:
            assert (model.calls, strategy.all_reduce("SUM", model.seen)) == (3, 7)

    run_ranks(program, 2)


def test_rows_are_of_the_first_tensor_as_the_program_has_written_the_arguments():
    class Biased(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(3, 1)

        def forward(self, x=None, bias=None, both=None):
            x, bias = (x, bias) if both is None else (both["x"], both["bias"])
            return self.one(x) + bias.sum()

    def program(comm):
        model = mt.replicate(Biased(), ms.MirroredStrategy())
        # 1 row of 1, 3 rows of 2; of the bias each rank has 7.
        given = {"x": torch.full((1 + 2 * comm.rank, 3), 1.0 + comm.rank), "bias": torch.zeros(7)}
        for call in (lambda: model(**given), lambda: model(both=given)):
            model.zero_grad()
            call().mean().backward()
            assert (model.one.weight.grad == 1.75).all()

    run_ranks(program, 2)


def rows(n, value):
    return torch.full((n, 3), float(value))


def accumulated(name, model, comm, zero_grad):
    """Make some backward passes of ranks 0 and 1; return the gradient that one process has."""
    r = comm.rank

    def passes(*given):
        for i, x in enumerate(given):
            with contextlib.nullcontext() if i == len(given) - 1 else mt.no_sync(model):
                model(x).mean().backward()

    if name == "no rows at first":  # of 2 passes: 2 rows of 1, 4 of 5
        passes(rows(2 * r, 1), rows(2, 5))
        return 2 * (2 * 1 + 4 * 5) / 6
    if name == "no rows at first, then none on the other":
        passes(rows(2 * r, 1), rows(2 - 2 * r, 5))
        return 2 * (2 * 1 + 2 * 5) / 4
    if name == "dropped after no rows":
        with mt.no_sync(model):
            model(rows(2 * r, 1)).mean().backward()
        zero_grad()
        passes(rows(2, 5))
        return 5
    if name == "zeros between":
        with mt.no_sync(model):
            model(rows(2, 5)).mean().backward()
        model.zero_grad(set_to_none=False)
        passes(rows(4, 1 + r))
        return 1.5
    passes(rows(2, 7))  # kept, and uneven passes on top
    passes(rows(1 + 2 * r, 1), rows(1, 5))
    return 7 + 2 * (1 + 3 + 5 + 5) / 6


ACCUMULATED = [
    "no rows at first",
    "no rows at first, then none on the other",
    "dropped after no rows",
    "zeros between",
    "kept",
]


@pytest.mark.parametrize(
    ("name", "fused"),
    [(name, False) for name in ACCUMULATED] + [(name, True) for name in ACCUMULATED[:-1]],
)
def test_gradients_of_several_passes_are_those_of_one_process(name, fused):
    def program(comm):
        model = mt.replicate(nn.Linear(3, 1), ms.MirroredStrategy())
        before = model.weight.detach().clone()
        optimizer = mt.FusedOptimizer(model, ms.optim.SGD(1.0)) if fused else model
        wanted = accumulated(name, model, comm, optimizer.zero_grad)
        if fused:
            optimizer.step()
        found = before - model.weight.detach() if fused else model.weight.grad
        torch.testing.assert_close(found, torch.full((1, 3), float(wanted)))

    run_ranks(program, 2)


class Towers(nn.Module):
    """Two sides that are called apart, and a weight that only a penalty uses."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 1, bias=False), nn.Linear(3, 1, bias=False)
        self.beside = nn.Parameter(torch.ones(()))

    def forward(self, x, side):
        return getattr(self, side)(x)


@pytest.mark.parametrize("first", [(3, 1), (1, 3), (2, 0), (0, 2)], ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_passes_count_by_their_rows_whatever_comes_first(first, fused):
    own = [first, (2, 2), (4, 0)]  # the rows of the ranks in each pass

    def program(comm):
        model = mt.replicate(Towers(), ms.MirroredStrategy())
        before = [p.detach().clone() for p in model.parameters()]
        optimizer = mt.FusedOptimizer(model, ms.optim.SGD(1.0)) if fused else None
        for i, counts in enumerate(own):
            n = counts[comm.rank]
            with mt.no_sync(model) if i < 2 else contextlib.nullcontext():
                outs = model(rows(n, i), "one").mean() + model(rows(n, 5 * i), "two").mean()
                loss = outs + (i + 1) * model.beside
                if n:
                    slopes = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
                    assert slopes[0] == i + 1 and (slopes[1] == i).all()
                loss.backward()
        if fused:
            optimizer.step()
        after = list(model.parameters())
        pairs = zip(before, after, strict=True)
        found = [b - a.detach() for b, a in pairs] if fused else [p.grad for p in after]
        share = [sum(counts) * 3 / sum(map(sum, own)) for counts in own]
        mean = share[1] + 2 * share[2]
        torch.testing.assert_close(found[0], torch.tensor(share[0] + 2 * share[1] + 3 * share[2]))
        torch.testing.assert_close(found[1], torch.full((1, 3), mean))
        torch.testing.assert_close(found[2], torch.full((1, 3), 5 * mean))

    run_ranks(program, 2)


def test_gradients_that_were_kept_outlast_a_look_at_others():
    def program(comm):
        model = mt.replicate(nn.Linear(3, 1), ms.MirroredStrategy())
        model(rows(2, 7)).mean().backward()
        with mt.no_sync(model):
            (slope,) = torch.autograd.grad(model(rows(2, 3)).mean(), [model.weight])
            assert (slope == 3).all() and (model.weight.grad == 7).all()
            model(rows(1 + 2 * comm.rank, 1)).mean().backward()
        model(rows(1, 5)).mean().backward()
        wanted = torch.full((1, 3), 7 + 2 * 14 / 6)
        torch.testing.assert_close(model.weight.grad, wanted)

    run_ranks(program, 2)


def test_a_backward_pass_that_failed_leaves_nothing_behind():
    def fail(_):
        raise RuntimeError("of the program")

    def program(comm):
        model = mt.replicate(nn.Linear(3, 1), ms.MirroredStrategy())
        first, second = (model(rows(2, value + comm.rank)).mean() for value in (1, 10))
        hook = model.weight.register_hook(fail)
        with pytest.raises(RuntimeError, match="of the program"):
            first.backward()
        hook.remove()
        model.zero_grad()
        second.backward()  # no call of the model in between
        assert (model.weight.grad == 10.5).all()
        model.zero_grad()
        with mt.no_sync(model):
            model(rows(2, 1)).mean().backward()
            hook = model.weight.register_hook(fail)
            with pytest.raises(RuntimeError, match="of the program"):
                model(rows(4, 1)).mean().backward()
            hook.remove()
        model.zero_grad()
        with mt.no_sync(model):
            model(rows(2, 1)).mean().backward()
        model(rows(4, 1)).mean().backward()
        assert (model.weight.grad == 2).all()

    run_ranks(program, 2)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_what_has_no_answer_is_an_error_that_says_so():
    scripted = torch.jit.script(nn.Linear(2, 1))

    def program(comm):
        strategy = ms.MirroredStrategy()
        words = mt.replicate(nn.Embedding(5, 2, sparse=True), strategy)
        with pytest.raises(ms.errors.LeafTypeError, match="sparse=False"):
            words(torch.tensor([1, 2])).sum().backward()
        model = mt.replicate(nn.Linear(2, 1), strategy)
        with pytest.raises(ms.errors.ContextError, match="create_graph"):
            model(torch.ones(3, 2)).square().mean().backward(create_graph=True)
        model.zero_grad()
        x = torch.ones(3, 2, requires_grad=True)  # gradients that no parameter gets
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        assert slope.shape == x.shape and model.weight.grad is None
        model(x).mean().backward()
        assert (model.weight.grad == 1).all()
        model.bias.requires_grad_(False)
        with pytest.raises(ms.errors.ContextError, match="frozen or unfrozen"):
            model(x)
        with pytest.raises(TypeError, match=r"not a torch\.nn\.Module"):
            mt.replicate([1], strategy)
        for call in (
            lambda: mt.replicate(nn.Linear(2, 1), ms.MirroredStrategy),
            lambda: mt.batches(torch.ones(4), comm, batch_size=2),
            lambda: mt.all_reduce("SUM", torch.ones(1), 3),
        ):
            with pytest.raises(TypeError, match="expected a strategy, such as"):
                call()
        with pytest.raises(TypeError, match=r"rows is 4; expected a function"):
            mt.replicate(nn.Linear(2, 1), strategy, rows=4)
        with pytest.raises(TypeError, match=r"<class .*SGD'> is not an optimizer"):
            mt.FusedOptimizer(model, ms.optim.SGD)
        with pytest.raises(TypeError, match="Linear is not what replicate"):
            mt.FusedOptimizer(nn.Linear(2, 1), ms.optim.SGD(0.1))
        with pytest.raises(TypeError, match=r"SGD is not .* torch\.optim needs no FusedOptimizer"):
            mt.FusedOptimizer(model, torch.optim.SGD(model.parameters()))
        with pytest.raises(ms.errors.LeafTypeError, match=r"0\.weight.*autocast"):
            mt.FusedOptimizer(
                mt.replicate(nn.Sequential(nn.Linear(2, 2)).bfloat16(), strategy),
                ms.optim.SGD(0.1),
            )
        with pytest.raises(ms.errors.LeafTypeError, match="lazy"):
            mt.replicate(nn.LazyLinear(3), strategy)
        with pytest.raises(ms.errors.LeafTypeError, match=r"^'0' is of torch\.jit.*Leave it"):
            mt.replicate(nn.Sequential(scripted), strategy)
        fused = mt.FusedOptimizer(mt.replicate(nn.Linear(2, 1), strategy), ms.optim.SGD(0.1))
        with pytest.raises(AttributeError, match=r"FusedOptimizer' object has no attribute 'x'$"):
            fused.x  # noqa: B018
        for words in nn.Embedding(5, 2, max_norm=1.0), nn.EmbeddingBag(5, 2, max_norm=1.0):
            with pytest.raises(ms.errors.LeafTypeError, match=r"^'0\.weight'.*max_norm=None"):
                mt.replicate(nn.Sequential(words), strategy)
            mt.replicate(words.requires_grad_(False), strategy)
            mt.replicate(words.requires_grad_(), ms.OneDeviceStrategy("cpu"))

    run_ranks(program, 2)


@pytest.mark.parametrize("fused", [False, True])
def test_a_loss_whose_rows_are_not_known_is_an_error_on_all_ranks(fused):
    def program(comm):
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        model = mt.replicate(model, ms.MirroredStrategy())
        optimizer = mt.FusedOptimizer(model, ms.optim.SGD(0.1)) if fused else None

        def refused(match, loss):
            with pytest.raises(ms.errors.ContextError, match=match):
                loss.backward()
                if fused:
                    optimizer.step()
            model.zero_grad()
            if fused:
                optimizer.zero_grad()

        refused("no output of the model", model[0](rows(2, 1)).mean())
        # One row at a time, as the model sees it: how many there are, it does not.
        refused(
            "into the forward of a module", torch.func.vmap(model)(rows(3 - comm.rank, 1)).sum()
        )
        slopes = torch.func.vmap(torch.func.jacrev(model))(rows(2, 1))
        refused("into the forward of a module", slopes.sum())
        # On rank 1 only, as one batch there is smaller.
        counts = [(2, 2), (2, 1)][comm.rank]
        refused(r"with 2, 1 rows|with 1, 2 rows", sum(model(rows(n, 1)).mean() for n in counts))
        # The loss of each is right.
        one, two = (torch.full((n, 3), float(n)) for n in counts)
        if fused:
            model(one).mean().backward()
            return optimizer.step()
        for x in (one, two):
            model(x).mean().backward()
        # Of the second, 2 rows of 2 and 1 row of 1.
        slope = model[1].weight.detach()[0] * (2 + 5 / 3)
        torch.testing.assert_close(model[0].weight.grad, slope[:, None].expand(2, 3))
        # Calls of as many rows are one loss, whatever they have.
        model.zero_grad()
        (model(one).mean() + 3 * model(one + 1).mean()).backward()
        slope = model[1].weight.detach()[0] * (2 + 9)
        torch.testing.assert_close(model[0].weight.grad, slope[:, None].expand(2, 3))

    run_ranks(program, 2)


def test_a_backward_pass_that_differs_between_ranks_is_told():
    def program(comm):
        model = mt.replicate(nn.Linear(2, 1), ms.MirroredStrategy())
        loss = model(torch.ones(3, 2)).mean()
        if comm.rank:
            loss.backward()
        else:
            model._mpistrat_gradients.strategy.all_reduce("sum", 1.0)

    with pytest.raises(AssertionError, match="LockstepError"):
        run_ranks(program, 2)


@pytest.mark.parametrize("freezes", [False, True])
def test_parameters_that_ranks_count_in_other_orders_are_an_error(freezes):
    """All have one shape, so that the gradient of one would pass for that of another."""

    def program(comm):
        names = ["a", "b", "c"]
        if comm.rank == 1 and not freezes:
            names = ["a", "c", "b"]
        model = nn.ModuleDict({name: nn.Linear(2, 2) for name in names})
        if freezes:
            model["bc"[comm.rank == 1]].requires_grad_(False)
        mt.replicate(nn.ReLU(), ms.MirroredStrategy())
        with pytest.raises(ms.errors.LockstepError, match="order of the parameters") as it:
            mt.replicate(model, ms.MirroredStrategy())
        return str(it.value)

    first = "'b.weight', frozen" if freezes else "'b.weight', trained"
    second = "'b.weight', trained" if freezes else "'c.weight', trained"
    for said in run_ranks(program, 3):
        assert f"number 2 is {first}, on rank 0, and {second}, on rank 1." in said


def test_weights_that_come_apart_are_found():
    def program(comm):
        model = mt.replicate(nn.Linear(2, 1, bias=False), ms.MirroredStrategy())
        if comm.rank:
            model.weight.data.add_(1)
        with pytest.raises(ms.errors.DivergenceError, match="weight"):
            for _ in range(100):
                model(torch.ones(3, 2)).mean().backward()

    run_ranks(program, 2)


def test_one_rank_leaves_gradients_where_pytorch_has_made_them():
    plain, model = made("plain"), mt.replicate(made("plain"), ms.MirroredStrategy())
    gradients = find_gradients(model)[0]
    for view in gradients.views:
        view.fill_(7.0)
    for _ in range(2):  # the second adds to the first, as nothing was zeroed
        for one in (plain, model):
            one(torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)).square().mean().backward()
        for p, other, view in zip(
            gradients.params, plain.parameters(), gradients.views, strict=True
        ):
            assert torch.equal(p.grad, other.grad)
            assert (view == 7.0).all()


def test_copies_are_ordinary_models():
    strategy = ms.OneDeviceStrategy("cpu")
    model = mt.replicate(nn.Linear(2, 1), strategy)
    assert isinstance(model, nn.Linear) and isinstance(model, type(model))
    assert list(model.state_dict()) == ["weight", "bias"]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is nn.Linear
        other(torch.ones(3, 2)).mean().backward()
        assert model.weight.grad is None and other.weight.grad is not None


def test_a_copy_of_a_traced_model_is_no_replicated_one():
    model = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 1)))
    model = mt.replicate(model, ms.OneDeviceStrategy("cpu"))
    other = copy.deepcopy(model)
    other(torch.ones(2, 3)).mean().backward()
    assert dict(model.named_parameters())["0.weight"].grad is None
    with pytest.raises(TypeError, match="is not what replicate"), mt.no_sync(other):
        pass
    again = mt.replicate(other, ms.OneDeviceStrategy("cpu"))
    with mt.no_sync(again):
        again(torch.ones(2, 3)).mean().backward()


CHANGES = {
    "module added": lambda m: m.append(nn.Linear(1, 1)),
    "module replaced": lambda m: m.__setitem__(2, nn.Linear(300, 1)),
    "parameter added": lambda m: m[1].register_parameter("slope", nn.Parameter(torch.rand(3))),
    "parameter removed": lambda m: m[0].register_parameter("bias", None),
    "cast": lambda m: m.double(),
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_was_changed_says_so_and_is_replicated_again(change, fused):
    def program(comm):
        strategy = ms.MirroredStrategy()
        model = mt.replicate(made("plain"), strategy)
        model(torch.ones(1, WIDTH)).mean().backward()
        with _lock:
            torch.manual_seed(comm.rank)
            CHANGES[change](model)
        x = torch.full((2, WIDTH), comm.rank + 1.0, dtype=next(model.parameters()).dtype)
        with pytest.raises(ms.errors.ContextError, match=r"was replaced .* added, removed"):
            model(x)
        assert mt.replicate(model) is model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if fused:
            optimizer = mt.FusedOptimizer(model, ms.optim.SGD(0.1))
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        strategy.check_same({name: p.detach() for name, p in model.named_parameters()})

    run_ranks(program, 2)


@pytest.mark.parametrize("when", ["before the pass", "after it"])
def test_gradients_reach_the_ranks_where_a_module_has_moved_them(when):
    def program(comm):
        model = mt.replicate(nn.Linear(2, 1), ms.MirroredStrategy())
        for step in range(3):
            with mt.no_sync(model) if step == 1 else contextlib.nullcontext():
                model(torch.full((1, 2), comm.rank + 1.0)).mean().backward()
            if step == (0 if when == "before the pass" else 1):
                model.share_memory()  # gives gradients other memory, too
            if step == 0:
                model.zero_grad()
        assert model.weight.grad.tolist() == [[3.0, 3.0]]

    run_ranks(program, 2)


def test_what_brings_no_parameter_may_come_and_go():
    model = mt.replicate(made("plain"), ms.OneDeviceStrategy("cpu"))
    model[1] = nn.ReLU()
    model.append(nn.Identity())
    model(torch.ones(2, WIDTH)).mean().backward()
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(given, x):
        return torch.func.functional_call(model, given, (x,)).mean()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, torch.ones(3, 1, WIDTH))
    torch.testing.assert_close(each["0.weight"][2], model[0].weight.grad)
    x = torch.ones(2, WIDTH)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), model(x))


@pytest.mark.parametrize("fused", [False, True])
def test_a_model_that_nobody_has_goes(fused):
    strategy = ms.OneDeviceStrategy("cpu")
    model = mt.replicate(made("plain"), strategy)
    optimizer = mt.FusedOptimizer(model, ms.optim.SGD(0.1)) if fused else None
    model(torch.ones(2, WIDTH)).mean().backward()
    gone = weakref.ref(model[0].weight)
    del model, optimizer
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("outside", [True, False])
def test_compiled_models(outside):
    wanted = alone(made("plain"))

    def program(comm):
        strategy, model = ms.MirroredStrategy(), made("plain")
        if outside:
            model = mt.replicate(model, strategy)
            called = torch.compile(model, backend="aot_eager")
        else:
            called = mt.replicate(torch.compile(model, backend="aot_eager"), strategy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        train(called, optimizer, comm.rank, 1)
        close(model, wanted)

    run_ranks(program, 1)


@pytest.mark.parametrize("fused", [False, True])
def test_a_batch_counts_once_its_backward_pass_was_made(tmp_path, fused):
    """A program that saves at the end of the body, and starts over, sees each batch once."""

    def program(comm, last):
        strategy = ms.MirroredStrategy()
        torch.manual_seed(1)
        model = nn.Linear(1, 1)
        with strategy.scope():
            replicated = mt.replicate(model)
            sgd = mt.FusedOptimizer(replicated, ms.optim.SGD(0.1)) if fused else None
            dataset = ms.Dataset(np.arange(12, dtype=np.float32)[:, None]).batch(4)
            checkpoint = ms.Checkpoint(model=replicated, data=dataset, step=0)
            manager = ms.CheckpointManager(checkpoint, tmp_path, None)
        optimizer = sgd or torch.optim.SGD(model.parameters(), 0.1)
        for batch in manager.resume(strategy.experimental_distribute_dataset(dataset), 2):
            replicated(torch.from_numpy(batch.local)).sum().backward()
            optimizer.step()
            checkpoint.step += 1
            if checkpoint.step == last:
                manager.save()
                break
        return checkpoint.step

    run_ranks(program, 2, 2)
    assert run_ranks(program, 2, None) == [6, 6]


def test_a_strategy_that_was_forgotten_is_asked_for():
    def program(comm):
        ms.MirroredStrategy()
        with pytest.raises(ms.errors.ContextError, match=r"Write replicate\(model, strategy\)\. "):
            mt.replicate(nn.Linear(1, 1))
        with pytest.raises(
            ms.errors.ContextError, match=r"Write batches\(data, strategy, \.\.\.\)"
        ):
            next(iter(mt.batches((torch.ones(3),), batch_size=2)))

    run_ranks(program, 2)


@pytest.mark.parametrize(("fused", "most"), [(False, 6), (True, 10)])
def test_python_calls_of_a_step_for_each_parameter(fused, most):
    """They were 4 with an optimizer of PyTorch, and 19 with the fused one."""

    def program(comm):
        strategy, counts = ms.MultiWorkerMirroredStrategy(comm=comm), []
        for layers in (4, 12):
            model = mt.replicate(nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers))), strategy)
            if fused:
                optimizer = mt.FusedOptimizer(model, ms.optim.Adam(1e-3))
            else:
                optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)

            for _ in range(4):
                loss = model(torch.ones(2, 8)).square().mean()
                counts.append(calls_of(loss.backward) + calls_of(optimizer.step))
        return (counts[-1] - counts[3]) / 16

    for calls in run_ranks(program, 2):
        assert calls < most


@pytest.mark.parametrize("size", [1, 2])
def test_a_backward_pass_that_fails_leaves_what_was_added_up(size):
    def fails(_):
        raise ZeroDivisionError

    first = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    batches = torch.rand(3, 2, 3)

    def program(comm):
        strategy, plain = ms.MultiWorkerMirroredStrategy(comm=comm), copy.deepcopy(first)
        model = mt.replicate(copy.deepcopy(first), strategy)
        with mt.no_sync(model):
            model(batches[0]).mean().backward()
            out = model(batches[1])
            hook = model[0].weight.register_hook(fails)  # those of the last layer have come then
            with pytest.raises(ZeroDivisionError):
                out.mean().backward()
            hook.remove()
        model(batches[2]).mean().backward()
        for part in (0, 2):
            plain(batches[part]).mean().backward()
        for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, wanted.grad)

    run_ranks(program, size)

"""The cases of `step.py`: who does what, beside whom, and what is wanted.

A case is a function of the job that returns its peers and figures; its docstring is its line in
``step.py --list``.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from common import Peer, contains_result, expected, gloo, import_everywhere, take, timed
from mpi4py import MPI
from step_counts import readme_replica_step
from variables import PSS, pss

import mpistrat as ms
from mpistrat.optim import passes
from mpistrat.shm.arena import LINE

# Does the work once, given the number of the repetition: this rank's seconds, and whether what came
# of it was right.
Clock = Callable[[int], tuple[float, bool]]
LARGE = 25_000_000
TINY = 400
DIGITS = "the same loop in NumPy"
BY_HAND = "the same by hand, mpi4py"
SHARED = (2, 3, 4, 6, 8)  # numbers of ranks for which figures of several are wanted


class Absent(Exception):
    """Something that a case needs is not here, or it is not one for so many ranks."""


class Job:
    """The job, for its cases.

    Args:
      comm: Its ranks; mpi4py's communicator.
      quick: Small arrays are enough.
    """

    def __init__(self, comm: MPI.Intracomm, quick: bool):
        """Make the strategy."""
        self.comm, self.rank, self.size, self.quick = comm, comm.rank, comm.size, quick
        self.strategy = ms.MirroredStrategy()
        self.large = 100_000 if quick else LARGE

    def print_on_rank0(self, text: str) -> None:
        """Print on rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    @property
    def threads(self) -> int:
        """How many threads a rank has."""
        team = self.strategy._replicas.lockstep.session.team
        return 1 if team is None else int(team.count)

    def torch(self) -> Any:
        """Return torch with as many threads, or None if some rank has not got it. Collective."""
        torch = import_everywhere(self.comm, "torch")
        if torch is not None:
            torch.set_num_threads(self.threads)
        return torch

    def clock(self, peer: Peer) -> Clock:
        """Return a function that measures a peer on all ranks at once."""
        return functools.partial(timed, self.comm, peer)

    def lead(self, work: Callable[[int], float]) -> Clock:
        """Return a function that measures work of the first rank; it returns its seconds."""

        def clock(number: int) -> tuple[float, bool]:
            self.comm.Barrier()
            seconds = work(number) if self.rank == 0 else 0.0
            self.comm.Barrier()
            return seconds, True

        return clock


class Limit(NamedTuple):
    """The wanted bound: a multiple of the reference's time, plus so many ms."""

    times: float = 0.0
    plus: float = 0.0

    def bound_ms(self, other: float) -> float:
        return self.times * other + self.plus

    def __str__(self) -> str:
        parts = [f"{self.times:.4g} x"] if self.times else []
        return " + ".join([*parts, *([f"{self.plus:g} ms"] if self.plus else [])])


class Figure(NamedTuple):
    """A row: a peer of ours, its reference, and the limit for these numbers of ranks."""

    peer: str
    reference: str = ""
    limit: Limit | None = None
    ranks: Sequence[int] | None = None


class Case(NamedTuple):
    """Peers that run in turns.

    Attributes:
      peers: By name.
      figures: The rows; one whose peers are not there is left out.
      measure: Takes a function that returns medians of peers, and returns those of the case.
      absent: Texts that name the parts which are left out.
    """

    figures: list[Figure]
    measure: Callable[[Callable[[Mapping[str, Clock]], dict[str, float]]], dict[str, float]]
    absent: Sequence[str] = ()


def _case(
    peers: Mapping[str, Clock],
    figures: list[Figure],
    strategy: ms.Strategy | None = None,
    absent: Sequence[str] = (),
) -> Case:
    """Return a case whose peers run one after the other; `strategy` replica code of a strategy."""

    def measure(medians: Callable[[Mapping[str, Clock]], dict[str, float]]) -> dict[str, float]:
        if strategy is None:
            return medians(peers)
        results: list[dict[str, float]] = []
        strategy.run(lambda: results.append(medians(peers)))
        return results[0]

    return Case(figures, measure, absent)


# Writes

# NumPy's operation in place, and its result for two numbers.
WRITES: dict[str, tuple[Callable[[Any, Any], Any], Callable[[float, float], float]]] = {
    "assign": (np.copyto, lambda old, given: given),
    "assign_add": (operator.iadd, operator.add),
    "assign_sub": (operator.isub, operator.sub),
}


def _written(job: Job, is_replica_code: bool) -> Case:
    with job.strategy.scope():
        variable = ms.Variable(np.zeros(job.large, np.float32))
    plain_array, operand = np.zeros(job.large, np.float32), np.zeros(job.large, np.float32)
    want, numbers = [0.0], itertools.cycle(range(1, 6))

    def peer(
        call: Callable[[], Any], read: Callable[[], Any], compute: Callable[..., float]
    ) -> Clock:
        def prepare() -> None:  # alike on all ranks, and other numbers each time
            operand.fill(next(numbers))
            want[0] = compute(float(read().flat[0]), float(operand[0]))

        return job.clock(
            Peer([], call, lambda _, number: contains_result(read(), want[0], number), prepare)
        )

    peers: dict[str, Clock] = {}
    for name, (plain_operation, compute) in WRITES.items():
        call = functools.partial(getattr(variable, name), operand)
        peers[name] = peer(call, functools.partial(np.asarray, variable), compute)
        peers[f"NumPy's {name}"] = peer(
            functools.partial(plain_operation, plain_array, operand), lambda: plain_array, compute
        )
    limit = Limit(1.2 if job.size == 1 else 1.4)
    figures = [Figure(name, f"NumPy's {name}", limit) for name in WRITES]
    return _case(peers, figures, job.strategy if is_replica_code else None)


def writes(job: Job) -> Case:
    """25 M float32 written in replica code, beside NumPy in place on all ranks at once."""
    return _written(job, True)


def scope(job: Job) -> Case:
    """The same in a scope."""
    return _written(job, False)


def small_writes(job: Job) -> Case:
    """12 variables of 1 KB written in a step, beside the arithmetic and an empty run."""
    with job.strategy.scope():
        variables = [ms.Variable(np.zeros(256, np.float32)) for _ in range(12)]
    plain_arrays = [np.zeros(256, np.float32) for _ in variables]
    step = np.ones(256, np.float32)
    counts = [0, 0]

    def written() -> None:
        for variable in variables:
            variable.assign_sub(step)

    def arithmetic() -> None:
        for array in plain_arrays:
            np.subtract(array, step, out=array)

    def peer(index: int, body: Callable[[], None], arrays: Sequence[Any]) -> Clock:
        def right(_: Any, number: int) -> bool:
            return all(contains_result(a, -counts[index], number) for a in map(np.asarray, arrays))

        def call() -> None:
            job.strategy.run(body)
            counts[index] += 1

        return job.clock(Peer([], call, right))

    peers = {
        "12 writes": peer(0, written, variables),
        "arithmetic": peer(1, arithmetic, plain_arrays),
    }
    return _case(peers, [Figure("12 writes", "arithmetic", Limit(1, 0.03), SHARED)])


# Optimizers


def adam(job: Job) -> Case:
    """Reduce + Adam, 25 M parameters in one call, beside torch's fused Adam and own memory."""
    with job.strategy.scope():
        weights = ms.Variable(np.ones(job.large, np.float32))
    (buffer,) = job.strategy.gradient_buffers([weights])
    optimizer = ms.optim.Adam(1e-3)
    share = -(-job.large // job.size)
    rows, state = np.zeros((job.size, share), np.float32), np.ones((3, share), np.float32)
    state[1:] = 0

    def reduce_and_update() -> None:
        optimizer.apply_gradients([(buffer, weights)])

    def loop() -> None:
        count[0] += 1
        g = passes.Gradient(rows, divisor=float(job.size))
        scalars = optimizer.scalars(count[0] - 1)
        passes.update(optimizer.rule, g, state[0], (state[1], state[2]), scalars)

    def is_finite(_: Any, number: int) -> bool:
        return bool(np.isfinite(np.asarray(weights)[:: max(1, job.large // 4096)]).all())

    count = [0]
    peers = {
        "reduce + Adam": job.clock(Peer([buffer], reduce_and_update, is_finite)),
        "own memory": job.clock(Peer([rows], loop, lambda _, __: True)),
    }
    torch, absent = job.torch(), []
    if torch is None:
        absent = ["torch, so without its Adam: pip install torch"]
    else:
        peers |= _torch_adam(job, torch, lambda: np.asarray(weights))
    figures = [
        Figure("reduce + Adam", "Allreduce + torch's Adam", Limit(0.25), SHARED),
        Figure("reduce + Adam", "own memory", Limit(1.15), SHARED),
        Figure("reduce + Adam", "torch's Adam", Limit(1.05), (1,)),
    ]
    return _case(peers, figures, job.strategy, absent)


def many_variables(job: Job) -> Case:
    """Adam with a global norm, 100 vectors and 20 matrices, beside NumPy's and torch's loops."""
    shapes = [(128,) if i % 6 else (128, 128) for i in range(120)]
    with job.strategy.scope():
        variables = [ms.Variable(np.ones(shape, np.float32)) for shape in shapes]
    gradients = [np.zeros(shape, np.float32) for shape in shapes]
    optimizer = ms.optim.Adam(1e-3, clip=ms.optim.ClipByGlobalNorm(1.0))
    # By hand gradients are in one array, so one call of MPI reduces them.
    sizes = [math.prod(shape) for shape in shapes]
    flat = np.zeros(sum(sizes), np.float32)
    parts = np.split(flat, np.cumsum(sizes)[:-1])
    slopes = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
    state = [(np.ones(s, np.float32), *np.zeros((2, *s), np.float32)) for s in shapes]
    count = itertools.count(1)

    def reduced() -> None:
        if job.size > 1:
            job.comm.Allreduce(MPI.IN_PLACE, flat)
            np.divide(flat, job.size, out=flat)

    def loop() -> None:
        reduced()
        t = next(count)
        rate = 1e-3 * math.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        factor = 1.0 / max(1.0, math.sqrt(sum(float(np.vdot(g, g)) for g in slopes)))
        for (w, m, v), g in zip(state, slopes, strict=True):
            g *= factor
            m += 0.1 * (g - m)
            v += 0.001 * (g * g - v)
            w -= rate * m / (np.sqrt(v) + 1e-8)

    def reduce_and_update() -> None:
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def is_near(_: Any, number: int) -> bool:
        pairs = zip(variables, state, strict=True)
        return all(np.abs(np.asarray(v) - w).max() < 0.01 for v, (w, *_) in pairs)

    peers = {"all ranks": job.clock(Peer(gradients, reduce_and_update, is_near))}
    peers["NumPy"] = job.clock(Peer([flat], loop, is_near))
    torch, figures = job.torch(), [Figure("all ranks", "NumPy")]
    if torch is not None:
        weights = [torch.ones(shape, requires_grad=True) for shape in shapes]
        for weight, slope in zip(weights, slopes, strict=True):
            weight.grad = torch.from_numpy(slope)
        adam = torch.optim.Adam(weights, lr=1e-3, foreach=True)

        def step() -> None:
            reduced()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            adam.step()

        peers["torch"] = job.clock(Peer([flat], step, lambda _, number: True))
        figures.append(Figure("all ranks", "torch"))
    absent = [] if torch else ["torch, so without its Adam: pip install torch"]
    return _case(peers, figures, job.strategy, absent)


def _torch_adam(job: Job, torch: Any, ours: Callable[[], Any]) -> dict[str, Clock]:
    weights = torch.ones(job.large, requires_grad=True)
    weights.grad = torch.zeros(job.large)
    gradient, torch_weights = weights.grad.numpy(), weights.detach().numpy()
    optimizer = torch.optim.Adam([weights], lr=1e-3, fused=True)

    def call() -> None:
        if job.size > 1:
            job.comm.Allreduce(MPI.IN_PLACE, gradient)
        optimizer.step()

    # Adam makes the same step of a sum of gradients and of their mean.
    right = functools.partial(_are_near, ours, torch_weights)
    name = "torch's Adam" if job.size == 1 else "Allreduce + torch's Adam"
    return {name: job.clock(Peer([gradient], call, right))}


def _are_near(ours: Callable[[], Any], torch_weights: Any, _: Any, number: int) -> bool:
    """Tell whether both have made about the same steps: whose turn it is, may be one ahead."""
    step = max(1, torch_weights.size // 4096)
    return bool(np.abs(torch_weights[::step] - ours()[::step]).max() < 0.01)


# Examples


def _single_rank_strategy(job: Job) -> ms.Strategy | None:
    """Return a strategy over one rank, on the first one; there and nowhere else it is used."""
    return ms.MirroredStrategy(comm=MPI.COMM_SELF) if job.rank == 0 else None


def _needs(job: Job, *names: str) -> list[Any]:
    modules = [import_everywhere(job.comm, name) for name in names]
    missing = [name for name, module in zip(names, modules, strict=True) if module is None]
    if missing:
        raise Absent(f"{', '.join(missing)} cannot be imported on all ranks")
    return modules


class Images(NamedTuple):
    """The examples of the digits job."""

    pixels: Any
    labels: Any


def _digits(job: Job, batch: int, limits: Mapping[int, float]) -> Case:
    digits, mlp, _ = _needs(job, "mpistrat.examples.digits", "mpistrat.examples.mlp", "sklearn")
    settings = digits.DigitsSettings(epochs=2, batch=batch)
    steps = math.ceil(digits.TRAINING_COUNT / batch)
    images = Images(*digits.load_images(settings.seed)[0])
    lone = _single_rank_strategy(job)

    def trained(strategy: ms.Strategy) -> float:
        # The second epoch: the first one compiles and allocates.
        _, history = digits.train(strategy, settings, verbose=False)
        return float(history.last("seconds")) / steps

    def all_of_us(number: int) -> tuple[float, bool]:
        job.comm.Barrier()
        return trained(job.strategy), True

    def by_hand(number: int) -> tuple[float, bool]:
        job.comm.Barrier()
        return _epoch_by_hand(job.comm, mlp, images, settings, number) / steps, True

    peers: dict[str, Clock] = {"all ranks": all_of_us, BY_HAND: by_hand}
    if job.size > 1:
        peers["one rank"] = job.lead(lambda _: trained(lone) if lone else 0.0)
    plain_epoch = functools.partial(_plain_epoch, mlp, images, settings)
    peers[DIGITS] = job.lead(lambda number: plain_epoch(number) / steps)
    figures = [Figure("all ranks", DIGITS, Limit(limits[n]), (n,)) for n in limits if n == job.size]
    figures = [*(figures or [Figure("all ranks", DIGITS)]), Figure("all ranks", BY_HAND)]
    if batch == 512:
        figures.append(Figure("all ranks", "one rank", Limit(1 / 1.6), (2,)))
    return _case(peers, figures)


def _plain_epoch(mlp: Any, images: Images, settings: Any, number: int) -> float:
    """Return the seconds of an epoch without any replicas: a loop over shuffled batches."""
    model = [
        np.array(value) for value in mlp.make_parameters(64, settings.hidden, 10, settings.seed)
    ]
    velocity = [np.zeros_like(value) for value in model]
    begin = time.perf_counter()
    order = np.random.default_rng(number).permutation(len(images.pixels))
    losses, hits = [], []
    for first in range(0, len(order), settings.batch):
        rows = order[first : first + settings.batch]
        gradient, loss, hit = mlp.compute_gradients(
            mlp.Parameters(*model), images.pixels[rows], images.labels[rows]
        )
        losses.append(loss)
        hits.append(hit)
        for value, speed, slope in zip(model, velocity, gradient, strict=True):
            speed *= 0.9
            speed += slope
            value -= settings.lr * speed
    np.concatenate(losses).mean(), np.concatenate(hits).mean()
    return time.perf_counter() - begin


def _epoch_by_hand(comm: MPI.Comm, mlp: Any, images: Images, settings: Any, number: int) -> float:
    """Return the seconds of an epoch as one writes it with mpi4py: one flat `Allreduce` a step."""
    start = mlp.make_parameters(64, settings.hidden, 10, settings.seed)
    cuts = np.cumsum([value.size for value in start])[:-1]
    weights = np.concatenate([value.ravel() for value in start])
    local_gradient, mean, velocity = (np.zeros_like(weights) for _ in range(3))

    def views(flat: Any) -> Any:
        parts = zip(np.split(flat, cuts), start, strict=True)
        return mlp.Parameters(*(part.reshape(value.shape) for part, value in parts))

    model, share = views(weights), views(local_gradient)
    begin = time.perf_counter()
    order = np.random.default_rng(number).permutation(len(images.pixels))
    losses, hits = [], []
    for first in range(0, len(order), settings.batch):
        batch = order[first : first + settings.batch]
        rows = batch[
            comm.rank * len(batch) // comm.size : (comm.rank + 1) * len(batch) // comm.size
        ]
        gradient, loss, hit = mlp.compute_gradients(model, images.pixels[rows], images.labels[rows])
        losses.append(loss)
        hits.append(hit)
        for part, slope in zip(share, gradient, strict=True):
            np.multiply(slope, len(rows) / len(batch), out=part)
        comm.Allreduce(local_gradient, mean)
        velocity *= 0.9
        velocity += mean
        weights -= settings.lr * velocity
    comm.Allreduce(
        MPI.IN_PLACE, np.array([np.concatenate(values).sum() for values in (losses, hits)])
    )
    return time.perf_counter() - begin


def digits_64(job: Job) -> Case:
    """A step of the digits job, 64 images, beside the same mathematics in NumPy on one core."""
    return _digits(job, 64, {1: 1.25, 2: 1.6})


def digits_512(job: Job) -> Case:
    """The same with 512 images, and beside one rank."""
    return _digits(job, 512, {})


def program(job: Job) -> Case:
    """A step of README's program, 64 rows of 3 numbers, beside the same mathematics in NumPy."""
    x, y = np.random.default_rng(0).normal(size=(1024, 3)), np.arange(1024.0)
    rows, strategy = 64, job.strategy
    steps = len(x) // rows
    with strategy.scope():
        w = ms.Variable(np.zeros(3))
    shuffled = ms.Dataset((x, y)).shuffle(seed=1).batch(rows)
    batches = strategy.experimental_distribute_dataset(shuffled)
    local_slice = slice(job.rank * rows // job.size, (job.rank + 1) * rows // job.size)

    step = readme_replica_step(w)

    def all_of_us(_: int) -> tuple[float, bool]:
        job.comm.Barrier()
        begin, loss = time.perf_counter(), math.nan
        for batch in batches:
            squares = strategy.run(step, args=(batch,))
            loss = strategy.reduce("mean", squares, axis=0)
        return (time.perf_counter() - begin) / steps, math.isfinite(loss)

    def loop(number: int, part: slice, reduce: Callable[[Any], object]) -> float:
        order, weights = np.random.default_rng(number).permutation(len(x)), np.zeros(3)
        begin, total = time.perf_counter(), np.empty(4)
        for first in range(0, len(x), rows):
            batch = order[first : first + rows][part]
            features, target = x[batch], y[batch]
            error = features @ weights - target
            total[:3], total[3] = features.T @ error, (error**2).sum()
            reduce(total)
            weights -= 0.1 * total[:3] / rows
        return (time.perf_counter() - begin) / steps

    def by_hand(number: int) -> tuple[float, bool]:
        job.comm.Barrier()
        return loop(number, local_slice, functools.partial(job.comm.Allreduce, MPI.IN_PLACE)), True

    plain_loop = job.lead(lambda number: loop(number, slice(None), id))
    peers = {"all ranks": all_of_us, BY_HAND: by_hand, DIGITS: plain_loop}
    return _case(peers, [Figure("all ranks", DIGITS), Figure("all ranks", BY_HAND)])


def text(job: Job) -> Case:
    """An update of the language model, all ranks beside one."""
    (example,) = _needs(job, "mpistrat.examples.text")
    small = {"channels": 16, "layers": 2, "batch": 8} if job.quick else {}
    settings = example.TextSettings(steps=2 if job.quick else 8, every=2, patience=99, **small)
    lone = _single_rank_strategy(job)

    def trained(strategy: ms.Strategy, folder: str) -> float:
        chosen = replace(settings, checkpoint=folder)
        _, history = example.train(strategy, chosen, verbose=False)
        return float(np.median(history["seconds"][1])) / settings.every

    def all_of_us(number: int) -> tuple[float, bool]:
        with _folder(job) as folder:
            return trained(job.strategy, folder), True

    def train_on_one_rank(_: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            return trained(lone, folder) if lone else 0.0

    peers: dict[str, Clock] = {"all ranks": all_of_us}
    if job.size > 1:
        peers["one rank"] = job.lead(train_on_one_rank)
    reference = "one rank" if job.size > 1 else ""
    return _case(peers, [Figure("all ranks", reference, Limit(1 / 1.7), (2,))])


@contextmanager
def _folder(job: Job) -> Iterator[str]:
    """Give all ranks a directory, for a while. Collective."""
    with tempfile.TemporaryDirectory() as folder:  # only the first rank's is used
        yield job.comm.bcast(folder)
        job.comm.Barrier()


# Memory


def memory(job: Job) -> Case:
    """MB (not ms) of variables, gradients and Adam's state on the node, beside torch DDP + Adam."""
    if not PSS.exists():
        raise Absent(f"{PSS} is not there: this system does not say who shares what")
    node = job.comm.Split_type(MPI.COMM_TYPE_SHARED)
    width = 1000 if job.quick else 2500  # enough to outgrow memory that was freed before
    megabytes = {"mpistrat": _is_time_ours(job, node, width)}
    torch, absent = gloo(job.comm), []
    if torch is None:
        absent = ["torch, so without DDP: pip install torch"]
    else:
        megabytes["torch DDP"] = _torch_takes(torch, node, width)
    megabytes = {
        peer_name: max(job.comm.allgather(nbytes)) / 1e6 for peer_name, nbytes in megabytes.items()
    }
    reference = "torch DDP" if torch is not None else ""
    figure = Figure("mpistrat", reference, Limit(0.45) if reference else None, (4,))
    return Case([figure], lambda _: megabytes, absent)


def _is_time_ours(job: Job, node: MPI.Intracomm, width: int) -> int:
    strategy, shapes = job.strategy, [(width, width), (width,)] * 4

    def step() -> None:
        for buffer in buffers:
            buffer[...] = 1e-3
        optimizer.apply_gradients(zip(buffers, variables, strict=True))

    # Once, for any model: memory of MPI, compiled loops.
    with strategy.scope():
        variables = [ms.Variable(np.ones(300_000, np.float32))]
    buffers, optimizer = strategy.gradient_buffers(variables), ms.optim.Adam(1e-3)
    strategy.run(step)
    nbytes_before = pss(node)
    with strategy.scope():
        variables = [ms.Variable(np.ones(shape, np.float32)) for shape in shapes]
    buffers, optimizer = strategy.gradient_buffers(variables), ms.optim.Adam(1e-3)
    for _ in range(2):
        strategy.run(step)
    for variable in variables:
        np.asarray(variable).sum()  # as a forward pass does: every rank reads all
    return pss(node) - nbytes_before


def _torch_takes(torch: Any, node: MPI.Intracomm, width: int) -> int:
    def trained(width: int) -> Any:
        layers = [torch.nn.Linear(width, width) for _ in range(4)]
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, width)).sum().backward()
            optimizer.step()
        return model, optimizer

    trained(16)
    nbytes_before = pss(node)
    model_and_optimizer = trained(width)
    nbytes_after = pss(node)
    del model_and_optimizer
    return nbytes_after - nbytes_before


# Reductions


def tiny(job: Job) -> Case:
    """400 arrays of a few numbers in buffers, beside one flat Allreduce of as many numbers."""
    buffers = job.strategy.gradient_buffers([np.zeros(8, np.float32)] * TINY)
    flat = np.zeros(8 * TINY, np.float32)
    ctx = ms.get_replica_context
    total = sum(range(job.size))

    def reduced(op: str) -> Callable[[], Any]:
        return lambda: ctx().all_reduce(op, buffers, out=buffers)

    def is_sum(arrays: Sequence[Any], divisor: int = 1) -> Callable[[Any, int], bool]:
        return lambda _, n: all(
            contains_result(a, np.float32((total + job.size * n) / divisor), n) for a in arrays
        )

    def native() -> None:
        job.comm.Allreduce(MPI.IN_PLACE, flat)

    def checked() -> None:
        for _ in range(3):
            reduced("sum")()
        want = expected(job.strategy, LINE * TINY, TINY)  # each begins on a line of its own
        take(job.comm, "400 tiny arrays", reduced("sum"), want)

    job.strategy.run(checked)
    peers = {
        "sum": job.clock(Peer(buffers, reduced("sum"), is_sum(buffers))),
        "mean": job.clock(Peer(buffers, reduced("mean"), is_sum(buffers, job.size))),
        "one flat Allreduce": job.clock(Peer([flat], native, is_sum([flat]))),
    }
    figures = [Figure(w, "one flat Allreduce", Limit(plus=0.05), SHARED) for w in ("sum", "mean")]
    return _case(peers, figures, job.strategy)


def single_rank(job: Job) -> Case:
    """The cost of an all-reduce of 25 M float32 on one rank, beside one copy."""
    if job.size > 1:
        raise Absent("it is for one rank")
    (buffer,) = job.strategy.gradient_buffers([np.zeros(job.large, np.float32)])
    value, out = np.zeros(job.large, np.float32), np.zeros(job.large, np.float32)
    ctx = ms.get_replica_context

    def is_value(array: Any) -> Callable[[Any, int], bool]:
        return lambda _, number: contains_result(array, number, number)

    def in_place() -> Any:
        return ctx().all_reduce("mean", buffer, out=buffer)

    def reduce_into() -> Any:
        return ctx().all_reduce("mean", value, out=out)

    def weighted() -> Any:
        return ctx().all_reduce("mean", value, weight=3, out=out)

    peers = {
        "in place": job.clock(Peer([buffer], in_place, is_value(buffer))),
        "out=": job.clock(Peer([value], reduce_into, is_value(out))),
        "weighted mean, out=": job.clock(Peer([value], weighted, is_value(out))),
        "one copy": job.clock(Peer([value], lambda: np.copyto(out, value), is_value(out))),
    }
    figures = [
        Figure("in place", "", Limit(plus=0.1)),
        Figure("out=", "one copy", Limit(1.1)),
        Figure("weighted mean, out=", "one copy", Limit(1.1)),
    ]
    return _case(peers, figures, job.strategy)


def fresh(job: Job) -> Case:
    """Results in new arrays beside results in given ones, 25 M float32."""
    value, out = np.zeros(job.large, np.float32), np.zeros(job.large, np.float32)
    ctx = ms.get_replica_context
    total = sum(range(job.size))

    def right(result: Any, number: int) -> bool:
        return contains_result(result, total + job.size * number, number)

    peers = {
        "fresh": job.clock(Peer([value], lambda: ctx().all_reduce("sum", value), right)),
        "out=": job.clock(Peer([value], lambda: ctx().all_reduce("sum", value, out=out), right)),
    }
    return _case(peers, [Figure("fresh", "out=", Limit(1.3))], job.strategy)


def bits16(job: Job) -> Case:
    """25 M numbers of 16 bits in buffers, beside as many of float32."""
    dtypes = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
    total = sum(range(job.size))
    peers: dict[str, Clock] = {}
    for name, dtype in dtypes.items():
        (buffer,) = job.strategy.gradient_buffers([np.zeros(job.large, dtype)])

        def call(buffer: Any = buffer) -> Any:
            return ms.get_replica_context().all_reduce("sum", buffer, out=buffer)

        def right(_: Any, number: int, buffer: Any = buffer) -> bool:
            return contains_result(buffer, total + job.size * number, number)

        peers[name] = job.clock(Peer([buffer], call, right))
    figures = [Figure(n, "float32", Limit(0.7), SHARED) for n in ("bfloat16", "float16")]
    return _case(peers, figures, job.strategy)


CASES: dict[str, Callable[[Job], Case]] = {
    "writes": writes,
    "scope": scope,
    "small-writes": small_writes,
    "adam": adam,
    "many": many_variables,
    "digits-64": digits_64,
    "digits-512": digits_512,
    "program": program,
    "text": text,
    "memory": memory,
    "tiny": tiny,
    "alone": single_rank,
    "fresh": fresh,
    "bits16": bits16,
}

"""What do calls cost one rank as the number of ranks grows, from 64 to 100,000?

    python benchmarks/growth.py
    python benchmarks/growth.py --ranks 64,4096 numbers exit

One process believes to be a rank of many (`RepeatedComm`): the program runs on one rank, or on two
where ranks have to differ, and all further ranks say the same as rank 0. So the bytes, the memory,
the Python and its time are those of one rank of such a job, though its sums are not; MPI's own time
is not in them. The counts at `HELD_SIZES` are held by ``tests/unit/lockstep/test_growth.py``.
"""

from __future__ import annotations

import contextvars
import functools
import gc
import statistics
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import common
import numpy as np

import mpistrat as ms
from mpistrat.comm.base import Buffer, Comm
from mpistrat.comm.loopback import LoopbackComm, LoopbackWorld
from mpistrat.comm.session import default_group
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.shm.segments import Pages

HELD_SIZES = (64, 1024, 4096)
REPORTED_SIZES = (16_384, 100_000)
RANKS_PER_NODE = 16
VARIABLE_SIZES = (3, 10_000)  # the second is in memory that the ranks of a node share
GRADIENT_COUNT = 161  # as many as ResNet-50 has
STEPS_BEFORE = 3
REPETITIONS = 7
_REDUCTIONS = {"MIN": np.fmin, "MAX": np.fmax, "BOR": np.bitwise_or}


class Traffic:
    """The bytes of one rank.

    Attributes:
      sent: Bytes that it has given to collective calls.
      received: Bytes that these have given to it.
      collective_count: The number of these calls.
    """

    def __init__(self) -> None:
        """Begin at zero."""
        self.sent = self.received = self.collective_count = 0


@final
class RepeatedComm(Comm):
    """A group of `size` ranks: a few that are there, and many that say the same as rank 0.

    They do so, too, where each rank would name itself, so a list of ranks has the few only.

    Args:
      speakers: The ranks that are there, the first ones of the group.
      size: The number of ranks.
      ranks_per_node: How many of them share memory; a multiple of the speakers.
      traffic: The bytes of this rank.
    """

    name = "repeated"

    def __init__(
        self, speakers: Comm, size: int, ranks_per_node: int, traffic: Traffic | None = None
    ):
        """Create the group; every speaker does."""
        self._speakers = speakers
        self.rank, self.size, self._ranks_per_node = speakers.rank, size, ranks_per_node
        self.traffic = traffic or Traffic()

    def _count(self, sent: int, received: int) -> None:
        self.traffic.sent += sent
        self.traffic.received += received
        self.traffic.collective_count += 1

    def _gather(self, send: Buffer) -> Buffer:
        """Return what the speakers give: an array of shape (speakers, elements)."""
        rows = np.empty((self._speakers.size, send.size), send.dtype)
        self._speakers.allgather(np.ascontiguousarray(send), rows)
        return rows

    def _fill(self, rows: Buffer, recv: Buffer) -> None:
        all_rows = recv.reshape(-1).view(np.uint8).reshape(self.size, -1)
        all_rows[: len(rows)] = rows
        all_rows[len(rows) :] = rows[0]

    def allgather(self, send: Buffer, recv: Buffer) -> None:
        """Put what the ranks give into `recv`."""
        self._count(send.nbytes, recv.nbytes)
        self._fill(self._gather(send.reshape(-1).view(np.uint8)), recv)

    def allgatherv(self, send: Buffer, recv: Buffer, counts: Sequence[int]) -> None:
        """Put what the ranks give into `recv`."""
        self._count(send.nbytes, recv.nbytes)
        speaker_count = self._speakers.size
        speaker_bytes = np.empty(sum(counts[:speaker_count]), np.uint8)
        self._speakers.allgatherv(send, speaker_bytes, counts[:speaker_count])
        recv[: speaker_bytes.size] = speaker_bytes
        repeated_bytes = recv[speaker_bytes.size :].reshape(-1, max(counts[0], 1))
        repeated_bytes[:] = speaker_bytes[: counts[0]]

    def allreduce(self, send: Buffer, recv: Buffer, op: str) -> None:
        """Reduce what the ranks give."""
        self._count(send.nbytes, recv.nbytes)
        rows = self._gather(send.reshape(-1))
        repeated_count = self.size - len(rows)
        if op == "SUM":
            total = rows.sum(axis=0, dtype=send.dtype) + rows[0] * send.dtype.type(repeated_count)
        elif op == "PROD":
            total = rows.prod(axis=0, dtype=send.dtype) * rows[0] ** repeated_count
        else:
            total = _REDUCTIONS[op].reduce(rows, axis=0)
        recv[...] = total.reshape(recv.shape)

    def bcast(self, buffer: Buffer, root: int) -> None:
        """Copy what `root` has to every rank."""
        self._count(buffer.nbytes * (self.rank == root), buffer.nbytes * (self.rank != root))
        self._speakers.bcast(buffer, root if root < self._speakers.size else 0)

    def gatherv(self, send: Buffer, recv: Buffer | None, counts: Sequence[int], root: int) -> None:
        """Put what the ranks give into `recv` of `root`, a speaker."""
        gathered_bytes = np.empty(sum(counts), np.uint8) if recv is None else recv
        self.allgatherv(send, gathered_bytes, counts)

    def sendrecv(self, send: Buffer, dest: int, recv: Buffer, source: int) -> None:
        """Get what this rank gives: the others do the same."""
        self._count(send.nbytes, recv.nbytes)
        recv.reshape(-1).view(np.uint8)[:] = send.reshape(-1).view(np.uint8)

    def barrier(self) -> None:
        """Wait for the speakers."""
        self._count(0, 0)
        self._speakers.barrier()

    def split(self, color: int, key: int | None = None) -> RepeatedComm:
        """Return the ranks of all nodes that have this rank's position, as `find_nodes` asks."""
        node_count = -(-self.size // self._ranks_per_node)
        return RepeatedComm(self._speakers.split(color, key), node_count, 1, self.traffic)

    def by_node(self) -> RepeatedComm:
        """Return the ranks of this node."""
        if self.size <= self._ranks_per_node:
            return self
        node_size = self._ranks_per_node
        return RepeatedComm(self._speakers, node_size, node_size, self.traffic)

    def shared(self, nbytes: int) -> memoryview | None:
        """Return memory that the speakers share; that of the other ranks stays zero."""
        return self._speakers.shared(nbytes)

    def pages(self, nbytes: int) -> Pages | None:
        """Return the same with a private mapping."""
        return self._speakers.pages(nbytes)

    def free(self) -> None:
        """Leave."""
        self._speakers.free()


class Case(NamedTuple):
    """One kind of call.

    Attributes:
      make_call: ``make_call(strategy)`` returns the call, and prepares what it needs.
      speaker_count: How many ranks are there; 1 if all make it alike.
      is_last: Whether it ends the program, so that it cannot be repeated.
    """

    make_call: Callable[[ms.Strategy], Callable[[], Any]]
    speaker_count: int = 1
    is_last: bool = False


def _make_run(strategy: ms.Strategy) -> Callable[[], Any]:
    return lambda: strategy.run(_return_nothing)


def _return_nothing() -> None:
    pass


def _make_update(strategy: ms.Strategy) -> Callable[[], Any]:
    with strategy.scope():
        weights = [ms.Variable(np.ones(n), name=f"w{n}") for n in VARIABLE_SIZES]
    optimizer = ms.optim.SGD(0.1, momentum=0.9)
    gradients = [np.full(n, 0.5) for n in VARIABLE_SIZES]

    def step() -> None:
        optimizer.apply_gradients(zip(gradients, weights, strict=True))

    return lambda: strategy.run(step)


def _make_reduction(strategy: ms.Strategy) -> Callable[[], Any]:
    def step() -> None:
        ms.get_replica_context().all_reduce("mean", np.ones(100))

    return lambda: strategy.run(step)


def _make_weighted_reduction(strategy: ms.Strategy) -> Callable[[], Any]:
    weight = 2.0 + strategy.rank

    def step() -> None:
        ms.get_replica_context().all_reduce("mean", np.ones(100), weight=weight)

    return lambda: strategy.run(step)


def _make_rows(strategy: ms.Strategy) -> Callable[[], Any]:
    rows = strategy.run(lambda: np.ones((2, 30)))
    return lambda: strategy.reduce("mean", rows, axis=0)


def _make_merge(strategy: ms.Strategy) -> Callable[[], Any]:
    def step() -> Any:
        return ms.get_replica_context().merge_call(_return_name, args=(0.5, "sgd"))

    return lambda: strategy.run(step)


def _return_name(strategy: ms.Strategy, rate: ms.PerReplica, name: str) -> str:
    return name


def _make_numbers(strategy: ms.Strategy) -> Callable[[], Any]:
    rank = strategy.rank
    return lambda: strategy.run(lambda: {"loss": 0.5 * rank, "a": rank, "b": np.float32(rank)})


def _make_reading(strategy: ms.Strategy) -> Callable[[], Any]:
    get_numbers = _make_numbers(strategy)
    return lambda: [number.values for number in get_numbers().values()]


def _make_next(strategy: ms.Strategy) -> Callable[[], Any]:
    rows = np.zeros((2 * strategy.size, 3))
    dataset = ms.Dataset(rows).batch(2 * strategy.size).repeat()
    return functools.partial(next, iter(strategy.experimental_distribute_dataset(dataset)))


def _make_own_next(strategy: ms.Strategy) -> Callable[[], Any]:
    def make_dataset(context: ms.InputContext) -> ms.Dataset:
        rank = context.input_pipeline_id
        dataset = ms.Dataset(np.full((2, 3), rank)).batch(2)
        return dataset if rank else dataset.repeat()  # the data of another speaker end

    distributed = strategy.distribute_datasets_from_function(make_dataset)
    return functools.partial(next, iter(distributed))


def _make_error(
    strategy: ms.Strategy, step: Callable[[int], None], kind: type[Exception]
) -> Callable[[], Any]:
    def fail() -> str:
        try:
            strategy.run(step, (strategy.rank,))
        except kind as error:
            return str(error)
        raise AssertionError(f"the step has not raised {kind.__name__}")

    return fail


def _make_mismatch(strategy: ms.Strategy) -> Callable[[], Any]:
    gradients = {f"layer{i}": np.zeros(4) for i in range(GRADIENT_COUNT)}

    def step(rank: int) -> None:
        ms.get_replica_context().all_reduce("max" if rank == 1 else "sum", gradients)

    return _make_error(strategy, step, ms.LockstepError)


def _make_exception(strategy: ms.Strategy) -> Callable[[], Any]:
    def step(rank: int) -> None:
        raise ValueError("singular matrix")

    return _make_error(strategy, step, ValueError)


def _make_exit(strategy: ms.Strategy) -> Callable[[], Any]:
    session = strategy._replicas.lockstep.session
    return lambda: Lockstep(session).leave_program(0)


CASES = {
    "run": Case(_make_run),
    "run + apply_gradients": Case(_make_update),
    "all_reduce, mean": Case(_make_reduction),
    "all_reduce, weights alike": Case(_make_weighted_reduction),
    "all_reduce, other weights": Case(_make_weighted_reduction, 2),
    "reduce, rows": Case(_make_rows),
    "merge_call": Case(_make_merge),
    "numbers, alike": Case(_make_numbers),
    "numbers, different": Case(_make_numbers, 2),
    "numbers, different, read": Case(_make_reading, 2),
    "next": Case(_make_next),
    "next, own data, alike": Case(_make_own_next),
    "next, own data, one has none": Case(_make_own_next, 2),
    "mismatch of 161 gradients": Case(_make_mismatch, 2),
    "same exception on all": Case(_make_exception),
    "normal exit": Case(_make_exit, is_last=True),
}


class Costs(NamedTuple):
    """The costs of one call on rank 0.

    Attributes:
      received: Bytes that it received.
      sent: Bytes that it gave.
      collective_count: Its collective calls of MPI.
      peak: Bytes of memory that it took at most, beyond what it had.
      calls: Calls of Python functions.
      bytecodes: Bytecodes.
      seconds: Processor time of its thread, the median.
    """

    received: int
    sent: int
    collective_count: int
    peak: int
    calls: int
    bytecodes: int
    seconds: float


def run_speakers(program: Callable[[RepeatedComm], Any], size: int, speaker_count: int) -> Any:
    """Run a program on the speakers of a group of `size` ranks; return the result of rank 0."""
    world = LoopbackWorld(speaker_count, patience=300.0)
    results: list[Any] = [None] * speaker_count
    ranks_per_node = min(RANKS_PER_NODE, size)

    def run_speaker(rank: int) -> None:
        speakers = LoopbackComm(world, rank)
        comm = RepeatedComm(speakers, size, ranks_per_node)
        try:
            with default_group(comm):
                results[rank] = program(comm)
        finally:
            comm.free()

    threads = [
        threading.Thread(target=contextvars.Context().run, args=(run_speaker, rank), daemon=True)
        for rank in range(speaker_count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if results[0] is None:
        raise RuntimeError(f"rank 0 of {size} has failed; its error is above.")
    return results[0]


def _run_case(case: Case, size: int, measure: Callable[[Callable[[], Any], Traffic], Any]) -> Any:
    """Return what ``measure(call, traffic)`` returns on rank 0, after the first calls."""

    def program(comm: RepeatedComm) -> Any:
        call = case.make_call(ms.MirroredStrategy())
        for _ in range(0 if case.is_last else STEPS_BEFORE):
            call()
        return measure(call, comm.traffic)

    return run_speakers(program, size, case.speaker_count)


def count_traffic(call: Callable[[], Any], traffic: Traffic) -> tuple[int, int, int]:
    """Return bytes received, bytes sent and collective calls of a call."""
    traffic.received = traffic.sent = traffic.collective_count = 0
    call()
    return traffic.received, traffic.sent, traffic.collective_count


def count_frames(call: Callable[[], Any], _: Traffic) -> tuple[int, int]:
    """Return Python calls and bytecodes of a call."""
    gc.disable()  # which may call finalizers of what was before
    try:
        with common.counting_frames() as counts:
            call()
    finally:
        gc.enable()
    return counts[0], counts[1]


def _time_call(call: Callable[[], Any]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


def measure_peak(case: Case, size: int) -> int:
    """Return the bytes of memory that a call takes at most on one of its speakers."""

    def measure(call: Callable[[], Any], _: Traffic) -> int:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        result = call()
        peak = tracemalloc.get_traced_memory()[1] - before
        del result
        return max(peak, 0) // case.speaker_count

    tracemalloc.start()
    try:
        return int(_run_case(case, size, measure))
    finally:
        tracemalloc.stop()


def measure_costs(case: Case, size: int) -> Costs:
    """Return the costs of a call on rank 0 of `size` ranks."""
    repetitions = 1 if case.is_last else REPETITIONS
    times = _run_case(case, size, lambda call, _: [_time_call(call) for _ in range(repetitions)])
    return Costs(
        *_run_case(case, size, count_traffic),
        measure_peak(case, size),
        *_run_case(case, size, count_frames),
        statistics.median(times),
    )


def format_bytes(nbytes: int) -> str:
    """Return a number of bytes for a column.

    Example:
      >>> format_bytes(1234), format_bytes(35_500_000)
      ('1,234', '35.5 MB')
    """
    return f"{nbytes:,}" if nbytes < 10**5 else f"{nbytes / 1e6:.1f} MB"


def main() -> int:
    """Print a line for each case and number of ranks."""
    parser = common.arguments(__doc__, "64 and 1,024 ranks")
    parser.add_argument("cases", nargs="*", help="parts of their names; all by default")
    parser.add_argument("--ranks", help="numbers of ranks, with commas")
    options = parser.parse_args()
    sizes = HELD_SIZES[:2] if options.quick else HELD_SIZES + REPORTED_SIZES
    if options.ranks:
        sizes = tuple(map(int, options.ranks.split(",")))
    columns = "received", "sent", "collectives", "peak memory", "calls", "bytecodes", "CPU ms"
    print(f"{'':28}{'ranks':>8}" + "".join(f"{column:>12}" for column in columns))
    rows = []
    for name, case in CASES.items():
        if options.cases and not any(part in name for part in options.cases):
            continue
        for size in sizes:
            costs = measure_costs(case, size)
            rows.append({"case": name, "ranks": size, **costs._asdict()})
            received, sent, peak = map(format_bytes, (costs.received, costs.sent, costs.peak))
            print(
                f"{name:28}{size:>8,}{received:>12}{sent:>12}{costs.collective_count:>12}"
                f"{peak:>12}{costs.calls:>12,}{costs.bytecodes:>12,}{costs.seconds * 1e3:>12.2f}",
                flush=True,
            )
    common.write_json(options.json, {**common.host(), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The shared parts of the benchmarks: peers that take turns, checks of paths, facts.

Nothing here starts MPI: `start.py` times that, in processes of its own.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import platform
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import mpistrat
from mpistrat.collectives.plan import is_worth_reducing_in_place

if TYPE_CHECKING:
    from mpi4py import MPI

Arrays = list[np.ndarray]
WARM_UPS = 2  # before that, memory is touched and compilers run
SAMPLE = 4096  # of so many elements of a large array is its value checked

# Functions that move the bytes of a gather, and the word for it; all-reduces say their `name`.
GATHERS = {"_join_payloads": "small", "_gather_by_mpi": "native"}


# Peers


def _no_operation() -> None:
    pass


class Peer(NamedTuple):
    """One way to do the work.

    Attributes:
      reads: What is filled again before each repetition, with the rank plus the repetition's
        number.
      call: The work, which is timed.
      right: Tells whether what `call` returned or wrote is right, given the repetition's number.
      prepare: Makes what `call` needs of `reads`; not timed.
    """

    reads: Arrays
    call: Callable[[], Any]
    right: Callable[[Any, int], bool]
    prepare: Callable[[], Any] = _no_operation


def contains_result(array: Any, want: float, number: int) -> bool:
    """Tell whether a number is in all places of an array, or of a large one in some of them."""
    flat = np.asarray(array).reshape(-1)
    step = 1 if number < WARM_UPS else max(1, flat.size // SAMPLE)
    return bool((flat[number % step :: step] == want).all() and (flat[-1:] == want).all())


def sums(comm: MPI.Intracomm, results: Callable[[Any], Any]) -> Callable[[Any, int], bool]:
    """Return what tells whether `results` of a call are the sums over all ranks."""

    def right(result: Any, number: int) -> bool:
        want = sum(rank + number for rank in range(comm.size))
        return all(contains_result(array, want, number) for array in results(result))

    return right


def timed(comm: MPI.Intracomm, peer: Peer, number: int) -> tuple[float, bool]:
    """Return this rank's seconds for one call on fresh numbers, and whether it was right."""
    for array in peer.reads:
        array.fill(comm.rank + number)
    peer.prepare()
    comm.Barrier()
    begin = time.perf_counter()
    result = peer.call()
    seconds = time.perf_counter() - begin
    right = peer.right(result, number)
    begin = time.perf_counter()
    del result  # to give new arrays back costs as well
    return seconds + time.perf_counter() - begin, right


def turns(peers: Mapping[str, Any], number: int) -> list[str]:
    """Return whose turn it is; they take turns in beginning, so what disturbs one disturbs all."""
    return list(peers) if number % 2 else list(peers)[::-1]


def measure(comm: MPI.Intracomm, peers: Mapping[str, Peer], repetitions: int) -> dict[str, float]:
    """Return each peer's median over repetitions of the slowest rank's seconds. Collective.

    Raises:
      ArithmeticError: On every rank, if a result was wrong on some rank.
    """
    times: dict[str, list[float]] = {name: [] for name in peers}
    wrong_peers: set[str] = set()
    for number in range(WARM_UPS + repetitions):
        for name in turns(peers, number):
            seconds, right = timed(comm, peers[name], number)
            if number >= WARM_UPS:
                times[name].append(seconds)
            if not right:
                wrong_peers.add(name)
    # To raise at once would leave the other ranks waiting.
    wrong_peers = set().union(*comm.allgather(wrong_peers))
    if wrong_peers:
        raise ArithmeticError(f"wrong results on some rank: {', '.join(sorted(wrong_peers))}")
    return {name: median(comm, seconds) for name, seconds in times.items()}


def median(comm: MPI.Intracomm, seconds: Sequence[float]) -> float:
    """Return the median of the slowest rank's times. Collective."""
    return statistics.median(np.max(comm.allgather(list(seconds)), axis=0).tolist())


def count_repetitions(
    comm: MPI.Intracomm,
    peers: Mapping[str, Peer],
    budget: float,
    least_count: int = 5,
    most_count: int = 1000,
) -> int:
    """Return how often the peers can be repeated in `budget` seconds each. Collective."""
    round_seconds = 0.0
    for number in range(WARM_UPS):
        round_seconds = sum(timed(comm, peer, number)[0] for peer in peers.values())
    # From the slowest rank's time, so that every rank counts alike.
    count = math.ceil(len(peers) * budget / max(*comm.allgather(round_seconds), 1e-9))
    return min(max(count, least_count), most_count)


def import_everywhere(comm: MPI.Intracomm, name: str) -> Any:
    """Return a module, or None if some rank cannot import it. Collective."""
    try:
        module = importlib.import_module(name)
    except ImportError:
        module = None
    return module if all(comm.allgather(module is not None)) else None


def address(comm: MPI.Intracomm) -> str:
    """Return a host and port of this rank where the others reach it. Collective."""
    host = socket.gethostname()
    if len(set(comm.allgather(host))) == 1:
        host = "127.0.0.1"
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{host}:{probe.getsockname()[1]}"


def gloo(comm: MPI.Intracomm) -> Any:
    """Return torch with its gloo group of these ranks begun; None without torch. Collective."""
    torch, dist = import_everywhere(comm, "torch"), import_everywhere(comm, "torch.distributed")
    if torch is None or dist is None or not dist.is_available():
        return None
    torch.set_num_threads(1)
    if not dist.is_initialized():
        url = f"tcp://{comm.bcast(address(comm))}"
        dist.init_process_group("gloo", url, rank=comm.rank, world_size=comm.size)
    return torch


# Paths


def path_of(call: Callable[[], Any]) -> str:
    """Make a call, and return the name of the algorithm that it took, as this rank saw it."""
    package = Path(mpistrat.__file__).parent / "collectives"
    algorithms, gathers_file = (
        f"{package.as_posix()}/algorithms/",
        f"{package.as_posix()}/reducer.py",
    )
    names: list[str] = []
    depth = 0  # of algorithms that run each other, of which the innermost moves the bytes

    def see(frame: Any, event: str, arg: Any) -> None:
        nonlocal depth
        code = frame.f_code
        if code.co_name == "run" and code.co_filename.startswith(algorithms):
            if event == "call":
                names[len(names) - bool(depth) :] = [frame.f_locals["self"].name]
            depth += {"call": 1, "return": -1}.get(event, 0)
        elif event == "call" and code.co_name in GATHERS and code.co_filename == gathers_file:
            names.append(GATHERS[code.co_name])

    previous_profiler = sys.getprofile()
    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(previous_profiler)
    return " + ".join(sorted(set(names))) or "unknown"


def expected(strategy: mpistrat.Strategy, nbytes: int, in_place: int = 0) -> str:
    """Return the path that an all-reduce is said to take, once its kind was made before.

    `in_place` is the number of leaves in buffers.
    """
    lockstep, arena = strategy._replicas.lockstep, strategy._replicas.reducer.node.arena
    if in_place and lockstep.comm.size > 1 and is_worth_reducing_in_place(nbytes, in_place):
        return "direct" if nbytes <= arena.direct else "in place"
    if lockstep.can_carry(nbytes):
        return "small"
    if lockstep.comm.size == 1:
        return "alone"
    return "direct" if nbytes <= arena.max_direct_nbytes else "node"


def take(comm: MPI.Intracomm, call_name: str, call: Callable[[], Any], want: str) -> str:
    """Make a call, and return its path. Collective.

    Raises:
      SystemExit: On every rank, if the path of some rank is not the one to measure.
    """
    paths = comm.allgather(path_of(call))
    if set(paths) != {want}:
        raise SystemExit(
            f"{call_name}: expected to measure the path {want!r}; the ranks took {paths}"
        )
    return want


# Counts


@contextmanager
def counting_frames() -> Iterator[list[int]]:
    """Give a list of two numbers: Python calls and bytecodes of the body so far."""
    counts = [0, 0]

    def trace(frame: Any, event: str, _: Any) -> Any:
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            counts[0] += 1
        counts[1] += event == "opcode"
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        yield counts
    finally:
        sys.settrace(previous)


# Input and output


def arguments(doc: str | None, quick: str) -> argparse.ArgumentParser:
    """Return a parser of what all benchmarks understand."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", metavar="PATH", help="where the numbers go")
    parser.add_argument("--plot", metavar="PATH", help="where the picture goes")
    return parser


def print_introduction(comm: MPI.Intracomm, header: str = "") -> dict[str, Any]:
    """Return what a reader must know to compare these numbers with others, printed. Collective."""
    from mpi4py import MPI

    hosts = len(set(comm.allgather(MPI.Get_processor_name())))
    library = first_line(MPI.Get_library_version())
    facts = {"mpi": library, "ranks": comm.size, "hosts": hosts, **host()}
    if comm.rank == 0:
        print_facts(facts, header)
    return facts


def first_line(text: str) -> str:
    """Return what an MPI library says of itself first."""
    return text.strip("\0\n ").splitlines()[0]


def host() -> dict[str, Any]:
    """Return the facts of this machine and its Python."""
    cpuinfo = Path("/proc/cpuinfo")
    models = [
        text.partition(":")[2].strip()
        for text in (cpuinfo.read_text().splitlines() if cpuinfo.exists() else ())
        if text.startswith("model name")
    ]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cores": cores,
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "system": platform.platform(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "mpistrat": mpistrat.__version__,
    }


def print_facts(facts: dict[str, Any], header: str = "") -> None:
    print(f"MPI     {facts['mpi']}")
    print(f"ranks   {facts['ranks']} on {facts['hosts']} host(s) with {facts['cores']} cores")
    print(f"host    {facts['cpu']}, {facts['system']}, load {facts['load']}")
    print(f"with    Python {facts['python']}, NumPy {facts['numpy']}, mpistrat {facts['mpistrat']}")
    if facts["hosts"] == 1 and facts["ranks"] > facts["cores"]:
        print("note    more ranks than cores: times are those of the scheduler")
    print(f"\n{header}", flush=True)


def write_json(path: str | None, data: dict[str, Any]) -> None:
    if path:
        Path(path).write_text(json.dumps(data, indent=2) + "\n")

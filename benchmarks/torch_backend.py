"""The backend of torch.distributed beside gloo, in the same run.

    python benchmarks/torch_backend.py [--ranks 2] [--rounds 10] [--quick]

Each round asks both backends for every case, in turns, so both meet the same machine. For each case
it prints the least and the middle time, and how they compare with gloo's.

==========  ========================================================================
case        what is timed
==========  ========================================================================
8 B         ``all_reduce`` of one float64
8 B async   the same with ``async_op=True``, and its ``wait``
25 MB       ``all_reduce`` of float32, as a bucket of DistributedDataParallel has
DDP step    backward and forward pass and SGD of an MLP with 6.3 M parameters
silent DDP  the same, where a hook (torch's ``noop_hook``) takes the place of all-reduces
and 25 MB   that, and one ``all_reduce`` of 25 MB after the backward pass
local       the same on each rank alone
==========  ========================================================================

The last lines show what DDP adds to the step alone (medians), and the least that DDP would add with
an all-reduce as quick as the one above.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator


def cases(quick: bool) -> Iterator[tuple[str, int, Callable[[object], Callable[[], object]]]]:
    """Yield each case: its name, how often it is called in a round, and what makes it."""
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

    width = 128 if quick else 1448
    small = torch.ones(1, dtype=torch.float64)
    large = torch.zeros((1 if quick else 25) * 2**20 // 4)

    def steps(
        group: object, silent: bool = False, reduces_after: bool = False
    ) -> Callable[[], None]:
        layers = [torch.nn.Linear(width, width) for _ in range(3)]
        net: torch.nn.Module = torch.nn.Sequential(*layers)
        if group is not None:
            net = torch.nn.parallel.DistributedDataParallel(
                net, process_group=group, gradient_as_bucket_view=True
            )
            if silent:
                net.register_comm_hook(None, noop_hook)
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        x = torch.randn(16, width)

        def step() -> None:
            optimizer.zero_grad()
            net(x).sum().backward()
            if reduces_after:
                dist.all_reduce(large, group=group)
            optimizer.step()

        return step

    def reduce_async(group: object) -> None:
        dist.all_reduce(small, group=group, async_op=True).wait()

    yield "8 B", 50, lambda group: lambda: dist.all_reduce(small, group=group)
    yield "8 B async", 50, lambda group: lambda: reduce_async(group)
    yield "25 MB", 2, lambda group: lambda: dist.all_reduce(large, group=group)
    yield "DDP step", 2, steps
    yield "silent DDP", 2, lambda group: steps(group, silent=True)
    yield "and 25 MB", 2, lambda group: steps(group, silent=True, reduces_after=True)
    yield "local", 2, lambda group: steps(None)


def rank(rounds: int, quick: bool) -> None:
    """Time everything as one rank; rank 0 prints."""
    import torch
    import torch.distributed as dist

    import mpistrat.torch as mt

    torch.set_num_threads(1)
    mt.init_process_group()
    groups = {"mpistrat": dist.new_group(), "gloo": dist.new_group(backend="gloo")}
    times_of_cases = {}
    for name, count, make in cases(quick):
        calls = {backend: make(group) for backend, group in groups.items()}
        times: dict[str, list[float]] = {backend: [] for backend in groups}
        for number in range(rounds + 1):
            for backend, call in calls.items():
                dist.barrier()
                for _ in range(count):
                    start = time.perf_counter()
                    call()
                    if number:  # the first warms up
                        times[backend].append(time.perf_counter() - start)
        times_of_cases[name] = {
            backend: sorted(case_times) for backend, case_times in times.items()
        }
    if dist.get_rank() == 0:
        print(f"{'case':12}{'mpistrat us: least, middle':>30}{'gloo: least, middle':>26}  ratio")
        for name, case_times in times_of_cases.items():
            (a, b), (c, d) = (
                (sorted_times[0] * 1e6, sorted_times[len(sorted_times) // 2] * 1e6)
                for sorted_times in (case_times["mpistrat"], case_times["gloo"])
            )
            print(f"{name:12}{a:16.0f}{b:14.0f}{c:14.0f}{d:12.0f}  {a / c:.2f}, {b / d:.2f}")
        middle = {
            name: {k: x[len(x) // 2] for k, x in case_times.items()}
            for name, case_times in times_of_cases.items()
        }
        gloo = middle["DDP step"]["gloo"] - middle["local"]["gloo"]
        for name in ("DDP step", "silent DDP", "and 25 MB"):
            added = middle[name]["mpistrat"] - middle["local"]["mpistrat"]
            print(
                f"{name} adds {added * 1e3:.1f} ms, {added / gloo:.2f} of what DDP adds over gloo"
            )
    dist.destroy_process_group()


def main() -> int:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        with contextlib.suppress(KeyboardInterrupt):
            rank(options.rounds, options.quick)
        return 0
    command = [
        sys.executable,
        "-m",
        "mpistrat",
        "run",
        "-n",
        str(options.ranks),
        __file__,
        "--rank",
    ]
    command += ["--rounds", str(options.rounds), *(["--quick"] if options.quick else [])]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

"""How much more does a training step of PyTorch take on all ranks than on one rank alone?

    mpiexec -n 2 python benchmarks/torch_step.py [--quick] [--repetitions N] [--json PATH]
                                                 [--plot PATH]

The same model (a perceptron of 25 M parameters, and a small convolutional network) takes the same
step, forward, backward and update by Adam, in peers that take turns in one job:

``alone``      each rank for itself, with ``torch.optim.Adam(fused=True)``
``replicate``  ``mpistrat.torch.replicate``, and the same optimizer
``fused``      ``replicate``, and ``mpistrat.torch.FusedOptimizer``
``ddp``        DistributedDataParallel over gloo, its gradients views of its buckets, and the same

``added`` is what a step takes more than alone, of the same repetition: the median, and the least.
Every rank has one thread.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "MPISTRAT_THREADS"):
    os.environ.setdefault(_name, "1")  # before NumPy is imported

import numpy as np  # noqa: E402
from common import WARM_UPS, arguments, gloo, print_introduction, turns, write_json  # noqa: E402
from mpi4py import MPI  # noqa: E402
from pictures import Panel, bars  # noqa: E402

import mpistrat as ms  # noqa: E402

HEADER = f"{'model':8} {'peer':10} {'ms':>9} {'least':>9} {'added':>9} {'least':>9} {'of ddp':>8}"


def perceptron(torch: Any, quick: bool) -> tuple[Any, Any, Any]:
    """25 M parameters and few rows: communication is most of what a step adds."""
    nn, width = torch.nn, 300 if quick else 3520
    return (
        nn.Sequential(
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 10),
        ),
        torch.rand(8, width),
        torch.randint(10, (8,)),
    )


def pictures(torch: Any, quick: bool) -> tuple[Any, Any, Any]:
    """A convolutional network of few parameters: what it adds is the price of a call."""
    nn = torch.nn
    net = nn.Sequential(
        *(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(64, 10),
    )
    return net, torch.rand(4 if quick else 32, 3, 32, 32), torch.randint(10, (4 if quick else 32,))


MODELS = {"mlp": perceptron, "conv": pictures}


def peers(torch: Any, make: Callable[..., Any], quick: bool) -> dict[str, Callable[[], Any]]:
    """Return one step of each peer, by name. Collective."""
    import mpistrat.torch as mt

    strategy, steps = ms.MultiWorkerMirroredStrategy(), {}

    def peer(name: str, wrap: Callable[[Any], Any], update: Callable[[Any], Any]) -> None:
        torch.manual_seed(0)
        net, x, y = make(torch, quick)
        model = wrap(net)
        optimizer = update(model)

        def step() -> Any:
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            return next(net.parameters())

        steps[name] = step

    def adam(model: Any) -> Any:
        return torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)

    def ddp(net: Any) -> Any:
        return torch.nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)

    peer("alone", lambda net: net, adam)
    peer("replicate", lambda net: mt.replicate(net, strategy), adam)
    peer(
        "fused",
        lambda net: mt.replicate(net, strategy),
        lambda model: mt.FusedOptimizer(model, ms.optim.Adam(1e-3, nonfinite="ignore")),
    )
    peer("ddp", ddp, adam)
    return steps


def measured(comm: MPI.Intracomm, steps: dict[str, Callable[[], Any]], count: int) -> Any:
    """Return each peer's seconds of the slowest rank, one for each repetition. Collective.

    Raises:
      ArithmeticError: On every rank, if the peers have come to other weights.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    weights = {}
    for number in range(WARM_UPS + count):
        for name in turns(steps, number):
            comm.Barrier()
            begin = time.perf_counter()
            weight = steps[name]()
            times[name].append(time.perf_counter() - begin)
            weights[name] = weight.detach().numpy()
    are_close = [np.allclose(w, weights["alone"], rtol=1e-3, atol=1e-3) for w in weights.values()]
    if not all(comm.allgather(all(are_close))):
        raise ArithmeticError(
            f"other weights than alone: {dict(zip(weights, are_close, strict=True))}"
        )
    slowest = {name: np.max(comm.allgather(seconds), axis=0) for name, seconds in times.items()}
    return {name: seconds[WARM_UPS:] for name, seconds in slowest.items()}


def rows_of(model: str, times: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each peer."""
    added = {name: 1e3 * (seconds - times["alone"]) for name, seconds in times.items()}
    of_ddp = statistics.median(added["ddp"])
    return [
        {
            "model": model,
            "peer": name,
            "ms": 1e3 * statistics.median(seconds),
            "least_ms": 1e3 * float(min(seconds)),
            "added_ms": statistics.median(added[name]),
            "least_added_ms": 1e3 * float(min(seconds) - min(times["alone"])),
            "of_ddp": statistics.median(added[name]) / of_ddp if of_ddp > 0 else float("nan"),
        }
        for name, seconds in times.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__, "a small model, few repetitions")
    parser.add_argument("--repetitions", type=int, default=30, help="of each peer, in turns")
    options = parser.parse_args(argv)
    comm = MPI.COMM_WORLD.Dup()
    torch = gloo(comm)
    if torch is None:
        if comm.rank == 0:
            print("nothing was measured: torch is not installed on all ranks")
        return 1
    facts, rows = print_introduction(comm, HEADER), []
    for name, make in MODELS.items():
        steps = peers(torch, make, options.quick)
        for row in rows_of(
            name, measured(comm, steps, 3 if options.quick else options.repetitions)
        ):
            rows.append(row)
            if comm.rank == 0:
                print(
                    f"{name:8} {row['peer']:10} {row['ms']:9.2f} {row['least_ms']:9.2f} "
                    f"{row['added_ms']:9.2f} {row['least_added_ms']:9.2f} {row['of_ddp']:8.2f}",
                    flush=True,
                )
    if comm.rank == 0:
        write_json(options.json, {**facts, "rows": rows})
        panels = [
            Panel(name, "ms", {r["peer"]: r["ms"] for r in rows if r["model"] == name})
            for name in MODELS
        ]
        bars(options.plot, facts, "A step of PyTorch", panels, {"replicate", "fused"})
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

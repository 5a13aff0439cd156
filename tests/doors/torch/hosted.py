"""Torch's own suite for backends, hosted by ranks of MPI: one ``mpiexec`` for each test.

    python tests/doors/torch/hosted.py --ranks 4 [--backend gloo] [--only all_reduce] [--every 8]
    python tests/doors/torch/hosted.py --ranks 4 --record tests/doors/torch/hosted.tsv

It prints each test that fails or hangs, and how many passed and were skipped; what GPUs, or the
literal name of another backend, gate is counted apart. `STANDS_OUT` says why a test may differ
from gloo's. The table `TABLE` has how each test went here, and with gloo where it did not pass
here; ``--record`` continues with a table that has been begun.
"""

from __future__ import annotations

import argparse
import collections
import functools
import inspect
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

LIMIT = 60  # seconds for one test
SUITE = "torch.testing._internal.distributed.distributed_test"
TABLE = Path(__file__).with_name("hosted.tsv")  # on 4 ranks: test, mpistrat, gloo, why

# Tests that pass with gloo and not here, each with its reason.
_NO_MONITOR = "it is barrier: its error has another text, and a call given up ends the job"
STANDS_OUT: dict[str, str] = {
    "test_barrier_timeout_full_group": "a call that was given up ends the job, with code 75",
    **dict.fromkeys(
        (
            "test_monitored_barrier_gloo",
            "test_monitored_barrier_gloo_rank_0_timeout",
            "test_monitored_barrier_gloo_subgroup",
        ),
        _NO_MONITOR,
    ),
    "test_sparse_all_reduce_sum": "sparse tensors are refused with `.to_dense()`",
}


def cases(directory, backend, size):
    """Import the suite for these ranks, and return the class that hosts it."""
    os.environ.update(
        BACKEND=backend,
        WORLD_SIZE=str(size),
        TEMP_DIR=str(directory),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
    )
    import torch
    import torch.testing._internal.common_distributed as common

    torch.manual_seed(0)  # the suite draws objects when it is imported, for all ranks the same

    for feature in ("ddp", "subgroup", "plugin"):
        common.DistTestCases.backend_feature[feature].add("mpistrat")
    import torch.testing._internal.distributed.distributed_test as suite

    class Hosted(suite.DistributedTest._DistTestBase, suite.TestDistBackend):
        def setUp(self):
            suite.Barrier.init()

        def tearDown(self):
            pass

    return Hosted, suite, common


@functools.cache
def tests():
    """The tests of the suite by their names, without starting anything."""
    before = dict(os.environ)
    try:
        hosted, _, _ = cases("", "gloo", 4)
    finally:
        os.environ.clear()
        os.environ.update(before)
    found = inspect.getmembers(hosted, callable)
    return {name: test for name, test in found if name.startswith("test_")}


def names():
    """The names of the tests, in order."""
    return sorted(tests())


def of_gpus(name):
    """Tell whether a test is skipped where there is no GPU, by its name or its decorators."""
    if "cuda" in name or "nccl" in name:  # some of these look for no GPU before they use one
        return True
    head = inspect.getsource(tests()[name]).split("def ")[0]
    return "skip_if_no_gpu" in head or "skip_if_lt_x_gpu" in head


def run_here(name, backend, directory):
    """Run one test as one rank, and write how it went."""
    import datetime

    from mpi4py import MPI

    import mpistrat.torch as mt

    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    hosted, suite, common = cases(directory, backend, size)
    import torch.distributed as dist

    seconds = suite.CUSTOM_PG_TIMEOUT.get(name, LIMIT)
    timeout = datetime.timedelta(seconds=seconds)
    if backend == "mpistrat":
        mt.init_process_group(timeout=timeout)
    else:
        method = f"file://{directory}/meet"
        dist.init_process_group(
            backend, init_method=method, rank=rank, world_size=size, timeout=timeout
        )
    case = hosted(name)
    case.rank, case.file_name = rank, f"{directory}/meet"
    case.setUp()
    MPI.COMM_WORLD.Barrier()  # `setUp` removes what others have written for `Barrier.sync`
    suite.Barrier.sync.__func__.__defaults__ = None, LIMIT  # 10 s is little on a busy machine
    reasons = {skip.exit_code: skip.message for skip in common.TEST_SKIPS.values()}
    try:
        getattr(case, name)()
        told = ("passed", "")
    except suite.unittest.SkipTest as skip:
        told = ("skipped", str(skip))
    except SystemExit as left:
        why = reasons.get(left.code, f"exit code {left.code}")
        told = ("skipped", why) if left.code else ("passed", "")
    except NameError as error:
        told = ("skipped" if "torchvision" in str(error) else "failed", str(error))
    except BaseException:
        told = ("failed", traceback.format_exc())
    (Path(directory) / f"rank-{rank}").write_text(json.dumps(told))
    if told[0] != "failed":
        MPI.COMM_WORLD.Barrier()
        if dist.is_initialized():
            dist.destroy_process_group()
    else:
        time.sleep(1)  # the others write too
        sys.exit(1)


def run_one(name, backend, size):
    """Run one test on several ranks; return how it went, and why."""
    if of_gpus(name):
        return "skipped", "GPU"
    from mpistrat.launch.mpi_libraries import find_launcher
    from mpistrat.launch.process import run_job

    with tempfile.TemporaryDirectory() as directory:
        for room in ("barrier", "test_dir", "init_dir"):
            Path(directory, room).mkdir()
        launcher, _ = find_launcher()
        program = [sys.executable, __file__, "--one", name, directory, "--backend", backend]
        printed = Path(directory, "printed")
        with printed.open("wb") as output:
            outcome = run_job(launcher.build_command(size, program), LIMIT + 30, output)
        told = [json.loads(path.read_text()) for path in Path(directory).glob("rank-*")]
        failed = [why for how, why in told if how == "failed"]
        if failed:
            return "failed", failed[0]
        if outcome.has_timed_out or len(told) < size or outcome.code:
            how = "hung" if outcome.has_timed_out else "failed"
            return how, printed.read_text(errors="replace")[-3000:]
        how = {how for how, _ in told}
        return ("skipped", told[0][1]) if how == {"skipped"} else ("passed", "")


def gate(reason):
    """What kept a test from running, in one word or two."""
    low = reason.lower()
    if any(word in low for word in ("gpu", "cuda", "nccl", "accelerator")):
        return "GPUs"
    return "another backend's name" if "backend" in low else reason[:60]


def recorded(path=TABLE):
    """Return the rows of a table by the names of the tests: mpistrat, gloo, why."""
    lines = path.read_text().splitlines()[1:] if path.exists() else []
    return {name: rest for name, *rest in (line.split("\t") for line in lines)}


def reason(how, why):
    """Return in one line why a test did not pass."""
    if how == "skipped":
        return " ".join(gate(why).split())
    lines = [line.strip() for line in why.splitlines() if "Error" in line or "Exception" in line]
    return (lines or why.splitlines() or [""])[-1].replace("\t", " ")[:150]


def record(path, chosen, size, seconds):
    """Write a row for each test that has none, until `seconds` are over."""
    known, end = recorded(path), time.monotonic() + seconds
    if not known:
        path.write_text("test\tmpistrat\tgloo\twhy\n")
    for name in [name for name in chosen if name not in known]:
        if time.monotonic() > end:
            break
        how, why = run_one(name, "mpistrat", size)
        said, beside = reason(how, why), ""
        if how != "passed" and said != "GPUs":
            beside, _ = run_one(name, "gloo", size)
        with path.open("a") as table:
            table.write(f"{name}\t{how}\t{beside}\t{said}\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="mpistrat")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--only", default="", help="a part of the names")
    parser.add_argument("--every", type=int, default=1, help="only each so many-th")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no test after these")
    parser.add_argument("--record", type=Path, metavar="PATH", help="write the table")
    parser.add_argument("--one", nargs=2, metavar=("NAME", "DIRECTORY"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        run_here(given.one[0], given.backend, given.one[1])
        return 0
    chosen = [name for name in names() if given.only in name][:: given.every]
    if given.record:
        record(given.record, chosen, given.ranks, given.seconds)
        return 0
    counts, gates, bad = collections.Counter(), collections.Counter(), []
    end = time.monotonic() + given.seconds
    for name in chosen:
        if time.monotonic() > end:
            counts["not tried"] += 1
            continue
        how, why = run_one(name, given.backend, given.ranks)
        counts[how] += 1
        if how == "skipped":
            gates[gate(why)] += 1
        elif how != "passed":
            print(
                f"{how}: {name}{' (known)' if name in STANDS_OUT else ''}\n{why[-1500:]}",
                flush=True,
            )
            bad.append(name)
    print(f"{given.backend} on {given.ranks} ranks: {dict(counts)}; skipped for {dict(gates)}")
    return 1 if set(bad) - set(STANDS_OUT) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Prints what each host sends in a call: a line of JSON with bytes by host, and their formula.

sent_bytes.py blocks|turns
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpistrat as ms

CALLS = 8  # of each kind; what else is sent meanwhile counts an eighth
ELEMENTS = 1 << 20  # of float32
NBYTES = 4 * ELEMENTS
GATHERED_NBYTES = NBYTES // 8  # from each rank
QUIET_SECONDS = 0.3  # until what was sent is counted


def count_sent_bytes():
    """Bytes that this host has sent, with the headers of Ethernet, IP and TCP."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    fields = next(line.split(":")[1].split() for line in lines if line.strip().startswith("eth0:"))
    return int(fields[8])


def make_calls(strategy):
    """The calls by name."""
    with strategy.scope():
        weights = [ms.Variable(np.zeros(ELEMENTS, "f4"), name=f"w{number}") for number in range(2)]
    optimizers = ms.optim.Adam(0.1), ms.optim.Adam(0.1, shard="all")
    gradient = np.ones(ELEMENTS, "f4")
    rows = np.ones(GATHERED_NBYTES // 4, "f4")
    return {
        "all_reduce": lambda: ms.get_replica_context().all_reduce("sum", gradient),
        "apply_gradients": lambda: optimizers[0].apply_gradients([(gradient, weights[0])]),
        "shard all": lambda: optimizers[1].apply_gradients([(gradient, weights[1])]),
        "gather": lambda: ms.get_replica_context().all_gather(rows, axis=0),
    }


def order_ranks(order):
    """The ranks of the job, those of a host one after the other ("blocks"), or "turns"."""
    world = MPI.COMM_WORLD
    rank_on_host = world.Split_type(MPI.COMM_TYPE_SHARED).rank
    return world.Split(0, key=rank_on_host if order == "turns" else 0)


def main():
    """Make each call some times, and print what a call sends."""
    comm = order_ranks(sys.argv[1])
    strategy = ms.MirroredStrategy(comm=comm)
    for name, call in make_calls(strategy).items():

        def step(call=call):
            call()

        strategy.run(step)  # the first call makes plans and communicators
        counts = []
        for call_count in (CALLS, 0):
            comm.Barrier()
            time.sleep(QUIET_SECONDS)
            counts.append(count_sent_bytes())
            comm.Barrier()
            for _ in range(call_count):
                strategy.run(step)
        sent = comm.gather((MPI.Get_processor_name(), (counts[1] - counts[0]) / CALLS))
        if comm.rank == 0:
            by_host = dict(sent)
            hosts = len(by_host)
            reduced = 2 * (hosts - 1) / hosts * NBYTES
            expected = comm.size * GATHERED_NBYTES if name == "gather" else reduced
            print(json.dumps({"call": name, "sent": by_host, "expected": expected}), flush=True)


main()

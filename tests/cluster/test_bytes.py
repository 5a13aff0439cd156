"""Bytes between nodes: what DESIGN.md says, at the hosts' network interfaces, with all headers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mpistrat.launch.mpi_libraries import find_library

PROGRAM = Path(__file__).parent / "programs" / "sent_bytes.py"
LAYOUTS = {
    "2 + 2": ({"node1": 2, "node2": 2}, "blocks"),
    "3 + 2 + 1": ({"node1": 3, "node2": 2, "node3": 1}, "blocks"),
    "3 + 2 + 1, in turns": ({"node1": 3, "node2": 2, "node3": 1}, "turns"),
    "1 + 1 + 1 + 1": (dict.fromkeys(["node1", "node2", "node3", "node4"], 1), "blocks"),
}


def run_over(hosts, clean, ranks_by_host, *words):
    """Run a program with so many ranks on each host, one host after the other."""
    slots = ",".join(f"{name}:{count}" for name, count in ranks_by_host.items())
    if find_library().flavour.name == "Open MPI":
        launcher = ["mpirun", "--bind-to", "none", "--host", slots]
    else:
        launcher = ["mpiexec", "-launcher", "ssh", "-launcher-exec", hosts.rsh, "-hosts", slots]
    env = {**clean, "PRTE_MCA_plm_ssh_agent": str(hosts.rsh)}
    argv = [*launcher, "-n", sum(ranks_by_host.values()), sys.executable, *words]
    return hosts.run("head", *argv, env=env, timeout=300)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_calls_send_what_the_design_says(hosts, clean, layout):
    ranks_by_host, order = LAYOUTS[layout]
    done = run_over(hosts, clean, ranks_by_host, PROGRAM, order)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["call"] for row in rows] == ["all_reduce", "apply_gradients", "shard all", "gather"]
    for row in rows:
        assert row["sent"].keys() == ranks_by_host.keys()
        for host, sent in row["sent"].items():
            if row["call"] != "gather":
                assert sent == pytest.approx(row["expected"], rel=0.05), (host, row)
            elif order == "blocks":  # at most, for the library chooses how
                assert sent < 1.05 * row["expected"], (host, row)

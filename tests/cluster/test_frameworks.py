"""Lightning, Accelerate and transformers on nodes of Slurm, and on hosts without it."""

from __future__ import annotations

import sys

import pytest
from frameworks import PROGRAMS, VARIABLES, find_missing_packages, read_results, write_program
from hosts import HEAD

MISSING = find_missing_packages()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {' '.join(MISSING)}")

NODES = ["-N2", "--ntasks-per-node=1"]


@pytest.fixture
def start_on_hosts(hosts, shared, clean):
    """A function that runs a program by `mpistrat run` on some virtual hosts, a rank on each."""

    def start(name, host_names):
        program = write_program(shared / f"on_{len(host_names)}", name)
        (program.parent / "hostfile").write_text("".join(f"{host}:1\n" for host in host_names))
        env = {
            **clean,
            **VARIABLES,
            "HYDRA_LAUNCHER": "ssh",
            "HYDRA_LAUNCHER_EXEC": str(hosts.rsh),
            "PRTE_MCA_plm_ssh_agent": str(hosts.rsh),
        }
        words = [sys.executable, "-m", "mpistrat", "run", "--hostfile", "hostfile", program.name]
        done = hosts.run(HEAD, *words, cwd=program.parent, env=env, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return start


@pytest.mark.parametrize("name", PROGRAMS)
def test_two_nodes_of_slurm(slurm, shared, pmi, name, start_on_hosts):
    """By srun, and by the launcher of MPI, whose ranks Slurm counts as one task each node."""
    wanted = read_results(start_on_hosts(name, ["node1", "node2"]))
    launchers = [f"srun -K1 --mpi={pmi} {sys.executable}", f"{sys.executable} -m mpistrat run"]
    launchers.append(f"{sys.executable} -m mpistrat run --launcher mpiexec")
    programs = [write_program(shared / str(index), name) for index in range(len(launchers))]
    exports = [f"export {variable}='{text}'" for variable, text in VARIABLES.items()]
    commands = [
        f"cd {program.parent} && {launcher} {program.name} && echo ended"
        for launcher, program in zip(launchers, programs, strict=True)
    ]
    job = slurm.submit(shared, "\n".join([*exports, *commands]), *NODES)
    job.until("COMPLETED")
    *logs, rest = job.log.split("ended\n")
    assert [read_results(log) for log in logs] == [wanted] * len(launchers), job.log
    assert rest == ""


@pytest.mark.parametrize("name", PROGRAMS)
def test_three_hosts(name, start_on_hosts):
    """Losses and metrics are numbers, from the backend of this library."""
    backend, *results = read_results(start_on_hosts(name, ["node1", "node2", "node3"]))
    assert backend == "backend: mpistrat"
    assert len(results) > 1 and "nan" not in " ".join(results), results

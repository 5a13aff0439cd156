"""The stock wheel of mpi4py on somebody else's MPI, which `MPI4PY_LIBMPI` names: Debian's two."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest
from hosts import HEAD
from test_slurm import EVERYBODY, HALF, RUN, WHO, ranks

from mpistrat.launch.process import TIMED_OUT

LIBRARIES = Path(f"/usr/lib/{platform.machine()}-linux-gnu")
SITES = {
    "openmpi": ("libmpi.so.40", "Open MPI v4", "openmpi-bin"),
    "mpich": ("libmpich.so.12", "MPICH Version: 4", "mpich"),
}
# What MPI says of itself, beside who is where.
TELL = "\nif c.rank == 0: print(MPI.Get_library_version())"


@pytest.fixture(params=list(SITES))
def site(request, tmp_path):
    """Variables that choose a library, and what it says of itself."""
    name, says, package = SITES[request.param]
    library = LIBRARIES / name
    if not library.exists():
        pytest.skip(f"NO {request.param} of the system: apt-get install {package}")
    env = {"MPI4PY_LIBMPI": str(library)}
    if request.param == "mpich":  # as the error that comes without it tells
        (tmp_path / "libmpi.so.12").symlink_to(library)
        env = {"MPI4PY_LIBMPI": "libmpi.so.12", "LD_LIBRARY_PATH": str(tmp_path)}
    return env, says


def test_in_slurm(slurm, shared, site):
    env, says = site
    (shared / "who.py").write_text(WHO + TELL)
    for launcher in ("srun", "mpiexec"):
        words = ["salloc", *HALF, *RUN.split(), "--launcher", launcher]
        for _ in range(3):
            done = slurm.command(*words, "--timeout", "60", "who.py", cwd=shared, env=env)
            # Debian's MPICH 4.0.2 over UCX stays in MPI_Finalize now and then: the rank that
            # closes its connections waits for others that sleep in the barrier of PMI.
            if done.returncode != TIMED_OUT or "mpich" not in says.lower():
                break
        assert done.returncode == 0, done.stderr
        assert ranks(done.stdout) == EVERYBODY
        assert says in " ".join(done.stdout.split())


def test_by_a_file_of_hosts(hosts, shared, site, clean):
    env, says = site
    (shared / "who.py").write_text(WHO + TELL)
    (shared / "hosts").write_text("".join(f"{name}:2\n" for name in hosts.names[:2]))
    env = {
        **clean,
        **env,
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_LAUNCHER_EXEC": str(hosts.rsh),
        "OMPI_MCA_plm_rsh_agent": str(hosts.rsh),
    }
    words = [*RUN.split(), "--hostfile", "hosts", "who.py"]
    done = hosts.run(HEAD, *words, cwd=shared, env=env)
    assert done.returncode == 0, done.stderr
    assert ranks(done.stdout) == EVERYBODY
    assert says in " ".join(done.stdout.split())


def test_a_library_under_another_name_is_explained(hosts, shared, clean):
    library = LIBRARIES / "libmpich.so.12"
    if not library.exists():
        pytest.skip("NO mpich of the system: apt-get install mpich")
    env = {**clean, "MPI4PY_LIBMPI": str(library)}
    words = [sys.executable, "-m", "mpistrat", "doctor"]
    done = hosts.run(HEAD, *words, cwd=shared, env=env)
    assert done.returncode == 1
    assert "ln -sf" in done.stdout

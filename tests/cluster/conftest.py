"""One Slurm on four virtual hosts for all tests of this directory, with this environment's MPI."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import hosts as virtual  # noqa: E402
import slurm as scheduler  # noqa: E402

from mpistrat.launch.mpi_libraries import find_library  # noqa: E402


def pytest_collection_modifyitems(items):
    """All tests of this directory are of a cluster, and say so where there can be none."""
    ours = [item for item in items if str(item.path).startswith(f"{HERE}/")]
    why = virtual.missing() or scheduler.missing()
    for item in ours:
        item.add_marker(pytest.mark.cluster)
        item.add_marker(pytest.mark.timeout(600))
        if why:
            item.add_marker(pytest.mark.skip(reason=f"NO CLUSTER: {why}"))


@pytest.fixture(scope="session")
def place():
    """A directory that all hosts see, with a path short enough for sockets."""
    directory = Path(tempfile.mkdtemp(prefix="cluster-", dir="/tmp"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="session")
def hosts(place):
    """Four nodes and a head; most jobs are of the first two."""
    (place / "hosts").mkdir()
    made = virtual.Hosts(place / "hosts", 4)
    yield made
    made.close()


@pytest.fixture(scope="session")
def clean():
    """Variables as a login shell has them: nothing of a launcher, and the tree to be tested."""
    return {
        "PATH": f"{Path(sys.executable).parent}:{scheduler.PATH}",
        "PYTHONPATH": str(HERE.parents[1]),
        "HOME": os.environ.get("HOME", "/root"),
        "LANG": "C.UTF-8",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        # Its transport for one-sided calls sleeps for a second in every MPI_Init.
        "OMPI_MCA_btl": "^ofi",
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }


@pytest.fixture(scope="session")
def started(hosts, place, clean):
    """Slurm over the nodes, for the whole session."""
    (place / "slurm").mkdir()
    made = scheduler.Slurm(hosts, place / "slurm", clean)
    yield made
    made.close()


@pytest.fixture
def slurm(started):
    """Slurm, with idle nodes."""
    started("scancel", "--user=root")
    started.until_idle()
    return started


@pytest.fixture
def shared(place, request):
    """A directory of one test that all nodes see."""
    directory = place / "".join(c if c.isalnum() else "_" for c in request.node.name)
    directory.mkdir()
    return directory


@pytest.fixture(scope="session")
def pmi():
    """What `srun --mpi` is to be told for the MPI library of this environment."""
    return "pmix" if find_library().flavour.name == "Open MPI" else "pmi2"

"""The fast suite on every Python that mpistrat supports, as far as they are installed.

nox                                     every interpreter on PATH; those that are missing are named
nox -s "fast-3.13(mpi='openmpi')"       one of them, with the other MPI
nox -s lowest                           the lowest versions of what it needs, on the oldest Python
nox -s doors                            PyTorch and JAX, the lowest versions and the newest
nox -s frameworks                       Lightning, Accelerate and transformers, the newest
nox --download-python auto              nox fetches what is missing
.ci/nightly                             the fast suite and the doors on the newest Pythons, and more
"""

import os
import re
from pathlib import Path

import nox

PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]

SETUP = Path("setup.py").read_text(encoding="utf-8")
# What setup.py asks for; mpi4py has no wheels of its lowest version.
NEEDED = re.findall(r'"((?:numpy|numba|optree|xxhash|threadpoolctl)>=[\d.]+)"', SETUP)
DOORS = re.findall(r'"((?:jax|torch)>=[\d.]+)"', SETUP)

nox.options.keywords = "mpich"
nox.options.default_venv_backend = "uv|venv"
nox.options.error_on_missing_interpreters = False


@nox.session(python=PYTHONS)
@nox.parametrize("mpi", ["mpich", "openmpi"])
def fast(session: nox.Session, mpi: str) -> None:
    """Run what ``python -m pytest`` runs; options for pytest stand after ``--``."""
    session.install("-e", f".[test,{mpi}]")
    session.run("python", "-m", "pytest", *session.posargs)


@nox.session(python=PYTHONS[0])
def lowest(session: nox.Session) -> None:
    """Run the fast suite with the lowest versions of what mpistrat needs."""
    session.install("-e", ".[test,mpich]", *[one.replace(">=", "==") for one in NEEDED])
    session.run("python", "-m", "pytest", *session.posargs)


@nox.session
@nox.parametrize(
    "versions, python", [("lowest", PYTHONS[0]), ("newest", PYTHONS[-1])], ids=["lowest", "newest"]
)
def doors(session: nox.Session, versions: str) -> None:
    """Run the tests of PyTorch and JAX; CI runs those of the newest JAX."""
    doors = [one.replace(">=", "==") for one in DOORS] if versions == "lowest" else DOORS
    over_jax = ["equinox", "numpyro"] if versions == "newest" else []
    session.install("-e", ".[test,mpich]", "ml_dtypes", "optax", *over_jax, *doors)
    places = ["tests/doors", "mpistrat/torch", "mpistrat/jax"]
    speed = "not mpi and not nightly and not cluster"
    session.run("python", "-m", "pytest", "-n", "2", "-m", speed, *places, *session.posargs)


@nox.session(python=PYTHONS[-1])
def frameworks(session: nox.Session) -> None:
    """Run the programs of docs/frameworks.md; with CLUSTER=1 on a Slurm of virtual hosts too."""
    session.install("-e", ".[test,mpich,torch]", "lightning", "accelerate", "transformers")
    places = ["tests/doors/torch/test_frameworks.py"]
    if os.environ.get("CLUSTER"):
        places += ["tests/cluster/test_frameworks.py"]
    session.run("python", "-m", "pytest", "-m", "nightly or cluster", *places, *session.posargs)

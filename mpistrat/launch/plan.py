"""The options of `mpistrat run`, and the launcher command for them; nothing is started.

In an allocation of Slurm the launcher is ``srun``, if it has a PMI in common with the MPI library,
and else ``mpiexec``, which finds the hosts of an allocation by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from mpistrat.cluster.allocation import Allocation
from mpistrat.errors import LaunchError
from mpistrat.launch.mpi_libraries import Command, Flavour, Launcher

_SRUN_BIND = {"none": "none", "core": "cores", "socket": "sockets", "numa": "ldoms"}
_FORWARDED_PREFIXES = (
    "MPISTRAT_",
    "MPI4PY_",
    "OMP_",
    "OPENBLAS_",
    "MKL_",
    "PYTHON",
    "LD_LIBRARY_PATH",
)
LOCAL_HOST = Allocation("", ("localhost",), (0,))  # this machine, outside of any allocation


class LaunchOptions(NamedTuple):
    """The options of `mpistrat run` for a job; None for an option that was not given.

    Attributes:
      ranks: Number of ranks.
      nodes: Number of nodes.
      per_node: Number of ranks on each node.
      bind: The unit that each rank is bound to, one of `BINDINGS`.
      launcher: ``"srun"`` or ``"mpiexec"``.
      extra: Further words for the launcher, passed on unchanged.
    """

    ranks: int | None = None
    nodes: int | None = None
    per_node: int | None = None
    bind: str | None = None
    launcher: str | None = None
    extra: tuple[str, ...] = ()


class JobShape(NamedTuple):
    """The number of ranks of a job, its hosts, and the number of ranks that each host can take."""

    ranks: int
    hosts: tuple[str, ...]
    ranks_per_host: tuple[int, ...]

    @property
    def max_ranks_per_host(self) -> int:
        """The largest number of ranks on one host."""
        return max(self.ranks_per_host)

    def format_hosts(self) -> list[str]:
        """Return the hosts with their numbers of ranks, as launchers take them.

        Example:
          >>> JobShape(3, ("n1", "n2"), (2, 1)).format_hosts()
          ['n1:2', 'n2:1']
        """
        return [
            f"{host}:{rank_count}"
            for host, rank_count in zip(self.hosts, self.ranks_per_host, strict=True)
        ]


def fit_shape(launch_options: LaunchOptions, allocation: Allocation) -> JobShape:
    """Return the shape of a job: its number of ranks, and their hosts.

    Args:
      launch_options: The options of `mpistrat run`.
      allocation: The allocation, or `LOCAL_HOST`.

    Raises:
      LaunchError: The number of ranks is not known, or the options do not fit each other or the
        allocation.

    Example:
      >>> allocation = Allocation("Slurm", ("n1", "n2", "n3"), (4, 4, 4))
      >>> fit_shape(LaunchOptions(), allocation).ranks
      12
      >>> fit_shape(LaunchOptions(nodes=2, per_node=8), allocation).ranks
      16
    """
    rank_count, node_count = launch_options.ranks, launch_options.nodes
    per_node = launch_options.per_node
    host_count = len(allocation.hosts)
    if node_count is not None and node_count > host_count:
        allocation_text = f"{allocation.scheduler or 'the file of hosts'} gives"
        available_text = allocation_text if allocation is not LOCAL_HOST else "here is"
        raise LaunchError(
            f"--nodes {node_count}: {available_text} {host_count}. Ask the batch system for more "
            "nodes, or give --hostfile FILE."
        )
    if rank_count is None:
        tasks = allocation.task_counts[:node_count]
        rank_count = per_node * len(tasks) if per_node else sum(tasks)
    if rank_count < 1:
        raise LaunchError(
            "how many ranks? Outside of an allocation only -n N can tell, before the program: "
            "mpistrat run -n 2 train.py."
        )
    used_host_count = node_count or min(
        host_count, -(-rank_count // per_node) if per_node else rank_count
    )
    ranks_per_host = allocation.task_counts[:used_host_count]
    if per_node or rank_count != sum(ranks_per_host):
        ranks_per_host = (per_node or -(-rank_count // used_host_count),) * used_host_count
    if rank_count > sum(ranks_per_host) or rank_count < used_host_count:
        nodes_text = f"{used_host_count} node{'s' * (used_host_count > 1)}"
        per_node_text = f" with {per_node} on each" if per_node else ""
        raise LaunchError(
            f"-n {rank_count} does not fit {nodes_text}{per_node_text}. Drop one of -n, --nodes "
            "and --per-node."
        )
    return JobShape(rank_count, allocation.hosts[:used_host_count], ranks_per_host)


def choose_pmi(flavour: Flavour, plugins_text: str, env: Mapping[str, str]) -> str | None:
    r"""Return the value for ``srun --mpi``, or None if this Slurm and this MPI have none in common.

    Args:
      flavour: That of the MPI library.
      plugins_text: The output of ``srun --mpi=list``.
      env: The environment.

    Example:
      >>> from mpistrat.launch.mpi_libraries import recognize_library
      >>> plugins_text = "MPI plugin types are...\n\tnone\n\tpmi2\n"
      >>> choose_pmi(recognize_library("MPICH Version:  5.0.2"), plugins_text, {})
      'pmi2'
      >>> choose_pmi(recognize_library("Open MPI v5.0.11"), plugins_text, {}) is None
      True
    """
    if flavour.srun_variable and flavour.srun_variable not in env:
        return None
    plugins = plugins_text.replace("srun:", " ").replace(",", " ").split()
    return next((name for name in flavour.pmi_names if name in plugins), None)


def build_srun_command(
    pmi: str,
    allocation: Allocation,
    launch_options: LaunchOptions,
    program: Sequence[str],
    env: Mapping[str, str],
) -> Command:
    """Return the call of ``srun`` that starts a program.

    Args:
      pmi: The protocol of the MPI library, from `choose_pmi`; empty for Slurm's default.
      allocation: The allocation.
      launch_options: The options of `mpistrat run`.
      program: The program and its arguments.
      env: Variables for the ranks.

    Raises:
      LaunchError: See `fit_shape`.

    Example:
      >>> allocation = Allocation("Slurm", ("n1", "n2"), (2, 2))
      >>> print(build_srun_command("pmi2", allocation, LaunchOptions(), ["train"], {}))
      srun --mpi=pmi2 -K1 -X --export=ALL --nodes=2 --ntasks=4 --distribution=block train
    """
    shape = fit_shape(launch_options, allocation)
    # -K1: when one rank dies the others are ended; else they wait for it until the time limit.
    # -X: an interrupt goes to the ranks, instead of a question whether it was meant.
    # --export: also in a job that was handed in with --export=NONE.
    words = ["srun", *([f"--mpi={pmi}"] if pmi else []), "-K1", "-X", "--export=ALL"]
    if allocation.is_step_shell:
        words.append("--overlap")  # the shell holds the cores, which ranks would wait for
    words += [f"--nodes={len(shape.hosts)}", f"--ntasks={shape.ranks}"]
    if launch_options.per_node:
        words.append(f"--ntasks-per-node={launch_options.per_node}")
    if allocation.hostfile:
        words.append(f"--nodelist={','.join(shape.hosts)}")
    if allocation.cpus_per_task:  # srun does not take it over from sbatch since Slurm 22.05
        words.append(f"--cpus-per-task={allocation.cpus_per_task}")
    if launch_options.bind:
        words.append(f"--cpu-bind={_SRUN_BIND[launch_options.bind]}")
    words.append("--distribution=block")  # neighbours share a node
    return Command((*words, *launch_options.extra, *program), env)


def build_mpiexec_command(
    launcher: Launcher,
    allocation: Allocation,
    launch_options: LaunchOptions,
    program: Sequence[str],
    env: Mapping[str, str],
    *,
    core_count: int,
) -> Command:
    """Return the call of ``mpiexec`` that starts a program.

    Args:
      launcher: The launcher.
      allocation: The allocation, or `LOCAL_HOST`.
      launch_options: The options of `mpistrat run`.
      program: The program and its arguments.
      env: Variables for the ranks.
      core_count: The number of cores of a node for them.

    Raises:
      LaunchError: See `fit_shape`.

    Example:
      >>> from mpistrat.launch.mpi_libraries import recognize_launcher
      >>> launcher = Launcher("mpiexec", recognize_launcher("HYDRA build details:"), "")
      >>> allocation = Allocation("", ("n1", "n2"), (4, 4), hostfile="hosts")
      >>> launch_options = LaunchOptions(per_node=2)
      >>> print(
      ...     build_mpiexec_command(
      ...         launcher, allocation, launch_options, ["train"], {}, core_count=4
      ...     )
      ... )
      mpiexec -hosts n1:2,n2:2 -ppn 2 -n 4 train
    """
    shape, flavour = fit_shape(launch_options, allocation), launcher.flavour
    flags = flavour.flags
    if launch_options.bind:
        flags = _strip_prefix(flags, flavour.bind_flags["none"])
    words = [launcher.path, *flags]
    words += flavour.oversubscribed_flags if shape.max_ranks_per_host > core_count else ()
    words += flavour.bind_flags[launch_options.bind] if launch_options.bind else ()
    ranks_per_node = launch_options.per_node
    if allocation.hostfile or len(shape.hosts) < len(allocation.hosts):
        hosts = shape.format_hosts() if flavour.has_slots else shape.hosts
        words += [flavour.hosts_flag, ",".join(hosts)]
        ranks_per_node = ranks_per_node or (None if flavour.has_slots else shape.max_ranks_per_host)
    if ranks_per_node and allocation is not LOCAL_HOST:
        words += [word.format(ranks_per_node) for word in flavour.per_node_flags]
    argv = (*words, "-n", str(shape.ranks), *launch_options.extra, *program)
    # On other hosts nobody would remove the directory.
    session_variable = flavour.session_variable if allocation is LOCAL_HOST else ""
    return Command(argv, {**launcher.collect_variables(), **env}, session_variable)


def forward_variables(command: Command, export_flag: str, variable_names: Iterable[str]) -> Command:
    """Return a call that takes variables to other hosts, if its launcher needs a flag for each.

    Args:
      command: The call.
      export_flag: The flag of its flavour, or an empty string.
      variable_names: All variables that are set; those that programs of this package read are
        taken.

    Example:
      >>> call = Command(("mpiexec", "-n", "2"), {})
      >>> print(forward_variables(call, "-x", ["HOME", "MPISTRAT_NAN"]))
      mpiexec -x MPISTRAT_NAN -n 2
    """
    forwarded_names = (
        sorted({n for n in variable_names if n.startswith(_FORWARDED_PREFIXES)})
        if export_flag
        else []
    )
    words = [word for name in forwarded_names for word in (export_flag, name)]
    return command._replace(argv=(command.argv[0], *words, *command.argv[1:]))


def _strip_prefix(words: tuple[str, ...], prefix_words: tuple[str, ...]) -> tuple[str, ...]:
    return words[len(prefix_words) :] if words[: len(prefix_words)] == prefix_words else words

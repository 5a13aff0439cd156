"""The options of `mpistrat run`, and the launcher command for them; nothing is started.

In an allocation of Slurm that is ``srun``, if it speaks what the MPI library speaks, and else
``mpiexec``, which finds the hosts of an allocation by itself.

``TF_CONFIG`` for each rank, so that TensorFlow programs run under the same launcher.

Types of arguments that several subcommands take.
"""

from __future__ import annotations

import argparse
import socket
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpistrat.arrays import check_int
from mpistrat.cluster.allocation import Allocation
from mpistrat.cluster.resolver import ClusterResolver
from mpistrat.cluster.resolvers import config_text, export, placed
from mpistrat.errors import LaunchError
from mpistrat.launch.mpi_libraries import Command, Flavour, Launcher
from mpistrat.lockstep.startup import begun

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
    """What a user has said of a job; None for what was not said.

    Attributes:
      ranks: How many.
      nodes: On how many nodes.
      per_node: How many on each.
      bind: What each rank is bound to, one of `BINDINGS`.
      launcher: ``"srun"`` or ``"mpiexec"``.
      extra: Words for the launcher, passed on as they are.
    """

    ranks: int | None = None
    nodes: int | None = None
    per_node: int | None = None
    bind: str | None = None
    launcher: str | None = None
    extra: tuple[str, ...] = ()


class JobShape(NamedTuple):
    """How many ranks a job has, the hosts that it is on, and how many each has room for."""

    ranks: int
    hosts: tuple[str, ...]
    rooms: tuple[int, ...]

    @property
    def max_ranks_per_host(self) -> int:
        """How many ranks are on one host, at most."""
        return max(self.rooms)

    def named(self) -> list[str]:
        """Return the hosts with their numbers of ranks.

        Example:
          >>> Shape(3, ("n1", "n2"), (2, 1)).named()
          ['n1:2', 'n2:1']
        """
        return [f"{host}:{room}" for host, room in zip(self.hosts, self.rooms, strict=True)]


def fit_shape(wishes: LaunchOptions, place: Allocation) -> JobShape:
    """Return how many ranks go where.

    Args:
      wishes: What was said.
      place: The allocation, or `HERE`.

    Raises:
      LaunchError: Nothing tells how many ranks, or the wishes do not fit each other or the place.

    Example:
      >>> place = Allocation("Slurm", ("n1", "n2", "n3"), (4, 4, 4))
      >>> shape(Wishes(), place).ranks, shape(Wishes(nodes=2, per_node=8), place).ranks
      (12, 16)
    """
    ranks, nodes, per_node = wishes.ranks, wishes.nodes, wishes.per_node
    host_count = len(place.hosts)
    if nodes is not None and nodes > host_count:
        allocation_text = f"{place.scheduler or 'the file of hosts'} gives"
        available_text = allocation_text if place is not LOCAL_HOST else "here is"
        raise LaunchError(
            f"--nodes {nodes}: {available_text} {host_count}. Ask the batch system for more nodes, "
            "or give --hostfile FILE."
        )
    if ranks is None:
        tasks = place.tasks[:nodes]
        ranks = per_node * len(tasks) if per_node else sum(tasks)
    if ranks < 1:
        raise LaunchError("how many ranks? Outside of an allocation only -n N can tell.")
    count = nodes or min(host_count, -(-ranks // per_node) if per_node else ranks)
    rooms = place.tasks[:count]
    if per_node or ranks != sum(rooms):
        rooms = (per_node or -(-ranks // count),) * count
    if ranks > sum(rooms) or ranks < count:
        per_node_text = f" with {per_node} on each" if per_node else ""
        raise LaunchError(
            f"-n {ranks} does not fit {count} node{'s' * (count > 1)}{per_node_text}. Drop one of "
            "-n, --nodes and --per-node."
        )
    return JobShape(ranks, place.hosts[:count], rooms)


def choose_pmi(row: Flavour, listed: str, env: Mapping[str, str]) -> str | None:
    r"""Return what to give to ``srun --mpi``, or None if this Slurm and this MPI cannot talk.

    Args:
      row: The MPI library's.
      listed: What ``srun --mpi=list`` printed.
      env: The environment.

    Example:
      >>> from mpistrat.launch.mpi_libraries import of_library
      >>> listed = "MPI plugin types are...\n\tnone\n\tpmi2\n"
      >>> spoken(of_library("MPICH Version:  5.0.2"), listed, {})
      'pmi2'
      >>> spoken(of_library("Open MPI v5.0.11"), listed, {}) is None
      True
    """
    if row.srun_wants and row.srun_wants not in env:
        return None
    plugins = listed.replace("srun:", " ").replace(",", " ").split()
    return next((name for name in row.srun if name in plugins), None)


def by_srun(
    pmi: str,
    place: Allocation,
    wishes: LaunchOptions,
    program: Sequence[str],
    env: Mapping[str, str],
) -> Command:
    """Return the call of ``srun`` that starts a program.

    Args:
      pmi: What the MPI library speaks, from `spoken`; empty for what Slurm was set up with.
      place: The allocation.
      wishes: What was said.
      program: The program and its arguments.
      env: Variables for the ranks.

    Raises:
      LaunchError: See `shape`.

    Example:
      >>> place = Allocation("Slurm", ("n1", "n2"), (2, 2))
      >>> print(by_srun("pmi2", place, Wishes(), ["train"], {}))
      srun --mpi=pmi2 -K1 -X --export=ALL --nodes=2 --ntasks=4 --distribution=block train
    """
    job = fit_shape(wishes, place)
    # -K1: when one rank dies the others are ended; else they wait for it until the time limit.
    # -X: an interrupt goes to the ranks, instead of a question whether it was meant.
    # --export: also in a job that was handed in with --export=NONE.
    words = ["srun", *([f"--mpi={pmi}"] if pmi else []), "-K1", "-X", "--export=ALL"]
    if place.in_step:
        words.append("--overlap")  # the shell holds the cores, which ranks would wait for
    words += [f"--nodes={len(job.hosts)}", f"--ntasks={job.ranks}"]
    if wishes.per_node:
        words.append(f"--ntasks-per-node={wishes.per_node}")
    if place.hostfile:
        words.append(f"--nodelist={','.join(job.hosts)}")
    if place.cpus_per_task:  # srun does not take it over from sbatch since Slurm 22.05
        words.append(f"--cpus-per-task={place.cpus_per_task}")
    if wishes.bind:
        words.append(f"--cpu-bind={_SRUN_BIND[wishes.bind]}")
    words.append("--distribution=block")  # neighbours share a node
    return Command((*words, *wishes.extra, *program), env)


def by_mpiexec(
    launcher: Launcher,
    place: Allocation,
    wishes: LaunchOptions,
    program: Sequence[str],
    env: Mapping[str, str],
    cores: int,
) -> Command:
    """Return the call of ``mpiexec`` that starts a program.

    Args:
      launcher: The launcher.
      place: The allocation, or `HERE`.
      wishes: What was said.
      program: The program and its arguments.
      env: Variables for the ranks.
      cores: How many cores a node has for them.

    Raises:
      LaunchError: See `shape`.

    Example:
      >>> from mpistrat.launch.mpi_libraries import of_launcher
      >>> launcher = Launcher("mpiexec", of_launcher("HYDRA build details:"), "")
      >>> place = Allocation("", ("n1", "n2"), (4, 4), hostfile="hosts")
      >>> print(by_mpiexec(launcher, place, Wishes(per_node=2), ["train"], {}, cores=4))
      mpiexec -hosts n1:2,n2:2 -ppn 2 -n 4 train
    """
    job, row = fit_shape(wishes, place), launcher.flavour
    words = [launcher.path]
    words += _strip_prefix(row.flags, row.bind["none"]) if wishes.bind else row.flags
    words += row.crowded if job.max_ranks_per_host > cores else ()
    words += row.bind[wishes.bind] if wishes.bind else ()
    ranks_per_node = wishes.per_node
    if place.hostfile or len(job.hosts) < len(place.hosts):
        words += [row.hosts, ",".join(job.named() if row.slots else job.hosts)]
        ranks_per_node = ranks_per_node or (None if row.slots else job.max_ranks_per_host)
    if ranks_per_node and place is not LOCAL_HOST:
        words += [word.format(ranks_per_node) for word in row.per_node]
    call = (*words, "-n", str(job.ranks), *wishes.extra, *program)
    # On other hosts nobody would remove the directory.
    return Command(call, {**launcher.env(), **env}, row.session if place is LOCAL_HOST else "")


def handing_on(command: Command, flag: str, names: Iterable[str]) -> Command:
    """Return a call that takes variables to other hosts, where its launcher has to be told.

    Args:
      command: The call.
      flag: The flag of its row, or an empty string.
      names: All variables that are set; those that programs of this package read are taken.

    Example:
      >>> print(handing_on(Command(("mpiexec", "-n", "2"), {}), "-x", ["HOME", "MPISTRAT_NAN"]))
      mpiexec -x MPISTRAT_NAN -n 2
    """
    forwarded_names = (
        sorted({n for n in names if n.startswith(_FORWARDED_PREFIXES)}) if flag else []
    )
    words = [word for name in forwarded_names for word in (flag, name)]
    return command._replace(argv=(command.argv[0], *words, *command.argv[1:]))


def _strip_prefix(words: Sequence[str], prefix: Sequence[str]) -> Sequence[str]:
    return words[len(prefix) :] if tuple(words[: len(prefix)]) == tuple(prefix) else words


_PORT = 8888


def tf_config(
    resolver: ClusterResolver | None = None,
    *,
    port_base: int = _PORT,
    jobs: Mapping[str, int] | None = None,
    host: str | None = None,
    comm: Any = None,
) -> str:
    """Return the text of ``TF_CONFIG`` for this rank.

    Collective: if no resolver is given. Cost: one handshake, with the names of the hosts.

    Args:
      resolver: Answers instead of MPI, without communication; the other arguments are for MPI.
      port_base: The port of the first rank of a host; the next gets the port after it. Whether
        these ports are free is not checked, so jobs that share a host need different ones.
      jobs: How many ranks each job takes, in this order, such as ``{"chief": 1, "worker": 3}``;
        None for one job ``worker`` of all ranks.
      host: The name of this host for the other ranks; None for its own.
      comm: An mpi4py intracommunicator; None for all ranks of the job.

    Returns:
      JSON with the cluster and the task of this rank, as TensorFlow's strategies and
      `TFConfigClusterResolver` read it.

    Raises:
      ValueError: The resolver does not know its task; or, on every rank, the jobs do not add
        up to all ranks or the ports are out of range.
      TypeError: `port_base` is not an integer; on every rank.
      LockstepError: Ranks give different ports or jobs.

    Example:
      >>> tf_config(host="n1")
      '{"cluster": {"worker": ["n1:8888"]}, "task": {"type": "worker", "index": 0}}'
    """
    if resolver is not None:
        return config_text(resolver)
    lockstep = begun(comm)
    with lockstep.preparing("tf_config"):
        check_int("tf_config: port_base", port_base, 1, ValueError)
        shares = None if jobs is None else list(jobs.items())
        local_host = (socket.gethostname() if host is None else host).encode()
    rows = lockstep.gather_payloads(
        f"tf_config(port_base={port_base!r}, jobs={shares})", local_host
    )
    # What is wrong now is wrong on every rank: all have the same hosts, ports and jobs.
    hosts = [row.decode() for row in rows]
    return config_text(placed(hosts, lockstep.comm.rank, port_base, jobs))


def write_tf_config(
    resolver: ClusterResolver | None = None,
    *,
    port_base: int = _PORT,
    jobs: Mapping[str, int] | None = None,
    host: str | None = None,
    comm: Any = None,
    env: MutableMapping[str, str] | None = None,
) -> str:
    """Set ``TF_CONFIG`` to the text of `tf_config`, for this process and those that it starts.

    Call it before TensorFlow makes a strategy.

    Collective: if no resolver is given. Cost: as `tf_config`.

    Args:
      resolver: As for `tf_config`.
      port_base: As for `tf_config`.
      jobs: As for `tf_config`.
      host: As for `tf_config`.
      comm: As for `tf_config`.
      env: Where to set it; None for the environment of this process.

    Returns:
      The text.

    Raises:
      ValueError: As `tf_config`; nothing is set then.
      TypeError: As `tf_config`.
      LockstepError: As `tf_config`.

    Example:
      >>> child = {}
      >>> text = write_tf_config(host="n1", env=child)
      >>> child["TF_CONFIG"] == text
      True
    """
    text = tf_config(resolver, port_base=port_base, jobs=jobs, host=host, comm=comm)
    export(text, env)
    return text


def positive(text: str) -> int:
    """Return an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


def seconds(text: str) -> float:
    """Return a number of seconds greater than 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be seconds greater than 0, got {text!r}")
    return value


def part(text: str) -> float:
    """Return a number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text!r}")
    return value


def file(text: str) -> Path:
    """Return the path of a file, which has a name."""
    if not Path(text).name:
        raise argparse.ArgumentTypeError(f"must be the name of a file, got {text!r}")
    return Path(text)

"""The hosts of this job, from the environment variables of the batch system."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from mpistrat.cluster.hostlist import expand_hostlist, expand_tasks_per_node
from mpistrat.environment import counted, shell_of_step

# What Slurm sets in every shell of an allocation. An editor that came by ssh may have some of them.
_SLURM = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES", "SLURM_TASKS_PER_NODE")


class Allocation(NamedTuple):
    """Hosts for a job.

    Attributes:
      scheduler: ``"Slurm"``, ``"PBS"``, or an empty string for a file of hosts.
      hosts: Their names.
      tasks: How many ranks each is meant for.
      cpus_per_task: Cores that were asked for each rank; 0 if nothing was said, or in a shell,
        which has them for itself.
      hostfile: The file that lists them; empty if there is none.
      in_step: This is the shell of ``srun --pty``, which holds the cores of the job itself.
    """

    scheduler: str
    hosts: tuple[str, ...]
    tasks: tuple[int, ...]
    cpus_per_task: int = 0
    hostfile: str = ""
    in_step: bool = False


def allocation(env: Mapping[str, str] = os.environ) -> Allocation | None:
    """Return the allocation that this process is in, or None.

    Args:
      env: The environment; that of this process if not given. Variables of Slurm that are there in
        part, or do not fit each other, are ignored.

    Raises:
      OSError: The file that PBS names cannot be read.

    Example:
      >>> slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}
      >>> allocation(slurm) is None
      True
      >>> slurm |= {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "4(x2)"}
      >>> allocation(slurm).hosts, allocation(slurm).tasks
      (('n1', 'n2'), (4, 4))
    """
    if all(name in env for name in _SLURM):
        return _slurm(env)
    if "PBS_JOBID" in env and "PBS_NODEFILE" in env:
        return from_file(env["PBS_NODEFILE"])._replace(scheduler="PBS")
    return None


def _slurm(env: Mapping[str, str]) -> Allocation | None:
    try:
        hosts = expand_hostlist(env["SLURM_JOB_NODELIST"])
        tasks = expand_tasks_per_node(env["SLURM_TASKS_PER_NODE"])
    except ValueError:
        return None
    if not hosts or counted(env["SLURM_JOB_NUM_NODES"]) != len(hosts):
        return None
    # In the shell of a step they are of the step, which may have fewer nodes.
    tasks += [1] * (len(hosts) - len(tasks))
    shell = shell_of_step(env)
    cores = 0 if shell else counted(env.get("SLURM_CPUS_PER_TASK", "")) or 0
    return Allocation("Slurm", tuple(hosts), tuple(tasks), cores, "", shell)


def from_file(path: str) -> Allocation:
    """Return the hosts that a file lists, one in each line.

    Args:
      path: Its lines are ``HOST``, ``HOST:RANKS`` or ``HOST slots=RANKS``. A host that comes again
        gets one rank more, as PBS means it.

    Raises:
      OSError: It cannot be read.
      ValueError: It lists no host, or a line has another form.
    """
    ranks_of_host: dict[str, int] = {}
    for line in Path(path).read_text("utf-8", "replace").splitlines():
        words = line.partition("#")[0].replace(":", " ").replace("slots=", " ").split()
        if words:
            ranks = counted(words[1]) if len(words) > 1 else 1
            if len(words) > 2 or not ranks:
                raise ValueError(f"{path}: {line!r:.80} is not HOST, HOST:RANKS or HOST slots=N")
            ranks_of_host[words[0]] = ranks_of_host.get(words[0], 0) + ranks
    if not ranks_of_host:
        raise ValueError(f"{path} lists no host; write one in each line")
    return Allocation("", tuple(ranks_of_host), tuple(ranks_of_host.values()), hostfile=path)

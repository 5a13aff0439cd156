"""The hosts of this job, from the environment variables of the batch system.

Reads Slurm's short forms of a list of hosts, and of the number of tasks on each.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from mpistrat.config import is_interactive_shell, parse_count

MOST_HOSTS = 1 << 16  # Slurm's own limit for the nodes of a cluster
_MOST_LETTERS = 255  # of a name, as in the Domain Name System

_ITEM = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+")  # no comma, but within brackets
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_COUNT = re.compile(r"([0-9]{1,18})(?:\(x([0-9]{1,18})\))?")


def expand_hostlist(hostlist: str) -> list[str]:
    """Return the hosts of a list in Slurm's short form.

    Args:
      hostlist: Names separated by commas; brackets hold numbers and ranges of numbers, whose zeros
        in front are kept. A name may have several brackets; the last one counts fastest.

    Raises:
      ValueError: The text has another form, or stands for more than `MOST_HOSTS` hosts.

    Example:
      >>> expand_hostlist("n[1-2],m5,o[08-10]")
      ['n1', 'n2', 'm5', 'o08', 'o09', 'o10']
    """
    items = _ITEM.findall(hostlist)
    if ",".join(items) != hostlist:
        raise ValueError(
            f"{hostlist!r:.200} is not a list of hosts as Slurm writes it, like 'n[1-3,7],m5'."
        )
    hosts: list[str] = []
    for item in items:
        hosts += _hosts(item, hostlist, MOST_HOSTS - len(hosts))
    return hosts


def _hosts(item: str, hostlist: str, max_hosts: int) -> list[str]:
    pieces = re.split(r"\[([^\]]*)\]", item)  # text and insides of brackets by turns
    texts, brackets = pieces[::2], [_ranges(bracket, hostlist) for bracket in pieces[1::2]]
    # Both are counted before any name is made.
    if math.prod(sum(len(numbers) for _, numbers in ranges) for ranges in brackets) > max_hosts:
        raise ValueError(_too_many(hostlist, "hosts"))
    digits = [max(max(width, len(str(n[-1]))) for width, n in ranges) for ranges in brackets]
    letters = len("".join(texts)) + sum(digits)
    if letters > _MOST_LETTERS:
        raise ValueError(
            f"{hostlist!r:.200} has a name of {letters} letters; the most is {_MOST_LETTERS}."
        )
    choices = [[texts[0]]]
    for ranges, text in zip(brackets, texts[1:], strict=True):
        choices += [[f"{n:0{width}}" for width, numbers in ranges for n in numbers], [text]]
    return ["".join(parts) for parts in itertools.product(*choices)]


def _ranges(bracket: str, hostlist: str) -> list[tuple[int, range]]:
    """Return the ranges of a bracket, each with the least number of its digits."""
    ranges = []
    for part in bracket.split(","):
        match = _RANGE.fullmatch(part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(
                f"{hostlist!r:.200} is not a list of hosts: [{bracket:.80}] does not hold numbers."
            )
        ranges.append((len(match[1]), range(int(match[1]), int(match[2] or match[1]) + 1)))
    return ranges


def _too_many(text: str, noun: str) -> str:
    return (
        f"{text!r:.200} stands for more than {MOST_HOSTS} {noun}, which is more than Slurm allows. "
        "Look for what has set that variable, or use another resolver."
    )


def expand_tasks_per_node(tasks_per_node: str) -> list[int]:
    """Return the number of tasks of each node from a list in Slurm's short form.

    Args:
      tasks_per_node: Counts separated by commas; ``3(x2)`` stands for two nodes of 3 tasks each.

    Raises:
      ValueError: The text has another form, or stands for more than `MOST_HOSTS` nodes.

    Example:
      >>> expand_tasks_per_node("3(x2),2,1")
      [3, 3, 2, 1]
    """
    task_counts: list[int] = []
    for part in tasks_per_node.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise ValueError(
                f"{tasks_per_node!r:.200} does not count tasks as Slurm does, like '3(x2),1'."
            )
        repeated = int(match[2] or 1)
        if repeated > MOST_HOSTS - len(task_counts):
            raise ValueError(_too_many(tasks_per_node, "nodes"))
        task_counts += [int(match[1])] * repeated
    return task_counts


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
    if not hosts or parse_count(env["SLURM_JOB_NUM_NODES"]) != len(hosts):
        return None
    # In the shell of a step they are of the step, which may have fewer nodes.
    tasks += [1] * (len(hosts) - len(tasks))
    shell = is_interactive_shell(env)
    cores = 0 if shell else parse_count(env.get("SLURM_CPUS_PER_TASK", "")) or 0
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
            ranks = parse_count(words[1]) if len(words) > 1 else 1
            if len(words) > 2 or not ranks:
                raise ValueError(f"{path}: {line!r:.80} is not HOST, HOST:RANKS or HOST slots=N")
            ranks_of_host[words[0]] = ranks_of_host.get(words[0], 0) + ranks
    if not ranks_of_host:
        raise ValueError(f"{path} lists no host; write one in each line")
    return Allocation("", tuple(ranks_of_host), tuple(ranks_of_host.values()), hostfile=path)

"""The hosts of this job, from the environment variables of the batch system, or from a file.

`expand_hostlist` and `expand_tasks_per_node` read Slurm's short forms of a list of hosts, and of
the number of tasks on each. `find_allocation` returns the hosts of the batch job, `read_hostfile`
those of a file.
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

MAX_HOSTS = 1 << 16  # Slurm's own limit for the nodes of a cluster
_MAX_LETTERS = 255  # of a name, as in the Domain Name System

_ITEM = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+")  # no comma, but within brackets
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_COUNT = re.compile(r"([0-9]{1,18})(?:\(x([0-9]{1,18})\))?")


def expand_hostlist(hostlist: str) -> list[str]:
    """Return the hosts of a list in Slurm's short form.

    Args:
      hostlist: Names separated by commas; brackets hold numbers and ranges of numbers, whose zeros
        in front are kept. A name may have several brackets; the last one changes fastest.

    Raises:
      ValueError: The text has another form, or stands for more than `MAX_HOSTS` hosts.

    Example:
      >>> expand_hostlist("n[1-2],m5,o[08-10]")
      ['n1', 'n2', 'm5', 'o08', 'o09', 'o10']
    """
    host_texts = _ITEM.findall(hostlist)
    if ",".join(host_texts) != hostlist:
        raise ValueError(
            f"{hostlist!r:.200} is not a list of hosts as Slurm writes it, like 'n[1-3,7],m5'."
        )
    hosts: list[str] = []
    for host_text in host_texts:
        hosts += _expand_hosts(host_text, hostlist, MAX_HOSTS - len(hosts))
    return hosts


def _expand_hosts(host_text: str, hostlist: str, max_hosts: int) -> list[str]:
    pieces = re.split(r"\[([^\]]*)\]", host_text)  # text and insides of brackets by turns
    texts, brackets = pieces[::2], [_parse_ranges(bracket, hostlist) for bracket in pieces[1::2]]
    # Both are counted before any name is made.
    if math.prod(sum(len(numbers) for _, numbers in ranges) for ranges in brackets) > max_hosts:
        raise ValueError(_describe_excess(hostlist, "hosts"))
    digits = [max(max(width, len(str(n[-1]))) for width, n in ranges) for ranges in brackets]
    letters = len("".join(texts)) + sum(digits)
    if letters > _MAX_LETTERS:
        raise ValueError(
            f"{hostlist!r:.200} has a name of {letters} letters; the most is {_MAX_LETTERS}."
        )
    alternatives = [[texts[0]]]
    for ranges, text in zip(brackets, texts[1:], strict=True):
        alternatives += [[f"{n:0{width}}" for width, numbers in ranges for n in numbers], [text]]
    return ["".join(pieces) for pieces in itertools.product(*alternatives)]


def _parse_ranges(bracket: str, hostlist: str) -> list[tuple[int, range]]:
    """Return the ranges of a bracket, each with the least number of its digits."""
    ranges = []
    for range_text in bracket.split(","):
        match = _RANGE.fullmatch(range_text)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(
                f"{hostlist!r:.200} is not a list of hosts: [{bracket:.80}] does not hold numbers."
            )
        ranges.append((len(match[1]), range(int(match[1]), int(match[2] or match[1]) + 1)))
    return ranges


def _describe_excess(text: str, noun: str) -> str:
    return (
        f"{text!r:.200} stands for more than {MAX_HOSTS} {noun}, which is more than Slurm allows. "
        "Look for what has set that variable, or use another resolver."
    )


def expand_tasks_per_node(tasks_per_node: str) -> list[int]:
    """Return the number of tasks of each node from a list in Slurm's short form.

    Args:
      tasks_per_node: Counts separated by commas; ``3(x2)`` stands for two nodes of 3 tasks each.

    Raises:
      ValueError: The text has another form, or stands for more than `MAX_HOSTS` nodes.

    Example:
      >>> expand_tasks_per_node("3(x2),2,1")
      [3, 3, 2, 1]
    """
    task_counts: list[int] = []
    for count_text in tasks_per_node.split(","):
        match = _COUNT.fullmatch(count_text.strip())
        if match is None:
            raise ValueError(
                f"{tasks_per_node!r:.200} does not count tasks as Slurm does, like '3(x2),1'."
            )
        repetitions = int(match[2] or 1)
        if repetitions > MAX_HOSTS - len(task_counts):
            raise ValueError(_describe_excess(tasks_per_node, "nodes"))
        task_counts += [int(match[1])] * repetitions
    return task_counts


# Slurm sets these in every shell of an allocation. An editor on ssh may have some of them.
_SLURM = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES", "SLURM_TASKS_PER_NODE")


class Allocation(NamedTuple):
    """Hosts for a job.

    Attributes:
      scheduler: ``"Slurm"``, ``"PBS"``, or an empty string for a file of hosts.
      hosts: The names of the hosts.
      task_counts: The number of ranks for each host.
      cpus_per_task: Cores that were requested for each rank; 0 without a request, or in a shell,
        which has them for itself.
      hostfile: The file that lists the hosts; empty if there is none.
      is_step_shell: This is the shell of ``srun --pty``, which holds the cores of the job itself.
    """

    scheduler: str
    hosts: tuple[str, ...]
    task_counts: tuple[int, ...]
    cpus_per_task: int = 0
    hostfile: str = ""
    is_step_shell: bool = False


def find_allocation(env: Mapping[str, str] = os.environ) -> Allocation | None:
    """Return the allocation that this process is in, or None.

    Args:
      env: The environment; that of this process if not given. Variables of Slurm that are there in
        part, or do not fit each other, are ignored.

    Raises:
      OSError: The file that PBS names cannot be read.

    Example:
      >>> slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}
      >>> find_allocation(slurm) is None
      True
      >>> slurm |= {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "4(x2)"}
      >>> find_allocation(slurm).hosts, find_allocation(slurm).tasks
      (('n1', 'n2'), (4, 4))
    """
    if all(name in env for name in _SLURM):
        return _read_slurm(env)
    if "PBS_JOBID" in env and "PBS_NODEFILE" in env:
        return read_hostfile(env["PBS_NODEFILE"])._replace(scheduler="PBS")
    return None


def _read_slurm(env: Mapping[str, str]) -> Allocation | None:
    try:
        hosts = expand_hostlist(env["SLURM_JOB_NODELIST"])
        task_counts = expand_tasks_per_node(env["SLURM_TASKS_PER_NODE"])
    except ValueError:
        return None
    if not hosts or parse_count(env["SLURM_JOB_NUM_NODES"]) != len(hosts):
        return None
    # In the shell of a step the counts are those of the step, which may have fewer nodes.
    task_counts += [1] * (len(hosts) - len(task_counts))
    is_step_shell = is_interactive_shell(env)
    cores = 0 if is_step_shell else parse_count(env.get("SLURM_CPUS_PER_TASK", "")) or 0
    return Allocation("Slurm", tuple(hosts), tuple(task_counts), cores, "", is_step_shell)


def read_hostfile(path: str) -> Allocation:
    """Return the hosts that a file lists, one in each line.

    Args:
      path: Its lines are ``HOST``, ``HOST:RANKS`` or ``HOST slots=RANKS``. A host on
        several lines gets the ranks of all of them, as in the files of PBS.

    Raises:
      OSError: It cannot be read.
      ValueError: It lists no host, or a line has another form.
    """
    ranks_by_host: dict[str, int] = {}
    for line in Path(path).read_text("utf-8", "replace").splitlines():
        words = line.partition("#")[0].replace(":", " ").replace("slots=", " ").split()
        if words:
            ranks = parse_count(words[1]) if len(words) > 1 else 1
            if len(words) > 2 or not ranks:
                raise ValueError(f"{path}: {line!r:.80} is not HOST, HOST:RANKS or HOST slots=N")
            ranks_by_host[words[0]] = ranks_by_host.get(words[0], 0) + ranks
    if not ranks_by_host:
        raise ValueError(f"{path} lists no host; write one in each line")
    return Allocation("", tuple(ranks_by_host), tuple(ranks_by_host.values()), hostfile=path)

"""Reads Slurm's short forms of a list of hosts, and of the number of tasks on each."""

from __future__ import annotations

import itertools
import math
import re

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

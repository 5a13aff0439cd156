"""How Slurm writes lists of hosts, and of how many tasks each has."""

from __future__ import annotations

import itertools
import re

__all__ = ["expand_hostlist", "expand_tasks_per_node"]

_ITEM = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+")  # no comma, but within brackets
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_hostlist(hostlist: str) -> list[str]:
    """Return the hosts of a list in Slurm's short form.

    Args:
      hostlist: Names separated by commas; brackets hold numbers and ranges of numbers, whose zeros
        in front are kept. A name may have several brackets; the last one counts fastest.

    Raises:
      ValueError: The text has another form.

    Example:
      >>> expand_hostlist("n[1-2],m5,o[08-10]")
      ['n1', 'n2', 'm5', 'o08', 'o09', 'o10']
    """
    items = _ITEM.findall(hostlist)
    if ",".join(items) != hostlist:
        raise ValueError(
            f"{hostlist!r} is no list of hosts as Slurm writes it, like 'n[1-3,7],m5'."
        )
    return [host for item in items for host in _hosts(item, hostlist)]


def _hosts(item: str, hostlist: str) -> list[str]:
    pieces = re.split(r"\[([^\]]*)\]", item)  # text and insides of brackets by turns
    choices = [
        _numbers(piece, hostlist) if inside else [piece]
        for inside, piece in zip(itertools.cycle((False, True)), pieces, strict=False)
    ]
    return ["".join(parts) for parts in itertools.product(*choices)]


def _numbers(inside: str, hostlist: str) -> list[str]:
    found: list[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"{hostlist!r} is no list of hosts: [{inside}] holds no numbers.")
        low, high = match[1], match[2] or match[1]
        found += [f"{number:0{len(low)}}" for number in range(int(low), int(high) + 1)]
    return found


def expand_tasks_per_node(tasks_per_node: str) -> list[int]:
    """Return the number of tasks of each node from a list in Slurm's short form.

    Args:
      tasks_per_node: Counts separated by commas; ``3(x2)`` stands for two nodes of 3.

    Raises:
      ValueError: The text has another form.

    Example:
      >>> expand_tasks_per_node("3(x2),2,1")
      [3, 3, 2, 1]
    """
    found: list[int] = []
    for part in tasks_per_node.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise ValueError(
                f"{tasks_per_node!r} does not count tasks as Slurm does, like '3(x2),1'."
            )
        found += [int(match[1])] * int(match[2] or 1)
    return found

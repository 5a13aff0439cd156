"""Ranks in the same state as one row, and a compact encoding of rows for other nodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from mpistrat.comm.callsite import runs_of

# What a rank does. Letters of proc(5), and five of our own.
COMPUTING: Final = "R"
STOPPED: Final = "T"
DEAD: Final = "X"
HELD: Final = "H"
REPLACED: Final = "E"
SILENT: Final = "Q"
AWAY: Final = "W"
TROUBLES: Final = frozenset((STOPPED, DEAD, HELD, REPLACED, SILENT))
_RUNS = 32  # pairs of first and last rank per row, where not all fit


class Status(NamedTuple):
    """Ranks that are in the same place.

    Attributes:
      ranks: Which ranks.
      node: The name of their node; empty if they are on several.
      home: The number of the node whose watchdog said so.
      key: Call and part of the call that they have come to.
      state: `BETWEEN`, `INSIDE`, `LEAVING` or `LEFT`.
      age: Seconds since the last of them continued, or since its long operation is over time; less
        than 0 while that may still last.
      doing: A letter: `COMPUTING`, ``"S"`` sleeping, ``"D"`` waiting for a device, or a trouble.
      place: ``file:line``; empty if not known.
      text: Text of the call; if `AWAY`, of the one on the other communicator.
      busy: Name of the long operation that they have declared, or an empty string.
      overdue: It has lasted longer than declared.
      patience: Seconds that the call may take, if it says so itself; else 0.
      still: Seconds since the Python stack of the last of them changed, if they make calls on other
        communicators, as ranks of groups do; else since the machine started.
      idle: Seconds since the last of them was seen to compute.
    """

    ranks: tuple[int, ...]
    node: str
    home: int
    key: int
    state: int
    age: float
    doing: str = COMPUTING
    place: str = ""
    text: str = ""
    busy: str = ""
    overdue: bool = False
    patience: float = 0.0
    still: float = 0.0
    idle: float = 0.0


def grouped(rows: Iterable[Status]) -> list[Status]:
    """Put rows that differ in ranks and age only together; the group is as young as its youngest.

    Example:
      >>> rows = [Status((0,), "a", 0, 7, 2, 1.0), Status((1,), "a", 0, 7, 2, 2.0)]
      >>> [row.ranks for row in grouped(rows)]
      [(0, 1)]
    """
    groups: dict[Status, list[Status]] = {}
    for row in rows:
        kind = row._replace(ranks=(), age=0.0, still=0.0, idle=0.0)
        groups.setdefault(kind, []).append(row)
    return [
        kind._replace(
            ranks=tuple(sorted(rank for row in members for rank in row.ranks)),
            age=min(row.age for row in members),
            still=min(row.still for row in members),
            idle=min(row.idle for row in members),
        )
        for kind, members in groups.items()
    ]


# From the longest to the shortest.
_FORMS: tuple[Callable[[Status], Status], ...] = (
    lambda row: row,
    lambda row: row._replace(text=row.text[:60], place=row.place[-40:]),
    lambda row: row._replace(text="", place="", node=""),
    lambda row: row._replace(text="", place="", node="", home=-1, busy=row.busy[:20]),
)


def _few(row: Status) -> Status:
    """Keep the first ranks only, so that a single row is never too long."""
    runs = runs_of(row.ranks)[:_RUNS]
    return row._replace(ranks=tuple(r for first, last in runs for r in range(first, last + 1)))


def encode(rows: Sequence[Status], limit: int) -> bytes:
    """Return rows as at most `limit` bytes.

    If they are too many, texts are cut, then left out; at last ranks are, and rows in the middle
    of the sequence of calls: whoever waits is at its end, whoever is missing at its beginning.
    """
    grouped_rows: list[Status] = []
    for shorten in _FORMS:
        grouped_rows = grouped(map(shorten, rows))
        data = _dump(grouped_rows)
        if len(data) <= limit:
            return data
    grouped_rows = sorted((_few(row) for row in grouped_rows), key=lambda row: row.key)
    while len(data := _dump(grouped_rows)) > limit:
        grouped_rows.pop(len(grouped_rows) // 2)
    return data


def _dump(rows: Iterable[Status]) -> bytes:
    plain_rows = [
        [
            runs_of(row.ranks),
            *row[1:5],
            round(row.age, 3),
            *row[6:-2],
            *(round(x, 3) for x in row[-2:]),
        ]
        for row in rows
    ]
    return json.dumps(plain_rows, separators=(",", ":")).encode()


def decode(data: bytes) -> list[Status]:
    """Return the rows that `encode` took.

    Example:
      >>> decode(encode([Status((0, 1, 4), "a", 0, 7, 2, 1.5)], 4096))[0].ranks
      (0, 1, 4)
    """
    return [
        Status(tuple(rank for first, last in runs for rank in range(first, last + 1)), *rest)
        for runs, *rest in json.loads(data)
    ]

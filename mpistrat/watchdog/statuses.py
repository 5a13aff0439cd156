"""The statuses of ranks, as a table with a row of numbers for each rank, and its texts.

Rows are compared with NumPy, whatever their number. The texts of a node stay encoded, as they came
from there, until a message shows some of them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Final, NamedTuple, final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.comm.callsite import group_by_key
from mpistrat.watchdog.status_board import (
    BETWEEN_CALLS,
    COMPUTING,
    IN_CALL,
    LEAVING,
    LEFT,
    TROUBLES,
)

# A row of `StatusTable`. State 0: nothing is known of the rank.
STATUS_DTYPE: Final = np.dtype(
    [
        ("key", np.int64),
        ("state", np.uint8),
        ("activity", np.uint8),
        ("is_declared", np.bool_),
        ("is_overdue", np.bool_),
        ("age", np.float64),
        ("patience", np.float64),
        ("stack_age", np.float64),
        ("compute_age", np.float64),
    ],
    align=True,
)
# By node: a summary of the ranks of the others, for ranks of that node that wait to leave.
OTHER_NODES_DTYPE: Final = np.dtype(
    [
        ("inside_key", np.int64),
        ("age", np.float64),
        ("stack_age", np.float64),
        ("compute_age", np.float64),
    ]
)
_MAX_STATUSES = 16  # as many as a message shows
# Bytes of texts in a message: for each rank, and for all. They hold shortened texts of all ranks.
_RANK_TEXT_NBYTES, _MIN_TEXT_NBYTES = 160, 4096


class Status(NamedTuple):
    """Ranks that are in the same place, for a message.

    Attributes:
      ranks: Which ranks.
      node: The name of their node, or that of the first.
      key: Call and part of the call that they have come to.
      state: `BETWEEN_CALLS`, `IN_CALL`, `LEAVING` or `LEFT`.
      age: Seconds since the last of them continued, or since the declared end of its long
        operation; negative before that end.
      activity: A letter: `COMPUTING`, ``"S"`` sleeping, ``"D"`` waiting for a device, or a trouble.
      is_overdue: The long operation has lasted longer than declared.
      position: ``file:line``; empty if not known.
      call_text: Text of the call; if `IN_OTHER_CALL`, of the one on the other communicator.
      operation: Name of the long operation that they have declared, or an empty string.
    """

    ranks: tuple[int, ...]
    node: str
    key: int
    state: int
    age: float
    activity: str
    is_overdue: bool
    position: str
    call_text: str
    operation: str


class StatusTexts(NamedTuple):
    """The texts of a rank, as `Status` has them; empty if not known."""

    position: str = ""
    call_text: str = ""
    operation: str = ""


class DecodedTexts(NamedTuple):
    """The texts of all rows of a table.

    Attributes:
      numbers: For each row the number of its texts, of shape (rows,).
      texts: The texts by number, as of `StatusTexts`; number 0 has unknown ones.
    """

    numbers: Array
    texts: list[tuple[str, ...]]

    def number_places(self) -> Array:
        """Return for each number of texts one that is equal for equal positions and call texts."""
        places: dict[tuple[str, ...], int] = {}
        return np.array([places.setdefault(texts[:2], len(places)) for texts in self.texts])


@final
class NodeLayout:
    """The ranks of the rows of a table: node by node, in the order of their slots.

    Args:
      nodes: The name and the ranks of each node.

    Attributes:
      ranks: The rank of each row, int64 of shape (rows,).
      node_names: The names of the nodes.
      node_indices: The number of the node of each row, of shape (rows,).
      sizes: The number of ranks of each node.
      starts: The first row of each node, of shape (nodes,).
    """

    def __init__(self, nodes: Sequence[tuple[str, Sequence[int]]]):
        """Create the layout of a table."""
        self.sizes = [len(ranks) for _, ranks in nodes]
        self.ranks = np.fromiter(itertools.chain(*(ranks for _, ranks in nodes)), np.int64)
        self.node_names = [name for name, _ in nodes]
        self.node_indices = np.repeat(np.arange(len(nodes)), self.sizes)
        self.starts = np.cumsum([0, *self.sizes[:-1]])

    def rows_of(self, node_index: int) -> slice:
        """Return the rows of a node."""
        start = int(self.starts[node_index])
        return slice(start, start + self.sizes[node_index])


def map_activities(letters: str) -> Array:
    """Return for each activity, a byte of a row, whether it is one of `letters`; bool of (256,).

    Example:
      >>> map_activities("TX")[ord("T")]
      np.True_
    """
    is_letter = np.zeros(256, np.bool_)
    is_letter[[ord(letter) for letter in letters]] = True
    return is_letter


IS_TROUBLE: Final = map_activities("".join(TROUBLES))


class StatusTable(NamedTuple):
    """The statuses of ranks.

    Attributes:
      layout: The ranks of the rows.
      rows: Their numbers, `STATUS_DTYPE` of shape (rows,).
      texts: For each node its texts, as of `encode_texts`.
    """

    layout: NodeLayout
    rows: Array
    texts: list[bytes]

    @staticmethod
    def create(layout: NodeLayout) -> StatusTable:
        """Return a table of ranks of which nothing is known yet."""
        return StatusTable(
            layout,
            np.zeros(len(layout.ranks), STATUS_DTYPE),
            [b"[]"] * len(layout.node_names),
        )

    def assume_started(self, rows: slice) -> None:
        """Write that these ranks have not come to any call, and have done something just now."""
        self.rows[rows] = 0
        self.rows["state"][rows], self.rows["activity"][rows] = BETWEEN_CALLS, ord(COMPUTING)

    def decode_texts(self) -> DecodedTexts:
        """Return the texts of all rows."""
        number_by_texts: dict[tuple[str, ...], int] = {StatusTexts(): 0}
        numbers: list[int] = []
        node_numbers: dict[tuple[bytes, int], list[int]] = {}  # those of many nodes are equal
        for encoded, size in zip(self.texts, self.layout.sizes, strict=True):
            if (encoded, size) not in node_numbers:
                node_numbers[encoded, size] = [0] * size
                for indices, *texts in json.loads(encoded):
                    number = number_by_texts.setdefault(tuple(texts), len(number_by_texts))
                    for index in indices:
                        node_numbers[encoded, size][index] = number
            numbers += node_numbers[encoded, size]
        return DecodedTexts(np.array(numbers, np.int64), list(number_by_texts))

    def join(
        self, indices: Array, texts: DecodedTexts, is_by_place: bool = False
    ) -> tuple[list[Status], int]:
        """Return statuses of ranks, those joined that differ in ranks and ages only.

        The age of a joined status is that of its youngest member.

        Args:
          indices: Their rows.
          texts: The texts of all rows.
          is_by_place: Join ranks of all nodes that have one position and call text, and put the
            lowest rank first. Otherwise those come first that have not moved for the longest time.

        Returns:
          At most 16 statuses, and the number of the others.
        """
        rows, ranks = self.rows[indices], self.layout.ranks[indices]
        text_numbers = texts.numbers[indices]
        if is_by_place:
            columns = [texts.number_places()[text_numbers]]
        else:
            fields = ("key", "state", "activity", "is_overdue")
            columns = [text_numbers, self.layout.node_indices[indices], *(rows[f] for f in fields)]
        order = np.lexsort((ranks, *columns))
        is_first = np.ones(len(order), np.bool_)
        is_first[1:] = np.any([column[order][1:] != column[order][:-1] for column in columns], 0)
        starts = np.flatnonzero(is_first)
        ages = np.minimum.reduceat(rows["age"][order], starts)
        first_ranks = ranks[order][starts]
        group_order = np.lexsort((first_ranks,) if is_by_place else (first_ranks, -ages))
        stops = np.append(starts[1:], len(order))
        statuses = []
        for group in group_order[:_MAX_STATUSES].tolist():
            members = order[starts[group] : stops[group]]
            row = rows[members[0]]
            statuses.append(
                Status(
                    tuple(ranks[members].tolist()),
                    self.layout.node_names[self.layout.node_indices[indices[members[0]]]],
                    int(row["key"]),
                    int(row["state"]),
                    float(ages[group]),
                    chr(row["activity"]),
                    bool(row["is_overdue"]),
                    *texts.texts[text_numbers[members[0]]],
                )
            )
        return statuses, len(starts) - len(statuses)

    def summarize_other_nodes(self) -> Array:
        """Return for each node a summary of the others, `OTHER_NODES_DTYPE` of shape (nodes,).

        These are the highest call that one of their ranks is inside of, as a key, 0 for none; and
        the seconds since one of their ranks that has not come to leave last did something, since
        the Python stack of such a rank changed, and since one was seen to compute.
        """
        state, starts = self.rows["state"], self.layout.starts
        summaries = np.empty(len(starts), OTHER_NODES_DTYPE)
        inside_keys = np.where(state == IN_CALL, self.rows["key"], 0)
        summaries["inside_key"] = _reduce_others(
            np.maximum, np.maximum.reduceat(inside_keys, starts), 0
        )
        is_staying = (state != 0) & (state != LEAVING) & (state != LEFT)
        for name in ("age", "stack_age", "compute_age"):
            ages = np.where(is_staying, self.rows[name], np.inf)
            summaries[name] = _reduce_others(np.minimum, np.minimum.reduceat(ages, starts), np.inf)
        return summaries


def _reduce_others(ufunc: np.ufunc, values: Array, neutral: float) -> Array:
    """Return for each value the maximum or minimum of all others."""
    extremes = np.full(len(values), neutral, values.dtype)
    extremes[1:] = ufunc.accumulate(values[:-1])
    extremes[:-1] = ufunc(extremes[:-1], ufunc.accumulate(values[:0:-1])[::-1])
    return extremes


def texts_nbytes(size: int) -> int:
    """Return how many bytes the texts of `size` ranks may take."""
    return size * _RANK_TEXT_NBYTES + _MIN_TEXT_NBYTES


def encode_texts(texts: Sequence[StatusTexts], max_nbytes: int) -> bytes:
    """Return a message of at most `max_nbytes` bytes with the texts of ranks, in their order.

    If they are too long, they are cut; if that is not enough, those of the last ranks are left out.
    """
    encoded = _format_json(texts)
    if len(encoded) > max_nbytes:
        texts = [StatusTexts(p[-40:], call[:60], operation[:20]) for p, call, operation in texts]
        while len(encoded := _format_json(texts)) > max_nbytes:
            texts = texts[: len(texts) // 2]
    return encoded


def _format_json(texts: Sequence[StatusTexts]) -> bytes:
    groups = group_by_key(texts, range(len(texts)))
    entries = [[indices, *place] for place, indices in groups.items() if any(place)]
    return json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")

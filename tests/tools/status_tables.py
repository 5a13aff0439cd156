"""Tables of statuses for tests, and what they say, rank by rank."""

from __future__ import annotations

from typing import NamedTuple

from mpistrat.watchdog.statuses import NodeLayout, StatusTable, StatusTexts, encode_texts


class Row(NamedTuple):
    """Ranks of one node that are in the same place; fields as of `StatusTable.rows` and texts."""

    ranks: tuple[int, ...]
    key: int
    state: int
    age: float
    activity: str = "R"
    position: str = ""
    call_text: str = ""
    operation: str = ""
    is_overdue: bool = False
    patience: float = 0.0
    stack_age: float = 0.0
    compute_age: float = 0.0
    node: str = "n1"


def make_table(rows):
    """Return a table of these rows; nodes come in the order of their names."""
    names = sorted({row.node for row in rows})
    of_node = {
        name: [(rank, row) for row in rows if row.node == name for rank in row.ranks]
        for name in names
    }
    layout = NodeLayout([(name, [rank for rank, _ in ranks]) for name, ranks in of_node.items()])
    table = StatusTable.create(layout)
    for index, row in enumerate(row for ranks in of_node.values() for _, row in ranks):
        head = (row.key, row.state, ord(row.activity), bool(row.operation), row.is_overdue)
        table.rows[index] = (*head, row.age, row.patience, row.stack_age, row.compute_age)
    for number, ranks in enumerate(of_node.values()):
        texts = [StatusTexts(row.position, row.call_text, row.operation) for _, row in ranks]
        table.texts[number] = encode_texts(texts, 10**9)
    return table


def texts_of(table):
    """Return the texts of each row."""
    numbers, texts = table.decode_texts()
    return [StatusTexts(*texts[number]) for number in numbers]

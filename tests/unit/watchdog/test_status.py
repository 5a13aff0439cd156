"""Tables of statuses: their texts, joined rows, and summaries of nodes."""

import random

import pytest
from status_tables import Row, make_table, texts_of

from mpistrat.watchdog.status_board import BETWEEN_CALLS, IN_CALL, LEAVING, LEFT
from mpistrat.watchdog.statuses import (
    NodeLayout,
    StatusTable,
    StatusTexts,
    encode_texts,
    texts_nbytes,
)


def texts_at(count, places):
    return [
        StatusTexts(
            f"a_rather_long_name_of_a_file_{i % places}.py:{i % places}",
            f"all_reduce(SUM, float32[{i % places}])" * (i % 3),
        )
        for i in range(count)
    ]


def sent(texts, max_nbytes):
    """The texts of one node as another one reads them."""
    table = StatusTable.create(NodeLayout([("n0", range(len(texts)))]))
    table.texts[0] = encode_texts(texts, max_nbytes)
    assert len(table.texts[0]) <= max_nbytes
    return texts_of(table)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 64, 128, 1024])
@pytest.mark.parametrize("places", [1, 5, 1000])
def test_texts_of_any_node_fit(count, places):
    texts = texts_at(count, places)
    assert sent(texts, texts_nbytes(count)) == texts


def test_long_texts_are_cut_before_any_is_left_out():
    texts = [
        StatusTexts(f"{'x' * 100}{i:03}.py:7", f"{i:03}{'y' * 500}", "z" * 99) for i in range(256)
    ]
    for i, cut in enumerate(sent(texts, texts_nbytes(256))):
        assert cut.position.endswith(f"{i:03}.py:7")
        assert cut.call_text.startswith(f"{i:03}yyy")
    left = sent(texts, 8192)
    assert left[0] != StatusTexts() == left[-1]


def test_texts_are_those_that_were_sent_whatever_their_characters():
    texts = [StatusTexts('a"\\\n\0.py:1', "\N{GREEK SMALL LETTER ALPHA}"), StatusTexts()]
    assert sent(texts, 4096) == texts


def test_equal_bytes_of_nodes_of_other_sizes_are_read_for_each():
    rows = [Row((0,), 1, IN_CALL, 1.0, position="a", node="n0"),
            Row((1,), 1, IN_CALL, 1.0, position="a", node="n1"),
            Row((2,), 1, IN_CALL, 1.0, node="n1")]  # fmt: skip
    table = make_table(rows)
    assert table.texts[0] == table.texts[1]
    assert [texts.position for texts in texts_of(table)] == ["a", "a", ""]


def slow_summary(rows, node):
    others = [row for row in rows if row.node != node]
    staying = [row for row in others if row.state not in (LEAVING, LEFT)]
    inside_keys = (row.key for row in others if row.state == IN_CALL)
    names = ("age", "stack_age", "compute_age")
    ages = (min((getattr(r, name) for r in staying), default=float("inf")) for name in names)
    return max(inside_keys, default=0), *ages


def test_summaries_of_other_nodes_are_those_of_a_loop():
    for seed in range(300):
        rng = random.Random(seed)
        node_count = rng.randint(1, 5)
        rows = [
            Row(
                (rank,),
                rng.randint(1, 4),
                rng.choice((BETWEEN_CALLS, IN_CALL, LEAVING, LEFT)),
                *(0.0, "R", "", "", "", False, 0.0, 0.0, 0.0),
                node=f"n{rank if rank < node_count else rng.randrange(node_count)}",
            )._replace(age=rng.random(), stack_age=rng.random(), compute_age=rng.random())
            for rank in range(node_count + rng.randint(0, 9))
        ]
        summaries = make_table(rows).summarize_other_nodes().tolist()
        assert summaries == [slow_summary(rows, f"n{node}") for node in range(node_count)]

"""Watching processes of several nodes tell each other; messages are simulated."""

import random

import numpy as np
import pytest
from every import every
from status_tables import Row, make_table, texts_of

from mpistrat.watchdog.exchange import StatusExchange
from mpistrat.watchdog.observer import Verdict
from mpistrat.watchdog.status_board import BETWEEN_CALLS, IN_CALL, LEAVING, SILENT
from mpistrat.watchdog.statuses import NodeLayout, StatusTexts


def rows_of(node_index, call=0, age=0.0):
    """The statuses of a node of two ranks."""
    ranks, position = (2 * node_index, 2 * node_index + 1), f"a.py:{call}"
    return make_table([Row(ranks, call << 20, BETWEEN_CALLS, age, position=position)])


@pytest.fixture
def cluster(new_post):
    def make(size, seed=0):
        post = new_post(seed)
        layout = NodeLayout([(f"n{h}", (2 * h, 2 * h + 1)) for h in range(size)])
        return post, [
            StatusExchange(post.channel(r, size), layout, 1.0, 3.0, 0.0) for r in range(size)
        ]

    return make


def look_at_all(links, looks, call=5, quiet=None, begin=0):
    """Let all nodes exchange messages, four times a second, but one that falls quiet."""
    for look in range(begin, looks):
        for node_index, link in enumerate(links):
            if node_index != quiet or look < 20:
                link.exchange_statuses(look / 4, rows_of(node_index, node_index + call), False)


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_the_first_node_hears_of_everybody_and_all_hear_of_the_first(size, cluster):
    _, links = cluster(size)
    look_at_all(links, 60)
    for node_index, link in enumerate(links):
        table = link.merge_statuses(15.0, rows_of(node_index, node_index + 5))
        known = range(size) if node_index == 0 else {0, node_index}
        for row, rank, texts in zip(table.rows, table.layout.ranks, texts_of(table), strict=True):
            if rank // 2 in known:
                assert (row["key"] >> 20, row["state"]) == (rank // 2 + 5, BETWEEN_CALLS)
                assert texts == StatusTexts(f"a.py:{rank // 2 + 5}")
            else:
                assert (row["state"], texts) == (0, StatusTexts())
        assert not link.is_cut_off(15.0)


@pytest.mark.parametrize("size", [2, 3, 7])
def test_each_node_hears_the_verdict_on_its_ranks(size, cluster):
    _, links = cluster(size)
    is_named = np.random.default_rng(size).random(2 * size) < 0.5
    links[0].record_decisions(Verdict(7 << 20, True, is_named), links[0]._summaries)
    look_at_all(links, 60)
    for link in links[1:]:
        assert link.verdict[:2] == (7 << 20, True)
        assert link.verdict.is_named.tolist() == is_named[link.own_rows].tolist()
    links[0].record_decisions(Verdict(0, False, is_named & False), links[0]._summaries)
    look_at_all(links, 120, begin=60)
    assert not any(link.verdict.is_ending or link.verdict.is_named.any() for link in links)


def test_the_summary_of_the_other_nodes_arrives_and_ages_with_a_silent_first_node(cluster):
    _, links = cluster(3)
    rows = [
        Row((0, 1), 5 << 20, IN_CALL, 4.0, stack_age=2.0, compute_age=1.0, node="n0"),
        Row((2, 3), 6 << 20, BETWEEN_CALLS, 3.0, stack_age=3.0, compute_age=9.0, node="n1"),
        Row((4, 5), 7 << 20, LEAVING, 0.0, node="n2"),
    ]
    summaries = make_table(rows).summarize_other_nodes()
    links[0].record_decisions(links[0].verdict, summaries)
    look_at_all(links, 30, quiet=0)
    assert links[0].read_other_nodes(7.5) == (0, 3.0, 3.0, 9.0)
    assert links[1].read_other_nodes(5.0) == (5 << 20, 4.0, 2.0, 1.0)
    assert links[2].read_other_nodes(5.0) == (5 << 20, 3.0, 2.0, 1.0)
    assert links[2].read_other_nodes(40.0)[1] > 3.0 + 34


@every("seed", range(200))
def test_leaving_in_any_order_leaves_no_message(seed, cluster):
    rng = random.Random(seed)
    size = rng.randint(2, 5)
    post, links = cluster(size, seed)
    leaves = [rng.randint(0, 60) for _ in range(size)]
    for look in range(200):
        for node_index in rng.sample(range(size), size):
            is_closing = look >= leaves[node_index]
            if not (is_closing and links[node_index].is_finished):
                links[node_index].exchange_statuses(look / 4, rows_of(node_index), is_closing)
    assert all(link.is_finished for link in links)
    assert not any(post.flying.values())
    assert not any(post.receives.values())


@pytest.mark.parametrize("quiet", [0, 1, 2])
def test_a_silent_node_is_known_to_those_who_hear_it(quiet, cluster):
    _, links = cluster(3)
    look_at_all(links, 80, call=5, quiet=quiet)
    for node_index in {0, 1, 2} - {quiet}:
        table = links[node_index].merge_statuses(20.0, rows_of(node_index, 5))
        is_silent = table.rows["activity"] == ord(SILENT)
        hears = quiet == 0 or node_index == 0
        assert set(table.layout.ranks[is_silent]) == (
            {2 * quiet, 2 * quiet + 1} if hears else set()
        )
        assert (table.rows["age"][is_silent] > 13).all()
        assert links[node_index].is_cut_off(20.0) == (quiet == 0)


def test_messages_are_once_an_interval(cluster):
    _, links = cluster(2)
    sent = []

    def counted(channel):
        send = channel.send_message

        def count(peer, data):
            sent.append(channel.rank)
            send(peer, data)

        channel.send_message = count

    for link in links:
        counted(link._channel)
    for look in range(400):
        for node_index, link in enumerate(links):
            link.exchange_statuses(look / 100, rows_of(node_index), False)
    assert 3 <= sent.count(1) <= 5
    assert 3 <= sent.count(0) <= 5

"""Watching processes of several nodes tell each other; messages are simulated."""

import random

import pytest
from every import every

from mpistrat.watchdog.exchange import StatusExchange
from mpistrat.watchdog.status_board import BETWEEN_CALLS, SILENT, Status


def rows_of(node_index, call=0, age=0.0):
    return [
        Status(
            (2 * node_index, 2 * node_index + 1),
            f"n{node_index}",
            node_index,
            call << 20,
            BETWEEN_CALLS,
            age,
        )
    ]


@pytest.fixture
def cluster(new_post):
    def make(size, seed=0):
        post = new_post(seed)
        known = [rows_of(node_index) for node_index in range(size)]
        return post, [
            StatusExchange(post.channel(r, size), known, 1.0, 3.0, 0.0) for r in range(size)
        ]

    return make


def calls(link, now, mine):
    return {rank: row.key >> 20 for row in link.merge_statuses(now, mine) for rank in row.ranks}


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_everybody_hears_of_everybody(size, cluster):
    _, links = cluster(size)
    for look in range(60):
        for node_index, link in enumerate(links):
            link.exchange_statuses(
                look / 4, lambda node_index=node_index: rows_of(node_index, node_index + 5), False
            )
    for node_index, link in enumerate(links):
        found = calls(link, 15.0, rows_of(node_index, node_index + 5))
        assert found == {rank: rank // 2 + 5 for rank in range(2 * size)}
        assert not link.is_cut_off(15.0)


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
                links[node_index].exchange_statuses(
                    look / 4, lambda node_index=node_index: rows_of(node_index), is_closing
                )
    assert all(link.is_finished for link in links)
    assert not any(post.flying.values())
    assert not any(post.receives.values())


@pytest.mark.parametrize("quiet", [0, 1, 2])
def test_a_silent_node_is_known_to_those_who_hear_it(quiet, cluster):
    _, links = cluster(3)
    for look in range(80):
        for node_index, link in enumerate(links):
            if node_index != quiet or look < 20:
                link.exchange_statuses(
                    look / 4, lambda node_index=node_index: rows_of(node_index, 5), False
                )
    for node_index in {0, 1, 2} - {quiet}:
        found = links[node_index].merge_statuses(20.0, rows_of(node_index, 5))
        silent = {rank for row in found if row.activity == SILENT for rank in row.ranks}
        assert silent == {2 * quiet, 2 * quiet + 1}
        assert all(row.age > 13 for row in found if row.activity == SILENT)
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
            link.exchange_statuses(
                look / 100, lambda node_index=node_index: rows_of(node_index), False
            )
    assert 3 <= sent.count(1) <= 5
    assert 3 <= sent.count(0) <= 5

"""Messages between nodes, simulated: each takes a while and needs a receive that waits."""

import random
from collections import deque

import pytest


class Post:
    """Messages in flight. Each takes some looks to arrive."""

    def __init__(self, seed=0, slowest=3):
        self.rng = random.Random(seed)
        self.slowest = slowest
        self.flying = {}
        self.receives = {}

    def channel(self, rank, size):
        return Channel(self, rank, size)


class Channel:
    def __init__(self, post, rank, size):
        self.post, self.rank, self.size = post, rank, size

    def post_receive(self, peer, max_nbytes):
        assert not self.post.receives.get((peer, self.rank)), "two receives at once"
        self.post.receives[peer, self.rank] = max_nbytes

    def take_message(self, peer):
        queue = self.post.flying.setdefault((peer, self.rank), deque())
        if not self.post.receives.get((peer, self.rank)):
            raise AssertionError("asked for a message that is not expected")
        if not queue:
            return None
        queue[0][0] -= 1
        if queue[0][0] > 0:
            return None
        self.post.receives[peer, self.rank] = 0
        return queue.popleft()[1]

    def send_message(self, peer, message):
        queue = self.post.flying.setdefault((self.rank, peer), deque())
        assert not queue, "a second message before the first has left"
        assert self.post.receives.get((self.rank, peer)), "nobody expects this message"
        assert len(message) <= self.post.receives[self.rank, peer], "it is too long"
        queue.append([self.post.rng.randint(1, self.post.slowest), message])

    def is_sent(self, peer):
        return not self.post.flying.get((self.rank, peer))


@pytest.fixture
def new_post():
    return Post

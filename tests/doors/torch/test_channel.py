"""How long a group's calls wait for other ranks."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from mpistrat.errors import StrategyError
from mpistrat.testing import run_ranks

torch = pytest.importorskip("torch", reason="wants PyTorch: pip install 'mpistrat[torch]'")
from mpistrat.lockstep.exits import exits  # noqa: E402
from mpistrat.torch.process_group import backend  # noqa: E402
from mpistrat.torch.process_group import channel as module  # noqa: E402
from mpistrat.torch.process_group import work as module_of_worker  # noqa: E402
from mpistrat.torch.process_group.point_to_point import MessageWork  # noqa: E402
from mpistrat.torch.process_group.work import CallTimeoutError, Worker  # noqa: E402


class Clock:
    """Time that passes when somebody says so."""

    now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.mark.parametrize("waits", [3.0, 9.0])
def test_what_a_rank_does_itself_does_not_count_as_waiting(monkeypatch, waits):
    """To compile a kernel may take longer than a short timeout."""
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)

    def program(comm):
        kept = []
        monkeypatch.setattr(comm, "patient", lambda wait: kept.append(wait) or comm, raising=False)
        channel = module.GroupChannel(comm, "", 5.0)

        def make():
            clock.sleep(20)
            end = clock.now + waits

            def there():
                clock.sleep(1e-3)
                return clock.now > end

            kept[0](there)

        work = channel.make_call("a call", make, (), is_async=False, seconds=None)
        if waits < 5:
            work.wait()
        else:
            with pytest.raises(CallTimeoutError, match="timeout of 5 s"):
                work.wait()
        assert channel.is_abandoned is (waits > 5)

    run_ranks(program, 1)


def test_who_has_not_come_is_known_from_who_waits(monkeypatch):
    store = torch.distributed.HashStore()
    ranks = [module.Arrivals(rank, 4) for rank in range(4)]
    assert ranks[0].find_missing_ranks() is None  # without a store
    for one in ranks:
        one.store = store
    assert ranks[0].find_missing_ranks() is None  # before it has told
    for rank, number in ((0, 7), (1, 6), (3, 8)):
        ranks[rank].announce_call(number)
        until(lambda key=f"mpistrat/waits/{rank}": store.check([key]))
    assert ranks[0].find_missing_ranks() == (1, 2)
    assert ranks[1].find_missing_ranks() == (2,)
    ranks[1].announce_call(8)
    until(lambda: store.get("mpistrat/waits/1") == b"8")
    assert ranks[0].find_missing_ranks() == (2,)

    class Silent:
        check = staticmethod(lambda keys: time.sleep(5))

    monkeypatch.setattr(module, "_STORE_SECONDS", 0.01)
    ranks[0].store = Silent()
    assert ranks[0].find_missing_ranks() is None


def test_groups_beside_another_backend_say_with_which_to_begin():
    factory = object.__new__(backend._GroupFactory)
    factory.world = None
    with pytest.raises(StrategyError, match=r"Begin with mpistrat\.torch\.init"):
        factory.create_channels(None)


def until(test):
    end = time.monotonic() + 240
    while not test():
        assert time.monotonic() < end
        time.sleep(1e-3)


def test_the_thread_makes_calls_that_nobody_waits_for_in_their_order():
    worker, made = Worker("test", can_use_thread=True), []
    for number in range(40):
        worker.queue_call(lambda beside, number=number: made.append((number, beside)))
        if number % 2:  # as the last of several buckets is
            worker.run_until(lambda number=number: len(made) > number)
        else:
            until(lambda number=number: len(made) > number)
    assert [number for number, _ in made] == list(range(40))
    assert all(beside for _, beside in made[::2])


def test_a_program_that_waits_makes_the_calls_that_the_thread_has_not_begun():
    worker, makers = Worker("test", can_use_thread=True), []
    with worker._lock:  # the thread begins when all is queued
        for _ in range(3):
            worker.queue_call(lambda beside: makers.append((threading.get_ident(), beside)))
        worker.run_until(lambda: len(makers) == 3)
    assert makers == [(threading.get_ident(), False)] * 3
    assert worker.take_turn()


def test_a_thread_that_has_ended_is_started_again(monkeypatch):
    monkeypatch.setattr(module_of_worker, "_LINGER_SECONDS", 0.01)
    worker, makers = Worker("test", can_use_thread=True), []
    for count in (1, 2):
        worker.queue_call(lambda beside: makers.append(threading.get_ident()))
        until(lambda count=count: len(makers) == count)
        until(lambda: not worker._has_thread)


def test_ctrl_c_ends_the_wait_for_a_message(monkeypatch):
    """Nothing is agreed on that it could break, and the message may come much later."""
    post = SimpleNamespace(test=lambda: False, peer=1, cancel=lambda: None)
    messages = SimpleNamespace(
        seconds=0.2,
        warn_seconds=9.0,
        rank=0,
        ranks=(0, 1),
        group_text="",
        discard_work=lambda work: None,
    )
    value = torch.ones(3)
    work = MessageWork(messages, "recv", value, value, post, is_receive=True)
    monkeypatch.setattr(exits().kept_interrupt, "pending", True)
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    with pytest.raises(CallTimeoutError):  # the call itself goes on
        work.wait()

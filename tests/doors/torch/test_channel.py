"""How long a group's calls wait for other ranks."""

from __future__ import annotations

import pytest

from mpistrat.testing import run_ranks

torch = pytest.importorskip("torch", reason="wants PyTorch: pip install 'mpistrat[torch]'")
from mpistrat.torch import channel as module  # noqa: E402
from mpistrat.torch.work import TimedOut  # noqa: E402


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

        work = channel.call("a call", make, (), beside=False, seconds=None)
        if waits < 5:
            work.wait()
        else:
            with pytest.raises(TimedOut, match="timeout of 5 s"):
                work.wait()
        assert channel.lost is (waits > 5)

    run_ranks(program, 1)

"""How a rank that leaves waits for the others: sleeping, until the last handshake.

MPI libraries poll while they wait, and MPICH lets no rank leave before the last one has come. A
rank that is done an hour before the others, such as one of a finished trial of a sweep, would
burn a core for that hour. So it looks at the page now and then and enters MPI only when all ranks
have come to leave, or when one is inside of a call of the same communicator, which must hear that
this rank leaves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import final

from mpistrat.board.page import INSIDE, LEAVING, LEFT, Page, SlotEntry
from mpistrat.board.proc import Activity, Look, look

_SHORTEST, _LONGEST = 0.0002, 0.02  # seconds between two looks


@final
class Departure:
    """What a rank that has come to leave knows of the others.

    Args:
      page: The page of its node.
      size: How many ranks there are on all nodes.
      start_waiting: Begins to wait for the other nodes, once all ranks of this one have come to
        leave, and returns a function that says whether they have; None where another rank of the
        node does that, or where there are no other nodes.
      look: Looks at a process.
      clock: Returns the time in ns, monotonic.
    """

    def __init__(
        self,
        page: Page,
        size: int,
        start_waiting: Callable[[], Callable[[], bool]] | None = None,
        look: Look = look,
        clock: Callable[[], int] = time.monotonic_ns,
    ):
        """Create it for the ranks of `page`."""
        self._activity, self._clock = Activity(look), clock
        self._page, self._others, self._alone = page, start_waiting, page.size == size
        self._have_come: Callable[[], bool] | None = None

    def all_leave(self) -> bool:
        """Tell whether all ranks of the communicator have come to leave."""
        page = self._page
        if page.all_leave:
            return True
        states = [page.key(index)[1] for index in range(page.size)]
        if any(state not in (LEAVING, LEFT) for state in states):
            return False
        if self._others is not None:
            self._have_come = self._have_come or self._others()
            if not self._have_come():
                return False
        elif not self._alone:
            return False
        page.all_leave = True
        return True

    def called(self, key: int) -> bool:
        """Tell whether a rank is inside of the call `key`, or a later one."""
        page = self._page
        keys_and_states = (page.key(index) for index in range(page.size))
        return page.elsewhere()[0] >= key or any(
            state == INSIDE and other >= key for other, state in keys_and_states
        )

    def wait(self, key: int, sleep: Callable[[float], None] = time.sleep) -> bool:
        """Sleep until all ranks have come to leave, or one makes the call `key`.

        Returns:
          Whether all have come.
        """
        seconds = _SHORTEST
        while not (is_departure_complete := self.all_leave()) and not self.called(key):
            sleep(seconds)
            seconds = min(2 * seconds, _LONGEST)
        return is_departure_complete

    def last_move(self) -> int:
        """Return the last sign of life of the ranks that have not come to leave, monotonic ns.

        That is the latest of their last calls on any communicator, and of the ends of operations
        that they have declared. 0 if all have come.
        """
        times = [self._page.elsewhere()[1]]
        for entry in self._entries():
            if entry.state not in (LEAVING, LEFT):
                times += (entry.changed, entry.elsewhere, entry.deadline, entry.compiling)
        return max(times)

    def signs(self) -> tuple[int, int]:
        """Return signs of life of those ranks beside their calls, as `StatusBoard.signs`."""
        now_ns, (stirred, computed) = self._clock(), self._page.signs()
        for entry in self._entries():
            if entry.state not in (LEAVING, LEFT):
                stirred = max(stirred, entry.stirred)
                computed = max(computed, self._activity.computed(entry.pid, entry.born, now_ns))
        return stirred, computed

    def has_groups(self) -> bool:
        """Tell whether a rank of this node has made calls on another communicator."""
        return any(entry.elsewhere for entry in self._entries())

    def _entries(self) -> list[SlotEntry]:
        entries = map(self._page.read, range(self._page.size))
        return [entry for entry in entries if entry is not None]

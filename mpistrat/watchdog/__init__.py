"""The watchdog: where each rank is, and which ranks keep the others waiting.

Every rank writes its state to a slot of the *status board* of its node: inside of which call it is,
or that it is between calls. That takes half a microsecond each time. The board is a memfd that the
ranks of the node map, so a crash leaves nothing behind. A thread in each process, its watchdog,
writes a heartbeat, the line that its rank executes, and whether it makes calls on other
communicators. On each node the first process that still runs Python watches the slots of all ranks.
The first node judges: once a second the others send it the statuses of their ranks, on a separate
communicator, and get its verdict. Only if it falls silent, the others judge what they see. Nothing
polls in a tight loop.

The rooms above are promised that no wait is silent. A rank that others wait for is named after
``MPISTRAT_WARN`` seconds, with its state (computing, sleeping, stopped, holding the GIL, dead) and
its stacks. After ``MPISTRAT_TIMEOUT`` the job ends with code 75, unless the rank has declared
``strategy.long_operation(...)`` or is compiling. ``timeout_seconds`` of a call is written to the
slot during that call, and replaces ``MPISTRAT_TIMEOUT`` there; the time includes the data that move
after the handshake. A process whose launcher is gone ends with code 76. Where there is no board
yet, or no longer, `mpistrat.lockstep` and `mpistrat.comm` limit the waits: a timer of
`faulthandler` in ``MPI_Init``, a thread from there to the board, `faulthandler` and SIGALRM after
the last handshake.

The slot also sums up two times for ``Strategy.time_spent``: handshakes beyond the shortest one,
which is waiting, and the rest of the calls. That takes 0.15 us a call.

Begin with `status_board`, which has the layout of a slot, then `observer`.

- `status_board`: slots of ranks, the board of a node, and what a process reports of itself.
- `processes`: other processes in ``/proc``, and the stack frames of this one.
- `statuses`: the statuses of many ranks, as a table of numbers and texts.
- `observer`: which ranks are missing, the messages that name them, and the end of the job.
- `exchange`: statuses of the nodes for each other, by MPI.
- `watchdog`: the thread that does all of this, and the interface: `WatchedBoard`.
"""

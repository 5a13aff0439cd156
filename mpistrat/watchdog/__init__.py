"""The board: a page of shared memory that shows where each rank is, and a watchdog that reads it.

When a rank keeps the others waiting, the watchdog names it, and ends the job after a time limit.

- `page`: memory that the ranks of a node share, one slot per rank.
- `proc`: what the operating system knows of a process.
- `frames`: where the threads of this process are.
- `status`: ranks that are in the same place, small enough to travel between nodes.
- `diagnosis`: who keeps whom waiting, and the text that says so.
- `reporter`: what a process writes about itself.
- `observer`: what the watching process of a node makes of its page.
- `link`: the watching processes of the nodes tell each other.
- `watchdog`: the thread that does all of this.
- `departure`: how a rank that has come to leave waits for the others.
- `board`: the interface: ``enter``, ``leave``, ``resume``, ``long_operation``, ``close``.
"""

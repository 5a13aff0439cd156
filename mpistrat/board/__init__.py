"""The board: where every rank of the job is now, and who says so when one does not arrive.

- `page`: memory that the ranks of a node share, one slot per rank.
- `proc`: what the operating system knows of a process.
- `places`: file and line of a frame, in words.
- `rows`: ranks that are in the same place, small enough to travel between nodes.
- `verdict`: who keeps whom waiting, and the text that says so.
- `reporter`: what a process writes about itself.
- `observer`: what the watching process of a node makes of its page.
- `link`: the watching processes of the nodes tell each other.
- `watchdog`: the thread that does all of this.
- `board`: the interface: ``enter``, ``leave``, ``resume``, ``long_operation``, ``close``.
"""

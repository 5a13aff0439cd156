"""Collectives: moving data after the handshake.

- `allreduce`: all-reduce of lists of arrays; `calls` remembers what was found out about them.
- `paths`: the ways that bytes can go, and when each is taken.
- `gatherer`: all-gather.
- `dtypes`: in which dtype a value travels and in which it comes back.
"""

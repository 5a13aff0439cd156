"""Memory that processes share, and memory that is used again; no communication.

- `shared`: how processes come by memory without a name that could be left behind.
- `overlay`: where one process writes for itself alone.
- `pool`: memory of results, used again once nothing holds it.
"""

"""How the values of all ranks meet.

- `reducer`: all-reduce and all-gather of lists of arrays.
- `bucket`: which leaves travel together.
- `forms`: in which dtype a value travels and in which it comes back.
"""

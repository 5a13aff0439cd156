"""Which examples each replica sees in each step.

- `dataset`: `Dataset`, a description of examples or batches; it never communicates.
- `sources`, `orders`, `steps`, `pipeline`, `pieces`: what it is made of.
- `prefetch`: reading ahead in one thread.
- `distributed`: every replica's part of each global batch, one proof a step.
"""

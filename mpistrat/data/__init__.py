"""Datasets: which examples each replica gets in each step.

- `dataset`: `Dataset`, a description of examples or batches; it never communicates.
- `sources`, `orders`, `steps`, `rebatch`, `padded`, `pipeline`, `pieces`: what it is made of.
- `filtered`: the rows that a predicate keeps; all ranks find them together.
- `policies`, `sharding`: the ways to divide it over replicas, without communication.
- `prefetch`: reading ahead in one thread.
- `iterators`, `distributed`: every replica's part of each step, one handshake a step.
"""

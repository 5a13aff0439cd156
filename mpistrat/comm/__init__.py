"""Groups of ranks, and how bytes move between them.

- `base`: what every communicator can do.
- `mpi`: the same over MPI; the only importer of mpi4py.
- `loopback`: N ranks as threads of one process, for tests and debuggers.
- `ordered`: the same ranks, numbered in the order of a strategy's replicas.
- `session`: what all strategies on one communicator share: a private duplicate of it, the sequence
  of calls, the thread that makes them.
- `world`: which communicator a strategy gets when none is named.
- `codec`: values as bytes. `chunks`: messages that are too large for one call of MPI.
- `nodes`: messages between the first ranks of the nodes, for the board.
- `callsite`: where a program called, and lists of ranks, in words.
"""

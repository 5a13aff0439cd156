"""Groups of ranks, and how bytes move between them.

A `Comm` (in `base`) is a group of ranks with the collective calls of MPI on contiguous NumPy
arrays. Its calls are not checked: `mpistrat.lockstep` does that before each of them.
Implementations promise that messages of any size arrive (MPI gets at most 1 GiB at once), and that
traffic of the program on its own communicators never meets that of mpistrat. Begin with `base`,
then `session`.

- `base`: the interface of every communicator; the same ranks in the order of a strategy's replicas.
- `mpi`: communicators of MPI, and messages too large for one call; the only importer of mpi4py.
- `loopback`: N ranks as threads of one process, for tests and debuggers.
- `session`: the state that all strategies on one communicator share; the default communicator.
- `point_to_point`: messages between two ranks that do not block.
- `serialization`: values, and trees of values, as bytes.
- `callsite`: the place where a program called, and lists of ranks, in words.
"""

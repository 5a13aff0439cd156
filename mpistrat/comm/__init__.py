"""Groups of ranks, and how bytes move between them.

- `base`: what every communicator can do, five methods.
- `mpi`: the same over MPI; the only importer of mpi4py.
- `loopback`: N ranks as threads of one process, for tests and debuggers.
- `session`: one life of this process in the job: private communicator, sequence of calls, owner.
- `world`: which communicator a strategy gets when none is named.
"""

"""Starts jobs: `mpistrat run` and `mpistrat doctor`, with the launcher of this environment.

- `flavours`: one row per MPI implementation: how it is recognised, which flags it needs.
- `mpiexec`: finds the MPI library and the launcher of this environment and checks that they fit.
- `plan`: the call of ``srun`` or ``mpiexec`` for an allocation and what a user wants.
- `process`: runs a launcher to its end: forwards signals, keeps a time limit, leaves no orphans.
- `run`, `rank`: what `mpistrat run` does, and what it starts on each rank.
- `input`: what rank 0 reads, and the other ranks do not.
- `output`: what the ranks print, labelled, or in a file for each.
- `roster`: the ranks on this host, and which of them a signal has ended.
- `doctor`: the checks of `mpistrat doctor`.
- `tf_config`: a ``TF_CONFIG`` for TensorFlow programs under the same launcher.
"""

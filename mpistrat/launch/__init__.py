"""Starting jobs: which launcher belongs to this environment, and how to call it.

- `flavours`: one row per MPI: how it is recognised and which flags and variables it needs.
- `mpiexec`: finds the MPI library and the launcher of this environment and checks that they fit.
- `process`: runs a launcher to its end, with signals, a time limit and no orphans.
- `doctor`: what `mpistrat doctor` looks at.
"""

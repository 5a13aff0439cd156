"""Checkpoints: the values of variables in files, each of which is complete or not there.

- `format`: what is in a file, and the reader, which checks all of it.
- `files`: names and numbers; `parts`: how a file or directory comes to be there whole.
- `tree`: the variables of a program by name; `options`: state of optimizers, and their options.
- `checkpoint`: `Checkpoint`, which all ranks save and restore together (`saving`, `restoring`).
- `manager`: `CheckpointManager`, which keeps the newest few.
- `claim`: the file that says which job saves in a directory.
- `planned`: `preemption`, which saves and leaves when the job is about to be ended; `notice`: how
  it hears of that. `preemption`: `PreemptionCheckpointHandler`, the same under TensorFlow's name.
"""

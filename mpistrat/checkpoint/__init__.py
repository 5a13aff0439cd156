"""Checkpoints: the values of variables in files, each of which is complete or absent.

All ranks call `Checkpoint.save` and `restore` together. The handshake of the call shows that they
save the same variables to the same path. Below 64 MB replica 0 writes one file; from 64 MB on all
ranks write their shares of a directory. A save that fails leaves the earlier checkpoints as they
were, and raises on all ranks. A restore checks all bytes before any rank changes a variable. Two
jobs that save to one directory stop with an error instead of mixing their checkpoints. A job that
is about to be ended saves at a step that all ranks have reached, and leaves.

Begin with `checkpoint`, then read `saving` and `restoring`, which do the work of its two methods.

- `checkpoint`: `Checkpoint`, which all ranks save and restore together.
- `saving`, `restoring`: a save and a restore: handshakes, who writes, who reads.
- `tree`: the variables of a program by name, and the state of optimizers; `values`: numbers,
  strings and generators.
- `format`: the contents of a file, and its reader; `sharded`, `shares`: the same for a directory,
  and how all ranks write it; `background`: saves in a thread.
- `files`: names and numbers of checkpoints; `atomic`: files and directories that appear whole.
- `manager`: `CheckpointManager`, which keeps the newest few and resumes training.
- `claim`: the file that says which job saves in a directory.
- `planned`: `preemption`, which saves and leaves when the job is about to be ended; `notice`: the
  signals and functions that announce it; `preemption`: `PreemptionCheckpointHandler`, the same
  under TensorFlow's name.
- `history`: `History`, curves of a training run; `inspection`: the command ``mpistrat checkpoint``.
"""

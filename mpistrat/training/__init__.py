"""The loop of epochs: `fit` trains, `evaluate` and `predict` read a dataset once.

A training program consists of data, a model, and a replica function for one step. All else is the
same in every program: batches are distributed, metrics are averaged over examples, the state is
saved and restored in the middle of an epoch, validation runs after each epoch, a notice that the
job will be ended leads to a checkpoint and exit code 42, and a history is written. `fit` does that
with the public classes of the other rooms (`Dataset`, `Checkpoint`, `CheckpointManager`,
`preemption`, `History`, `metrics.Mean`), so a loop by hand can take its place, and can read its
checkpoints.

Begin with `fit`; `run` has the state of a training run and its order of events.

- `fit`: the function, and the checks of its arguments.
- `run`: one training run: steps, rows of the history, saves, and when it ends.
- `results`: what `step` and `score` return, as sums for means.
- `evaluation`: `evaluate` and `predict`.
- `progress`: a bar on a terminal, lines elsewhere.
- `tensorboard`: a callback that writes TensorBoard files.
"""

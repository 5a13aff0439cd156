"""Mistakes of newcomers, and what they see: an error or a warning with the line and the cure.

A row has a name, the program as a newcomer writes it, the class of the error or warning, and a
pattern of the cure. The comment ``# here`` marks the lines of which one is named. Every rank raises
the error, except for the rows that name the ranks that do: there the other ranks have ended before.
"""

from __future__ import annotations

import linecache
import re
import subprocess
import sys
import traceback
import warnings
from typing import NamedTuple

import pytest
from crowded import command

import mpistrat as ms
from mpistrat.config import child_environment
from mpistrat.testing import RanksFailed, run_ranks

HEAD = """
import numpy as np
import mpistrat as ms
"""
# A linear model, and a dataset whose last batch has one row.
MODEL = f"""{HEAD}
strategy = ms.MirroredStrategy()
with strategy.scope():
    w = ms.Variable(np.zeros(3), name="w")
optimizer = ms.optim.SGD(0.1)
random = np.random.default_rng(0)
x, y = random.normal(size=(17, 3)), random.normal(size=17)
dataset = ms.Dataset((x, y)).shuffle(seed=1).batch(8)
"""
STEP = """
def step(x, y):
    gradient = x.T @ (x @ w - y) / max(len(x), 1)
    optimizer.apply_gradients([(gradient, w)], weight=len(x))  # here
"""
LOOP = "for batch in strategy.experimental_distribute_dataset(dataset):"


class Mistake(NamedTuple):
    """One row.

    Attributes:
      program: What the newcomer writes.
      outcome: The class of the error or warning; for a job, text that the launcher's output has.
      cure: A pattern in its text.
      raising_ranks: The ranks that raise the error.
      size: The number of ranks.
    """

    program: str
    outcome: type[BaseException] | str
    cure: str
    raising_ranks: tuple[int, ...] = (0, 1, 2)
    size: int = 3


MISTAKES = {
    "the learning rate of an optimizer is changed": Mistake(
        f"""{MODEL}
def step():
    optimizer.learning_rate = 0.01  # here

strategy.run(step)
""",
        AttributeError,
        r"cannot assign to field 'learning_rate'.*SGD\(lambda step: \.\.\.\)",
    ),
    "the directory of checkpoints is a file": Mistake(
        f"""{MODEL}
import tempfile
path = tempfile.NamedTemporaryFile()
ms.CheckpointManager(ms.Checkpoint(w=w), path.name, 2)  # here
""",
        NotADirectoryError,
        r"Not a directory, but a file; checkpoints need a directory, give another one",
    ),
    # Leaving out `run`, the scope or the distribution.
    "the step is called without run": Mistake(
        f"""{MODEL}
def step(x, y):
    return x.T @ (x @ w - y)  # here

{LOOP}
    step(*batch)
""",
        AttributeError,
        r"PerReplica has no 'T'.*strategy\.run\(step, args=",
    ),
    "the step is called without run on the whole batch": Mistake(
        f"""{MODEL}{STEP}
for batch in dataset:
    step(*batch)
""",
        UserWarning,
        r"outside of strategy\.run.*Loop over strategy\.experimental_distribute_dataset",
    ),
    "the step is called without run on rows of the rank": Mistake(
        f"""{MODEL}{STEP}
rows = slice(strategy.rank, None, strategy.size)
step(x[rows], y[rows])
""",
        ms.LockstepError,
        r"Call the step by strategy\.run\(step, args=batch\)",
    ),
    "the batch is passed as an argument of run": Mistake(
        f"""{MODEL}{STEP}
{LOOP}
    strategy.run(step, *batch)  # here
""",
        ms.StructureError,
        r"args must be a list or tuple",
    ),
    "the dataset is not distributed": Mistake(
        f"""{MODEL}{STEP}
for batch in dataset:
    strategy.run(step, args=batch)  # here
""".replace("weight=len(x))  # here", "weight=len(x))"),
        UserWarning,
        r"same batch.*Loop over strategy\.experimental_distribute_dataset",
    ),
    "the dataset is not distributed and shuffled without a seed": Mistake(
        f"""{MODEL.replace("seed=1", "")}{STEP.replace("  # here", "")}
for batch in dataset:
    strategy.run(step, args=batch)  # here
""",
        UserWarning,
        r"batches of the same rows.*Loop over strategy\.experimental_distribute_dataset",
    ),
    "no scope": Mistake(
        f"""{HEAD}
strategy = ms.MirroredStrategy()
w = ms.Variable(np.zeros(3), name="w")
optimizer = ms.optim.SGD(0.1)
strategy.run(lambda: optimizer.apply_gradients([(np.ones(3), w)]))  # here
""",
        ms.StrategyError,
        r"create it in `with strategy\.scope\(\):`",
    ),
    "a variable is created in the step": Mistake(
        f"""{HEAD}
strategy = ms.MirroredStrategy()
def step():
    w = ms.Variable(np.zeros(3), name="w")  # here
    return w.assign_add(np.ones(3))
for _ in range(3):
    print(strategy.run(step))
""",
        UserWarning,
        r"anew in each run.*If it is to keep.*create it once, before the loop and in strategy",
    ),
    # Writing to variables.
    "an assignment in a function": Mistake(
        f"""{MODEL}
def step(x, y):
    gradient = x.T @ (x @ w - y)  # here
    w = w - 0.1 * ms.get_replica_context().all_reduce("sum", gradient)

{LOOP}
    strategy.run(step, args=batch)
""",
        UnboundLocalError,
        r"'w' is a variable.*Write w\.assign_sub\(x\)",
    ),
    "an assignment in a dict": Mistake(
        f"""{MODEL}
model = {{"w": w}}
def step(batch):
    x, y = batch
    error = x @ model["w"] - y
    gradient = ms.get_replica_context().all_reduce("mean", x.T @ error / 8, weight=len(x))
    model["w"] = model["w"] - 0.1 * gradient
    return {{"loss": error**2}}
ms.fit(step, dataset, epochs=2, state=model, strategy=strategy, verbose=False)  # here
""",
        UserWarning,
        r"the place of variables in the state, 'w':.*Write by optimizer\.apply_gradients",
    ),
    "a write to a copy": Mistake(
        f"""{MODEL}
def step(batch):
    x, y = batch
    error = x @ w - y
    w.numpy()[:] -= 0.1 * ms.get_replica_context().all_reduce("sum", x.T @ error)
    return {{"loss": error**2}}
ms.fit(step, dataset, epochs=2, state={{"w": w}}, strategy=strategy, verbose=False)  # here
""",
        UserWarning,
        r"no step so far has changed 'w'.*w\.numpy\(\) is a copy",
    ),
    "a write to a view": Mistake(
        f"""{MODEL}
def step(x, y):
    weights = np.asarray(w)
    weights -= 0.1 * x.T @ (x @ weights - y)  # here

{LOOP}
    strategy.run(step, args=batch)
""",
        ValueError,
        r"read-only\n  If it is the array of a variable: write by w\.assign",
    ),
    "an in-place operator": Mistake(
        f"""{MODEL}
w += np.ones(3)  # here
""",
        TypeError,
        r"by v\.assign_add\(x\)",
    ),
    "an index": Mistake(
        f"""{MODEL}
w[:] = np.ones(3)  # here
""",
        TypeError,
        r"by v\.assign\(array\)",
    ),
    "an attribute": Mistake(
        f"""{MODEL}
w.value = np.ones(3)  # here
""",
        AttributeError,
        r"assign",
    ),
    "random numbers of each rank are written": Mistake(
        f"""{MODEL}
def step(x, y):
    w.assign_add(np.random.default_rng().normal(size=3))
{LOOP}
    strategy.run(step, args=batch)  # here
""",
        ms.LockstepError,
        r"reduce it first",
    ),
    # Values per replica.
    "a value per replica as a number": Mistake(
        f"""{MODEL}
{LOOP}
    loss = strategy.run(lambda x, y: np.sum((x @ w - y) ** 2), args=batch)
    print(float(loss))  # here
""",
        TypeError,
        r"PerReplica is not a number.*strategy\.reduce\(op, value, axis=None\)",
    ),
    "a value per replica as an array": Mistake(
        f"""{MODEL}
{LOOP}
    losses = strategy.run(lambda x, y: (x @ w - y) ** 2, args=batch)
    print(np.mean(losses))  # here
""",
        ms.StructureError,
        r"PerReplica is not an array.*strategy\.reduce\(op, value, axis=None\)",
    ),
    # Data.
    "no batch": Mistake(
        f"""{HEAD}
strategy = ms.MirroredStrategy()
strategy.experimental_distribute_dataset(ms.Dataset(np.ones((8, 3))))  # here
""",
        ms.errors.DataError,
        r"dataset\.batch\(global_batch_size\)",
    ),
    "two arrays as arguments": Mistake(
        f"""{HEAD}
ms.Dataset(np.ones((8, 3)), np.ones(8)).batch(4)  # here
""",
        TypeError,
        r"Dataset\(\(x, y\)\)",
    ),
    "two arrays as a list": Mistake(
        f"""{HEAD}
ms.Dataset([np.ones((8, 3)), np.ones(8)]).batch(4)  # here
""",
        ms.errors.DataError,
        r"Dataset\(\(x, y\)\)",
    ),
    "lists of numbers": Mistake(
        f"""{HEAD}
ms.Dataset([[1.0, 2.0], [3.0, 4.0]]).batch(2)  # here
""",
        ms.errors.DataError,
        r"np\.asarray\(list\)",
    ),
    "a generator for two epochs": Mistake(
        f"""{HEAD}
strategy = ms.MirroredStrategy()
data = strategy.experimental_distribute_dataset(ms.Dataset(np.ones(4) for _ in range(2)))
for epoch in range(2):
    for batch in data:  # here
        pass
""",
        ms.errors.DataError,
        r"pass a callable instead",
    ),
    "a permutation without a seed": Mistake(
        f"""{HEAD}
strategy = ms.MirroredStrategy()
x = np.arange(64.0)[np.random.default_rng().permutation(64)]
strategy.experimental_distribute_dataset(ms.Dataset(x).batch(8))  # here
""",
        ms.LockstepError,
        r"give a seed to whatever permutes",
    ),
    "a generator without a seed": Mistake(
        f"""{HEAD}
strategy = ms.MirroredStrategy()
def batches():
    yield np.random.default_rng().normal(size=4)
for x in strategy.experimental_distribute_dataset(ms.Dataset.from_batches(batches)):  # here
    pass
""",
        ms.LockstepError,
        r"Give a seed to what is random in its source",
    ),
    "the seed of a shuffle is the rank": Mistake(
        f"""{HEAD}
strategy = ms.MirroredStrategy()
dataset = ms.Dataset(np.arange(8.0)).shuffle(seed=strategy.rank).batch(4)
strategy.experimental_distribute_dataset(dataset)  # here
""",
        ms.LockstepError,
        r"the same dataset, with equal seeds and without shard\(\)",
    ),
    "a shard by hand": Mistake(
        f"""{HEAD}
strategy = ms.MirroredStrategy()
dataset = ms.Dataset(np.arange(8.0)).shard(strategy.size, strategy.rank).batch(4)
strategy.experimental_distribute_dataset(dataset)  # here
""",
        ms.LockstepError,
        r"the same dataset, with equal seeds and without shard\(\)",
    ),
    "arrays that are no dataset": Mistake(
        f"""{MODEL}
ms.evaluate(lambda batch: {{"loss": batch[0] @ w - batch[1]}}, (x, y), strategy=strategy)  # here
""",
        ms.errors.DataError,
        r"got an object of type tuple\. .*ms\.Dataset\(\(x, y\)\)\.batch\(64\)",
    ),
    "predictions of shuffled rows": Mistake(
        f"""{MODEL}
ms.predict(lambda batch: batch[0] @ w, dataset, strategy=strategy)  # here
""",
        ms.errors.DataError,
        r"not be in the order of the rows\. Leave out shuffle\(\)",
    ),
    # Means and gradients.
    "a mean without a weight": Mistake(
        f"""{MODEL}
def step(x, y):
    loss = np.sum((x @ w - y) ** 2) / max(len(x), 1)
    return ms.get_replica_context().all_reduce("mean", loss)  # here

{LOOP}
    strategy.run(step, args=batch)
""",
        UserWarning,
        r"weight=len\(x\)",
    ),
    "an update without a weight": Mistake(
        f"""{MODEL}
def step(x, y):
    gradient = x.T @ (x @ w - y) / max(len(x), 1)
    optimizer.apply_gradients([(gradient, w)])  # here

{LOOP}
    strategy.run(step, args=batch)
""",
        UserWarning,
        r"weight=len\(x\)",
    ),
    "a number out of the step of fit": Mistake(
        f"""{MODEL}{STEP.replace("  # here", "")}
def train(batch):
    step(*batch)
    return {{"loss": float(np.sum((batch[0] @ w - batch[1]) ** 2))}}
ms.fit(train, dataset, epochs=1, state={{"w": w}}, strategy=strategy, verbose=False)  # here
""",
        TypeError,
        r"\{'loss': \(mean, len\(x\)\)\}.*number of rows",
    ),
    "a pair with the number of arrays as its weight": Mistake(
        f"""{MODEL}{STEP.replace("  # here", "")}
def train(batch):
    x, y = batch
    step(x, y)
    loss = np.sum((x @ w - y) ** 2) / max(len(x), 1)
    return {{"loss": (loss, len(batch))}}
ms.fit(train, dataset, epochs=1, state={{"w": w}}, strategy=strategy, verbose=False)  # here
""",
        ms.StructureError,
        r"'loss' with weight 2.*has no rows.*len\(x\).*counts the arrays of a batch",
    ),
    "an update with the number of arrays as its weight": Mistake(
        f"""{MODEL}
def step(*batch):
    x, y = batch
    gradient = x.T @ (x @ w - y) / max(len(x), 1)
    optimizer.apply_gradients([(gradient, w)], weight=len(batch))  # here

{LOOP}
    strategy.run(step, args=batch)
""",
        ms.StructureError,
        r"weight is 2 on this replica.*has no rows.*len\(x\).*counts the arrays of a batch",
    ),
    "losses that have broadcast": Mistake(
        f"""{MODEL}
columns = ms.Dataset((x, y[:, None])).batch(8)
ms.evaluate(lambda batch: {{"loss": (batch[0] @ w - batch[1]) ** 2}}, columns,  # here
            strategy=strategy)
""",
        ms.StructureError,
        r"shape \((\d), \1\) for 'loss'.*has \1 rows.*y\[:, 0\].*\.mean\(axis=1\)",
    ),
    "losses reduced without their axis": Mistake(
        f"""{MODEL}
{LOOP}
    losses = strategy.run(lambda x, y: (x @ w - y) ** 2, args=batch)
    print(strategy.reduce("mean", losses, axis=None))  # here
""",
        ms.LockstepError,
        r"reduce them with axis=0",
    ),
    "a collective inside of the step": Mistake(
        f"""{HEAD}
strategy = ms.MirroredStrategy()
strategy.run(lambda: strategy.reduce("sum", 1.0, axis=None))  # here
""",
        ms.ContextError,
        r"call get_replica_context\(\)\.all_reduce",
    ),
    "gradients in another order": Mistake(
        f"""{HEAD}
strategy = ms.MirroredStrategy()
with strategy.scope():
    w, b = ms.Variable(np.zeros((3, 2)), name="w"), ms.Variable(np.zeros(2), name="b")
optimizer = ms.optim.SGD(0.1)
gradients = [np.ones(2), np.ones((3, 2))]
strategy.run(lambda: optimizer.apply_gradients(zip(gradients, [w, b])))  # here
""",
        ms.StructureError,
        r"gradient of variable 'w:0'.*'b:0' has that shape.*the order of the variables",
    ),
    "a gradient with another axis": Mistake(
        f"""{MODEL}
strategy.run(lambda: optimizer.apply_gradients([(np.ones((3, 1)), w)]))  # here
""",
        ms.StructureError,
        r"gradient\.reshape\(\(3,\)\)",
    ),
    "a gradient that is None": Mistake(
        f"""{MODEL}
strategy.run(lambda: optimizer.apply_gradients([(None, w)]))  # here
""",
        ValueError,
        r"each is None\. Compute them in the step",
    ),
    "integer weights": Mistake(
        f"""{HEAD}
strategy = ms.MirroredStrategy()
with strategy.scope():
    w = ms.Variable([0, 0, 0], name="w")
optimizer = ms.optim.SGD(0.1)
strategy.run(lambda: optimizer.apply_gradients([(np.ones(3), w)]))  # here
""",
        ms.LeafTypeError,
        r"Create it from floating-point values",
    ),
    "labels that would broadcast": Mistake(
        f"""{HEAD}
ms.losses.mean_squared_error(np.zeros(8), np.ones((8, 1)))  # here
""",
        ms.StructureError,
        r"Reshape one of them",
    ),
    # Code that depends on the rank.
    "a collective on rank 0": Mistake(
        f"""{MODEL}
if strategy.rank == 0:
    print(strategy.all_reduce("sum", 1))  # here
""",
        ms.LockstepError,
        r"under `if rank == \.\.\.`",
        raising_ranks=(0,),
    ),
    "a save on rank 0": Mistake(
        f"""{MODEL}
checkpoint = ms.Checkpoint(w=w)
if strategy.rank == 0:
    checkpoint.save("run/ckpt")  # here
""",
        ms.LockstepError,
        r"Save and restore on all ranks",
        raising_ranks=(0,),
    ),
    "a metric on rank 0": Mistake(
        f"""{HEAD}
strategy = ms.MirroredStrategy()
with strategy.scope():
    loss = ms.metrics.Mean("loss")
strategy.run(lambda: loss.update_state(1.0))
if strategy.rank == 0:
    print(loss.result())  # here
""",
        ms.LockstepError,
        r"result\(\).*\n.*under `if rank == \.\.\.`",
        raising_ranks=(0,),
    ),
    "build on rank 0": Mistake(
        f"""{MODEL}
if strategy.rank == 0:
    optimizer.build([w])  # here
strategy.all_reduce("sum", 1)
""",
        ms.LockstepError,
        r"\.build\((.|\n)*under `if rank == \.\.\.`",
    ),
    "a break by the loss of the rank": Mistake(
        f"""{MODEL}
{LOOP}  # here
    loss = strategy.run(lambda x, y: float(strategy.rank), args=batch)
    if loss.local < 0.5:
        break
""",
        ms.LockstepError,
        r"early return or break",
        raising_ranks=(1, 2),
    ),
    "an exception that one rank hides": Mistake(
        f"""{MODEL}
def step(x, y):
    try:
        if strategy.rank == 1:
            raise ValueError("a bad row")
        ms.get_replica_context().all_reduce("sum", 1)  # here
    except Exception:
        return

{LOOP}
    strategy.run(step, args=batch)
""",
        ms.LockstepError,
        r"an `except` that hides the error",
    ),
    "sys.exit on one rank": Mistake(
        f"""{MODEL}
import sys
if strategy.rank == 1:
    sys.exit("nothing to do")
strategy.all_reduce("sum", 1)  # here
""",
        ms.LockstepError,
        r"exit code 1: nothing to do(.|\n)*a sys\.exit",
        raising_ranks=(0, 2),
    ),
    "a loop by the clock": Mistake(
        f"""{MODEL}
import time
end = time.monotonic() + 9.0 * strategy.rank
while time.monotonic() < end:
    strategy.all_reduce("sum", 1)  # here
""",
        ms.LockstepError,
        r"a loop of another length on one rank",
        raising_ranks=(1, 2),
    ),
    "a thread": Mistake(
        f"""{MODEL}
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(1) as pool:
    pool.submit(strategy.all_reduce, "sum", 1).result()  # here
""",
        ms.StrategyError,
        r"Make and call them all in one thread",
    ),
    # Checkpoints.
    "an optimizer that is not built": Mistake(
        f"""{MODEL}
ms.Checkpoint(w=w, optimizer=optimizer).save("run/ckpt")  # here
""",
        ms.StructureError,
        r"optimizer\.build\(variables\)",
    ),
    "a directory for each rank": Mistake(
        f"""{MODEL}
ms.Checkpoint(w=w).save(f"run{{strategy.rank}}/ckpt")  # here
""",
        ms.LockstepError,
        r"Every rank must name the same path",
    ),
    "an optimizer that is not saved": Mistake(
        f"""{MODEL.replace("SGD", "Adam")}{STEP.replace("  # here", "")}
def train(batch):
    step(*batch)
    return {{"loss": batch[1]}}
ms.fit(train, dataset, epochs=2, state={{"w": w}}, strategy=strategy, verbose=False,  # here
       directory="run")
""",
        UserWarning,
        r"lack the state of Adam,.*state=\{\.\.\., 'optimizer': optimizer\}",
    ),
    "weights that are no variables": Mistake(
        f"""{MODEL}
weights = np.zeros(3)
def step(x, y):
    weights[:] -= x.T @ (x @ weights - y)
{LOOP}
    strategy.run(step, args=batch)
with strategy.scope():
    ms.Checkpoint(model={{"w": weights}}).save("run/ckpt")  # here
""",
        UserWarning,
        r"on ranks 1, 2 'model/w' differs from rank 0.*strategy\.broadcast",
    ),
    "other settings in the same directory": Mistake(
        f"""{MODEL}{STEP.replace("  # here", "")}
def train(batch):
    step(*batch)
    return {{"loss": batch[1]}}
for rate in (0.1, 0.2):
    ms.fit(train, dataset, epochs=1, state={{"w": w}}, strategy=strategy, verbose=False,  # here
           directory="run", settings={{"rate": rate}})
""",
        ValueError,
        r"begun with rate=0\.1, not 0\.2\. Give the same settings, or another directory",
    ),
    "a model of PyTorch that is not replicated": Mistake(
        f"""{HEAD}
import torch
strategy = ms.MirroredStrategy()
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def step(x):
    optimizer.zero_grad()
    losses = model(torch.from_numpy(x)).square()[:, 0]
    losses.sum().backward()
    optimizer.step()
    return {{"loss": losses}}
data, state = ms.Dataset(np.eye(3, dtype="f")).batch(3), {{"model": model, "sgd": optimizer}}
ms.fit(step, data, epochs=1, state=state, strategy=strategy, verbose=False)  # here
""",
        UserWarning,
        r"on ranks 1, 2 'model/bias', 'model/weight' differ from rank 0.*torch\.replicate\(model",
    ),
}


# Programs that look like mistakes and are none: nothing is seen.
RIGHT = {
    "a step": f"""{MODEL}{STEP}
{LOOP}
    strategy.run(step, args=batch)
""",
    "an update outside of run, by the gradient of all": f"""{MODEL}{STEP}
for batch in dataset:
    pass
for _ in range(3):
    step(x, y)
""",
    "orders of the ranks on purpose": f"""{MODEL.replace("seed=1", "seed=strategy.rank")}{STEP}
for batch in dataset:
    strategy.run(step, args=batch)
""",
    "layers that the first run creates": f"""{HEAD}
strategy = ms.MirroredStrategy()
for trial in range(2):  # the second one drops the model of the first
    model = []
    def step():
        if not model:
            model.extend(ms.Variable(np.zeros(3), name=f"w{{i}}") for i in range(3))
        model[0].assign_add(np.ones(3))
    for _ in range(3):
        strategy.run(step)
""",
    "variables that the program keeps": f"""{HEAD}
strategy, kept = ms.MirroredStrategy(), []
for _ in range(4):
    strategy.run(lambda: kept.append(ms.Variable(np.zeros(3), name="w")))
""",
    "batches of other lengths in a list": f"""{HEAD}
batches = [np.zeros((4, 2)), np.zeros((4, 5)), np.zeros((1, 3))]
for batch in ms.Dataset(batches):
    pass
""",
    "replicas that count alike, with or without rows": f"""{MODEL}
{STEP.replace("len(x))  # here", "1)")}
{LOOP}
    strategy.run(step, args=batch)
""",
    "losses in a column": f"""{MODEL}
ms.evaluate(lambda batch: {{"loss": (batch[0] @ w - batch[1])[:, None] ** 2}}, dataset,
            strategy=strategy)
""",
    "a name that is no variable": f"""{MODEL}
def step(x, y):
    try:
        total = total + 1
    except UnboundLocalError as error:
        assert "assign_sub" not in str(error)
{LOOP}
    strategy.run(step, args=batch)
""",
    "a fit that is continued": f"""{MODEL}{STEP}
def train(batch):
    step(*batch)
    return {{"loss": batch[1]}}
weights = np.zeros(3)  # equal on all ranks
for epochs in (1, 1, 2):
    ms.fit(train, dataset, epochs=epochs, state={{"w": w, "rest": [weights]}}, strategy=strategy,
           directory="run", verbose=False)
""",
    "a fit of an array that all ranks write alike": f"""{HEAD}
strategy = ms.MirroredStrategy()
w = np.zeros(())
def step(x):
    w[...] += ms.get_replica_context().all_reduce("mean", x.sum(), weight=len(x))
    return {{"loss": x}}
data = ms.Dataset(np.arange(8.0)).batch(3)
ms.fit(step, data, epochs=1, state={{"w": w}}, strategy=strategy, verbose=False)
""",
    "a fit that updates in its fourth row": f"""{MODEL.replace("0.1", "0.1, accumulate=4")}{STEP}
def train(batch):
    step(*batch)
    return {{"loss": batch[1]}}
ms.fit(train, dataset, epochs=2, state={{"w": w}}, strategy=strategy, verbose=False,
       validate_every="1 step")
""",
    "a fit with the learning rate 0 in its first row": f"""\
{MODEL.replace("0.1", "lambda step: 0.1 * step")}{STEP}
def train(batch):
    step(*batch)
    return {{"loss": batch[1]}}
ms.fit(train, dataset, epochs=2, state={{"w": w}}, strategy=strategy, verbose=False,
       validate_every="1 step")
""",
}
# Mistakes that only jobs of MPI show.
JOB_MISTAKES = {
    "a call of MPI on rank 0": Mistake(
        f"""{HEAD}
import os
from mpi4py import MPI
MPI.COMM_WORLD.barrier()
os.environ |= {{"MPISTRAT_WARN": "1", "MPISTRAT_TIMEOUT": "3"}}
strategy = ms.MirroredStrategy()
if strategy.rank == 0:
    MPI.COMM_WORLD.barrier()  # here
strategy.all_reduce("sum", 1)
""",
        "nothing moved for 3 s",
        r"All ranks have to make the same calls, those of MPI itself too",
        size=2,
    ),
    "a pool of forked processes": Mistake(
        f"""{HEAD}
import multiprocessing
strategy = ms.MirroredStrategy()
def score(x):
    return strategy.all_reduce("sum", x)
with multiprocessing.get_context("fork").Pool(2) as pool:
    pool.map(score, [1.0, 2.0])  # here
""",
        "StrategyError",
        r"Let it compute, and its parent call strategies",
        size=2,
    ),
    "torchrun": Mistake(
        f"""{HEAD}
strategy = ms.MirroredStrategy()  # here
""",
        "PreflightError: torchrun started 2 processes",
        r"`mpistrat run -n 2",
        size=1,
    ),
}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}


def marked_lines(source):
    return {number for number, line in enumerate(source.splitlines(), 1) if "# here" in line}


def run_program(source, size, action="always"):
    """Run a program on ranks that are threads; return the errors by rank, and the warnings.

    The action is that of `warnings.simplefilter` for the warnings of this library.
    """
    code = compile(source, "newcomer.py", "exec")
    linecache.cache["newcomer.py"] = len(source), None, source.splitlines(True), "newcomer.py"
    errors = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter(action, UserWarning)
        try:
            run_ranks(lambda comm: exec(code, {"__name__": "__main__"}), size)
        except RanksFailed as failure:
            errors = failure.errors
    return errors, caught


@pytest.mark.beside
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_sees_nothing(name, size, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    errors, caught = run_program(RIGHT[name].lstrip(), size)
    assert errors == {}
    assert [str(warning.message) for warning in caught] == []


@pytest.fixture
def mistake(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "torch" in MISTAKES[name].program:
        pytest.importorskip("torch", reason="wants PyTorch: pip install 'mpistrat[torch]'")
    return MISTAKES[name]._replace(program=MISTAKES[name].program.lstrip())


@pytest.mark.beside
@pytest.mark.parametrize("name", MISTAKES)
def test_every_rank_raises_with_the_line_and_the_cure(mistake):
    """So it is with warnings where they are errors."""
    errors, _ = run_program(mistake.program, mistake.size, action="error")
    errors = {rank: e for rank, e in errors.items() if not isinstance(e, SystemExit)}
    assert set(errors) == set(mistake.raising_ranks)
    for error in errors.values():
        assert isinstance(error, mistake.outcome)
        assert re.search(mistake.cure, str(error), re.DOTALL)
        frames = traceback.extract_tb(error.__traceback__)
        lines = {frame.lineno for frame in frames if frame.filename == "newcomer.py"}
        lines |= {int(line) for line in re.findall(r"newcomer\.py:(\d+)", str(error))}
        assert lines & marked_lines(mistake.program)


@pytest.mark.beside
@pytest.mark.parametrize("name", [n for n, m in MISTAKES.items() if issubclass(m.outcome, Warning)])
def test_a_warning_comes_once_with_the_line_and_the_cure(mistake):
    errors, (warning,) = run_program(mistake.program, mistake.size)
    assert errors == {}
    assert warning.category is mistake.outcome
    assert re.search(mistake.cure, str(warning.message), re.DOTALL)
    assert warning.filename == "newcomer.py"
    assert warning.lineno in marked_lines(mistake.program)


@pytest.mark.parametrize("name", JOB_MISTAKES)
def test_a_job_ends_with_the_line_and_the_cure(name, tmp_path):
    mistake = JOB_MISTAKES[name]
    source = mistake.program.lstrip()
    (tmp_path / "newcomer.py").write_text(source)
    words, environment = [sys.executable, "newcomer.py"], child_environment(TORCHRUN)
    if mistake.size > 1:
        call = command(mistake.size, words)
        words, environment = call.argv, call.build_environment()
    done = subprocess.run(
        words,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode, output
    assert mistake.outcome in output
    assert re.search(mistake.cure, output), output
    lines = {int(line) for line in re.findall(r"newcomer\.py(?:\", line |:)(\d+)", output)}
    assert lines & marked_lines(source), output

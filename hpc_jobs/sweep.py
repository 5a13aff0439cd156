"""Trials of a sweep in one job: each group of ranks trains with a learning rate of its own.

    mpistrat run -n 4 hpc_jobs/sweep.py --groups 2 --checkpoint runs/sweep 0.05 0.1 0.2 0.4

A group is a communicator, and every trial a strategy on it. What fails in one trial is printed and
the group goes on to its next trial; the other groups do not notice. Started again, the trials that
have finished say what they came to, and the others go on after their last epoch.
"""

import argparse
import sys

import numpy as np
from mpi4py import MPI
from sklearn.datasets import load_digits

import mpistrat as ms

TRAINING = 1437  # of the 1,797 images; the others tell how good it is


def train(strategy, rate, epochs, directory):
    """Train a softmax classifier of digits; return its accuracy on images that it has not seen."""
    if not 0 < rate < 10:
        raise ValueError(f"a learning rate of {rate} diverges")
    images, digits = load_digits(return_X_y=True)
    images = images / 16.0
    with strategy.scope():
        weights = ms.Variable(np.zeros((64, 10)))
        done = ms.Variable(0)
        checkpoint = ms.Checkpoint(weights=weights, done=done)
        manager = ms.CheckpointManager(checkpoint, directory, max_to_keep=1)
        manager.restore_or_initialize()
    data = ms.Dataset((images[:TRAINING], digits[:TRAINING])).shuffle(seed=1).batch(64)
    data.begin_after(int(done.numpy()) - 1)
    batches = strategy.experimental_distribute_dataset(data)

    def step(x, y):
        scores = x @ weights.numpy()
        chances = np.exp(scores - scores.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        gradient = x.T @ (chances - np.eye(10)[y]) / max(len(x), 1)
        context = ms.get_replica_context()
        weights.assign_sub(rate * context.all_reduce("mean", gradient, weight=len(x)))

    with strategy.scope():
        while int(done.numpy()) < epochs:
            for x, y in batches:
                strategy.run(step, args=(x, y))
            done.assign_add(1)
            manager.save()
    guesses = (images[TRAINING:] @ weights.numpy()).argmax(axis=1)
    return float((guesses == digits[TRAINING:]).mean())


def main():
    """Run the trials; return the exit code."""
    parser = argparse.ArgumentParser(description="Train with several learning rates.")
    parser.add_argument("rates", type=float, nargs="+", help="learning rates, one for each trial")
    parser.add_argument("--groups", type=int, default=2, help="trials that run at once")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--checkpoint", default="runs/sweep", help="each trial has a part of it")
    args = parser.parse_args()

    ms.MirroredStrategy()  # of all ranks, so that each group is seen by the others
    world = MPI.COMM_WORLD
    groups = min(args.groups, world.size)
    group = world.rank * groups // world.size  # neighbours share a node
    part = world.Split(group, world.rank)
    failed = False
    for number in range(group, len(args.rates), groups):
        rate, strategy = args.rates[number], ms.MirroredStrategy(comm=part)
        try:
            directory = f"{args.checkpoint}/rate-{rate:g}"
            accuracy = train(strategy, rate, args.epochs, directory)
            said = f"test accuracy {accuracy:.4f}"
        except Exception as error:  # the same on all ranks of this group
            failed, said = True, f"failed: {type(error).__name__}: {error}"
        if part.rank == 0:
            # With its newline in one piece, as other groups print at the same time.
            line = f"trial {number}: rate {rate:g}, ranks {part.size}: {said}\n"
            print(line, end="", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""A job that saves as it goes and continues where it stopped; ``--forget`` leaves out its momentum.

``seen`` counts how many times each example was used.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

import mpistrat as ms

EXAMPLES, BATCH, EVERY = 48, 4, 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--pause", type=float, default=0.02)
    parser.add_argument("--forget", action="store_true")
    parser.add_argument("--leave", action="store_true")
    args = parser.parse_args()
    strategy = ms.MirroredStrategy()
    noise = ms.random.stream(3, "noise")
    with strategy.scope():
        weights = ms.Variable(np.ones(5), name="weights")
        momentum = ms.Variable(np.zeros(5), name="momentum")
        seen = ms.Variable(np.zeros(EXAMPLES, np.int64), name="seen")
        done = ms.Variable(0, name="done")
        begun = ms.Variable(0, name="begun")
    saved = dict(weights=weights, seen=seen, done=done)
    if not args.forget:
        saved["momentum"] = momentum
    checkpoint = ms.Checkpoint(**saved)
    manager = ms.CheckpointManager(checkpoint, args.checkpoint, max_to_keep=2)
    handler = None
    if args.leave:
        config = ms.experimental.TerminationConfig(signals=["SIGUSR1"])
        handler = ms.experimental.PreemptionCheckpointHandler(
            None, checkpoint, args.checkpoint, config
        )
        # Tells the drill that from now on a notice is heard.
        ms.CheckpointManager(
            ms.Checkpoint(begun=begun), args.checkpoint, 1, checkpoint_name="begun"
        ).save()
    else:
        manager.restore_or_initialize()

    def step():
        context = ms.get_replica_context()
        first = int(done.numpy()) * BATCH
        mine = np.arange(first, first + BATCH)[strategy.rank :: context.num_replicas_in_sync]
        mine %= EXAMPLES
        drawn = noise.normal(mine, 5, step=int(done.numpy()))
        gradient = context.all_reduce("sum", (drawn - weights.numpy()).sum(0))
        counts = context.all_reduce("sum", np.bincount(mine, minlength=EXAMPLES))
        momentum.assign(0.9 * momentum.numpy() + gradient)
        weights.assign_add(0.01 * momentum.numpy())
        seen.assign_add(counts)
        done.assign_add(1)

    while int(done.numpy()) < args.steps:
        time.sleep(args.pause)
        handler.run(strategy.run, step) if handler else strategy.run(step)
        if not handler and int(done.numpy()) % EVERY == 0:
            manager.save()
    if handler:
        ms.Checkpoint(**saved).write(f"{args.checkpoint}/last-1")


if __name__ == "__main__":
    main()

"""Fit a line with replicas placed by hand, and all steps in one call: TPUStrategy, mpistrat."""

import numpy as np

import mpistrat as ms
from mpistrat.compat.v1 import distribute as tf_distribute

resolver = ms.cluster_resolver.TPUClusterResolver(tpu="")
topology = ms.Topology.read()  # there: tf.tpu.experimental.initialize_tpu_system(resolver)
backwards = list(reversed(range(topology.num_ranks)))
assignment = ms.DeviceAssignment(topology, backwards)  # replica 0 is the last rank
strategy = tf_distribute.experimental.TPUStrategy(
    resolver, steps_per_run=3, device_assignment=assignment
)

x = np.arange(10.0)
with strategy.scope():
    w = ms.Variable(0.0)


def replica(batch):
    x, y = batch
    error = w * x - y
    context = ms.get_replica_context()
    gradient = error @ x / max(len(x), 1)
    w.assign_sub(0.01 * context.all_reduce("mean", gradient, weight=len(x)))
    return error @ error


def step(context, batch):
    squares = strategy.run(replica, args=(batch,))
    context.set_last_step_output("squares", squares, reduce_op="SUM")


dataset = ms.Dataset((x, 3 * x)).batch(4)
steps = iter(strategy.experimental_distribute_dataset(dataset))
done = strategy.extended.experimental_run_steps_on_iterator(step, steps)

if strategy.extended.should_save_summary:  # replica 0
    print(float(w.numpy()), float(done.last_step_outputs["squares"]))

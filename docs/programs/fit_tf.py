"""Fit a line on every replica: tf.distribute."""

import tensorflow as tf

strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    w = tf.Variable(0.0)


def gradients(batch):
    x, y = batch
    return (w * x - y) * x  # one for each example


x = tf.range(10.0)
dataset = tf.data.Dataset.from_tensor_slices((x, 3.0 * x)).batch(4)
for batch in strategy.experimental_distribute_dataset(dataset):
    example_gradients = strategy.run(gradients, args=(batch,))
    gradient = strategy.reduce(tf.distribute.ReduceOp.MEAN, example_gradients, axis=0)
    w.assign_sub(0.01 * gradient)

print(float(w.numpy()))

"""What programs ask of the objects that the tf module gives them, as TensorFlow answers it."""

from __future__ import annotations

import pytest

import mpistrat as ms
from mpistrat.compat import tf
from mpistrat.testing import run_ranks

DISTRIBUTED = tf.types.experimental.distributed


@pytest.mark.parametrize("n", [1, 2])
def test_variables_of_replicas_count_as_values_of_replicas(n):
    """The classes of TensorFlow 2.21: MirroredVariable, SyncOnReadVariable, ResourceVariable."""

    def program(comm):
        with tf.distribute.MirroredStrategy().scope():
            copies = tf.Variable(1.0)
            sums = tf.Variable(1.0, synchronization=tf.VariableSynchronization.ON_READ)
        with tf.distribute.OneDeviceStrategy("cpu").scope():
            one = tf.Variable(1.0)
        kinds = (tf.distribute.DistributedValues, DISTRIBUTED.Mirrored, DISTRIBUTED.PerReplica)
        given = (copies, sums, one, ms.PerReplica(1), ms.Mirrored(1), 1.0)
        return [[isinstance(value, kind) for kind in kinds] for value in given]

    wanted = [
        [True, True, False],
        [True, False, False],
        [False, False, False],
        [True, False, True],
        [True, True, False],
        [False, False, False],
    ]
    assert run_ranks(program, n) == [wanted] * n

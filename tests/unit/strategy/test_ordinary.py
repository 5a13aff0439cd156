"""Variables of one replica alone are ordinary: kinds that mean nothing there are no errors."""

from __future__ import annotations

import contextlib
import copy

import numpy as np
import pytest
from every import every

import mpistrat as ms

KINDS = ms.VariableAggregation
SYNCHRONIZATIONS = ms.VariableSynchronization


@pytest.fixture(params=["no scope", "one device"])
def scoped(request):
    """How a program makes a variable, and how it calls a function on it."""
    if request.param == "no scope":
        return contextlib.nullcontext, lambda fn: fn()
    strategy = ms.OneDeviceStrategy("cpu:0")
    return strategy.scope, strategy.run


@every("aggregation", list(KINDS))
@every("synchronization", list(SYNCHRONIZATIONS))
def test_every_kind_can_be_made_written_and_read(scoped, synchronization, aggregation):
    scope, run = scoped
    with scope():
        v = ms.Variable(3, synchronization=synchronization, aggregation=aggregation)
    run(lambda: v.assign_add(2))
    run(lambda: v.assign_sub(1))
    assert (v.numpy(), v.dtype) == (4, np.int64)
    with scope():
        v.assign(9)
        assert copy.deepcopy(v).numpy() == 9
    assert run(v.read_value) == 9


def test_where_there_are_replicas_they_are():
    strategy = ms.MirroredStrategy()
    for kind in ({"aggregation": KINDS.MEAN}, {"synchronization": SYNCHRONIZATIONS.NONE}):
        with strategy.scope(), pytest.raises(ValueError, match=r"aggregation MEAN|drift apart"):
            ms.Variable(3, **kind)

"""Short names beside those of tf.distribute: `distribute`, `size`, `is_chief`, `print`."""

from __future__ import annotations

import numpy as np
import pytest

import mpistrat as ms
from mpistrat import advice
from mpistrat.strategy.replica_context import ReplicaContext
from mpistrat.strategy.strategy import Strategy
from mpistrat.testing import run_ranks


@pytest.mark.parametrize("size", [1, 3])
def test_they_are_the_long_ones(size, capsys):
    def program(comm):
        strategy = ms.MirroredStrategy()
        dataset = ms.Dataset(np.arange(6)).batch(3)
        rows = [strategy.gather(batch, 0).tolist() for batch in strategy.distribute(dataset)]
        strategy.print("rank", comm.rank)
        assert strategy.size == strategy.num_replicas_in_sync == comm.size
        assert strategy.is_chief == strategy.extended.should_save_summary == (comm.rank == 0)
        return rows

    assert run_ranks(program, size) == [[[0, 1, 2], [3, 4, 5]]] * size
    assert capsys.readouterr().out == "rank 0\n"


def test_one_device_has_no_other_chief():
    def program(comm):
        strategy = ms.OneDeviceStrategy("cpu")
        return strategy.size, strategy.rank

    assert run_ranks(program, 2) == [(1, 0)] * 2


def test_no_advice_is_for_a_name_that_exists():
    rows = ((advice.STRATEGY_REPLACEMENTS, Strategy), (advice.CONTEXT_REPLACEMENTS, ReplicaContext))
    assert [name for names, kind in rows for name in names if hasattr(kind, name)] == []

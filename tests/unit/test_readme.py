"""The program in README runs as it stands there, and gives the same numbers at every size."""

import re
from pathlib import Path

import numpy as np
import pytest

from mpistrat.testing import run_ranks

README = Path(__file__).parents[2] / "README.md"


def weights(comm):
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(program, str(README), "exec"), names)
    return names["w"].numpy(), names["loss"]


@pytest.fixture(scope="module")
def alone():
    return run_ranks(weights, 1)[0]


def test_its_loss_is_a_number(alone):
    w, loss = alone
    assert w.shape == (3,)
    assert np.isfinite(loss)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_size_gives_the_same(size, alone):
    for w, loss in run_ranks(weights, size):
        np.testing.assert_allclose(w, alone[0], rtol=1e-11)
        np.testing.assert_allclose(loss, alone[1], rtol=1e-11)

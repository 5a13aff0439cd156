"""Libraries over JAX on two ranks: modules of equinox, and numpyro's variational inference."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.launch.mpi_libraries import find_launcher
from mpistrat.launch.process import run_job
from mpistrat.testing import run_ranks

PROGRAM = Path(__file__).parent / "programs" / "infer_weights.py"

jax = pytest.importorskip("jax", reason="wants JAX: pip install 'mpistrat[jax]'")
import jax.numpy as jnp  # noqa: E402

import mpistrat.jax as mj  # noqa: E402


@pytest.mark.parametrize("size", [1, 2, 3])
def test_functions_in_a_tree_stay_and_arrays_are_those_of_replica_0(size):
    def program(comm):
        def activation(x):
            return x + comm.rank

        with ms.MirroredStrategy(comm=comm).scope():
            model = {"w": jnp.full(2, comm.rank), "key": jax.random.key(comm.rank), "f": activation}
            copy = mj.replicate(model)
        assert copy["f"] is activation
        return copy["w"].tolist(), jax.random.key_data(copy["key"]).tolist()

    expected = [0, 0], jax.random.key_data(jax.random.key(0)).tolist()
    assert run_ranks(program, size) == [expected] * size


def test_a_tree_of_functions_alone():
    with ms.MirroredStrategy().scope():
        assert mj.replicate([jnp.tanh]) == [jnp.tanh]


def test_a_module_of_equinox():
    equinox = pytest.importorskip("equinox")

    def program(comm):
        model = equinox.nn.MLP(3, 1, 8, 2, key=jax.random.key(comm.rank))
        with ms.MirroredStrategy(comm=comm).scope():
            return float(mj.replicate(model)(jnp.ones(3))[0])

    alone = equinox.nn.MLP(3, 1, 8, 2, key=jax.random.key(0))
    assert run_ranks(program, 2) == [float(alone(jnp.ones(3))[0])] * 2


@pytest.mark.job
@pytest.mark.timeout(300)
def test_variational_inference_of_numpyro(tmp_path):
    """In processes, for numpyro has one stack of handlers for all threads."""
    pytest.importorskip("numpyro")
    pytest.importorskip("optax")
    launcher, _ = find_launcher()
    output_path = tmp_path / "output"
    with output_path.open("wb") as output:
        command = launcher.build_command(2, [sys.executable, str(PROGRAM)])
        outcome = run_job(command, 240, output)
    assert outcome.code == 0, output_path.read_text()
    numbers = [float(word) for word in output_path.read_text().splitlines()[-1].split()]
    first_rank, second_rank, exact = np.reshape(numbers, (3, 2)).tolist()
    assert first_rank == second_rank
    np.testing.assert_allclose(first_rank, exact, atol=5e-3)

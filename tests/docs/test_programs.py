"""The programs side by side print the same number, wherever they can run."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from page_programs import DOCS, PROGRAMS, read_sources

import mpistrat
import mpistrat as ms
from mpistrat.config import launched_by
from mpistrat.launch.mpi_libraries import find_launcher
from mpistrat.launch.process import run_job

LONGEST = 240  # seconds; a job takes a few
HERE = Path(mpistrat.__file__).parents[1]  # so that the ranks import what is tested

pytestmark = [
    pytest.mark.timeout(LONGEST + 30),
    pytest.mark.skipif(launched_by() is not None, reason="this process is itself a rank of a job"),
]

SIZES = pytest.mark.parametrize(
    "size", [2, *(pytest.param(size, marks=pytest.mark.mpi) for size in (1, 3))]
)

# What the programs of others print, too, is of the pages alone.
LIBRARIES = pytest.mark.parametrize(
    "library", ["mpistrat", pytest.param("mpi4py", marks=pytest.mark.mpi)]
)


def fitted():
    """The fit in plain NumPy, on whole batches."""
    x, w = np.arange(10.0), 0.0
    for first in range(0, 10, 4):
        batch = x[first : first + 4]
        w -= 0.01 * np.mean((w * batch - 3 * batch) * batch)
    return w


def gathered(size):
    return sum(2 * (rank + 1) ** 2 for rank in range(size))


def printed(program, size, folder):
    """What the ranks of a job print, as numbers."""
    launcher, _ = find_launcher()
    output = folder / "printed"
    command = launcher.build_command(size, [sys.executable, str(program)])
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    # Buffered, so that a line is one write: launchers may mix what ranks write in several.
    # With a number of threads, or rank 0 would say which share of the cores each rank has.
    told = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "", "OMP_NUM_THREADS": "1"}
    command = command._replace(env={**command.env, **told})
    with output.open("wb") as file:
        outcome = run_job(command, LONGEST, file, cwd=folder)
    text = output.read_text(errors="replace")
    assert outcome.code == 0, text
    return [float(word) for word in text.split()]


@SIZES
@LIBRARIES
def test_fit(library, size, tmp_path):
    [w] = printed(PROGRAMS / f"fit_{library}.py", size, tmp_path)
    np.testing.assert_allclose(w, fitted(), rtol=1e-12)


@pytest.mark.skipif(importlib.util.find_spec("optax") is None, reason="wants jax and optax")
@SIZES
@pytest.mark.parametrize("program", ["fit_jax", "fit_jax_inside"])
def test_fit_with_jax(program, size, tmp_path):
    [w] = printed(PROGRAMS / f"{program}.py", size, tmp_path)
    np.testing.assert_allclose(w, fitted(), rtol=1e-6)  # float32


@pytest.mark.mpi
@SIZES
def test_fit_with_replicas_placed_by_hand_and_all_steps_in_one_call(size, tmp_path):
    w, squares = printed(PROGRAMS / "fit_tpu.py", size, tmp_path)
    np.testing.assert_allclose(w, fitted(), rtol=1e-12)
    # Of the last step, whose batch is 8 and 9, with w as the step found it.
    before = (w - 0.01 * 3 * np.mean(np.square([8, 9]))) / (1 - 0.01 * np.mean(np.square([8, 9])))
    np.testing.assert_allclose(squares, np.sum(np.square((before - 3) * np.array([8, 9]))))


@pytest.mark.mpi
@SIZES
@LIBRARIES
def test_gather(library, size, tmp_path):
    assert printed(PROGRAMS / f"gather_{library}.py", size, tmp_path) == [gathered(size)]


def fitted_in_epochs():
    """The fit in plain NumPy with the order of each epoch, after each."""
    dataset, w = ms.Dataset(np.arange(10.0)).shuffle(seed=1).batch(4), 0.0
    while True:
        for batch in dataset:
            w -= 0.01 * np.mean((w * batch - 3 * batch) * batch)
        yield w


def test_a_program_goes_on_where_its_last_start_stopped(tmp_path):
    for epochs, size, w in zip([1, 2, 3], [2, 1, 3], fitted_in_epochs(), strict=False):
        found = printed(PROGRAMS / "save_mpistrat.py", size, tmp_path)
        np.testing.assert_allclose(found, [epochs, w], rtol=1e-12)
    assert {path.name for path in tmp_path.iterdir()} == {"saved", "printed"}
    assert {path.name for path in (tmp_path / "saved").glob("ckpt*")} == {
        "ckpt-2.npz",
        "ckpt-3.npz",
    }


@pytest.mark.mpi
def test_a_program_that_may_be_told_to_end(tmp_path):
    *_, w = itertools.islice(fitted_in_epochs(), 4)
    found = printed(PROGRAMS / "preempt_mpistrat.py", 2, tmp_path)
    np.testing.assert_allclose(found, [12, w], rtol=1e-12)
    # Not the directory of save_mpistrat.py, which saves other variables.
    assert '"saved"' not in (PROGRAMS / "preempt_mpistrat.py").read_text()


def trained():
    """The same steps with gradients by central differences, on whole batches."""
    x = np.linspace(0.0, 1.0, 10)
    y = 2 * (x - x.mean()) ** 2

    def loss(weights, x, y):
        layer = np.tanh(weights[0] * x)
        return np.mean((weights[1] * (layer - layer.mean()) + weights[2] - y) ** 2)

    weights, h, before = np.array([0.5, 1.0, 0.0]), 1e-5, 0.0
    for step in range(60):
        rows = slice(4 * (step % 3), 4 * (step % 3) + 4)
        given, before = (x[rows], y[rows]), loss(weights, x[rows], y[rows])
        slopes = [loss(weights + d, *given) - loss(weights - d, *given) for d in h * np.eye(3)]
        weights = weights - 0.5 * np.array(slopes) / (2 * h)
    return [*weights, before]


@SIZES
def test_training_with_a_backward_pass_through_a_collective(size, tmp_path):
    found = printed(PROGRAMS / "train_vjp.py", size, tmp_path)
    np.testing.assert_allclose(found, trained(), rtol=1e-6)


@SIZES
def test_a_minimum_of_divided_rows(size, tmp_path):
    pytest.importorskip("scipy")
    found = printed(PROGRAMS / "solve_minimize.py", size, tmp_path)
    random = np.random.default_rng(0)
    x = random.normal(size=(200, 3))
    y = np.where(x @ np.array([1.0, -2.0, 0.5]) + random.normal(size=200) > 0, 1, -1)
    w = np.zeros(3)
    for _ in range(50):  # Newton's method
        p = 1 / (1 + np.exp(y * (x @ w)))
        w -= np.linalg.solve(x.T @ (x * (p * (1 - p))[:, None]) + np.eye(3), w - x.T @ (y * p))
    np.testing.assert_allclose(found, w, rtol=1e-4)


@SIZES
def test_eigenvalues_of_divided_rows(size, tmp_path):
    pytest.importorskip("scipy")
    found = printed(PROGRAMS / "solve_eigsh.py", size, tmp_path)
    x = np.random.default_rng(0).normal(size=(500, 40)) * np.arange(1.0, 41.0)
    np.testing.assert_allclose(found, np.linalg.eigvalsh(x.T @ x / 500)[-3:], rtol=1e-10)


@SIZES
def test_a_penalty_that_ranks_have_chosen_together(size, tmp_path):
    pytest.importorskip("sklearn")
    best, score = printed(PROGRAMS / "solve_sklearn.py", size, tmp_path)
    linear, selection = (
        importlib.import_module(f"sklearn.{n}") for n in ("linear_model", "model_selection")
    )
    random = np.random.default_rng(0)
    x = random.normal(size=(120, 10))
    y = x @ random.normal(size=10) + random.normal(size=120)
    x, x_test, y, y_test = selection.train_test_split(x, y, test_size=20, random_state=0)
    search = selection.GridSearchCV(
        linear.Ridge(),
        {"alpha": np.logspace(-2, 3, 11)},
        cv=selection.KFold(5, shuffle=True, random_state=0),
    ).fit(x, y)
    np.testing.assert_allclose(best, search.best_params_["alpha"])
    np.testing.assert_allclose(score, search.score(x_test, y_test), rtol=1e-12)


@SIZES
def test_fit_written_for_tensorflow_with_its_import_changed(size, tmp_path):
    text = (PROGRAMS / "fit_tf.py").read_text()
    assert text.count("import tensorflow as tf\n") == 1
    changed = tmp_path / "fit.py"
    changed.write_text(
        text.replace("import tensorflow as tf\n", "from mpistrat.compat import tf\n")
    )
    found = printed(changed, size, tmp_path)
    assert len(found) == size
    np.testing.assert_allclose(found, fitted(), rtol=1e-6)  # float32


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize("size", [1, 2])
def test_fit_with_torch(size):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    env |= {"WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    call = [sys.executable, str(PROGRAMS / "fit_torch.py")]
    ranks = [
        subprocess.Popen(call, env={**env, "RANK": str(rank)}, text=True, stdout=subprocess.PIPE)
        for rank in range(size)
    ]
    try:
        texts = [rank.communicate(timeout=LONGEST)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * size
    np.testing.assert_allclose([float(word) for word in texts[0].split()], [fitted()], rtol=1e-12)


@pytest.mark.parametrize("path", sorted(PROGRAMS.glob("*.py")), ids=lambda path: path.name)
def test_every_program_is_on_the_page_and_compiles(path):
    compile(path.read_text(), str(path), "exec")
    assert any(path.read_text() in read_sources(page.stem) for page in DOCS.glob("*.md"))


@pytest.mark.parametrize("page", sorted(path.stem for path in DOCS.glob("*.md")))
def test_every_whole_program_of_a_page_is_a_file(page):
    """A block that begins with a docstring, so that no page has an older text of a program."""
    file_texts = [path.read_text() for path in PROGRAMS.glob("*.py")]
    whole_programs = [source for source in read_sources(page) if source.startswith('"""')]
    assert [source for source in whole_programs if source not in file_texts] == []

"""The benchmarks run, at their quickest, and tell wrong results and other paths from right ones."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import mpistrat
from mpistrat.config import launched_by
from mpistrat.launch.mpi_libraries import find_launcher
from mpistrat.launch.process import run_job
from mpistrat.testing import run_ranks

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
PACKAGE = Path(mpistrat.__file__).parent
LONGEST = 240  # seconds; a job takes a few


def alone(test):
    """Mark a test of a job, which takes seconds."""
    unless = pytest.mark.skipif(launched_by() is not None, reason="this process is a rank of a job")
    return pytest.mark.nightly(unless(test))


pytestmark = pytest.mark.timeout(LONGEST + 30)
SIZES = pytest.mark.parametrize(
    "size", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))]
)


def imported(name):
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


common = imported("common")


def run(name, size, folder, *options):
    """Run one benchmark on `size` ranks; return its exit code, its rows, and what it printed."""
    program = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--quick", *options]
    written, printed = folder / "found.json", folder / "printed"
    program += ["--json", str(written)]
    drawn = importlib.util.find_spec("matplotlib") is not None
    drawn = drawn and name not in (
        "overlap",
        "jax_step",
        "step_counts",
        "step_parts",
    )  # they have no picture
    if drawn:
        program += ["--plot", str(folder / "picture.png")]
    launcher, _ = find_launcher()
    command = launcher.build_command(size, program)
    if name == "start":  # starts its jobs itself
        command = command._replace(argv=(*program, "--ranks", str(size)))
    path = os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))
    command = command._replace(env={**command.env, "PYTHONPATH": path})
    with printed.open("wb") as file:
        outcome = run_job(command, LONGEST, file, cwd=folder)
    text = printed.read_text(errors="replace")
    assert written.exists(), text
    if drawn:
        assert (folder / "picture.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads(written.read_text())
    assert found["ranks"] == size
    assert found["mpistrat"] == mpistrat.__version__
    return outcome.code, found["rows"], text


# The jobs


@alone
@SIZES
def test_latency(size, tmp_path):
    code, rows, text = run("latency", size, tmp_path)
    assert code == 0, text
    sizes = sorted({row["bytes"] for row in rows})
    assert sizes[0] == 4
    ways = {"fresh", "out=", "arena", "raw in place", "raw into"}
    for nbytes in sizes:
        assert ways <= {row["way"] for row in rows if row["bytes"] == nbytes}
    for row in rows:
        assert row["count"] == row["bytes"] // 4
        bandwidth = row["bytes"] / (row["time_us"] * 1e3)
        np.testing.assert_allclose(row["algbw_gbps"], bandwidth, rtol=1e-9)
        np.testing.assert_allclose(row["busbw_gbps"], bandwidth * 2 * (size - 1) / size, rtol=1e-9)
        assert (row["path"] != "") == (row["way"] in ("fresh", "out=", "arena"))
    paths = {row["path"] for row in rows if row["path"]}
    assert paths == ({"small", "direct", "node", "in place"} if size > 1 else {"small", "alone"})


@alone
@pytest.mark.parametrize("size", [2])
def test_overlap(size, tmp_path):
    code, rows, text = run("overlap", size, tmp_path, "--nodes", "2")
    assert code == 0, text
    assert [row["where"] for row in rows] == ["ordinary", "buffers"]
    assert all(row[f"{name}_s"] > 0 for row in rows for name in ("comm", "compute", "both", "open"))


@alone
@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed")
@SIZES
def test_jax_step(size, tmp_path):
    code, rows, text = run("jax_step", size, tmp_path)
    assert code == 0, text
    ways = {"numpy out=", "numpy", "jax", "jax tree", "jax in jit"}
    for nbytes in (8, 65_536, 1 << 20):
        assert {row["way"] for row in rows if row["bytes"] == nbytes} == ways
    assert all(row["ms"] > 0 for row in rows)


@alone
@SIZES
def test_gathers(size, tmp_path):
    code, rows, text = run("gathers", size, tmp_path)
    assert code == 0, text
    layouts = {row["layout"] for row in rows}
    assert layouts == {"even", "linear", "one", "few"}
    for layout in layouts:
        counts = next(r["counts"] for r in rows if r["layout"] == layout and r["bytes"] == 64 * 256)
        assert len(counts) == size
        assert sum(counts) == 256
        if layout == "even":
            assert max(counts) - min(counts) <= 1
        if layout == "linear":
            assert all(
                abs(count - counts[0] * (rank + 1)) <= size for rank, count in enumerate(counts)
            )
        if layout == "one":
            assert counts[0] == 256
        if layout == "few":
            assert counts[-1] == 256  # below four ranks nobody else has any
    paths = {(row["bytes"], row["path"]) for row in rows if row["way"] == "ours"}
    assert paths == {(64, "small"), (64 * 256, "native"), (64 * 65536, "native")}


@alone
@SIZES
def test_variables(size, tmp_path):
    code, rows, text = run("variables", size, tmp_path, "--at-most", "1.2")
    assert code == 0, text
    grown = {row["what"]: row["grown"] for row in rows}
    # What NumPy takes is known, so this tests the way to measure.
    np.testing.assert_allclose(grown["copies"], size * rows[0]["bytes"], rtol=0.15)
    [path] = {row["path"] for row in rows if row["what"] != "copies"}
    expected = {"shared": rows[0]["bytes"], "private": size * rows[0]["bytes"]}[path]
    np.testing.assert_allclose(grown["variables"], expected, rtol=0.15)
    assert f"path: {path}" in text


@alone
def test_variables_that_take_more_than_they_may_fail(tmp_path):
    code, rows, text = run("variables", 2, tmp_path, "--at-most", "0.01")
    assert code != 0, text
    assert max(row["ratio"] for row in rows if row["what"] != "copies") > 0.01


@alone
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_start(size, tmp_path):
    code, rows, text = run("start", size, tmp_path)
    assert code == 0, text
    found = {row["what"]: row for row in rows}
    assert {"cold", "warm", "numpy", "mpi4py"} <= set(found)
    for what in ("cold", "warm"):
        assert list(found[what]["ms"]) == ["import", "strategy", "small", "large", "again"]
        assert (found[what]["path"] == "no compiler") == (size == 1 or not compiled())
    assert all(ms > 0 for row in rows for ms in row["ms"].values())
    raw, digits = json.loads((tmp_path / "found.json").read_text())["first_step"]
    assert raw["ms"] > 0
    if digits["calls"] and digits["one file"]:
        assert 0 < digits["calls"] - raw["calls"] <= 800


def compiled():
    return mpistrat.config.read_options().numba and importlib.util.find_spec("numba") is not None


@alone
@SIZES
def test_gradients(size, tmp_path):
    code, rows, text = run("gradients", size, tmp_path, "--only", "400 tiny")
    assert code == 0, text
    [row] = rows
    assert row["bytes"] == 400 * 64 * 4
    assert (
        set(row["paths"])
        == {"arena", "arena mean", "arena uneven", "out=", "fresh"}
        < set(row["ms"])
    )
    assert row["paths"]["arena"] == {1: "alone", 2: "direct"}.get(size, "in place")


@alone
@SIZES
def test_step(size, tmp_path):
    """The cases that take neither torch nor scikit-learn; where these are, the others too."""
    code, rows, text = run("step", size, tmp_path)
    assert code == 0, text
    cases = {row["case"] for row in rows}
    wanted = {"writes", "scope", "small-writes", "adam", "tiny", "fresh", "bits16"}
    assert wanted | ({"alone"} if size == 1 else set()) <= cases
    assert all(row["ms"] > 0 for row in rows)
    assert {row["peer"] for row in rows if row["case"] == "scope"} == {
        "assign",
        "assign_add",
        "assign_sub",
    }
    assert not any(row["limit"] for row in rows)  # of small arrays nothing is wanted


@alone
def test_step_measures_what_is_named_and_says_what_is_missing(tmp_path):
    code, rows, text = run("step", 2, tmp_path, "tiny", "alone")
    assert code == 0, text
    assert [(row["case"], row["peer"]) for row in rows] == [("tiny", "sum"), ("tiny", "mean")]
    assert "alone        left out: it is for one rank" in text


@alone
@SIZES
def test_step_counts(size, tmp_path):
    code, rows, text = run("step_counts", size, tmp_path)
    assert code == 0, text
    assert [row["case"] for row in rows] == ["digits", "readme"]
    assert all(0 < row["calls"] < row["bytecodes"] for row in rows)


# What they share


class Alone:
    """What the benchmarks use of a communicator, of one rank."""

    rank, size = 0, 1

    def allgather(self, value):
        return [value]

    def Barrier(self):
        pass


class Halves(Alone):
    """Two ranks that see the same, except for what the other one takes twice as long for."""

    size = 2

    def allgather(self, value):
        return [value, [2 * one for one in value] if isinstance(value, list) else value]


def summing(factor=1, late=0):
    """A peer on one rank; wrong unless `factor` is 1, and only from repetition `late` on."""
    array, calls = np.zeros(5), []

    def call():
        calls.append(1)
        array[:] *= factor if len(calls) > late else 1

    return common.Peer([array], call, common.sums(Alone(), lambda _: [array]))


def test_peers_take_turns_and_each_writes_anew():
    order = []

    def peer(name):
        array = np.full(3, -1.0)
        return common.Peer([array], lambda: order.append((name, array[0])), lambda *_: True)

    found = common.measure(Alone(), {"a": peer("a"), "b": peer("b")}, 2)
    assert order == [("b", 0), ("a", 0), ("a", 1), ("b", 1), ("b", 2), ("a", 2), ("a", 3), ("b", 3)]
    assert set(found) == {"a", "b"}


def test_what_makes_ready_is_not_timed(monkeypatch):
    def ready():
        now[0] += 60

    now = [0.0]
    monkeypatch.setattr(common, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    peer = common.Peer([np.zeros(1)], lambda: None, lambda *_: True, ready)
    seconds, right = common.timed(Alone(), peer, 0)
    assert right
    assert seconds == 0


@pytest.mark.parametrize("late", [0, 4])
def test_a_wrong_result_of_any_repetition_is_an_error_that_names_the_peer(late):
    peers = {"good": summing(), "bad": summing(factor=3, late=late)}
    with pytest.raises(ArithmeticError, match="bad") as caught:
        common.measure(Alone(), peers, 5)
    assert "good" not in str(caught.value)


@pytest.mark.parametrize("size", [1, 7, 10**5])
def test_one_wrong_number_is_seen_in_the_warm_ups_wherever_it_is(size):
    for at in {0, size // 2, size - 1}:
        array = np.ones(size, np.float32)
        assert common.contains_result(array, 1, 0)
        array[at] = 2
        assert not common.contains_result(array, 1, 0)
        assert not common.contains_result(array, 1, 1)


def test_repetitions_look_at_some_numbers_of_a_large_array_and_together_at_all():
    for at in range(100):
        array = np.ones(10**5, np.float32)
        array[at] = 2
        seen = [number for number in range(2, 200) if not common.contains_result(array, 1, number)]
        assert 0 < len(seen) < 100


def test_nothing_holds_anything():
    assert common.contains_result(np.empty((0, 3)), 5, 0)


def test_median_is_that_of_the_slowest_rank():
    assert common.median(Alone(), [3.0, 1.0, 2.0]) == 2
    assert common.median(Halves(), [3.0, 1.0, 2.0]) == 4


def test_repetitions_follow_from_the_budget():
    def peer(seconds):
        return common.Peer([np.zeros(1)], lambda: time.sleep(seconds), lambda *_: True)

    assert common.count_repetitions(Alone(), {"a": peer(0.02)}, 0) == 5
    assert common.count_repetitions(Alone(), {"a": peer(0)}, 1e9) == 1000
    assert 5 <= common.count_repetitions(Alone(), {"a": peer(0.02)}, 0.4) <= 20


@pytest.mark.parametrize("size", [1, 2, 3])
def test_paths_are_seen(size):
    def rank(comm):
        strategy = mpistrat.MirroredStrategy()
        found = []

        def program():
            ctx = mpistrat.get_replica_context()
            for count in (2, 2, 10**3, 10**3, 10**6):
                array = np.ones(count)
                found.append(common.path_of(lambda a=array: ctx.all_reduce("sum", a)))
                assert found[-1] == common.expected(strategy, array.nbytes) or count == 10**3
            found.append(common.path_of(lambda: ctx.all_gather(np.ones(2), 0)))
            found.append(common.path_of(lambda: ctx.all_gather(np.ones(100), 0)))
            found.append(common.path_of(lambda: None))

        strategy.run(program)
        return found

    # The first call that is not small makes the room that the next ones find.
    reductions = ["alone"] * 3 if size == 1 else ["node", "direct", "node"]
    want = ["small", "small", *reductions, "small", "native", "unknown"]
    assert run_ranks(rank, size) == [want] * size


def test_another_path_than_the_one_to_measure_is_the_end():
    with pytest.raises(SystemExit, match=r"expected to measure the path 'node'.*unknown"):
        common.take(Alone(), "fresh", lambda: None, "node")
    assert common.take(Alone(), "fresh", lambda: None, "unknown") == "unknown"


def test_every_function_that_gathers_is_there():
    tree = ast.parse((PACKAGE / "collectives/reducer.py").read_text())
    names = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert [names.count(name) for name in common.GATHERS] == [1, 1]


def test_every_benchmark_is_in_the_list():
    text = (BENCHMARKS / "README.md").read_text()
    for path in sorted(BENCHMARKS.glob("*.py")):
        assert f"`{path.name}`" in text


@pytest.mark.parametrize(("name", "rows"), [("shuffling", 11), ("rows_per_rank", 6)])
def test_benchmarks_of_one_process(name, rows, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--quick"])
    imported(name).main()
    lines = capsys.readouterr().out.splitlines()
    figures = [line for line in lines if re.search(r" \d+\.\d$", line)]
    missing = sum("not installed" in line for line in lines)
    assert len(figures) == rows or missing


@alone
@pytest.mark.parametrize("size", [1, 2])
def test_step_parts(size, tmp_path):
    pytest.importorskip("sklearn", reason="wants scikit-learn: pip install 'mpistrat[examples]'")
    code, rows, text = run("step_parts", size, tmp_path)
    assert code == 0, text
    parts = ["next", "enter", "gradients", "apply", "metric", "leave"]
    assert [row["part"] for row in rows] == parts
    assert all(row["step_us"] > 0 < row["own_us"] for row in rows)
    assert all(row["bytecodes"] > 0 for row in rows)
    assert [bool(row["plain_bytecodes"]) for row in rows] == [
        size == 1 and part in ("next", "gradients", "apply") for part in parts
    ]


@alone
@pytest.mark.parametrize("size", [2])
def test_torch_step(size, tmp_path):
    pytest.importorskip("torch", reason="wants PyTorch: pip install 'mpistrat[torch]'")
    code, rows, text = run("torch_step", size, tmp_path)
    assert code == 0, text
    peers = ["alone", "replicate", "fused", "ddp"]
    assert [(row["model"], row["peer"]) for row in rows] == [
        (model, peer) for model in ("mlp", "conv") for peer in peers
    ]
    assert all(row["least_ms"] > 0 for row in rows)

"""All-reduces give the same bits on every rank, in every run and, on one node, on every library.

Jobs of 3, 5 and 7 ranks print hashes of their results. On one node they are those of NumPy's folds
in rank order, made here: so they do not depend on the MPI library either. Between nodes the library
folds; every rank still has the same, and the next run too.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from crowded import command

from mpistrat.config import launched_by
from mpistrat.launch.process import run_job

PROGRAM = Path(__file__).parent / "programs" / "bits.py"
LONGEST = 240

pytestmark = [
    pytest.mark.timeout(2 * LONGEST + 30),
    pytest.mark.skipif(launched_by() is not None, reason="this process is itself a rank of a job"),
]

FOLDS = {"SUM": np.add, "PROD": np.multiply, "MIN": np.minimum, "MAX": np.maximum, "MEAN": np.add}


@functools.cache
def program():
    spec = importlib.util.spec_from_file_location("bits", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def hashes(size, directory):
    printed = directory / "printed"
    with printed.open("wb") as output:
        argv = [sys.executable, str(PROGRAM), "2", "3"]
        outcome = run_job(command(size, argv), LONGEST, output)
    text = printed.read_text(errors="replace")
    assert outcome.code == 0 and not outcome.has_timed_out, text[-3000:]
    return json.loads(next(line for line in text.splitlines() if line.startswith("{")))


def wanted(op, dtype, size):
    bits = program()
    ranks = [bits.values(rank, dtype) for rank in range(size)]
    weights = [bits.weight(rank) for rank in range(size)]
    found = []
    with np.errstate(all="ignore"):
        for leaves in zip(*ranks, strict=True):
            if op == "MEAN":
                kind = leaves[0].dtype.type
                leaves = [
                    leaf * kind(w) if w else np.zeros_like(leaf)
                    for leaf, w in zip(leaves, weights, strict=True)
                ]
            total = functools.reduce(FOLDS[op], leaves)
            found.append(total / kind(sum(weights)) if op == "MEAN" else total)
    return bits.digest(found, quiet=True)


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(3, marks=pytest.mark.mpi),
        *(pytest.param(n, marks=pytest.mark.nightly) for n in (5, 7)),
    ],
)
def test_every_rank_and_run_has_the_same_bits(size, tmp_path):
    first = hashes(size, tmp_path)
    if size == 3:
        assert hashes(size, tmp_path) == first
    bits = program()
    ways = [f"{way} {turn}" for way in ("fresh", "out", "in place", "apart") for turn in (0, 1)]
    calls = len(bits.OPS) + len({2, 3} - {size}) * len(bits.BETWEEN)
    assert len(first) == calls * len(bits.DTYPES) * len(ways)
    for dtype in bits.DTYPES:
        for op in bits.OPS:
            want = wanted(op, dtype, size)
            for way in ways:
                assert first[f"{size} {dtype} {op} {way}"][1] == want, (dtype, op, way)

"""Every field of a call is compared in its handshake; without it a difference is missed."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from crowded import command

import mpistrat as ms
from mpistrat.collectives.algorithms import algorithm
from mpistrat.config import launched_by
from mpistrat.launch.process import run_job
from mpistrat.lockstep import frame, handshake
from mpistrat.testing import RanksFailed, run_ranks

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
pairs = importlib.import_module("pairs")


def ctx():
    return ms.get_replica_context()


@pytest.mark.skipif(launched_by() is not None, reason="this process is itself a rank of a job")
@pytest.mark.parametrize(
    ("size", "count"),
    [
        (2, 600),
        pytest.param(3, 600, marks=pytest.mark.mpi),
        *(pytest.param(n, 1500, marks=pytest.mark.nightly) for n in (2, 3)),
    ],
)
def test_pairs_on_mpi(size, count, tmp_path):
    """A short run of the figure: as many pairs, and a third as many good calls."""
    words = ["--pairs", str(count), "--good", str(count // 3)]
    program = [sys.executable, str(HERE / "pairs.py"), *words]
    with (tmp_path / "printed").open("wb") as output:
        outcome = run_job(command(size, program), 240, output, cwd=HERE.parents[1])
    printed = (tmp_path / "printed").read_text()
    assert outcome.code == 0, printed
    rows = {line[:20].strip(): line[20:].split() for line in printed.splitlines()}
    for field in pairs.FIELDS:
        injected, detected, missed = map(int, rows[field])
        assert injected == detected > count / 25
        assert missed == 0


@pytest.mark.parametrize("size", [2, 4, 5])
def test_pairs_on_threads(size):
    def rank(comm):
        return pairs.play(pairs.World(comm), 150, 150, size)

    for made, done in run_ranks(rank, size):
        assert sum(made.values()) == done == 150


# What to leave out of the text of a call, so that it says nothing of one field.
FORGET = {
    "API name": (r"^(all_reduce|all_gather|reduce_to|batch_reduce_to|assign(_add|_sub)?)\b", ""),
    "reduce op": (r"\b(SUM|MEAN|MIN|MAX|PROD)\b", "op"),
    "destination": (r" to ('[^']*'( no\. \d+ \S+)?|a value)", ""),
    "axis": (r"axis=(\d+|\([^)]*\))", "axis"),
    "tree structure": (r"[\[\](){}*]", ""),
    "leaf key": (r"'[^']*': |\b\w+: |\('[^']*',\): |\b7: ", ""),
    "shape": (r"\[[\d,*]*\]", ""),
    "dtype": (r"\b(float|int|uint)\d+", "number"),
    "variable identity": (r"no\. \d+", ""),
    "weight": (r" weighted", ""),
    "options": (r"ON_WRITE|ON_READ|NONE|SUM|trainable=\w+", ""),
}
# A batch is one more list around its tree, and a gather shows an axis: not the name alone.
NAMED = {"API name": pairs.WRITES}


def unnumbered(digest, number, flags, size, payload):
    """Return a frame without the number of the call."""
    return frame.pack_frame(digest, 0, flags, size, payload)


def play_one_field(field, monkeypatch, count=60):
    monkeypatch.setitem(pairs.FIELDS, field, NAMED.get(field, pairs.FIELDS[field]))
    if field in NAMED:
        monkeypatch.setattr(pairs, "FAMILIES", (NAMED[field],))

    def rank(comm):
        made, _ = pairs.play(pairs.World(comm), count, 0, 1, (field,))
        return made[field]

    return run_ranks(rank, 2)


def test_every_field_can_be_left_out():
    assert {*FORGET, "sequence number"} == set(pairs.FIELDS)


@pytest.mark.parametrize("field", FORGET)
def test_a_field_left_out_of_the_proof_is_missed(field, monkeypatch):
    assert play_one_field(field, monkeypatch) == [60, 60]
    whole, (pattern, instead) = handshake.digest_call, FORGET[field]
    for module in (handshake, algorithm):
        monkeypatch.setattr(
            module, "digest_call", lambda text: whole(re.sub(pattern, instead, text))
        )
    with pytest.raises(RanksFailed, match=f"missed: pair \\d+, {field}"):
        play_one_field(field, monkeypatch)


def test_a_number_left_out_of_the_proof_is_missed(monkeypatch):
    assert play_one_field("sequence number", monkeypatch) == [60, 60]
    monkeypatch.setattr(handshake, "pack_frame", unnumbered)
    with pytest.raises(RanksFailed, match=r"missed: pair \d+, sequence number"):
        play_one_field("sequence number", monkeypatch)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "change",
    [lambda x: np.ones(6), lambda x: x.astype("f4"), lambda x: x.astype("i8"), lambda x: None],
    ids=["shape", "dtype", "dtype of one size", "none"],
)
def test_a_leaf_replaced_in_a_tree_whose_plan_is_cached(size, change):
    """The caches hold what depends on the structure only; a leaf is looked at in every call."""

    def rank(comm):
        strategy = ms.MirroredStrategy()
        tree = {f"layer{i}": {"kernel": np.full((2, 3), 1.0), "bias": 1.0} for i in range(50)}

        def step():
            return ctx().all_reduce("SUM", tree)["layer7"]["kernel"][0, 0]

        assert [strategy.run(step).local for _ in range(5)] == [size] * 5
        if comm.rank == size - 1:
            tree["layer33"]["kernel"] = change(tree["layer33"]["kernel"])
        with pytest.raises((ms.LockstepError, TypeError), match="layer33/kernel"):
            strategy.run(step)
        tree["layer33"]["kernel"] = np.ones((2, 3))
        assert strategy.run(step).local == size

    run_ranks(rank, size)

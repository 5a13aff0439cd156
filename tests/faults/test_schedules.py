"""Random programs with faults on seeded schedules: nobody hangs, no update is lost."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mpistrat.collectives.algorithms import algorithm
from mpistrat.lockstep import handshake
from mpistrat.testing import ranks
from mpistrat.variables.variable import Variable

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
schedules = importlib.import_module("schedules")
programs = importlib.import_module("schedule_programs")
TEXTS = re.compile(r"(?<=allgatherv of )\[.*\]")  # how long each rank's is


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    """Compare the copies of variables as often as the command does."""
    monkeypatch.setenv("MPISTRAT_CHECK_EVERY", "3")


def _command(*words):
    command = [sys.executable, str(HERE / "schedules.py"), *words]
    return subprocess.run(command, capture_output=True, text=True)


def test_four_hundred_schedules():
    done = _command("--count", "400")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    rows = {}
    for line in done.stdout.splitlines():
        *words, number = line.split()
        rows[" ".join(words)] = number
    for wrong in ("deadlocks", "lost updates", "wrong results", "wrong errors"):
        assert rows[wrong] == "0"
    assert rows["replays that differ"] == "0"
    assert int(rows["schedules with a fault"]) + int(rows["schedules without a fault"]) == 400
    assert all(int(rows[f"schedules of {n} ranks"]) > 20 for n in range(1, 6))
    every = {kind for kinds in programs.FAULTS.values() for kind in kinds}
    for kind in every | {"raise", "exit", "return", "thread"}:
        assert int(rows[f"faults injected {kind}"]) > 0, kind
    for kind in programs.FAULTS:
        assert int(rows[f"calls before the fault {kind}"].replace(",", "")) > 20, kind


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_a_hundred_thousand_schedules():
    words = ["--count", "100000"]
    done = subprocess.run([sys.executable, str(HERE / "schedules.py"), *words], timeout=7000)
    assert done.returncode == 0


@pytest.mark.parametrize("seed", [3, 11, 12, 77])
def test_a_seed_replays_exactly(seed):
    """Also with the texts of exceptions, whose lengths are in the trace."""
    first = schedules.run(seed)
    assert not first.problems
    assert len(first.trace) > 30
    assert all(schedules.run(seed).trace == first.trace for _ in range(20))


def test_a_printed_seed_replays_exactly_in_another_process():
    first, second = (_command("--replay", "12") for _ in range(2))
    assert first.returncode == 0, first.stdout[-3000:] + first.stderr
    assert first.stdout == second.stdout
    # Lengths of texts, which quote lines as each process finds them, are compared above: of two
    # processes that were started alike.
    replayed = [f"  rank {rank}: {what}" for rank, what in schedules.run(12).trace]
    told = [line for line in first.stdout.splitlines() if line.startswith("  rank ")]
    assert [TEXTS.sub("", line) for line in told] == [TEXTS.sub("", line) for line in replayed]


def _undo_nothing(monkeypatch):
    right = handshake.Lockstep._raise_explained

    def without_writes(*args, writes, **options):
        right(*args, writes=[], **options)

    monkeypatch.setattr(handshake.Lockstep, "_raise_explained", without_writes)


def _show_no_failure(monkeypatch):
    monkeypatch.setattr(handshake, "FAILED", 0)


def _prove_all_calls_alike(monkeypatch):
    for module in (handshake, algorithm):
        monkeypatch.setattr(module, "digest_call", lambda text: bytes(16))


def _leave_without_a_word(monkeypatch):
    monkeypatch.setattr(ranks, "_leave", lambda comm, failure: None)


def _lose_writes_of_rank_one(monkeypatch):
    right = Variable._store

    def apply(self, *given):
        if self.strategy._replicas.lockstep.comm.rank != 1:
            right(self, *given)

    monkeypatch.setattr(Variable, "_store", apply)


@pytest.mark.parametrize(
    ("breaks", "kinds"),
    [
        (_undo_nothing, {"lost updates"}),
        (_show_no_failure, {"wrong errors"}),
        (_prove_all_calls_alike, {"deadlocks", "wrong results", "wrong errors"}),
        (_leave_without_a_word, {"deadlocks"}),
        (_lose_writes_of_rank_one, {"lost updates", "wrong results"}),
    ],
)
def test_a_broken_library_is_found(monkeypatch, breaks, kinds):
    """Within a few hundred seeds, each of which is right with the library as it is."""
    right = next(s for s in range(400) if not schedules.run(s).problems)
    breaks(monkeypatch)
    found = (schedules.run(seed) for seed in range(right, 400))
    assert any(kinds & {problem.kind for problem in played.problems} for played in found)

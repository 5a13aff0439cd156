"""Runs the programs on N ranks and puts the ranks' results together."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import mpistrat as ms
from mpistrat.testing import RanksFailed, run_ranks

from .programs import PROGRAMS
from .record import Case

# A warning that the recorded programs bring about: more or fewer device names than ranks.
EXPECTED_WARNING = "MirroredStrategy was given 1 devices"
LONGEST = 240.0  # seconds for one program, which may have to compile on a busy machine


def on_rank(comm: Any, program: str) -> dict[str, Any]:
    """Return what this rank gets from a program. Collective over `comm`."""
    strategy = ms.MirroredStrategy(comm=comm)
    return dict(PROGRAMS[program](strategy, strategy.num_replicas_in_sync, comm))


def together(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one outcome per case from what each rank got.

    An outcome is ``{"ok": value}`` if all ranks got the same, ``{"error": [of each rank]}`` if all
    raised, ``{"ranks": [of each rank]}`` if they got different values, ``{"mixed": texts}`` if only
    some raised.
    """
    return {case: _outcome([rank.get(case, {}) for rank in found]) for case in found[0]}


def _outcome(each: list[dict[str, Any]]) -> dict[str, Any]:
    if all("error" in one for one in each):
        return {"error": [one["error"] for one in each]}
    if all("ok" in one for one in each) and any(one != each[0] for one in each):
        return {"ranks": [one["ok"] for one in each]}
    return each[0]


@functools.cache
def results(program: str, size: int) -> dict[str, Any]:
    """Return the outcomes of a program on `size` thread ranks; run once, also if it fails."""
    if program not in PROGRAMS:
        return {}
    with expected_warning():
        try:
            return together(run_ranks(on_rank, size, program, timeout=LONGEST))
        except RanksFailed as error:
            return {"failed": {"text": str(error)}}


@contextlib.contextmanager
def expected_warning() -> Iterator[None]:
    """Ignore the warning that the programs bring about on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", EXPECTED_WARNING, UserWarning)
        yield


def outcome(case: Case, found: dict[str, Any]) -> dict[str, Any] | None:
    """Return the outcome of a case, or of its eager twin: here tf.function is the identity."""
    return found.get(case.name, found.get(case.name.replace("@function", "")))

"""Says of every case whether it is equal, differs by decision or comes later; and what is wrong."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from .compare import DIFFERENT, EQUAL, WRAPPED, Comparison, compare, describe, show
from .decisions import DIFFERS, Differs, Fails, Ranks
from .decisions import WRAPPED as WRAPPED_CASES
from .harness import outcome
from .later import LATER
from .patterns import matches
from .record import Case
from .recorder import written

BY_DECISION, LISTED_LATER = "differs by decision", "later"


class Verdict(NamedTuple):
    """What a case turned out to be.

    Attributes:
      kind: `EQUAL`, `BY_DECISION` or `LISTED_LATER`.
      decision: The decision, where one is named.
      problem: What is wrong; empty if nothing is.
    """

    kind: str
    decision: str = ""
    problem: str = ""


@functools.cache
def listed(key: str) -> tuple[tuple[str, str], ...]:
    """Return every (list, pattern) that names a case."""
    lists = {"DIFFERS": DIFFERS, "WRAPPED": WRAPPED_CASES, "LATER": LATER}
    return tuple(
        (name, pattern)
        for name, patterns in lists.items()
        for pattern in patterns
        if matches(pattern, key)
    )


def judge(case: Case, found: dict[str, Any]) -> Verdict:
    """Return what a case is, given the outcomes of its program."""
    places = listed(case.key)
    if len(places) > 1:
        return Verdict(DIFFERENT, problem=f"named more than once: {places}")
    name, pattern = places[0] if places else ("", "")
    ours = outcome(case, found)
    if name == "LATER":
        problem = "stands in LATER, but its program gives it" if ours is not None else ""
        return Verdict(LISTED_LATER, problem=problem)
    if ours is None:
        reason = found.get("failed", {}).get("text", "no program gives it, and it is not in LATER")
        return Verdict(DIFFERENT, problem=reason)
    status, problem = compare(case.recorded, ours)
    if name == "DIFFERS" and case.size in DIFFERS[pattern].sizes:
        difference = DIFFERS[pattern]
        problem = "stands in DIFFERS, but does not" if status != DIFFERENT else ""
        return Verdict(
            BY_DECISION, difference.decision, problem or _against(difference, case.size, ours)
        )
    if name == "WRAPPED":
        wrong = f"stands in WRAPPED, but is {status}: {problem or describe(ours)}"
        return Verdict(BY_DECISION, "D2", "" if status == WRAPPED else wrong)
    if status == EQUAL:
        return Verdict(EQUAL)
    return Verdict(DIFFERENT, problem=problem or f"wrapped, but not in WRAPPED: {describe(ours)}")


def _against(difference: Differs, size: int, ours: dict[str, Any]) -> str:
    """Return how ours differs from what the decision says."""
    wanted = difference.ours(size)
    where = f"{difference.decision} ({difference.why})"
    if isinstance(wanted, Fails):
        errors = ours.get("error", [])
        if errors and all(wanted.name in error["classes"] for error in errors):
            return ""
        return f"{where}: expected {wanted.name} on every rank, got {describe(ours)}"
    if isinstance(wanted, Ranks):
        got = ours.get("ranks", [])
        if len(got) != len(wanted):
            return f"{where}: expected a value for each rank, got {describe(ours)}"
        pairs = zip(wanted, got, strict=True)
        found = (Comparison(written(w), g) for w, g in pairs)
        return next((f"{where}: {c.problem}" for c in found if c.problem), "")
    if "ok" not in ours:
        return f"{where}: expected {show(written(wanted))}, got {describe(ours)}"
    found = Comparison(written(wanted), ours["ok"])
    problem = found.problem or ("it is wrapped" if found.wrapped else "")
    return problem and f"{where}: {problem}"

"""Which ranks others wait for, and the messages about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mpistrat.board.page import INSIDE, LEAVING, LEFT, number_of
from mpistrat.board.status import AWAY, DEAD, SILENT, TROUBLES, Status
from mpistrat.comm.callsite import few, ranks_text

_DOING = {
    "R": "computing",
    "S": "sleeping, or waiting for something",
    "D": "waiting for a disk or a device",
    "T": "stopped by a signal",
    "W": "waiting in a call on another communicator",
    "X": "its process is gone",
    "H": "its Python does not run: a C call holds the GIL, or the machine is overloaded",
    "E": "another program runs in its process: it has called os.exec",
    "Q": "its node does not answer: suspended, overloaded, or down",
}


class Diagnosis(NamedTuple):
    """Ranks wait, and this is why.

    Attributes:
      key: The call that they wait in, and the part of it.
      seconds: How long nothing has moved.
      missing: The ranks that they wait for, longest first. Empty: all have come to the call, and
        none comes out of it.
      waiting: The ranks that wait.
      unknown: How many ranks of the job nothing is known of here.
      patience: Seconds that the call may take, if it says so itself; else 0.
    """

    key: int
    seconds: float
    missing: tuple[Status, ...]
    waiting: tuple[Status, ...]
    unknown: int = 0
    patience: float = 0.0


def diagnose(rows: Sequence[Status], size: int = 0) -> Diagnosis | None:
    """Return who keeps whom waiting, or None if nobody waits or the wait has a declared reason.

    Seconds count from the later of two moments: the first rank began to wait in that call; the
    missing rank did something that the board sees.

    Args:
      rows: What all ranks do, as far as it is known.
      size: How many ranks there are; 0 for as many as `rows` know.
    """
    unknown = max(0, size - sum(len(row.ranks) for row in rows))
    waits = (INSIDE, LEAVING)
    rows_in_calls = [row for row in rows if row.state in waits and row.doing not in TROUBLES]
    if not rows_in_calls:
        return None
    key = max(row.key for row in rows_in_calls)
    waiting = tuple(row for row in rows_in_calls if row.key == key)
    patience = min((row.patience for row in waiting if row.patience), default=0.0)
    missing = [
        row
        for row in rows
        if row not in waiting and (row.key < key or row.state == LEFT or row.doing in TROUBLES)
    ]
    # Of a silent node only those count that had not come as far, unless nobody else is missing.
    missing = [row for row in missing if row.doing != SILENT or row.key < key] or missing
    if not missing:
        # Also since the last one came out: of the others it may only not be known yet.
        return Diagnosis(key, min(row.age for row in rows), (), waiting, unknown, patience)
    undeclared = [row for row in missing if not row.busy or row.overdue]
    if not undeclared:
        return None
    waited = max(row.age for row in waiting)
    undeclared.sort(key=lambda row: -row.age)
    seconds = min(waited, undeclared[0].age)
    return Diagnosis(key, seconds, tuple(undeclared), waiting, unknown, patience)


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def _what(row: Status) -> str:
    """Return what the ranks of a row do, in words."""
    activity = _DOING.get(row.doing, row.doing)
    if len(row.ranks) > 1:
        activity = activity.replace("its process is", "their processes are").replace(
            "its ", "their "
        )
    if row.overdue:
        activity += f"; over the time declared for {row.busy!r}"
    return activity


def _whereabouts(row: Status, key: int) -> str:
    is_plural = len(row.ranks) > 1
    is_last_seen = row.doing in TROUBLES and row.doing != "T"
    pronoun = "They" if is_plural else "It"
    verb = "are in" if is_plural else "is in"
    if is_last_seen:
        verb = ("were" if is_plural else "was") + " last seen in"
    call = ""
    if row.state == INSIDE and number_of(row.key) != number_of(key):
        call = f" of call {number_of(row.key)}" + (f", {row.text}" if row.text else "")
    elif row.doing == AWAY and row.text:
        call = f", {row.text}"
    if not row.place:
        return f"Its position is not known ({_what(row)})."
    return f"{pronoun} {verb} {row.place}{call} ({_what(row)})."


def _missing(row: Status, key: int, seconds: float) -> str:
    """Return who is missing where for how long."""
    is_plural = len(row.ranks) > 1
    node = f" ({row.node})" if row.node else ""
    subject = f"{ranks_text(row.ranks)}{node}"
    number = number_of(key)
    if row.state == LEFT:
        predicate = f"{'have' if is_plural else 'has'} left the program or finalized MPI"
        return f"{subject} {predicate} before call {number}."
    if number_of(row.key) < number:
        predicate = f"{'have' if is_plural else 'has'} not reached call {number}"
    else:
        predicate = f"{'have' if is_plural else 'has'} made no progress in call {number}"
    return f"{subject} {predicate} for {_seconds(seconds)}. {_whereabouts(row, key)}"


def _waiting(diagnosis: Diagnosis) -> str:
    places: dict[tuple[str, str], list[int]] = {}
    for row in diagnosis.waiting:
        places.setdefault((row.place, row.text), []).extend(row.ranks)
    parts = []
    for (place, text), ranks in places.items():
        whereabouts = " ".join(part for part in (place, text) if part)
        verb = "wait in" if len(ranks) > 1 else "waits in"
        parts.append(
            f"{ranks_text(ranks)} {verb} {whereabouts or f'call {number_of(diagnosis.key)}'}"
        )
    return "; ".join(few(parts))


def _body(diagnosis: Diagnosis, min_seconds: float) -> tuple[str, str]:
    """Return who is missing, and who waits."""
    late_rows = [row for row in diagnosis.missing if row.age >= min_seconds or row.doing == DEAD]
    if not diagnosis.missing:
        ranks = [rank for row in diagnosis.waiting for rank in row.ranks]
        arrival_text = f"{ranks_text(ranks)} {'have' if len(ranks) > 1 else 'has'} come to call"
        missing_text = (
            f"{arrival_text} {number_of(diagnosis.key)} and not out of it for "
            f"{_seconds(diagnosis.seconds)}."
        )
        if diagnosis.unknown:
            missing_text += f" Nothing is known here about the other {diagnosis.unknown}."
        return missing_text, _waiting(diagnosis)
    lines = [_missing(row, diagnosis.key, min(diagnosis.seconds, row.age)) for row in late_rows]
    return "\n  ".join(few(lines)), _waiting(diagnosis)


def warning(diagnosis: Diagnosis, warn: float, timeout: float) -> str:
    """Return what to say after `warn` seconds.

    Example:
      >>> from mpistrat.board.page import BETWEEN
      >>> rows = [
      ...     Status((5,), "node12", 0, 411 << 20, BETWEEN, 80.0, "T", "data.py:31"),
      ...     Status((0, 1, 2, 3, 4, 6, 7), "node12", 0, 412 << 20, INSIDE, 60.0, "S",
      ...         "train.py:88", "all_reduce(SUM, float32[1024] 'grads')"),
      ... ]
      >>> print(warning(diagnose(rows), 60, 1800))
      mpistrat: rank 5 (node12) has not reached call 412 for 60 s. It is in data.py:31 (stopped by
        a signal).
        ranks 0-4, 6, 7 wait in train.py:88 all_reduce(SUM, float32[1024] 'grads'). The job ends
        after 1800 s of this; MPISTRAT_TIMEOUT changes that.
    """
    missing, waiting = _body(diagnosis, warn)
    return (
        f"mpistrat: {missing}\n  {waiting}. The job ends after {timeout:g} s of this; "
        f"{'timeout_seconds says so' if diagnosis.patience else 'MPISTRAT_TIMEOUT changes that'}."
    )


def ending(diagnosis: Diagnosis, timeout: float, code: int) -> str:
    """Return what to say when the job is ended after `timeout` seconds."""
    missing, waiting = _body(diagnosis, timeout)
    return (
        f"mpistrat: the job ends with exit code {code}: nothing moved for {timeout:g} s.\n"
        f"  {missing}\n  {waiting}."
    )

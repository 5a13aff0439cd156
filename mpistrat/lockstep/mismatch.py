"""Error messages for calls that differ; only then are the texts of calls exchanged."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mpistrat.comm.callsite import find_call_site, ranks_text, shorten
from mpistrat.errors import (
    DivergenceError,
    LockstepError,
    PreflightError,
    remote_error,
    text_of,
)
from mpistrat.lockstep.frame import VERSION
from mpistrat.lockstep.ranks import CallState, Ranks
from mpistrat.lockstep.tracebacks import place_of_failure, traceback_of

# Modules whose exception classes are the same on every rank.
_SHARED = ("builtins", "mpistrat.errors")
# Characters of a text that other ranks are told; the rank itself keeps all of it.
_LONGEST = 1 << 16
_LIMIT = 300
_HEAD = 60


# A digest of contents, as texts of calls show it, with what is shown of the contents.
_HASH = re.compile(r"\b[0-9a-f]{16,}\b(?: \([^()]*\))?")
# What stands before the digest of a tree that has to be the same on all ranks, and all of that.
SAME = "same="
_SAME_POINT = re.compile(rf"{SAME}{_HASH.pattern}")
# Small writes to variables, as the text of the handshake that follows them shows them.
_WRITES = re.compile(r", after (?:assign|scatter_).*")

_ADVICE = (
    "  Every rank must make the same calls in the same order, with the same structure, shapes and "
    "dtypes. Look for a collective under `if rank == ...`, or an early `break`."
)
_ALL_RANKS_ADVICE = (
    "\n  Save and restore on all ranks, not under `if rank == 0`: replica 0 writes, and the others "
    "take part."
)
_SAVING = (
    "  Every rank must name the same path, as replica 0 writes and looks for all of them (no rank "
    "needs one of its own), and save the same variables, numbers and strings."
)
_OF_POINTS = (
    "  Each rank is at a point of its own, so what they reduce belongs to none of them. Give the "
    "solver the same starting point, x0 = strategy.broadcast(x0), and the same seed on all ranks."
)
_BROADCASTING = (
    "  Only the value of replica 0 counts, but every rank gives one of the same structure, shapes "
    "and dtypes. What replica 0 alone can make: ms.once(fn) calls fn there and returns its result "
    "on all ranks."
)
# What is said of calls that have one name, which begins so.
_OF_CALLS = {"Checkpoint": _SAVING, "broadcast": _BROADCASTING}
# Hyper-parameters of an optimizer of PyTorch, which a handshake compares.
_HYPER_PARAMETERS = re.compile(r", after .*?\w+\.param_groups: (.*)")
_SHOWN_NUMBERS = 4
_STEPPING = (
    "  Hyper-parameters of an optimizer differ between ranks, which would then have other weights. "
    "Set them alike on all ranks. What a scheduler is given, such as a loss, has to be that of all "
    "ranks: strategy.all_reduce('MEAN', loss)."
)
# What texts of calls say of arrays that are reduced in place in shared memory.
_PLACED = re.compile(r", out, in place [0-9/ ]+")


def advice_of_saving(calls: Iterable[str]) -> str:
    """Return a line for programs that save or restore on some ranks only; empty for others.

    Args:
      calls: What ranks called while others called something else, or have left.
    """
    return _ALL_RANKS_ADVICE if any(call.startswith("Checkpoint") for call in calls) else ""


def cut(text: str) -> str:
    """Return a string that can be sent; a very long one is cut in the middle, and says so.

    Example:
      >>> len(cut("x" * 10**7)) < 70_000
      True
    """
    excess_length = len(text) - _LONGEST
    if excess_length <= 0:
        return text
    half = _LONGEST // 2
    return f"{text[:half]}\n... {excess_length:,} characters are cut here ...\n{text[-half:]}"


def _window(text: str, at: int = 0) -> str:
    """Return a string, or of a long one its head and what stands around position `at`."""
    if len(text) <= _LIMIT:
        return text
    start = max(_HEAD, at - _HEAD)
    gap = " ... " if start > _HEAD else ""
    end = start + _LIMIT - _HEAD
    return text[:_HEAD] + gap + text[start:end] + (" ..." if end < len(text) else "")


def mismatch(lockstep: Ranks, call: str) -> LockstepError | DivergenceError:
    """Return the error of every rank when the calls differ. Collective.

    It is a DivergenceError where they differ only in what they were given as ``same=``.
    """
    number = lockstep.session.calls
    own_text = json.dumps([number, find_call_site(), call]).encode()
    ranks_by_text, other_ranks = lockstep.distinct_texts(own_text)
    calls: dict[tuple[int, str, str], list[int]] = {
        tuple(json.loads(text)): ranks for text, ranks in ranks_by_text.items()
    }
    at_points = (
        len({(call_number, _SAME_POINT.sub("", text)) for call_number, _, text in calls}) == 1
    )
    what_differs = "values given as same= differ" if at_points else "collective calls differ"
    lines = [f"{what_differs} between ranks ({lockstep.here}, call {number})"]
    width = max(len(ranks_text(ranks)) for ranks in calls.values())
    columns = enumerate(zip(*(text for _, _, text in calls), strict=False))
    first = next((at for at, letters in columns if len(set(letters)) > 1), 0)
    call_lines = []
    for (other, place, text), ranks in calls.items():
        number_text = "" if other == number else f"call {other}: "
        ranks_column = f"{ranks_text(ranks) + ':':{width + 1}}"
        call_lines.append(f"{ranks_column} {place}   {number_text}{_window(text, first)}")
    lines += [f"  {text}" for text in shorten(call_lines, hidden_count=len(other_ranks))]
    if at_points:
        return DivergenceError("\n".join([*lines, _OF_POINTS]))
    if len({tuple(_WRITES.findall(text)) for _, _, text in calls} - {()}) > 1:
        lines.append(
            "  If what they wrote to a variable differs: reduce it first (ctx.all_reduce), or "
            "create the variable with an aggregation. What differs is undone."
        )
    if len({(call_number, place, _HASH.sub("", text)) for call_number, place, text in calls}) == 1:
        lines.append(
            "  The calls are the same, but a value in them is not (its hash is shown): it depends "
            "on the rank. Make it the same on all, or reduce it first."
        )
        return LockstepError("\n".join(lines))
    if stepping := _of_hyper_parameters(calls):
        return LockstepError("\n".join([*lines, *stepping]))
    buffers_text = "" if other_ranks else _of_buffers(calls)
    lines.append(buffers_text or _advice_for([text for _, _, text in calls]))
    return LockstepError("\n".join(lines))


def _advice_for(texts: Sequence[str]) -> str:
    """Return what to look for where ranks have made calls of these texts."""
    # A broadcast of torch.distributed says itself whose value counts.
    names = {"" if ", src=" in text else text.partition("(")[0] for text in texts}
    name = names.pop() if len(names) == 1 else ""
    advice = (text for begin, text in _OF_CALLS.items() if name.startswith(begin))
    return next(advice, _ADVICE + advice_of_saving(texts))


def _of_hyper_parameters(calls: dict[tuple[int, str, str], list[int]]) -> list[str]:
    """Return lines that say which hyper-parameters of an optimizer differ, if any do."""
    texts = [
        (_HYPER_PARAMETERS.findall(call_text), ranks) for (_, _, call_text), ranks in calls.items()
    ]
    rows = [(text[0].split(", "), ranks) for text, ranks in texts if text]
    numbers = zip(*(row for row, _ in rows), strict=False)
    places = [i for i, column in enumerate(numbers) if len(set(column)) > 1][:_SHOWN_NUMBERS]
    if len(rows) < len(texts) or not places:
        return []
    rank_lines = [
        f"  {ranks_text(ranks)}: {', '.join(row[i] for i in places)}" for row, ranks in rows
    ]
    return [*shorten(rank_lines), _STEPPING]


def _of_buffers(calls: dict[tuple[int, str, str], list[int]]) -> str:
    """Return who gave arrays of `gradient_buffers`, if that is all that calls differ in."""
    placed: dict[bool, list[int]] = {}
    for (_, _, call_text), ranks in calls.items():
        placed.setdefault(_PLACED.search(call_text) is not None, []).extend(ranks)
    if len(placed) < 2 or len({_PLACED.sub("", call_text) for _, _, call_text in calls}) > 1:
        return ""
    return (
        f"  {ranks_text(sorted(placed[True]))} gave arrays of gradient_buffers, "
        f"{ranks_text(sorted(placed[False]))} ordinary arrays. Give the one or the other on all "
        "ranks."
    )


def report(error: BaseException) -> bytes:
    """Return the description of an exception for other ranks, as JSON."""
    failure_fields: dict[str, Any] = {
        "kind": type(error).__name__,
        "names": [c.__name__ for c in type(error).__mro__ if c.__module__ in _SHARED],
        "text": cut(text_of(error)),
        "place": place_of_failure(error),
        "traceback": cut(traceback_of(error)),
    }
    return json.dumps(failure_fields).encode()


_REPORTING = (
    "an exception of this rank is being reported to the others. Let its __str__ and __repr__ make "
    "no collective call."
)


@contextmanager
def asking(state: CallState) -> Iterator[None]:
    """Refuse calls of the body, which asks an exception of the program's for its text.

    It is asked before the handshake that tells it: inside of that, a call of its own would mix with
    what the ranks exchange.
    """
    previous_error = state.gone
    state.gone = previous_error or LockstepError(_REPORTING)
    try:
        yield
    finally:
        state.gone = previous_error


def remote(lockstep: Ranks, call: str, failure: BaseException | None, text: bytes) -> BaseException:
    """Return the error of every rank when at least one has failed. Collective.

    The rank that failed gets its own exception back; the others a `RemoteError` about the lowest
    rank that failed.

    Args:
      lockstep: The ranks.
      call: The call of this rank.
      failure: The exception of this rank, if it has failed.
      text: `report` of that, or empty.
    """
    failed = lockstep.ranks_with(bool(text))
    # The first replica; the lowest rank says for all which that is, as orders may differ.
    choice = str(min(failed, key=lockstep.ranks.index)).encode()
    first = int(lockstep.text_from(failed[0], choice))
    other_ranks = [rank for rank in failed if rank != first]
    report_text = lockstep.text_from(first, text)
    if failure is not None:
        return failure
    failure_fields = json.loads(report_text)
    replica = lockstep.ranks.index(first)
    also = f" ({ranks_text(other_ranks)} failed too)" if other_ranks else ""
    message = (
        f"replica {replica} raised {failure_fields['kind']} in {failure_fields['place']}: "
        f"{failure_fields['text']}{also}\n"
        f"  This is replica {lockstep.comm.rank} of {lockstep.comm.size}, in {find_call_site()}, "
        f"{_window(call)}.\n  On replica {replica}:\n{failure_fields['traceback']}"
    )
    names = tuple(failure_fields["names"])
    return remote_error(message, first, failure_fields["kind"], names, failure_fields["traceback"])


def other_versions(lockstep: Ranks, version_bits: int) -> PreflightError:
    """Return the error of every rank when their handshakes have several formats. Not collective.

    Args:
      lockstep: The ranks.
      version_bits: The bits of the versions of all ranks; see `mpistrat.lockstep.frame`.
    """
    versions = [str(bit - 7) for bit in range(8, 32) if version_bits >> bit & 1]
    return PreflightError(
        "the ranks of this job run versions of mpistrat that do not fit: their handshakes have "
        f"the formats {' and '.join(versions)} ({lockstep.here}, which has {VERSION}). Start all "
        "ranks in one environment."
    )


def alarms(lockstep: Ranks, alarm: str) -> tuple[str, int]:
    """Return what is wrong with the numbers of all ranks, and the first rank of these. Collective.

    Args:
      lockstep: The ranks.
      alarm: What is wrong with those of this rank; empty if nothing is.
    """
    ranks_by_text, other_ranks = lockstep.distinct_texts(alarm.encode(errors="replace"))
    texts = sorted((rank, text) for text, ranks in ranks_by_text.items() for rank in ranks)
    lines = [f"rank {rank}: {text.decode()}" for rank, text in texts]
    return "\n".join(shorten(lines, hidden_count=len(other_ranks))), texts[0][0]

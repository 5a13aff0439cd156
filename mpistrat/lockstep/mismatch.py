"""Errors of calls that differ or fail: then, and only then, the ranks exchange texts.

Up to 64 ranks gather texts. Above, a text that several ranks have travels once, from the lowest of
them, and at most 16 do (`Ranks.gather_distinct_texts`), so the bytes that a rank receives do not
grow with the number of ranks, but for a bit of each rank in each text. Nothing travels that all
ranks have alike.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

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
from mpistrat.lockstep.tracebacks import format_traceback, locate_failure

# Modules whose exception classes are the same on every rank.
_SHARED_MODULES = ("builtins", "mpistrat.errors")
# Characters of a text that is sent to other ranks; the rank itself keeps all of it.
_MAX_SENT = 1 << 16
# Characters of a call in a message, and how many come from its beginning.
_MAX_SHOWN, _HEAD = 300, 60


# A digest of contents in the text of a call, with the shown part of the contents.
_HASH = re.compile(r"\b[0-9a-f]{16,}\b(?: \([^()]*\))?")
# The mark before the digest of a tree that has to be the same on all ranks; mark and digest.
SAME = "same="
_SAME_POINT = re.compile(rf"{SAME}{_HASH.pattern}")
# Small writes to variables, in the text of the handshake that follows them.
_WRITES = re.compile(r", after (?:assign|scatter_).*")

_ADVICE = (
    "  Every rank must make the same calls in the same order, with the same structure, shapes and "
    "dtypes. Look for a collective under `if rank == ...`, or an early `break`."
)
_SAVING_ON_ALL_ADVICE = (
    "\n  Save and restore on all ranks, not under `if rank == 0`: replica 0 writes, and the others "
    "take part."
)
_SAVING_ADVICE = (
    "  Every rank must name the same path, as replica 0 writes and looks for all of them (no rank "
    "needs one of its own), and save the same variables, numbers and strings."
)
_POINTS_ADVICE = (
    "  Each rank is at a point of its own, so what they reduce belongs to none of them. Give the "
    "solver the same starting point, x0 = strategy.broadcast(x0), and the same seed on all ranks."
)
_BROADCAST_ADVICE = (
    "  Only the value of replica 0 counts, but every rank gives one of the same structure, shapes "
    "and dtypes. What replica 0 alone can make: ms.once(fn) calls fn there and returns its result "
    "on all ranks."
)
_AXIS_ADVICE = (
    "\n  Values with an element for each example may differ in length: reduce them with axis=0."
)
# The advice for calls that all have one name, by the beginning of the name.
_ADVICE_BY_NAME = {"Checkpoint": _SAVING_ADVICE, "broadcast": _BROADCAST_ADVICE}
# Advice where the call of some rank has a text.
_ADVICE_BY_PART = {
    "distribute dataset": (
        "\n  Give all ranks the same dataset, with equal seeds and without shard(): each replica "
        "gets its rows of every batch. For a dataset of each rank call "
        "distribute_datasets_from_function."
    ),
    ".apply_gradients of all": (
        "\n  apply_gradients outside of strategy.run takes gradients that are equal on all ranks. "
        "Call the step by strategy.run(step, args=batch): there the gradients are reduced."
    ),
    "run, whose function returned": (
        "\n  Where the function of run has returned: look for an early `return`, or an `except` "
        "that hides the error of that rank."
    ),
}
# Hyper-parameters of an optimizer of PyTorch, which a handshake compares.
_HYPER_PARAMETERS = re.compile(r", after .*?\w+\.param_groups: (.*)")
_SHOWN_NUMBERS = 4
_HYPER_PARAMETERS_ADVICE = (
    "  Hyper-parameters of an optimizer differ between ranks, which would then have other weights. "
    "Set them alike on all ranks. What a scheduler is given, such as a loss, has to be that of all "
    "ranks: strategy.all_reduce('MEAN', loss)."
)
# The mark of arrays that are reduced in place in shared memory.
_IN_PLACE = re.compile(r", out, in place [0-9/ ]+")


def get_saving_advice(calls: Iterable[str]) -> str:
    """Return advice for programs that save or restore on some ranks only; empty for others.

    Args:
      calls: The calls of ranks, while others made other calls, or have left.
    """
    return _SAVING_ON_ALL_ADVICE if any(call.startswith("Checkpoint") for call in calls) else ""


def shorten_text(text: str) -> str:
    """Return a text that can be sent; a very long one is cut in the middle, with a note.

    Example:
      >>> len(shorten_text("x" * 10**7)) < 70_000
      True
    """
    excess_length = len(text) - _MAX_SENT
    if excess_length <= 0:
        return text
    half = _MAX_SENT // 2
    return f"{text[:half]}\n... {excess_length:,} characters are cut here ...\n{text[-half:]}"


class _ReportedCall(NamedTuple):
    """A call as a message shows it.

    Attributes:
      number: The number of the call.
      position: ``file:line`` of the program that makes it.
      text: The text of the call.
    """

    number: int
    position: str
    text: str


def _shorten_around(text: str, center: int = 0) -> str:
    """Return a text; the head of a long one, and its part around the index `center`."""
    if len(text) <= _MAX_SHOWN:
        return text
    start = max(_HEAD, center - _HEAD)
    gap = " ... " if start > _HEAD else ""
    end = start + _MAX_SHOWN - _HEAD
    return text[:_HEAD] + gap + text[start:end] + (" ..." if end < len(text) else "")


def explain_mismatch(lockstep: Ranks, call: str) -> LockstepError | DivergenceError:
    """Return the error of every rank when the calls differ. Collective.

    It is a DivergenceError where they differ only in the values given as ``same=``.
    """
    number = lockstep.session.calls
    own_text = json.dumps([number, find_call_site(), call]).encode()
    ranks_by_text, other_ranks = lockstep.gather_distinct_texts(own_text)
    ranks_by_call = {
        _ReportedCall(*json.loads(text)): ranks for text, ranks in ranks_by_text.items()
    }
    calls_but_points = {(c.number, _SAME_POINT.sub("", c.text)) for c in ranks_by_call}
    has_other_points = len(calls_but_points) == 1
    summary = "values given as same= differ" if has_other_points else "collective calls differ"
    lines = [f"{summary} between ranks ({lockstep.rank_text}, call {number})"]
    call_lines = _list_calls(ranks_by_call, number)
    lines += [f"  {line}" for line in shorten(call_lines, hidden_count=len(other_ranks))]
    if has_other_points:
        return DivergenceError("\n".join([*lines, _POINTS_ADVICE]))
    if len({tuple(_WRITES.findall(reported.text)) for reported in ranks_by_call} - {()}) > 1:
        lines.append(
            "  If what they wrote to a variable differs: reduce it first (ctx.all_reduce), or "
            "create the variable with an aggregation. What differs is undone."
        )
    if len({(c.number, c.position, _HASH.sub("", c.text)) for c in ranks_by_call}) == 1:
        lines.append(
            "  The calls are the same, but a value in them is not (its hash is shown): it depends "
            "on the rank. Make it the same on all, or reduce it first."
        )
        return LockstepError("\n".join(lines))
    if parameter_lines := _compare_hyper_parameters(ranks_by_call):
        return LockstepError("\n".join([*lines, *parameter_lines]))
    buffers_text = "" if other_ranks else _compare_buffers(ranks_by_call)
    lines.append(buffers_text or _get_advice([reported.text for reported in ranks_by_call]))
    return LockstepError("\n".join(lines))


def _list_calls(ranks_by_call: Mapping[_ReportedCall, Sequence[int]], number: int) -> list[str]:
    """Return a line for each call; it has the number of the call if that is not `number`."""
    width = max(len(ranks_text(ranks)) for ranks in ranks_by_call.values())
    columns = enumerate(zip(*(reported.text for reported in ranks_by_call), strict=False))
    first_difference = next((i for i, letters in columns if len(set(letters)) > 1), 0)
    lines = []
    for reported, ranks in ranks_by_call.items():
        number_text = "" if reported.number == number else f"call {reported.number}: "
        ranks_column = f"{ranks_text(ranks) + ':':{width + 1}}"
        shown_text = _shorten_around(reported.text, first_difference)
        lines.append(f"{ranks_column} {reported.position}   {number_text}{shown_text}")
    return lines


def _get_advice(texts: Sequence[str]) -> str:
    """Return advice for a program whose ranks have made calls of these texts."""
    # The text of a broadcast of torch.distributed contains whose value counts.
    names = {"" if ", src=" in text else text.partition("(")[0] for text in texts}
    name = names.pop() if len(names) == 1 else ""
    advice = (text for begin, text in _ADVICE_BY_NAME.items() if name.startswith(begin))
    parts = (part for part in _ADVICE_BY_PART if any(part in text for text in texts))
    more_advice = "".join(_ADVICE_BY_PART[part] for part in parts)
    beginnings = {text.partition(",")[0] for text in texts}  # with the operation
    if len(beginnings) == 1 and texts[0].startswith("reduce("):
        more_advice += _AXIS_ADVICE
    return next(advice, _ADVICE + more_advice + get_saving_advice(texts))


def _compare_hyper_parameters(ranks_by_call: Mapping[_ReportedCall, Sequence[int]]) -> list[str]:
    """Return lines with the hyper-parameters of an optimizer that differ; empty if none do."""
    matches = [
        (_HYPER_PARAMETERS.findall(reported.text), ranks)
        for reported, ranks in ranks_by_call.items()
    ]
    parameters_of_ranks = [(match[0].split(", "), ranks) for match, ranks in matches if match]
    columns = enumerate(zip(*(parameters for parameters, _ in parameters_of_ranks), strict=False))
    differing = [i for i, column in columns if len(set(column)) > 1][:_SHOWN_NUMBERS]
    if len(parameters_of_ranks) < len(matches) or not differing:
        return []
    rank_lines = [
        f"  {ranks_text(ranks)}: {', '.join(parameters[i] for i in differing)}"
        for parameters, ranks in parameters_of_ranks
    ]
    return [*shorten(rank_lines), _HYPER_PARAMETERS_ADVICE]


def _compare_buffers(ranks_by_call: Mapping[_ReportedCall, Sequence[int]]) -> str:
    """Return the ranks that gave arrays of `gradient_buffers`, if calls differ in that only."""
    ranks_by_kind: dict[bool, list[int]] = {}  # True: arrays of `gradient_buffers`
    for reported, ranks in ranks_by_call.items():
        is_in_place = _IN_PLACE.search(reported.text) is not None
        ranks_by_kind.setdefault(is_in_place, []).extend(ranks)
    if len(ranks_by_kind) < 2 or len({_IN_PLACE.sub("", c.text) for c in ranks_by_call}) > 1:
        return ""
    buffer_ranks = ranks_text(sorted(ranks_by_kind[True]))
    other_ranks = ranks_text(sorted(ranks_by_kind[False]))
    return (
        f"  {buffer_ranks} gave arrays of gradient_buffers, {other_ranks} ordinary arrays. Give "
        "the one or the other on all ranks."
    )


def encode_report(error: BaseException) -> bytes:
    """Return the description of an exception for other ranks, as JSON."""
    failure_fields: dict[str, Any] = {
        "kind": type(error).__name__,
        "names": [c.__name__ for c in type(error).__mro__ if c.__module__ in _SHARED_MODULES],
        "text": shorten_text(text_of(error)),
        "place": locate_failure(error),
        "traceback": shorten_text(format_traceback(error)),
    }
    return json.dumps(failure_fields).encode()


_REFUSAL_TEXT = (
    "an exception of this rank is being reported to the others. Let its __str__ and __repr__ make "
    "no collective call."
)


@contextmanager
def refusing_calls(state: CallState) -> Iterator[None]:
    """Refuse calls of the body, which converts an exception of the program to a text.

    That happens before the handshake that sends the text: inside of the handshake, a call out of
    ``__str__`` would mix with the exchange of the ranks.
    """
    previous_error = state.closing_error
    state.closing_error = previous_error or LockstepError(_REFUSAL_TEXT)
    try:
        yield
    finally:
        state.closing_error = previous_error


def explain_failure(
    lockstep: Ranks, call: str, failure: BaseException | None, text: bytes
) -> BaseException:
    """Return the error of every rank when at least one has failed. Collective.

    The rank that failed gets its own exception back; the others a `RemoteError` about the lowest
    rank that failed.

    Args:
      lockstep: The ranks.
      call: The call of this rank.
      failure: The exception of this rank, if it has failed.
      text: `encode_report` of that exception, or empty.
    """
    first_rank, have_all_failed = lockstep.find_first_replica(bool(text))
    if failure is not None and have_all_failed:  # then nobody needs the report of another
        return failure
    failed = lockstep.find_ranks_with(bool(text))
    other_ranks = [rank for rank in failed if rank != first_rank]
    report_text = lockstep.broadcast_text(first_rank, text)
    if failure is not None:
        return failure
    failure_fields = json.loads(report_text)
    replica = lockstep.ranks.index(first_rank)
    others_text = f" ({ranks_text(other_ranks)} failed too)" if other_ranks else ""
    message = (
        f"replica {replica} raised {failure_fields['kind']} in {failure_fields['place']}: "
        f"{failure_fields['text']}{others_text}\n"
        f"  This is replica {lockstep.comm.rank} of {lockstep.comm.size}, in {find_call_site()}, "
        f"{_shorten_around(call)}.\n  On replica {replica}:\n{failure_fields['traceback']}"
    )
    names = tuple(failure_fields["names"])
    kind, trace = failure_fields["kind"], failure_fields["traceback"]
    return remote_error(message, first_rank, kind, names, trace)


def explain_versions(lockstep: Ranks, version_bits: int) -> PreflightError:
    """Return the error of every rank when their handshakes have several formats. Not collective.

    Args:
      lockstep: The ranks.
      version_bits: The bits of the versions of all ranks; see `mpistrat.lockstep.frame`.
    """
    versions = [str(bit - 7) for bit in range(8, 32) if version_bits >> bit & 1]
    return PreflightError(
        "the ranks of this job run versions of mpistrat that do not fit: their handshakes have "
        f"the formats {' and '.join(versions)} ({lockstep.rank_text}, which has {VERSION}). "
        "Start all ranks in one environment."
    )


def gather_alarms(lockstep: Ranks, alarm: str) -> tuple[str, int]:
    """Return the alarms of all ranks, and the first rank that has one. Collective.

    Args:
      lockstep: The ranks.
      alarm: The description of the numbers of this rank that are not finite; empty if all are.
    """
    ranks_by_text, other_ranks = lockstep.gather_distinct_texts(alarm.encode(errors="replace"))
    texts = sorted((rank, text) for text, ranks in ranks_by_text.items() for rank in ranks)
    lines = [f"rank {rank}: {text.decode()}" for rank, text in texts]
    return "\n".join(shorten(lines, hidden_count=len(other_ranks))), texts[0][0]

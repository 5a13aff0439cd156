"""Leaving the program is a collective call too.

Whatever way a rank leaves, by its end, an exception, ``sys.exit`` or Ctrl-C, it takes part in one
more handshake, whose call is "leave the program". So a rank that leaves while others are in a call
is found out at once by all of them, and ranks that leave together agree on one exit code (MPICH's
launcher would OR different ones).

Exit codes: 0, every rank left well; 77, a rank left while others had more to do; else the code of
the lowest rank that failed by itself. Where ranks have left sessions of their own before, such as
the trials of a sweep, the largest code that any of these left with.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrat.comm import callsite, mpi
from mpistrat.comm.base import Comm
from mpistrat.errors import LockstepError, RemoteError, remote_error, text_of
from mpistrat.lockstep import mismatch
from mpistrat.lockstep.ranks import CallState, DistinctTexts, Ranks, Unproved
from mpistrat.lockstep.tracebacks import failure_line

LEAVE = "leave the program"
MISMATCH = 77


class Agreement(NamedTuple):
    """What the ranks agreed on when one or more of them left.

    Attributes:
      code: The exit code of the job.
      speaks: This rank is the one to print the exception that it left with.
      also: How many ranks left with the same exception.
      planned: All ranks left together, each by ``sys.exit`` with that code, which is not 0.
    """

    code: int
    speaks: bool
    also: int
    planned: bool

    def describe_leavers(self, comm: Comm, in_job: Sequence[int]) -> str:
        """Return who left with the same, in words.

        Args:
          comm: The ranks that have left together.
          in_job: Their numbers in the job.
        """
        leavers_text = f"rank {comm.rank}" if self.also == 1 else f"{self.also} ranks"
        part = in_job != list(range(comm.size)) or comm.size == 1
        return f"{leavers_text} of {comm.size}" + (
            f" ({callsite.ranks_text(in_job)} of the job)" * part
        )


def extract_exit_text(failure: BaseException | None) -> str:
    """Return the text that a program left with by ``sys.exit(text)``; empty if it did not."""
    if not isinstance(failure, SystemExit) or isinstance(failure.code, int | None):
        return ""
    return mismatch.cut(text_of(failure.code))


def row(
    state: CallState, code: int, failure: BaseException | None, of_group: bool
) -> dict[str, Any]:
    """Return the message of a rank to the others when it leaves.

    Args:
      state: The state of its calls.
      code: The exit code that it would leave with.
      failure: The exception that it leaves with, if any.
      of_group: The code is what ranks of another session have agreed on.
    """
    fields: dict[str, Any] = {
        "leaving": True,
        "code": code,
        "group": of_group,
        "echo": isinstance(failure, RemoteError),
    }
    with mismatch.asking(state):
        fields["said"] = extract_exit_text(failure)
        if failure is not None and not isinstance(failure, SystemExit):
            fields |= json.loads(mismatch.report(failure))
    return fields


def _kind(row: dict[str, Any]) -> bytes:
    """Return what ranks have in common that leave with the same; empty of a rank that stays."""
    if not row["leaving"]:
        return b""
    kind = [row.get("kind"), row.get("place"), row["code"], row["said"]]
    return json.dumps(kind).encode()


def _code(kind: bytes) -> str:
    *_, code, exit_message = json.loads(kind)
    return f"{code}: {exit_message}" if exit_message else str(code)


# No rank: larger than any, with its code.
_NO_RANK = np.iinfo(np.int64).max
_CODE_BITS = 32


class _Tally(NamedTuple):
    """What all ranks say of their ends, in numbers: the least of each over all ranks.

    Attributes:
      all_leave: 1 if no rank stays.
      none_of_group: 0 if ranks of another session have agreed on the code of some rank.
      none_left_well: 0 if some rank leaves with code 0.
      all_exit: 1 if every rank leaves by itself, without an exception other than ``sys.exit``.
      lowest_code: Of the ranks that leave; 0 if some rank stays.
      minus_highest_code: The same of the highest, with the opposite sign.
      failed: The lowest rank that leaves with a code that is not 0, and the code.
      failed_itself: The same, if it is not for an exception of another rank.
      raised_itself: The lowest rank that leaves with an exception of its own.
      raised: The same, of its own or of another rank's.
      stays: The lowest rank that stays.
    """

    all_leave: int
    none_of_group: int
    none_left_well: int
    all_exit: int
    lowest_code: int
    minus_highest_code: int
    failed: int
    failed_itself: int
    raised_itself: int
    raised: int
    stays: int

    def exit_code(self) -> int:
        """Return the exit code of the job."""
        if self.all_leave and not self.none_of_group:
            return -self.minus_highest_code
        if self.failed_itself != _NO_RANK:
            return self.failed_itself & ((1 << _CODE_BITS) - 1)
        if self.failed == _NO_RANK:
            return 0 if self.all_leave else MISMATCH
        if not self.none_left_well:  # a sys.exit(0) that the others heard of as an exception
            return MISMATCH
        return self.failed & ((1 << _CODE_BITS) - 1)


def _tally(rank: int, row: dict[str, Any]) -> _Tally:
    """Return what one rank says of its end."""
    leaves, code, echo = row["leaving"], row["code"], row["echo"]
    with_code = rank << _CODE_BITS | code if leaves and code else _NO_RANK
    return _Tally(
        all_leave=int(leaves),
        none_of_group=int(not (leaves and row["group"])),
        none_left_well=int(not leaves or code != 0),
        all_exit=int(leaves and not row["group"] and "kind" not in row),
        lowest_code=code if leaves else 0,
        minus_highest_code=-code if leaves else 0,
        failed=with_code,
        failed_itself=_NO_RANK if echo else with_code,
        raised_itself=rank if leaves and "kind" in row and not echo else _NO_RANK,
        raised=rank if leaves and "kind" in row else _NO_RANK,
        stays=_NO_RANK if leaves else rank,
    )


class _Departure(NamedTuple):
    """Which ranks leave, and with what; equal on all ranks.

    Attributes:
      tally: In numbers.
      kinds: The different ways in which they leave, by `_kind`.
      alike_count: How many writes since the last handshake all ranks have made alike.
      row: What the rank tells whose exception has ended the program, if one has.
    """

    tally: _Tally
    kinds: DistinctTexts
    alike_count: int
    row: dict[str, Any] | None


def _exchange(lockstep: Ranks, row: dict[str, Any], writes: Sequence[Unproved]) -> _Departure:
    """Exchange which ranks leave, and why. Collective, of those that leave and those that stay.

    The line about the exception that has ended the program, if one has, is noted in the state.

    Args:
      lockstep: The ranks.
      row: The `row` of this rank.
      writes: Those of this rank since the last handshake.
    """
    local_tally = np.array(_tally(lockstep.session.comm.rank, row), np.int64)
    tally = _Tally(*lockstep.reduce_numbers(local_tally, np.minimum, "MIN").tolist())
    kinds = lockstep.distinct_texts(_kind(row))
    alike_write_count = alike_count(lockstep, writes)
    speaker_row = None
    in_job = mpi.ranks_in_job(lockstep.session.comm)
    if tally.raised != _NO_RANK:
        speaker = tally.raised if tally.raised_itself == _NO_RANK else tally.raised_itself
        speaker_row = json.loads(lockstep.text_from(speaker, json.dumps(row).encode()))
        failed = [in_job[rank] for rank in kinds.ranks_by_text.get(_kind(speaker_row), [speaker])]
        line = failure_line(failed, speaker_row["kind"], speaker_row["place"], speaker_row["text"])
    elif not tally.all_leave:  # those that stay raise that some have left
        place = lockstep.text_from(tally.stays, callsite.find_call_site().encode()).decode()
        departed_ranks = {rank for ranks in kinds.ranks_by_text.values() for rank in ranks}
        departed_ranks.update(kinds.other_ranks)
        staying = [in_job[rank] for rank in range(len(in_job)) if rank not in departed_ranks]
        line = failure_line(staying, "LockstepError", place, _too_early(kinds))
    else:
        line = ""
    lockstep.state.cause = line
    return _Departure(tally, kinds, alike_write_count, speaker_row)


def _too_early(kinds: DistinctTexts) -> str:
    """Return in words which ranks have left while others had more to do."""
    departed_ranks = sorted(sum(kinds.ranks_by_text.values(), kinds.other_ranks))
    codes = callsite.group_by_key(map(_code, kinds.ranks_by_text), kinds.ranks_by_text)
    codes_text = ", ".join(callsite.shorten(list(codes), hidden_count=len(kinds.other_ranks)))
    verb = "has" if len(departed_ranks) == 1 else "have"
    departed_text = callsite.ranks_text(departed_ranks)
    return (
        f"{departed_text} {verb} left the program (exit code {codes_text}) while others had more "
        "to do"
    )


def farewell(lockstep: Ranks, own_row: dict[str, Any]) -> Agreement:
    """Exchange why each rank leaves, and agree. Collective; the part of who leaves.

    Args:
      lockstep: The ranks.
      own_row: The `row` of this one.
    """
    tally, kinds, _, _ = _exchange(lockstep, own_row, lockstep.state.unproved)
    rank = lockstep.session.comm.rank
    # A rank whose way is not among those that were exchanged speaks for itself.
    alike_ranks = kinds.ranks_by_text.get(_kind(own_row), [rank])
    # An echo of another rank's exception is not worth printing where that rank prints it itself.
    speaks = alike_ranks[0] == rank and not (own_row["echo"] and tally.raised_itself != _NO_RANK)
    code = tally.exit_code()
    is_common = tally.lowest_code == -tally.minus_highest_code == code
    return Agreement(code, speaks, len(alike_ranks), bool(code and tally.all_exit and is_common))


def digests(writes: Sequence[Unproved]) -> bytes:
    """Return the digests of writes, one after the other."""
    return b"".join([write.digest for write in writes])


def alike_count(lockstep: Ranks, writes: Sequence[Unproved]) -> int:
    """Return how many writes, from the first on, all ranks have made alike. Collective.

    Args:
      lockstep: The ranks.
      writes: Those of this rank since the last handshake.
    """
    count = int(lockstep.reduce_numbers(np.array(len(writes)), np.minimum, "MIN"))
    if not count:
        return 0
    # Bits that are 1 on some rank, and those that are 0 on some rank: see `frame`.
    words = np.frombuffer(digests(writes[:count]), np.uint64)
    union = lockstep.reduce_numbers(np.concatenate([words, ~words]), np.bitwise_or, "BOR")
    differs = (union[: words.size] & union[words.size :]).reshape(count, -1).any(axis=1)
    return int(differs.argmax()) if differs.any() else count


def keep_alike(writes: Sequence[Unproved], count: int) -> None:
    """Undo the writes of this rank except for the first ones, which all ranks have made alike.

    Args:
      writes: Those since the last handshake.
      count: How many are kept; see `alike_count`.
    """
    for write in reversed(writes[count:]):
        write.undo()


def left(lockstep: Ranks, call: str, writes: Sequence[Unproved]) -> BaseException:
    """Learn who has left while this rank was in `call`. Collective; the part of who stays.

    Args:
      lockstep: The ranks of the call.
      call: Its text.
      writes: Those of this rank since the last handshake.

    Returns:
      The error to raise; the session remembers it and the exit code.
    """
    state, session = lockstep.state, lockstep.session
    own_row = {"leaving": False, "code": 0, "group": False, "echo": False, "said": ""}
    tally, kinds, count, row = _exchange(lockstep, own_row, writes)
    keep_alike(writes, count)
    state.exit_code = tally.exit_code()
    state.speaks = tally.stays == session.comm.rank
    place_text = f"{lockstep.here}, call {session.calls}: {callsite.find_call_site()} {call}"
    if row is not None and tally.raised_itself != _NO_RANK:
        rank = tally.raised_itself
        replica = lockstep.ranks.index(rank)
        return remote_error(
            f"replica {replica} raised {row['kind']} in {row['place']} and left the program: "
            f"{row['text']}\n  ({place_text})\n  On replica {replica}:\n{row['traceback']}",
            rank,
            row["kind"],
            tuple(row["names"]),
            row["traceback"],
        )
    return LockstepError(
        f"{_too_early(kinds)} ({place_text}).\n"
        "  Every rank must make the same calls. Look for a collective call under `if rank == ...`, "
        "an early return or break, a sys.exit, or a loop of another length on one rank."
        + mismatch.advice_of_saving([call])
    )

"""Leaving the program is a collective call too.

A rank takes part in one more handshake when it leaves, by its end, an exception, ``sys.exit`` or
Ctrl-C; the call is "leave the program". So all ranks notice at once if one leaves while others are
in a call, and ranks that leave together agree on one exit code (MPICH's launcher would OR different
ones). `agree_on_exit` is the part of the ranks that leave, `explain_departure` that of the ranks
that stay; both make `_exchange`.

Exit codes: 0 if every rank left well; 77 if a rank left while others had more to do; else the code
of the lowest rank that failed by itself. Where ranks have left sessions of their own before, such
as the trials of a sweep, it is the largest code of these sessions.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpistrat.comm import callsite, mpi
from mpistrat.comm.base import Comm
from mpistrat.errors import LockstepError, RemoteError, remote_error, text_of
from mpistrat.lockstep import mismatch
from mpistrat.lockstep.ranks import CallState, DistinctTexts, PendingWrite, Ranks
from mpistrat.lockstep.tracebacks import format_failure_line

_Message: TypeAlias = dict[str, Any]  # of a rank that leaves or stays, sent as JSON

LEAVE = "leave the program"
MISMATCH = 77


class Agreement(NamedTuple):
    """The agreement of the ranks when one or more of them left.

    Attributes:
      code: The exit code of the job.
      is_speaker: This rank prints the exception that it left with, for all that left with it.
      alike_rank_count: How many ranks left with the same exception.
      is_planned: All ranks left together, each by ``sys.exit`` with that code, which is not 0.
    """

    code: int
    is_speaker: bool
    alike_rank_count: int
    is_planned: bool

    def describe_leavers(self, comm: Comm, in_job: Sequence[int]) -> str:
        """Return in words the ranks that left with the same exception.

        Args:
          comm: The ranks that have left together.
          in_job: Their numbers in the job.
        """
        leavers_text = (
            f"rank {comm.rank}" if self.alike_rank_count == 1 else f"{self.alike_rank_count} ranks"
        )
        is_part = [*in_job] != [*range(comm.size)] or comm.size == 1
        return f"{leavers_text} of {comm.size}" + (
            f" ({callsite.ranks_text(in_job)} of the job)" * is_part
        )


def extract_exit_text(failure: BaseException | None) -> str:
    """Return the text that a program left with by ``sys.exit(text)``; empty if it did not."""
    if not isinstance(failure, SystemExit) or isinstance(failure.code, int | None):
        return ""
    return mismatch.shorten_text(text_of(failure.code))


def describe_departure(
    state: CallState, code: int, failure: BaseException | None, of_group: bool
) -> _Message:
    """Return the message of a rank to the others when it leaves.

    Args:
      state: The state of its calls.
      code: The exit code that it would leave with.
      failure: The exception that it leaves with, if any.
      of_group: Ranks of another session have agreed on the code.
    """
    message: _Message = {
        "leaving": True,
        "code": code,
        "group": of_group,
        "echo": isinstance(failure, RemoteError),
    }
    with mismatch.refusing_calls(state):
        message["said"] = extract_exit_text(failure)
        if failure is not None and not isinstance(failure, SystemExit):
            message |= json.loads(mismatch.encode_report(failure))
    return message


def _encode_kind(message: _Message) -> bytes:
    """Return the kind of a departure, equal for alike ones; empty if the rank stays."""
    if not message["leaving"]:
        return b""
    fields = [message.get("kind"), message.get("place"), message["code"], message["said"]]
    return json.dumps(fields).encode()


def _describe_exit_code(encoded_kind: bytes) -> str:
    *_, code, exit_message = json.loads(encoded_kind)
    return f"{code}: {exit_message}" if exit_message else str(code)


# Stands for no rank: larger than any rank with its code.
_NO_RANK = np.iinfo(np.int64).max
_CODE_BITS = 32


class _Tally(NamedTuple):
    """The departures of all ranks in numbers: the least of each over all ranks.

    Attributes:
      all_leave: 1 if no rank stays.
      none_of_group: 0 if ranks of another session have agreed on the code of some rank.
      none_left_well: 0 if some rank leaves with code 0.
      all_exit: 1 if every rank leaves by itself, without an exception other than ``sys.exit``.
      lowest_code: Of the ranks that leave; 0 if some rank stays.
      minus_highest_code: The highest code of the ranks that leave, with the opposite sign.
      failed: The lowest rank that leaves with a code other than 0, and the code.
      failed_itself: The lowest rank that leaves so not because of another rank, and the code.
      raised_itself: The lowest rank that leaves with an exception of its own.
      raised: The lowest rank that leaves with an exception, its own or another rank's.
      staying: The lowest rank that stays.
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
    staying: int

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


def _tally(rank: int, message: _Message) -> _Tally:
    """Return the tally of one rank alone."""
    leaves, code, is_echo = message["leaving"], message["code"], message["echo"]
    with_code = rank << _CODE_BITS | code if leaves and code else _NO_RANK
    return _Tally(
        all_leave=int(leaves),
        none_of_group=int(not (leaves and message["group"])),
        none_left_well=int(not leaves or code != 0),
        all_exit=int(leaves and not message["group"] and "kind" not in message),
        lowest_code=code if leaves else 0,
        minus_highest_code=-code if leaves else 0,
        failed=with_code,
        failed_itself=_NO_RANK if is_echo else with_code,
        raised_itself=rank if leaves and "kind" in message and not is_echo else _NO_RANK,
        raised=rank if leaves and "kind" in message else _NO_RANK,
        staying=_NO_RANK if leaves else rank,
    )


class _Departure(NamedTuple):
    """The departure of ranks; equal on all ranks.

    Attributes:
      tally: The departures in numbers.
      kinds: The different kinds of departures, as `_encode_kind` returns them.
      alike_write_count: How many writes since the last handshake all ranks have made alike.
      cause: The message of the rank whose exception has ended the program, if one has.
    """

    tally: _Tally
    kinds: DistinctTexts
    alike_write_count: int
    cause: _Message | None


def _exchange(lockstep: Ranks, message: _Message, writes: Sequence[PendingWrite]) -> _Departure:
    """Exchange the departures of the ranks. Collective over ranks that leave and ranks that stay.

    The line about the exception that has ended the program, if one has, goes into the state.

    Args:
      lockstep: The ranks.
      message: The message of this rank.
      writes: The writes of this rank since the last handshake.
    """
    local_tally = np.array(_tally(lockstep.session.comm.rank, message), np.int64)
    tally = _Tally(*lockstep.reduce_numbers(local_tally, np.minimum, "MIN").tolist())
    kinds = lockstep.gather_distinct_texts(_encode_kind(message))
    alike_write_count = count_alike_writes(lockstep, writes)
    cause = None
    comm = lockstep.session.comm
    if tally.raised != _NO_RANK:
        speaker = tally.raised if tally.raised_itself == _NO_RANK else tally.raised_itself
        cause = json.loads(lockstep.broadcast_text(speaker, json.dumps(message).encode()))
        alike_ranks = kinds.ranks_by_text.get(_encode_kind(cause), [speaker])
        failed = _convert_to_job(comm, alike_ranks)
        line = format_failure_line(failed, cause["kind"], cause["place"], cause["text"])
    elif not tally.all_leave:  # those that stay raise that some have left
        position = lockstep.broadcast_text(
            tally.staying, callsite.find_call_site().encode()
        ).decode()
        departed_ranks = {rank for ranks in kinds.ranks_by_text.values() for rank in ranks}
        departed_ranks.update(kinds.other_ranks)
        staying_ranks = [rank for rank in range(comm.size) if rank not in departed_ranks]
        staying = _convert_to_job(comm, staying_ranks)
        line = format_failure_line(
            staying, "LockstepError", position, _describe_early_departure(kinds)
        )
    else:
        line = ""
    lockstep.state.cause_text = line
    return _Departure(tally, kinds, alike_write_count, cause)


def _convert_to_job(comm: Comm, ranks: Sequence[int]) -> Sequence[int]:
    """Return the numbers in the job of some ranks of `comm`."""
    in_job = mpi.ranks_in_job(comm)
    return in_job if len(ranks) == len(in_job) else [in_job[rank] for rank in ranks]


def _describe_early_departure(kinds: DistinctTexts) -> str:
    """Return in words the ranks that have left while others had more to do."""
    departed_ranks = sorted(itertools.chain(kinds.other_ranks, *kinds.ranks_by_text.values()))
    codes = callsite.group_by_key(
        map(_describe_exit_code, kinds.ranks_by_text), kinds.ranks_by_text
    )
    codes_text = ", ".join(callsite.shorten(list(codes), hidden_count=len(kinds.other_ranks)))
    verb = "has" if len(departed_ranks) == 1 else "have"
    departed_text = callsite.ranks_text(departed_ranks)
    return (
        f"{departed_text} {verb} left the program (exit code {codes_text}) while others had more "
        "to do"
    )


def agree_on_exit(lockstep: Ranks, message: _Message) -> Agreement:
    """Exchange the departures of all ranks, and agree. Collective; the part of ranks that leave.

    Args:
      lockstep: The ranks.
      message: The message of this rank.
    """
    departure = _exchange(lockstep, message, lockstep.state.pending_writes)
    tally, kinds = departure.tally, departure.kinds
    rank = lockstep.session.comm.rank
    # A rank whose kind of departure is not among those that were exchanged speaks for itself.
    alike_ranks = kinds.ranks_by_text.get(_encode_kind(message), [rank])
    # An echo of another rank's exception is not worth printing where that rank prints it itself.
    is_echoed = message["echo"] and tally.raised_itself != _NO_RANK
    is_speaker = alike_ranks[0] == rank and not is_echoed
    code = tally.exit_code()
    is_common = tally.lowest_code == -tally.minus_highest_code == code
    return Agreement(
        code, is_speaker, len(alike_ranks), bool(code and tally.all_exit and is_common)
    )


def join_digests(writes: Sequence[PendingWrite]) -> bytes:
    """Return the digests of writes, one after the other."""
    return b"".join([write.digest for write in writes])


def count_alike_writes(lockstep: Ranks, writes: Sequence[PendingWrite]) -> int:
    """Return the number of writes, from the first on, that all ranks have made alike. Collective.

    Args:
      lockstep: The ranks.
      writes: The writes of this rank since the last handshake.
    """
    count = int(lockstep.reduce_numbers(np.array(len(writes)), np.minimum, "MIN"))
    if not count:
        return 0
    # Bits that are 1 on some rank, and those that are 0 on some rank: see `frame`.
    words = np.frombuffer(join_digests(writes[:count]), np.uint64)
    union = lockstep.reduce_numbers(np.concatenate([words, ~words]), np.bitwise_or, "BOR")
    differs = (union[: words.size] & union[words.size :]).reshape(count, -1).any(axis=1)
    return int(differs.argmax()) if differs.any() else count


def undo_unlike_writes(writes: Sequence[PendingWrite], count: int) -> None:
    """Undo the writes of this rank except for the first ones, which all ranks have made alike.

    Args:
      writes: The writes of this rank since the last handshake.
      count: How many are kept; see `count_alike_writes`.
    """
    for write in reversed(writes[count:]):
        write.undo()


def explain_departure(lockstep: Ranks, call: str, writes: Sequence[PendingWrite]) -> BaseException:
    """Exchange the departures of ranks that have left. Collective; the part of ranks that stay.

    Args:
      lockstep: The ranks of the call.
      call: The text of the call that this rank is inside of.
      writes: The writes of this rank since the last handshake.

    Returns:
      The error to raise; the session keeps it and the exit code.
    """
    state, session = lockstep.state, lockstep.session
    own_message: _Message = {"leaving": False, "code": 0, "group": False, "echo": False, "said": ""}
    tally, kinds, alike_write_count, cause = _exchange(lockstep, own_message, writes)
    undo_unlike_writes(writes, alike_write_count)
    state.exit_code = tally.exit_code()
    state.is_speaker = tally.staying == session.comm.rank
    position_text = (
        f"{lockstep.rank_text}, call {session.calls}: {callsite.find_call_site()} {call}"
    )
    if cause is not None and tally.raised_itself != _NO_RANK:
        rank = tally.raised_itself
        replica = lockstep.ranks.index(rank)
        return remote_error(
            f"replica {replica} raised {cause['kind']} in {cause['place']} and left the program: "
            f"{cause['text']}\n  ({position_text})\n  On replica {replica}:\n{cause['traceback']}",
            rank,
            cause["kind"],
            tuple(cause["names"]),
            cause["traceback"],
        )
    return LockstepError(
        f"{_describe_early_departure(kinds)} ({position_text}).\n"
        "  Every rank must make the same calls. Look for a collective call under `if rank == ...`, "
        "an early return or break, a sys.exit, or a loop of another length on one rank."
        + mismatch.get_saving_advice([call])
    )

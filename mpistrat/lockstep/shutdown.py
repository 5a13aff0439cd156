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

from mpistrat.comm import callsite, mpi
from mpistrat.comm.base import Comm
from mpistrat.errors import LockstepError, RemoteError, remote_error, text_of
from mpistrat.lockstep import mismatch
from mpistrat.lockstep.ranks import CallState, Ranks, Unproved
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

    def who(self, comm: Comm, in_job: Sequence[int]) -> str:
        """Return who left with the same, in words.

        Args:
          comm: The ranks that have left together.
          in_job: Their numbers in the job.
        """
        who = f"rank {comm.rank}" if self.also == 1 else f"{self.also} ranks"
        part = in_job != list(range(comm.size)) or comm.size == 1
        return f"{who} of {comm.size}" + (f" ({callsite.ranks_text(in_job)} of the job)" * part)


def said_by(failure: BaseException | None) -> str:
    """Return the text that a program left with by ``sys.exit(text)``; empty if it did not."""
    if not isinstance(failure, SystemExit) or isinstance(failure.code, int | None):
        return ""
    return mismatch.cut(text_of(failure.code))


def row(
    state: CallState, code: int, failure: BaseException | None, of_group: bool
) -> dict[str, Any]:
    """Return what a rank tells the others when it leaves.

    Args:
      state: Of its calls.
      code: The exit code that it would leave with.
      failure: The exception that it leaves with, if any.
      of_group: The code is what ranks of another session have agreed on.
    """
    told: dict[str, Any] = {
        "leaving": True,
        "code": code,
        "group": of_group,
        "echo": isinstance(failure, RemoteError),
    }
    with mismatch.asking(state):
        told["said"] = said_by(failure)
        if failure is not None and not isinstance(failure, SystemExit):
            told |= json.loads(mismatch.report(failure))
    return told


def _kind(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what ranks have in common that leave with the same."""
    return row.get("kind"), row.get("place"), None if "kind" in row else (row["code"], row["said"])


def _code(row: dict[str, Any]) -> str:
    return f"{row['code']}: {row['said']}" if row["said"] else str(row["code"])


def _cause(ranks: Ranks, rows: Sequence[dict[str, Any]]) -> str:
    """Return the line about the exception that has ended the program; empty if none has.

    Args:
      ranks: Those who have told `rows`.
      rows: What each has told.
    """
    if not any("kind" in row for row in rows):  # those that stay raise that some have left
        told = {"kind": "LockstepError", "text": _too_early(ranks, rows)}
        rows = [row if row["leaving"] else row | told | {"place": row["at"]} for row in rows]
    failed = [row for row in rows if "kind" in row]
    row = next((row for row in failed if not row["echo"]), next(iter(failed), None))
    if row is None:
        return ""
    in_job = mpi.ranks_in_job(ranks.session.comm)
    pairs = zip(ranks.ranks, rows, strict=True)
    alike = [in_job[rank] for rank, other in pairs if _kind(other) == _kind(row)]
    return failure_line(alike, row["kind"], row["place"], row["text"])


def _too_early(ranks: Ranks, rows: Sequence[dict[str, Any]]) -> str:
    """Return in words which ranks have left while others had more to do."""
    gone = [rank for rank, row in zip(ranks.ranks, rows, strict=True) if row["leaving"]]
    codes = ", ".join(_code(row) for row in rows if row["leaving"])
    verb = "has" if len(gone) == 1 else "have"
    who = callsite.ranks_text(gone)
    return f"{who} {verb} left the program (exit code {codes}) while others had more to do"


def _agreed(rows: list[dict[str, Any]]) -> int:
    leavers = [row for row in rows if row["leaving"]]
    if any(row["group"] for row in leavers) and len(leavers) == len(rows):
        return int(max(row["code"] for row in leavers))
    own = [row["code"] for row in leavers if row["code"] and not row["echo"]]
    echoed = [row["code"] for row in leavers if row["code"]]
    left_well = [row for row in leavers if not row["code"]]
    if echoed and not own and left_well:  # a sys.exit(0) that the others heard of as an exception
        return MISMATCH
    well = 0 if len(leavers) == len(rows) else MISMATCH
    return int(next(iter([*own, *echoed, well])))


def farewell(lockstep: Ranks, mine: dict[str, Any]) -> Agreement:
    """Exchange why each rank leaves, and agree. Collective; the part of who leaves.

    Args:
      lockstep: The ranks.
      mine: The `row` of this one.
    """
    mine["writes"] = digests(lockstep.state.unproved).hex()
    rows = [json.loads(text) for text in lockstep.texts(json.dumps(mine).encode())]
    alike = [rank for rank, row in enumerate(rows) if _kind(row) == _kind(mine)]
    # An echo of another rank's exception is not worth printing where that rank prints it itself.
    printed = any("kind" in row and not row["echo"] for row in rows)
    speaks = alike[0] == lockstep.comm.rank and not (mine["echo"] and printed)
    code = _agreed(rows)
    lockstep.state.cause = _cause(lockstep, rows)
    planned = bool(code) and all(
        row["leaving"] and row["code"] == code and not row["group"] and "kind" not in row
        for row in rows
    )
    return Agreement(code, speaks, len(alike), planned)


def digests(writes: Sequence[Unproved]) -> bytes:
    """Return the digests of writes, one after the other."""
    return b"".join([write.digest for write in writes])


def keep_alike(writes: Sequence[Unproved], rows: Sequence[bytes]) -> None:
    """Undo the writes of this rank from the first on that not all ranks have made alike.

    Args:
      writes: Those since the last handshake.
      rows: What `digests` says of those of every rank.
    """
    alike = 0
    for number, write in enumerate(writes):
        here = slice(number * len(write.digest), (number + 1) * len(write.digest))
        if any(row[here] != write.digest for row in rows):
            break
        alike += 1
    for write in reversed(writes[alike:]):
        write.undo()


def left(lockstep: Ranks, call: str, writes: Sequence[Unproved]) -> BaseException:
    """Learn who has left while this rank was in `call`. Collective; the part of who stays.

    Args:
      lockstep: Whose call it was.
      call: Its text.
      writes: Those of this rank since the last handshake.

    Returns:
      The error to raise; the session remembers it and the exit code.
    """
    state, comm = lockstep.state, lockstep.comm
    mine = {"leaving": False, "code": 0, "group": False, "echo": False, "said": ""}
    mine |= {"writes": digests(writes).hex(), "at": callsite.where()}
    rows = [json.loads(text) for text in lockstep.texts(json.dumps(mine).encode())]
    keep_alike(writes, [bytes.fromhex(row["writes"]) for row in rows])
    state.exit_code = _agreed(rows)
    stayed = [rank for rank, row in enumerate(rows) if not row["leaving"]]
    state.speaks = stayed[0] == comm.rank
    gone = [rank for rank, row in enumerate(rows) if row["leaving"]]
    ranks = lockstep.ranks  # of the replicas, by which the rows are counted
    where = f"call {lockstep.session.calls}: {callsite.where()} {call}"
    here = f"{lockstep.here}, {where}"
    culprits = [rank for rank in gone if "kind" in rows[rank] and not rows[rank]["echo"]]
    state.cause = _cause(lockstep, rows)
    if culprits:
        row, rank = rows[culprits[0]], culprits[0]
        return remote_error(
            f"replica {rank} raised {row['kind']} in {row['place']} and left the program: "
            f"{row['text']}\n  ({here})\n  On replica {rank}:\n{row['traceback']}",
            ranks[rank],
            row["kind"],
            tuple(row["names"]),
            row["traceback"],
        )
    return LockstepError(
        f"{_too_early(lockstep, rows)} ({here}).\n"
        "  Every rank must make the same calls. Look for a collective call under `if rank == ...`, "
        "an early return or break, a sys.exit, or a loop of another length on one rank."
        + mismatch.advice_of_saving([call])
    )

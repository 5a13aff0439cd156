"""The ranks of a job on this host: which of them a signal has ended, and what files they leave.

A rank that `mpistrat run` has started signs in when MPI has started: a file in the job's own
directory, with its process and the shared files that MPI has mapped meanwhile. So `mpistrat run`
can wait for the end of each process (a pidfd, see pidfd_open(2)), although ranks are not its
children. MPI's launchers end all ranks as soon as one is killed, so only the first one to end tells
which. Of ranks on other hosts nothing is known here: where a job may have some, nobody signs in.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import select
import signal
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, final

from mpistrat.comm.callsite import ranks_text
from mpistrat.config import rank_text, read_or_default
from mpistrat.watchdog.processes import look
from mpistrat.watchdog.status_board import say

CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
_LOOK = 0.05  # seconds between two looks
_END_SECONDS = 1.0  # seconds in which a process has ended that has given its memory back
_FATAL = (signal.SIGKILL, signal.SIGTERM, *CRASHES)
# PIDFD_GET_INFO of linux/pidfd.h: a structure of 64 bytes, its mask first, the exit code last.
_ROUNDED = 1.0  # seconds by which times of files may be off
_INFO_NBYTES, _INFO_EXIT = 64, 1 << 3
_GET_INFO = 3 << 30 | _INFO_NBYTES << 16 | 0xFF << 8 | 11
_SIGNS = "rank-*[0-9]"
RECORD = "exit-code"  # the file in which the ranks write what they have agreed on
CAUSE = "cause"  # the file in which they write what is to be printed last
_OPEN = "roster"  # the file that says that ranks are to sign in


class EndedRank(NamedTuple):
    """A rank that has ended without leaving the program in order.

    Attributes:
      rank: Its number in the job.
      pid: Its process.
      number: The signal that ended it; 0 for none.
      code: The exit code that it ended with by itself.
      sure: Whether the system says so; if not, it follows from the launcher's exit code.
    """

    rank: int
    pid: int
    number: int
    code: int
    sure: bool


def sign_in(directory: Path, rank: int, files: Iterable[str]) -> None:
    """Register this rank with `mpistrat run`, if that waits for it.

    Args:
      directory: That of the job.
      rank: The number of this rank in the job.
      files: Shared files to remove after the job, if it does not do so itself.
    """
    if not (directory / _OPEN).exists():
        return
    sign_file = directory / f"rank-{rank}"
    with contextlib.suppress(OSError):
        sign_file.with_suffix(".part").write_text(
            json.dumps({"rank": rank, "pid": os.getpid(), "files": sorted(files)}), encoding="utf-8"
        )
        sign_file.with_suffix(".part").rename(sign_file)


def conclude_by_launcher(directory: Path, line: str) -> bool:
    """Let `mpistrat run` print the last line of a job; tell whether it is there to do so.

    Args:
      directory: That of the job.
      line: The line.
    """
    with contextlib.suppress(OSError):
        path = directory / CAUSE
        if path.exists():
            path.write_text(line, encoding="utf-8", errors="replace")
            return True
    return False


def begins() -> None:
    """Tell `mpistrat run`, if that waits for it, that this rank is about to start MPI.

    In MPI it waits for all others, of whom those that do not come have not told this.
    """
    record, number = read_or_default().record, rank_text()
    if record and number and Path(record).with_name(_OPEN).exists():
        with contextlib.suppress(OSError):
            Path(record).with_name(f"begins-{number}").touch()


@final
class Roster:
    """Waits for the first rank of a job to end, in a thread of its own.

    Args:
      directory: That of the job, in which the ranks sign in.
      ranks: How many there are; 0 if none of them is known to be on this host.
    """

    def __init__(self, directory: Path, ranks: int):
        """Start the thread that waits."""
        self._directory, self._ranks = directory, ranks
        (directory / _OPEN).touch()
        self._record = directory / RECORD
        self._files: set[Path] = set()
        self._signed_in: set[str] = set()
        self._are_all_known = False  # all ranks were known when the first one ended
        # Rank, process, and its wait status if it can still be had.
        self._ended_ranks: list[tuple[int, int, int | None]] = []
        self._stopped: list[int] = []  # ranks that were, after all had left the program
        self._oom = _oom_kills()
        self._seconds_since_begin = 0.0  # seconds since the first rank began to start MPI
        self._seconds_after_leaving = 0.0  # seconds since all ranks have left the program
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mpistrat roster", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop waiting, and remove files that the ranks have left; all ranks have ended."""
        self._stop.set()
        self._thread.join()
        close_time = time.time()
        begin_times = [file.stat().st_mtime for file in self._directory.glob("begins-*")]
        self._seconds_since_begin = close_time - min(begin_times, default=close_time)
        with contextlib.suppress(OSError):
            self._seconds_after_leaving = close_time - self._record.stat().st_mtime
        self._collect_arrivals()
        for file in self._files:
            with contextlib.suppress(OSError):
                file.unlink()

    def complete(self) -> bool:
        """Tell whether MPI has started on all ranks that are known to be on this host."""
        return len(list(self._directory.glob(_SIGNS))) >= self._ranks

    def first_ended(self, code: int) -> Sequence[EndedRank]:
        """Return the ranks that ended before any other rank did, if that is known.

        Empty if a rank had not signed in by then (one on another host never does), because it may
        have been the first, or if all that is known is that launchers have ended them, as after
        MPI_Abort. Several if this process was too slow to tell which was first.

        Args:
          code: The exit code of the launcher. It tells how a rank ended where the system does not
            any more: as it is (MPICH), or 128 more than a signal (Open MPI).
        """
        if not self._are_all_known:
            return []
        number = code - 128 if code > 128 else code
        killed = number if number in _FATAL else 0
        ended_ranks = [
            EndedRank(rank, pid, killed, 0 if killed else code, False)
            if status is None
            else EndedRank(rank, pid, status & 127, status >> 8, True)
            for rank, pid, status in self._ended_ranks
        ]
        # With these signals launchers end the others; of one from elsewhere their code tells.
        launcher_signals = (signal.SIGKILL, signal.SIGTERM)
        self_ended = [
            ended_rank for ended_rank in ended_ranks if ended_rank.number not in launcher_signals
        ]
        return self_ended or [
            ended_rank for ended_rank in ended_ranks if ended_rank.number == code % 128
        ]

    def describe_wait(self, code: int, recorded: int | None) -> str:
        """Return what ranks waited for inside of MPI until they gave up; empty if they did not.

        Args:
          code: The exit code of the launcher.
          recorded: The one that the ranks have agreed on; None if they have not.
        """
        starting = (
            len(self._signed_in) < self._ranks
            and self._seconds_since_begin >= read_or_default().timeout
        )
        if recorded is None and code and starting:
            return "to start MPI"
        # Python prints a stack and ends with 1, or SIGALRM comes where it does not run any more.
        hung = code == 1 and self._seconds_after_leaving >= read_or_default().timeout - _ROUNDED
        if recorded == 0 and (hung or code % 128 == signal.SIGALRM):
            subject = "one of them may be stopped, or hang where a stack above says"
            if self._stopped:
                verb = "was" if len(self._stopped) == 1 else "were"
                subject = f"{ranks_text(sorted(self._stopped))} {verb} stopped by a signal"
            return f"to end, after all had left the program; {subject}"
        return ""

    @property
    def out_of_memory(self) -> bool:
        """Whether the kernel has killed a process for lack of memory since the roster was made."""
        return _oom_kills() > self._oom

    def _run(self) -> None:
        waiting: dict[int, tuple[int, int]] = {}  # descriptor -> rank, pid
        poll = select.poll()
        warn = time.monotonic() + read_or_default().warn
        try:
            while not self._ended_ranks and not self._stop.is_set():
                for rank, pid in self._collect_arrivals():
                    try:
                        descriptor = os.pidfd_open(pid)
                    except AttributeError:  # not on this system
                        return
                    except ProcessLookupError:
                        self._ended_ranks.append((rank, pid, None))
                        continue
                    except OSError:  # it may not be watched, so nothing is known of it
                        return
                    waiting[descriptor] = rank, pid
                    poll.register(descriptor, select.POLLIN)
                are_all_known = len(self._signed_in) == self._ranks
                if not are_all_known and time.monotonic() > warn:
                    warn = math.inf
                    self._report_missing_ranks()
                if are_all_known and not self._ended_ranks and self._record.exists():
                    # Before one ends, as a launcher then ends these too.
                    self._stopped = [rank for rank, pid in waiting.values() if _is_stopped(pid)]
                wait = 0.0 if self._ended_ranks else _LOOK if are_all_known else _LOOK / 10
                if ended_descriptors := [descriptor for descriptor, _ in poll.poll(1000 * wait)]:
                    for descriptor in waiting.keys() - ended_descriptors:
                        if _has_freed_memory(waiting[descriptor][1]):
                            select.select([descriptor], [], [], _END_SECONDS)
                            ended_descriptors.append(descriptor)
                self._ended_ranks += [
                    (*waiting[d], _status(d, waiting[d][1])) for d in ended_descriptors
                ]
                self._are_all_known = are_all_known
        finally:
            for descriptor in waiting:
                os.close(descriptor)

    def _report_missing_ranks(self) -> None:
        if self._ranks:
            options = read_or_default()
            signs = {file.name for file in self._directory.glob("begins-*")}
            missing = [rank for rank in range(self._ranks) if f"begins-{rank}" not in signs]
            explanation = "All have come to it, so one may be stopped, or MPI itself hangs."
            if missing:
                subject = f"{ranks_text(missing)} {'has' if len(missing) == 1 else 'have'}"
                explanation = (
                    f"{subject[0].upper()}{subject[1:]} not come to it: slow, stopped, or exited "
                    "before, for example because a package is missing. Then the error is printed "
                    "above, and the others wait."
                )
            say(
                f"mpistrat: after {options.warn:g} s {len(self._signed_in)} of {self._ranks} ranks "
                f"have started MPI. {explanation} The job ends when they have waited "
                f"{options.timeout:g} s (MPISTRAT_TIMEOUT)."
            )

    def _collect_arrivals(self) -> list[tuple[int, int]]:
        """Return rank and process of each rank that has signed in since the last call."""
        arrivals = []
        for file in self._directory.glob(_SIGNS):
            if file.name not in self._signed_in:
                self._signed_in.add(file.name)
                sign = json.loads(file.read_text(encoding="utf-8"))
                self._files.update(map(Path, sign["files"]))
                arrivals.append((sign["rank"], sign["pid"]))
        return arrivals


def _has_freed_memory(pid: int) -> bool:
    """Tell whether a process ends: its memory is given back, and soon after it its files.

    A launcher that sees the files close may have ended another one before this one is a zombie.
    """
    try:
        return Path(f"/proc/{pid}/statm").read_bytes().startswith(b"0 ")
    except OSError:
        return True


def _is_stopped(pid: int) -> bool:
    process = look(pid)
    return process is not None and process.state in "Tt"


def _status(descriptor: int, pid: int) -> int | None:
    """Return the wait status of a process that has ended, or None if it is lost."""
    with contextlib.suppress(OSError):  # Linux 6.15 keeps it with the descriptor
        info_buffer = bytearray(struct.pack("=Q", _INFO_EXIT).ljust(_INFO_NBYTES, b"\0"))
        fcntl.ioctl(descriptor, _GET_INFO, info_buffer)
        if struct.unpack_from("=Q", info_buffer)[0] & _INFO_EXIT:
            return int(struct.unpack_from("=i", info_buffer, _INFO_NBYTES - 4)[0])
    with contextlib.suppress(OSError, ValueError, IndexError):
        # Until its parent has taken note of its end.
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[49])
    return None


def _oom_kills() -> int:
    """Return how many processes of this host the kernel has killed for lack of memory."""
    with contextlib.suppress(OSError):
        rows = dict(
            line.split() for line in Path("/proc/vmstat").read_text(encoding="utf-8").splitlines()
        )
        return int(rows.get("oom_kill", 0))
    return 0

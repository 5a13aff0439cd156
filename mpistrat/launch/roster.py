"""The ranks of a job on this host: which of them a signal has ended, and which files they leave.

A rank that `mpistrat run` has started signs in when MPI has started: a file in the job's own
directory, with its process and the shared files that MPI has mapped meanwhile. So `mpistrat run`
can wait for the end of each process (a pidfd, see pidfd_open(2)), although ranks are not its
children. MPI's launchers end all ranks as soon as one is killed, so the rank that was killed is the
first one to end. Nothing is known here of ranks on other hosts: in a job that may have such ranks,
no rank signs in.
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
from mpistrat.watchdog.processes import read_process
from mpistrat.watchdog.status_board import say

CRASH_SIGNALS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
_LOOK_SECONDS = 0.05  # seconds between two looks
_END_SECONDS = 1.0  # seconds in which a process has ended that has given its memory back
_FATAL_SIGNALS = (signal.SIGKILL, signal.SIGTERM, *CRASH_SIGNALS)
_FILE_TIME_SECONDS = 1.0  # seconds by which times of files may be off
# PIDFD_GET_INFO of linux/pidfd.h: a structure of 64 bytes, its mask first, the exit code last.
_INFO_NBYTES, _INFO_EXIT = 64, 1 << 3
_GET_INFO = 3 << 30 | _INFO_NBYTES << 16 | 0xFF << 8 | 11
_SIGN_PATTERN = "rank-*[0-9]"
RECORD_NAME = "exit-code"  # the file for the exit code that the ranks have agreed on
CAUSE_NAME = "cause"  # the file for the line that is to be printed last
_OPEN_NAME = "roster"  # the file that says that ranks are to sign in


class EndedRank(NamedTuple):
    """A rank that has ended without leaving the program in order.

    Attributes:
      rank: Its number in the job.
      pid: Its process.
      signal_number: The signal that ended it; 0 for none.
      code: The exit code that it ended with by itself.
      is_certain: Whether the system says so; if not, it follows from the launcher's exit code.
    """

    rank: int
    pid: int
    signal_number: int
    code: int
    is_certain: bool


def sign_in(directory: Path, rank: int, files: Iterable[str]) -> None:
    """Register this rank with `mpistrat run`, if that waits for it.

    Args:
      directory: The directory of the job.
      rank: The number of this rank in the job.
      files: Shared files to remove after the job, if it does not do so itself.
    """
    if not (directory / _OPEN_NAME).exists():
        return
    sign_file = directory / f"rank-{rank}"
    with contextlib.suppress(OSError):
        sign_file.with_suffix(".part").write_text(
            json.dumps({"rank": rank, "pid": os.getpid(), "files": sorted(files)}), encoding="utf-8"
        )
        sign_file.with_suffix(".part").rename(sign_file)


def leave_last_line(directory: Path, line: str) -> bool:
    """Let `mpistrat run` print the last line of a job; return whether it is there to do so.

    Args:
      directory: The directory of the job.
      line: The line.
    """
    with contextlib.suppress(OSError):
        path = directory / CAUSE_NAME
        if path.exists():
            path.write_text(line, encoding="utf-8", errors="replace")
            return True
    return False


def announce_begin() -> None:
    """Leave a sign for `mpistrat run`, if that waits for it, that this rank is about to start MPI.

    In MPI this rank waits for all others; a rank that does not come has left no such sign.
    """
    record_path, own_rank_text = read_or_default().record, rank_text()
    if record_path and own_rank_text and Path(record_path).with_name(_OPEN_NAME).exists():
        with contextlib.suppress(OSError):
            Path(record_path).with_name(f"begins-{own_rank_text}").touch()


@final
class Roster:
    """Waits for the first rank of a job to end, in a thread of its own.

    Args:
      directory: The directory of the job, in which the ranks sign in.
      rank_count: Their number; 0 if none of them is known to be on this host.
    """

    def __init__(self, directory: Path, rank_count: int):
        """Start the thread that waits."""
        self._directory, self._rank_count = directory, rank_count
        (directory / _OPEN_NAME).touch()
        self._record_path = directory / RECORD_NAME
        self._files: set[Path] = set()
        self._signed_in: set[str] = set()
        self._are_all_known = False  # all ranks were known when the first one ended
        # Rank, process, and its wait status if it can still be had.
        self._ended_ranks: list[tuple[int, int, int | None]] = []
        self._stopped_ranks: list[int] = []  # ranks that were, after all had left the program
        self._oom_kill_count = _count_oom_kills()
        self._seconds_since_begin = 0.0  # seconds since the first rank began to start MPI
        self._seconds_after_leaving = 0.0  # seconds since all ranks have left the program
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mpistrat roster", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop waiting, and remove files that the ranks have left; all ranks have ended."""
        self._stop_event.set()
        self._thread.join()
        close_time = time.time()
        begin_times = [file.stat().st_mtime for file in self._directory.glob("begins-*")]
        self._seconds_since_begin = close_time - min(begin_times, default=close_time)
        with contextlib.suppress(OSError):
            self._seconds_after_leaving = close_time - self._record_path.stat().st_mtime
        self._collect_arrivals()
        for file in self._files:
            with contextlib.suppress(OSError):
                file.unlink()

    def is_complete(self) -> bool:
        """Tell whether MPI has started on all ranks that are known to be on this host."""
        return len(list(self._directory.glob(_SIGN_PATTERN))) >= self._rank_count

    def find_first_ended(self, code: int) -> Sequence[EndedRank]:
        """Return the ranks that ended before any other rank did, if that is known.

        It is empty if a rank had not signed in by then (one on another host never does), because
        that may have been the first, or if it is only known that launchers have ended them, as
        after MPI_Abort. It has several ranks if this process was too slow to see which was first.

        Args:
          code: The exit code of the launcher. Where the system no longer has the code of a rank, it
            follows from this one, which is the same (MPICH), or 128 more than a signal (Open MPI).
        """
        if not self._are_all_known:
            return []
        code_signal = code - 128 if code > 128 else code
        killing_signal = code_signal if code_signal in _FATAL_SIGNALS else 0
        ended_ranks = [
            EndedRank(rank, pid, killing_signal, 0 if killing_signal else code, False)
            if status is None
            else EndedRank(rank, pid, status & 127, status >> 8, True)
            for rank, pid, status in self._ended_ranks
        ]
        # Launchers end the others with these signals. One from elsewhere is in their exit code.
        launcher_signals = (signal.SIGKILL, signal.SIGTERM)
        self_ended = [rank for rank in ended_ranks if rank.signal_number not in launcher_signals]
        return self_ended or [rank for rank in ended_ranks if rank.signal_number == code % 128]

    def describe_wait(self, code: int, recorded_code: int | None) -> str:
        """Return in words how ranks waited inside of MPI until they gave up; empty if they did not.

        Args:
          code: The exit code of the launcher.
          recorded_code: The exit code that the ranks have agreed on; None if they have not.
        """
        is_too_late = self._seconds_since_begin >= read_or_default().timeout
        is_starting = len(self._signed_in) < self._rank_count and is_too_late
        if recorded_code is None and code and is_starting:
            return "to start MPI"
        # Python prints a stack and ends with 1, or SIGALRM comes where it does not run any more.
        is_hung = (
            code == 1
            and self._seconds_after_leaving >= read_or_default().timeout - _FILE_TIME_SECONDS
        )
        if recorded_code == 0 and (is_hung or code % 128 == signal.SIGALRM):
            subject = "one of them may be stopped, or hang where a stack above says"
            if self._stopped_ranks:
                verb = "was" if len(self._stopped_ranks) == 1 else "were"
                subject = f"{ranks_text(sorted(self._stopped_ranks))} {verb} stopped by a signal"
            return f"to end, after all had left the program; {subject}"
        return ""

    @property
    def has_run_out_of_memory(self) -> bool:
        """Whether the kernel has killed a process for lack of memory since the roster was made."""
        return _count_oom_kills() > self._oom_kill_count

    def _run(self) -> None:
        rank_by_descriptor: dict[int, tuple[int, int]] = {}  # descriptor -> rank, pid
        poller = select.poll()
        warn_time = time.monotonic() + read_or_default().warn
        try:
            while not self._ended_ranks and not self._stop_event.is_set():
                if not self._watch_arrivals(poller, rank_by_descriptor):
                    return
                are_all_known = len(self._signed_in) == self._rank_count
                if not are_all_known and time.monotonic() > warn_time:
                    warn_time = math.inf
                    self._report_missing_ranks()
                if are_all_known and not self._ended_ranks and self._record_path.exists():
                    # Before one ends, as a launcher then ends these too.
                    self._stopped_ranks = [
                        rank for rank, pid in rank_by_descriptor.values() if _is_stopped(pid)
                    ]
                look_seconds = _LOOK_SECONDS if are_all_known else _LOOK_SECONDS / 10
                wait_seconds = 0.0 if self._ended_ranks else look_seconds
                ended_descriptors = [d for d, _ in poller.poll(1000 * wait_seconds)]
                if ended_descriptors:
                    for descriptor in rank_by_descriptor.keys() - ended_descriptors:
                        if _has_freed_memory(rank_by_descriptor[descriptor][1]):
                            select.select([descriptor], [], [], _END_SECONDS)
                            ended_descriptors.append(descriptor)
                self._ended_ranks += [
                    (*rank_by_descriptor[d], _read_wait_status(d, rank_by_descriptor[d][1]))
                    for d in ended_descriptors
                ]
                self._are_all_known = are_all_known
        finally:
            for descriptor in rank_by_descriptor:
                os.close(descriptor)

    def _watch_arrivals(
        self, poller: select.poll, rank_by_descriptor: dict[int, tuple[int, int]]
    ) -> bool:
        """Watch the processes of ranks that have signed in; return whether all can be watched."""
        for rank, pid in self._collect_arrivals():
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._ended_ranks.append((rank, pid, None))
                continue
            except (AttributeError, OSError):  # not on this system, or not for this user
                return False
            rank_by_descriptor[descriptor] = rank, pid
            poller.register(descriptor, select.POLLIN)
        return True

    def _report_missing_ranks(self) -> None:
        if self._rank_count:
            limits = read_or_default()
            begin_names = {file.name for file in self._directory.glob("begins-*")}
            missing_ranks = [
                rank for rank in range(self._rank_count) if f"begins-{rank}" not in begin_names
            ]
            explanation = "All have come to it, so one may be stopped, or MPI itself hangs."
            if missing_ranks:
                subject = (
                    f"{ranks_text(missing_ranks)} {'has' if len(missing_ranks) == 1 else 'have'}"
                )
                explanation = (
                    f"{subject[0].upper()}{subject[1:]} not come to it: slow, stopped, or exited "
                    "before, for example because a package is missing. Then the error is printed "
                    "above, and the others wait."
                )
            say(
                f"mpistrat: after {limits.warn:g} s {len(self._signed_in)} of {self._rank_count} "
                f"ranks have started MPI. {explanation} The job ends when they have waited "
                f"{limits.timeout:g} s (MPISTRAT_TIMEOUT)."
            )

    def _collect_arrivals(self) -> list[tuple[int, int]]:
        """Return rank and process of each rank that has signed in since the last call."""
        arrivals = []
        for file in self._directory.glob(_SIGN_PATTERN):
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
    process = read_process(pid)
    return process is not None and process.state in "Tt"


def _read_wait_status(descriptor: int, pid: int) -> int | None:
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


def _count_oom_kills() -> int:
    """Return how many processes of this host the kernel has killed for lack of memory."""
    with contextlib.suppress(OSError):
        counters = dict(
            line.split() for line in Path("/proc/vmstat").read_text(encoding="utf-8").splitlines()
        )
        return int(counters.get("oom_kill", 0))
    return 0

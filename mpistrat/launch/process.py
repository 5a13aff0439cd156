"""Runs a launcher to its end: forwards signals, keeps a time limit, leaves no process behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import IO, NamedTuple

from mpistrat.launch.mpi_libraries import Command
from mpistrat.launch.streams import FORWARDED_SIGNALS, is_standard, relaying_streams
from mpistrat.watchdog.processes import read_process

TIMED_OUT = 124  # as timeout(1) of the GNU coreutils
_PR_SET_PDEATHSIG = 1  # of prctl(2)
_GRACE_SECONDS = 5.0  # seconds between asking a launcher to end its ranks and ending them ourselves


class Outcome(NamedTuple):
    """The end of a job.

    Attributes:
      code: Its exit code.
      has_timed_out: Whether the time ran out.
      forwarded_signals: The numbers of the signals that were forwarded to it.
      killing_signal: The number of the signal that ended the launcher itself, if it was neither
        forwarded nor sent because the time ran out; else 0.
    """

    code: int
    has_timed_out: bool
    forwarded_signals: frozenset[int] = frozenset()
    killing_signal: int = 0

    @property
    def is_interrupted(self) -> bool:
        """Whether SIGINT was forwarded to it."""
        return signal.SIGINT in self.forwarded_signals


def find_descendants(pid: int) -> dict[int, int]:
    """Return all descendants of the process `pid`, with their start times.

    A launcher puts its ranks into process groups of their own, so a group is not enough.
    On systems without /proc the answer is empty.
    """
    children: dict[int, dict[int, int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        if process := read_process(int(entry.name)):
            children.setdefault(process.parent_pid, {})[int(entry.name)] = process.start_ticks
    born_by_pid: dict[int, int] = {}
    pending_pids = [pid]
    while pending_pids:
        child_pids = children.get(pending_pids.pop(), {})
        born_by_pid |= child_pids
        pending_pids += child_pids
    return born_by_pid


def _end_job(launcher_process: subprocess.Popen[bytes]) -> None:
    """Ask the launcher to end its job; after the grace period kill it with all it started."""
    job_processes = find_descendants(launcher_process.pid)
    launcher_process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        launcher_process.wait(_GRACE_SECONDS)
    for pid, born in {**job_processes, **find_descendants(launcher_process.pid)}.items():
        current_process = read_process(pid)
        # Else the number belongs to another process by now.
        if current_process and current_process.start_ticks == born:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    launcher_process.kill()
    launcher_process.wait()


def _build_parent_watch(parent_pid: int) -> Callable[[], None] | None:
    """Return a function that makes its process end when `parent` does; None if not on Linux."""
    if not sys.platform.startswith("linux"):
        return None
    call_prctl = ctypes.CDLL(None).prctl  # looked up here: between fork and exec little is allowed

    def end_with_parent() -> None:
        call_prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent_pid:
            os._exit(1)

    return end_with_parent


@contextlib.contextmanager
def _preparing_environment(command: Command) -> Iterator[dict[str, str]]:
    """Yield all variables of a job, with a directory of its own for the files of its launcher.

    Open MPI names that directory by the number of the launcher's process, and does not start
    where a job that was killed has left one of the same number ("The PMIx server's listener
    thread failed to start").
    """
    variables = command.build_environment()
    if not command.session_variable or command.session_variable in variables:
        yield variables
        return
    with tempfile.TemporaryDirectory(prefix="mpistrat-", ignore_cleanup_errors=True) as directory:
        # With TMPDIR=. it is not absolute, which the launcher needs.
        yield {**variables, command.session_variable: str(Path(directory).absolute())}


@contextlib.contextmanager
def _forwarding_signals(
    has_started: Callable[[], bool],
) -> Iterator[tuple[set[int], Callable[[subprocess.Popen[bytes]], None]]]:
    """Forward signals to the launcher, which forwards them to its ranks.

    Yields the signals so far, and a function that takes the process of the launcher, which then
    gets the earlier signals.
    """
    forwarded_signals: set[int] = set()
    early_signals: list[int] = []
    processes: list[subprocess.Popen[bytes]] = []

    def forward_signal(signal_number: int, frame: FrameType | None = None) -> None:
        forwarded_signals.add(signal_number)
        if not processes:
            early_signals.append(signal_number)
            return
        # When a terminal closes, MPICH's launcher sends its ranks nothing, and dies.
        ends_job = signal_number == signal.SIGHUP or (
            signal_number == signal.SIGINT and not has_started()
        )
        with contextlib.suppress(ProcessLookupError):
            processes[0].send_signal(signal.SIGTERM if ends_job else signal_number)

    def attach_launcher(launcher_process: subprocess.Popen[bytes]) -> None:
        processes.append(launcher_process)
        for number in early_signals:
            forward_signal(number)

    # Only the main thread may set handlers.
    is_main_thread = threading.current_thread() is threading.main_thread()
    previous_handlers = {
        number: signal.signal(number, forward_signal)
        for number in FORWARDED_SIGNALS
        if is_main_thread
    }
    try:
        yield forwarded_signals, attach_launcher
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def run_job(
    command: Command,
    timeout: float | None = None,
    output_file: IO[bytes] | None = None,
    cwd: str | Path | None = None,
    *,
    has_started: Callable[[], bool] = lambda: True,
    stdin: int | None = None,
) -> Outcome:
    """Run a launcher and wait for it.

    Where nobody reads its output any more, or the disk is full, the job continues.

    Args:
      command: The call, from `Launcher.command`.
      timeout: Seconds after which the job is ended, or None for never.
      output_file: A file for all output of the job, or None for the terminal of this process.
      cwd: Directory to run in, or None for that of this process.
      has_started: A function: whether MPI has started on all ranks. Before that, Ctrl-C ends the
        job: a rank that it ends alone would leave the others in MPI_Init, where no message reaches
        them.
      stdin: The standard input of the launcher, as Popen takes it; None for that of this process.

    Returns:
      The outcome. The code is the launcher's own, 128 + n if signal n ended it, and
      `TIMED_OUT` if the time ran out.
    """
    has_timed_out = False
    relay = _opening_file(output_file) if output_file else relaying_streams(_report_unread_output)
    with (
        _preparing_environment(command) as variables,
        relay as (stdout, stderr, start_relays),
        _forwarding_signals(has_started) as (forwarded_signals, attach_launcher),
    ):
        # The launcher gets a session of its own. Else Ctrl-C reaches it twice, from the terminal
        # and from us, and twice means "do not clean up" to it.
        process = subprocess.Popen(
            command.argv,
            env=variables,
            stdin=subprocess.DEVNULL if stdin is None and not is_standard(0) else stdin,
            stdout=stdout,
            stderr=stderr,
            cwd=cwd,
            start_new_session=True,
            preexec_fn=_build_parent_watch(os.getpid()),
        )
        attach_launcher(process)
        try:
            start_relays()
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            has_timed_out, code = True, TIMED_OUT
        finally:
            if process.poll() is None:
                _end_job(process)
    killing_signal = -code if code < 0 and -code not in forwarded_signals else 0
    code = 128 - code if code < 0 else code
    return Outcome(code, has_timed_out, frozenset(forwarded_signals), killing_signal)


@contextlib.contextmanager
def _opening_file(output_file: IO[bytes]) -> Iterator[tuple[IO[bytes], int, Callable[[], None]]]:
    yield output_file, subprocess.STDOUT, lambda: None


def _report_unread_output() -> None:
    # Not through sys.stderr: where it is the same pipe, its buffer would keep the line, and Python
    # would end with 120 because it cannot write it at the end either.
    line = b"mpistrat: nobody reads the output of the job any more; the job continues\n"
    if is_standard(2):
        with contextlib.suppress(OSError):
            os.write(2, line)

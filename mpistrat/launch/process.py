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
from mpistrat.launch.streams import FOR_RANKS, is_standard, streams
from mpistrat.watchdog.processes import read_process

TIMED_OUT = 124  # as timeout(1) of the GNU coreutils
_PR_SET_PDEATHSIG = 1  # of prctl(2)
_GRACE = 5.0  # seconds between asking a launcher to end its ranks and ending them ourselves


class Outcome(NamedTuple):
    """How a job ended.

    Attributes:
      code: Its exit code.
      timed_out: It ran out of time.
      handed: The numbers of the signals that were forwarded to it.
      killed: The number of the signal that ended the launcher itself, if it came from elsewhere:
        neither forwarded nor sent because the time ran out; else 0.
    """

    code: int
    timed_out: bool
    forwarded_signals: frozenset[int] = frozenset()
    killed: int = 0

    @property
    def interrupted(self) -> bool:
        """Whether SIGINT was forwarded to it."""
        return signal.SIGINT in self.forwarded_signals


def descendants(pid: int) -> dict[int, int]:
    """Return all descendants of the process `pid`, with their start times.

    A launcher puts its ranks into process groups of their own, so a group is not enough.
    On systems without /proc the answer is empty.
    """
    children: dict[int, dict[int, int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        if process := read_process(int(entry.name)):
            children.setdefault(process.parent_pid, {})[int(entry.name)] = process.start_ticks
    born_by_pid: dict[int, int] = {}
    todo = [pid]
    while todo:
        child_pids = children.get(todo.pop(), {})
        born_by_pid |= child_pids
        todo += child_pids
    return born_by_pid


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the launcher to end its job; after the grace period kill it with all it started."""
    job_processes = descendants(process.pid)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE)
    for pid, born in {**job_processes, **descendants(process.pid)}.items():
        current_process = read_process(pid)
        # Else the number belongs to another process by now.
        if current_process and current_process.start_ticks == born:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.kill()
    process.wait()


def _end_with(parent: int) -> Callable[[], None] | None:
    """Return a function that makes its process end when `parent` does; None if not on Linux."""
    if not sys.platform.startswith("linux"):
        return None
    control = ctypes.CDLL(None).prctl  # looked up here: between fork and exec little is allowed

    def end() -> None:
        control(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return end


@contextlib.contextmanager
def _environment(command: Command) -> Iterator[dict[str, str]]:
    """Yield all variables of a job, with a directory of its own for the files of its launcher.

    Open MPI names that directory by the number of the launcher's process, and does not start
    where a job that was killed has left one of the same number ("The PMIx server's listener
    thread failed to start").
    """
    variables = command.environment()
    if not command.session or command.session in variables:
        yield variables
        return
    with tempfile.TemporaryDirectory(prefix="mpistrat-", ignore_cleanup_errors=True) as directory:
        # With TMPDIR=. it is not absolute, which the launcher needs.
        yield {**variables, command.session: str(Path(directory).absolute())}


@contextlib.contextmanager
def _handing_on(
    started: Callable[[], bool],
) -> Iterator[tuple[set[int], Callable[[subprocess.Popen[bytes]], None]]]:
    """Forward signals to the launcher, which forwards them to its ranks.

    Yields the signals so far, and a function that takes the process of the launcher, which then
    gets the earlier signals.
    """
    forwarded_signals: set[int] = set()
    early_signals: list[int] = []
    processes: list[subprocess.Popen[bytes]] = []

    def hand_on(number: int, frame: FrameType | None = None) -> None:
        forwarded_signals.add(number)
        if not processes:
            early_signals.append(number)
            return
        # Of a terminal that closes MPICH's launcher tells its ranks nothing, and dies.
        ends = number == signal.SIGHUP or (number == signal.SIGINT and not started())
        with contextlib.suppress(ProcessLookupError):
            processes[0].send_signal(signal.SIGTERM if ends else number)

    def begin(process: subprocess.Popen[bytes]) -> None:
        processes.append(process)
        for number in early_signals:
            hand_on(number)

    main = threading.current_thread() is threading.main_thread()  # only that may set handlers
    previous_handlers = {number: signal.signal(number, hand_on) for number in FOR_RANKS if main}
    try:
        yield forwarded_signals, begin
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def run_job(
    command: Command,
    timeout: float | None = None,
    output: IO[bytes] | None = None,
    cwd: str | Path | None = None,
    started: Callable[[], bool] = lambda: True,
    stdin: int | None = None,
) -> Outcome:
    """Run a launcher and wait for it.

    Where nobody reads what it prints any more, or the disk is full, the job continues.

    Args:
      command: The call, from `Launcher.command`.
      timeout: Seconds after which the job is ended, or None for never.
      output: A file for all the job prints, or None for the terminal of this process.
      cwd: Directory to run in, or None for that of this process.
      started: Tells whether MPI has started on all ranks. Before that, Ctrl-C ends the job: a rank
        that it ends alone would leave the others in MPI_Init, where nobody can tell them.
      stdin: The standard input of the launcher, as Popen takes it; None for that of this process.

    Returns:
      The outcome. The code is the launcher's own, 128 + n if signal n ended it, and
      `TIMED_OUT` if the time ran out.
    """
    timed_out = False
    output_streams = streams(_report_unread_output) if output is None else _open_directly(output)
    with (
        _environment(command) as variables,
        output_streams as (out, err, start_relays),
        _handing_on(started) as (forwarded_signals, begin),
    ):
        # A session of its own: else Ctrl-C reaches the launcher twice, from the terminal and from
        # us, and twice means "do not clean up" to it.
        process = subprocess.Popen(
            command.argv,
            env=variables,
            stdin=subprocess.DEVNULL if stdin is None and not is_standard(0) else stdin,
            stdout=out,
            stderr=err,
            cwd=cwd,
            start_new_session=True,
            preexec_fn=_end_with(os.getpid()),
        )
        begin(process)
        try:
            start_relays()
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            timed_out, code = True, TIMED_OUT
        finally:
            if process.poll() is None:
                _end(process)
    killed = -code if code < 0 and -code not in forwarded_signals else 0
    code = 128 - code if code < 0 else code
    return Outcome(code, timed_out, frozenset(forwarded_signals), killed)


@contextlib.contextmanager
def _open_directly(output: IO[bytes]) -> Iterator[tuple[IO[bytes], int, Callable[[], None]]]:
    yield output, subprocess.STDOUT, lambda: None


def _report_unread_output() -> None:
    # Not through sys.stderr: where it is the same pipe, its buffer would keep the line, and Python
    # would end with 120 because it cannot write it at the end either.
    line = b"mpistrat: nobody reads the output of the job any more; the job continues\n"
    if is_standard(2):
        with contextlib.suppress(OSError):
            os.write(2, line)

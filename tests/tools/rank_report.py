"""One test report for many ranks, and no endless wait.

`RankReporter` is a pytest plugin of one rank. It writes what happens to a file of its rank, keeps
the ranks together (nobody starts a test before all have left the one before), and ends the job when
a test takes too long, leaving in every rank's file which test it is in and where. `read` and
`failures` make one list of the files: each failing test once, with the ranks it failed on.
"""

from __future__ import annotations

import faulthandler
import json
import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, final

import pytest

__all__ = ["Barrier", "Failure", "Limits", "RankLog", "RankReporter", "failures", "read"]

STUCK_EXIT_CODE = 86  # exit code of a rank that ended itself because a test took too long
_FLAG = "stuck"
_TICK = 0.1  # seconds between two looks of the watching thread
_ANSWER = 3.0  # seconds in which the other ranks tell where they are, once one gave up
_COLLECT = 120.0  # seconds for all ranks to import all tests, on a cold file system


class Barrier(Protocol):
    """A barrier under way: ``Test()`` is true once all ranks have come."""

    def Test(self) -> bool:
        """Tell whether all ranks have come, without waiting; the name is mpi4py's."""
        ...


class Limits(NamedTuple):
    """How long tests of a rank may take.

    Attributes:
      seconds: For one test; the ``timeout`` marker of a test comes first.
      patience: Seconds that a rank on which a test failed waits for the others to leave it.
      stderr: File descriptor for last words, which pytest does not capture.
    """

    seconds: float = 60.0
    patience: float = 10.0
    stderr: int = 2


@final
class RankReporter:
    """The pytest plugin of one rank.

    Args:
      rank: This rank.
      size: Number of ranks.
      directory: Empty directory that all ranks see.
      barrier: Starts a barrier on a communicator that nothing else uses.
      limits: How long tests may take, and the file for last words.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        directory: Path,
        barrier: Callable[[], Barrier],
        limits: Limits,
    ):
        """Open the files of this rank and start watching."""
        self._rank, self._size, self._directory = rank, size, directory
        self._barrier, self._limits = barrier, limits
        # Open until the process ends, which may be at any moment; faulthandler keeps the second.
        self._log = (directory / f"rank-{rank}.jsonl").open("w", buffering=1)
        self._stack = (directory / f"rank-{rank}.stack").open("w")
        self._test, self._is_inside, self._failed = "(start)", True, False
        self._deadline: float | None = None
        self._done = threading.Event()
        threading.Thread(target=self._watch, name="rank-report", daemon=True).start()

    def _write(self, event: str, **fields: Any) -> None:
        self._log.write(json.dumps({"event": event, "test": self._test, **fields}) + "\n")

    def _watch(self) -> None:
        flag = self._directory / _FLAG
        while not self._done.wait(_TICK):
            deadline = self._deadline
            if (deadline is not None and time.monotonic() > deadline) or flag.exists():
                self._give_up(flag)

    def _give_up(self, flag: Path) -> None:
        """Tell where this rank is, let the others do the same, and end the job."""
        faulthandler.dump_traceback(self._stack, all_threads=True)
        self._stack.flush()
        answer = self._directory / f"rank-{self._rank}.stuck"
        partial = answer.with_suffix(".partial")
        partial.write_text(json.dumps({"test": self._test, "inside": self._is_inside}))
        partial.rename(answer)
        flag.touch()
        if self._is_inside:
            words = f"rank {self._rank} of {self._size} is stuck in {self._test}; the job ends\n"
            os.write(self._limits.stderr, words.encode())
        end = time.monotonic() + _ANSWER
        while len(list(self._directory.glob("*.stuck"))) < self._size and time.monotonic() < end:
            time.sleep(_TICK / 2)
        # MPI_Abort is for the thread that may call MPI; the launcher sees this exit just as well.
        os._exit(STUCK_EXIT_CODE)

    def _wait_for_all(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        request = self._barrier()
        while not request.Test():
            time.sleep(0.001)
        self._deadline = None

    @pytest.hookimpl
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a module that could not be imported."""
        if report.failed:
            self._write("failed", test=report.nodeid, text=report.longreprtext)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Wait for all ranks, and refuse to continue unless all have the same tests."""
        own_tests = [item.nodeid for item in session.items]
        self._write("collected", tests=own_tests)
        self._wait_for_all(_COLLECT)
        tests_of_ranks = [log.collected for log in read(self._directory, self._size)]
        self._is_inside = False
        if any(tests != own_tests for tests in tests_of_ranks):
            counts = [-1 if tests is None else len(tests) for tests in tests_of_ranks]
            raise pytest.UsageError(
                f"the ranks collected different tests (numbers by rank: {counts})"
            )

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Run one test under watch, then wait for the other ranks."""
        marker = item.get_closest_marker("timeout")
        limit = float(marker.args[0]) if marker and marker.args else self._limits.seconds
        self._test, self._failed, self._is_inside = item.nodeid, False, True
        self._write("entered")
        self._deadline = time.monotonic() + limit
        # For C code that keeps the interpreter lock, so that the watching thread cannot run.
        faulthandler.dump_traceback_later(limit + 1, exit=True, file=self._stack)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._is_inside = False
            self._write("left")
            self._wait_for_all(self._limits.patience if self._failed else limit)

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record one phase of a test."""
        if report.failed:
            self._failed = True
            sections = [f"--- {title} ---\n{text}" for title, text in report.sections]
            self._write("failed", text="\n".join([report.longreprtext, *sections]))
        elif report.skipped or report.when == "call":
            self._write("skipped" if report.skipped else "passed")

    @pytest.hookimpl
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Record that this rank came to its end."""
        self._done.set()
        self._write("end", code=int(exitstatus))


class RankLog(NamedTuple):
    """The contents of one rank's files.

    Attributes:
      rank: The rank.
      collected: Its tests, or None if it did not come so far.
      passed_count: Number of tests that passed.
      skipped_count: Number of tests that were skipped.
      failed: Test and text of each failure.
      last: The test it was in last.
      is_inside: Whether it was still in it.
      was_stuck: Whether it ended the job because a test took too long.
      stack: Where it was then.
      is_complete: Whether pytest came to its end.
    """

    rank: int
    collected: list[str] | None
    passed_count: int
    skipped_count: int
    failed: list[tuple[str, str]]
    last: str
    is_inside: bool
    was_stuck: bool
    stack: str
    is_complete: bool


class Failure(NamedTuple):
    """One failing test: its name, the ranks it failed on, and the lowest one's text."""

    test: str
    ranks: list[int]
    text: str

    def __str__(self) -> str:
        """Return the text below a line that names test and ranks."""
        return f"{self.test}: failed on ranks {self.ranks}\n{self.text}"


def _own_stack(text: str) -> str:
    """Keep the threads that did not ask for the dump, down to the test's function."""
    stacks = []
    for block in text.strip().split("\n\n"):
        if not block.startswith("Current thread") and "in _watch" not in block:
            calls = block.split("\n", 1)[-1]
            stacks.append(calls.partition("_pytest/python.py")[0].rpartition("\n")[0] or calls)
    return "\n".join(stacks)


def read(directory: Path, size: int) -> list[RankLog]:
    """Read the files that `size` ranks left in a directory, whether complete or not."""
    logs = []
    for rank in range(size):
        path = directory / f"rank-{rank}.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        events = [json.loads(line) for line in lines]
        events_by_name = {name: [e for e in events if e["event"] == name] for name in _EVENTS}
        stack, stuck = path.with_suffix(".stack"), path.with_suffix(".stuck")
        stack_text = stack.read_text() if stack.exists() else ""
        logs.append(
            RankLog(
                rank=rank,
                collected=events_by_name["collected"][0]["tests"]
                if events_by_name["collected"]
                else None,
                passed_count=len(events_by_name["passed"]),
                skipped_count=len(events_by_name["skipped"]),
                failed=[(e["test"], e["text"]) for e in events_by_name["failed"]],
                last=events[-1]["test"] if events else "(start)",
                is_inside=len(events_by_name["entered"]) > len(events_by_name["left"])
                or not events_by_name["collected"],
                was_stuck=stuck.exists() or bool(stack_text),
                stack=_own_stack(stack_text),
                is_complete=bool(events_by_name["end"]),
            )
        )
    return logs


_EVENTS = ("collected", "entered", "left", "passed", "skipped", "failed", "end")


def _unfinished(logs: Sequence[RankLog], code: int) -> tuple[str, list[int], str] | None:
    """Say which test the job ended in, if it did not come to its end."""
    if all(log.is_complete for log in logs):
        return None
    unfinished_logs = [log for log in logs if log.is_inside] or [
        log for log in logs if not log.is_complete
    ]
    test, ranks = unfinished_logs[0].last, [log.rank for log in unfinished_logs]
    other_ranks = [log.rank for log in logs if log.rank not in ranks]
    if any(log.was_stuck for log in logs):
        stuck_log = next((log for log in unfinished_logs if log.stack), unfinished_logs[0])
        text = f"HUNG: ranks {ranks} did not leave it in time; "
        text += f"ranks {other_ranks} had left it and waited.\n"
        stack = stuck_log.stack or "  (none: it did not answer)"
        text += f"stack of rank {stuck_log.rank}, innermost call first:\n{stack}"
    else:
        text = f"ENDED: the job ended (exit code {code}) while ranks {ranks} were in it"
        text += f"; ranks {other_ranks} had left it." if other_ranks else "."
    return test, ranks, text


def failures(logs: Sequence[RankLog], code: int) -> list[Failure]:
    """Merge the logs of all ranks: each failing test once.

    Args:
      logs: From `read`.
      code: The launcher's exit code.

    Returns:
      The failures in order of appearance; empty only if every rank came to its end with code 0.
    """
    failures_by_test: dict[str, Failure] = {}
    all_ranks = [log.rank for log in logs]
    for log in logs:
        for test, text in log.failed:
            previous = failures_by_test.setdefault(test, Failure(test, [], text))
            failures_by_test[test] = previous._replace(ranks=sorted({*previous.ranks, log.rank}))
    unfinished = _unfinished(logs, code)
    if unfinished:
        test, ranks, text = unfinished
        previous = failures_by_test.setdefault(test, Failure(test, ranks, ""))
        failures_by_test[test] = previous._replace(text=f"{previous.text}\n{text}".lstrip())
    elif any(log.collected != logs[0].collected for log in logs):
        failures_by_test["(collection)"] = Failure(
            "(collection)", all_ranks, "not the same tests on all ranks"
        )
    if code and not failures_by_test:
        failures_by_test["(job)"] = Failure(
            "(job)", all_ranks, f"all tests ended well, but exit code {code}"
        )
    return list(failures_by_test.values())

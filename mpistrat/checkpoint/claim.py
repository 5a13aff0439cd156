"""A file that says which job saves in a directory, and its progress.

It takes no lock. Whoever holds it rewrites it every 10 s, in place, in the file that it has made:
a job that takes over puts another file there, which the job before can no longer reach. Each
commit of a checkpoint reads whose file is there; so a job that slept, and was taken for dead, saves
nothing any more.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, final

from mpistrat.board.proc import Process, ended, look, machine
from mpistrat.checkpoint import parts
from mpistrat.cluster.job import job_id, restarts

NAME = "job.json"
BEAT = 10.0  # seconds between two rewritings
STILL = 30.0  # seconds of the reader's own clock after which a number that stood still is nobody's
_LOOK = 0.5  # seconds between two looks at a number
_LASTING = ("saved", "saved_step", "save_seconds")
_ROOM = 8192  # bytes; always as many, so that rewriting changes no size
_TEXT = 400  # characters of one text; JSON may need six bytes for each
_TRIES = 20  # files that others may put there, or take away, before this job gives up
# What each name is, in files that this library has written.
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("host", "machine", "job", "token"), (str,)),
    **dict.fromkeys(("pid", "born", "restart", "number"), (int,)),
    "held": (bool,),
    "saved": (str,),
    "saved_step": (int, type(None)),
    "save_seconds": (int, float),
}
_LONGEST = 1e9  # seconds; no save has taken longer


@final
class Holder(NamedTuple):
    """Who holds a claim.

    Attributes:
      host: Name of the host of its rank 0.
      machine: This boot of it, and its namespace of pids.
      pid: Of its rank 0.
      born: When that started, clock ticks after boot.
      job: Id of the batch job; empty outside of one.
      restart: How many times that has been started again.
      token: Of this claim alone.
    """

    host: str
    machine: str
    pid: int
    born: int
    job: str
    restart: int
    token: str

    def __str__(self) -> str:
        """Return it for messages."""
        job = f"job {self.job}, restart {self.restart}, " * bool(self.job)
        return f"{job}process {self.pid} on {self.host}"


def myself() -> Holder:
    """Return this process as a holder."""
    process = look(os.getpid())
    born = process.born if process else 0
    where = machine(), os.getpid(), born
    host, job = _shortened(platform.node()), _shortened(job_id())
    return Holder(host, *where, job, restarts(), secrets.token_hex(8))


def read(path: Path) -> dict[str, Any] | None:
    """Return what a claim says; None without a file.

    A file that is not as this library writes it is ``{"text": ..., "held": True}``, which says of
    no holder: it is watched, and then replaced. So is a link that leads nowhere.

    Raises:
      OSError: It cannot be read, or is a directory; the text names it.
    """
    try:
        # Not blocking: what has the name of a claim may be a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            text = file.read(_ROOM + 1) or b""
    except FileNotFoundError:
        return {"text": "", "held": True} if path.is_symlink() else None
    except OSError as error:
        why = f"{NAME} cannot be read ({error.strerror}); remove it"
        raise OSError(error.errno, why, os.fspath(path)) from None
    with contextlib.suppress(ValueError, RecursionError):
        content = json.loads(text)
        if len(text) <= _ROOM and _is_claim(content):
            return dict(content)
    return {"text": text.decode(errors="replace"), "held": True}


def _is_claim(content: Any) -> bool:
    """Tell whether the content of a file has all names of a claim, and values of their types."""
    if not isinstance(content, dict) or not content.keys() >= {*Holder._fields, "number", "held"}:
        return False
    seconds = content.get("save_seconds", 0.0)
    return all(type(content.get(name, types[0]())) in types for name, types in _TYPES.items()) and (
        0.0 <= seconds <= _LONGEST
    )


def _shortened(value: Any) -> Any:
    """Return a value as it is; of a long text, such as a path, the end."""
    return f"...{value[-_TEXT:]}" if isinstance(value, str) and len(value) > _TEXT else value


def holder(found: Mapping[str, Any]) -> Holder | None:
    """Return who holds a claim that was read; None if nobody can tell."""
    return Holder(*(found[name] for name in Holder._fields)) if "token" in found else None


def free_at_once(
    found: Mapping[str, Any], mine: Holder, process: Callable[[int], Process | None] = look
) -> bool:
    """Tell whether a claim may be taken over without waiting.

    Args:
      found: What it says.
      mine: Who wants it.
      process: What the system knows of a pid.
    """
    other = holder(found)
    if not found["held"]:
        return True
    if other is None:
        return False
    if other.job and other.job == mine.job and mine.restart > other.restart:
        return True
    return other.machine == mine.machine and ended(process(other.pid), other.born)


@final
class Claim:
    """The claim of this process on one directory.

    Args:
      directory: Where checkpoints are saved; made if it is not there.
      mine: Who this is; None for this process.
      clock: Seconds, monotonic.
      sleep: Sleeps so many seconds.
    """

    def __init__(
        self,
        directory: Path,
        mine: Holder | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ):
        """Create it; nothing is claimed yet."""
        self.path = directory / NAME
        self._mine = mine or myself()
        self._clock, self._sleep = clock, sleep
        self._pid, self._number, self._file = os.getpid(), 0, -1
        self.shown: dict[str, Any] = {}  # what the file tells of the job
        self._over = threading.Event()
        self._writing = threading.RLock()  # garbage collection may release it during a write
        self.users: set[int] = set()  # of this process
        self.before: Mapping[str, Any] = {}  # what the last job left

    def take(self) -> None:
        """Claim the directory; wait up to 30 s to see whether another job does.

        Raises:
          FileExistsError: Another job saves there.
          OSError: The file cannot be read or written.
        """
        for _ in range(_TRIES):
            content = read(self.path)
            if content is not None:
                if not free_at_once(content, self._mine):
                    self._watch(content)
                # Until this job has saved, what the one before has saved is the last.
                self.shown = {name: content[name] for name in _LASTING if name in content}
            if self._put(over=content is not None):
                self.before = content or {}
                return
            # Another was quicker.
        text = f"{NAME} changes all the time; several jobs may save here, or its disk fails"
        raise FileExistsError(errno.EEXIST, text, os.fspath(self.path))

    def _watch(self, found: Mapping[str, Any]) -> None:
        """Return when the number has stood still for long enough; raise if it moves."""
        end = self._clock() + STILL
        while self._clock() < end:
            self._sleep(_LOOK)
            now = read(self.path)
            if now is None or free_at_once(now, self._mine):
                return
            if now != found:
                self._refuse(now)

    def _refuse(self, found: Mapping[str, Any]) -> None:
        raise FileExistsError(
            errno.EEXIST,
            f"Another job saves here: {holder(found) or 'an unknown one'}, which has rewritten "
            f"{NAME} while this one watched. Give each job a directory of its own, or end that one",
            os.fspath(self.path.parent),
        )

    def _put(self, over: bool) -> bool:
        """Put a file of this claim in its place; tell whether it is there."""
        part = parts.Part(self.path)
        try:
            self._file = os.dup(part.descriptor)
            self._write(held=True)
            part.commit(over)
        except OSError as error:
            self._close()
            if not isinstance(error, FileExistsError | FileNotFoundError):
                raise
            return False  # another was quicker, and has swept
        finally:
            part.drop()
        found = read(self.path)
        return found is not None and holder(found) == self._mine

    def _write(self, held: bool) -> None:
        with self._writing:
            if self._file < 0:
                return  # released
            self._number += 1
            claim = {**self._mine._asdict(), "number": self._number, "held": held}
            text = json.dumps({**claim, **self.shown}, indent=1).encode()
            if len(text) >= _ROOM:  # a part of it could not be read, so that this job would stop
                text = json.dumps(claim, indent=1).encode()
            text, at = text.ljust(_ROOM - 1)[: _ROOM - 1] + b"\n", 0
            while at < _ROOM:  # a full disk takes a part first, and then raises
                at += os.pwrite(self._file, text[at:], at)
            os.fsync(self._file)
            if not held:
                self._close()

    def _close(self) -> None:
        descriptor, self._file = self._file, -1
        parts.close(descriptor)

    def show(self, **told: Any) -> None:
        """Say more of the job, from the next rewriting on: step, rate, last save and the like."""
        self.shown.update((name, _shortened(value)) for name, value in told.items())

    def beat(self) -> None:
        """Rewrite it; nothing that fails matters to the job."""
        with contextlib.suppress(OSError):
            self._write(held=True)

    def keep(self) -> None:
        """Rewrite it every 10 s, in a thread of its own."""

        def beats() -> None:
            while not self._over.wait(BEAT):
                self.beat()

        threading.Thread(target=beats, name="mpistrat-claim", daemon=True).start()

    def check(self) -> None:
        """Raise if it is no longer this process's.

        Raises:
          FileExistsError: Another job has taken it over, or it is gone.
        """
        found = read(self.path)
        who = None if found is None else holder(found)
        if who != self._mine:
            if found is None:
                why, act = "the file, or its whole directory, was removed", "start it again"
            elif who is None:
                why = "another program has overwritten the file"
                act = "remove it, start this job again"
            else:
                why = (
                    f"it now belongs to {who}, because this job did not rewrite it for {STILL:g} s"
                )
                act = "end it"
            raise FileExistsError(
                errno.EEXIST,
                f"This job no longer holds {NAME}: {why}. It may not save here; {act}, or "
                "save in another directory",
                os.fspath(self.path.parent),
            )

    @property
    def released(self) -> bool:
        """Whether the next job may take it."""
        return self._over.is_set()

    def release(self) -> None:
        """Release the claim: the next job may take it at once. What the file says stays."""
        if self._over.is_set() or os.getpid() != self._pid:
            return
        self._over.set()
        with contextlib.suppress(OSError):
            self._write(held=False)


# Of this process, by the real path of the directory.
_HELD: dict[str, Claim] = {}
_TAKING = threading.Lock()


def take(directory: Path, user: object) -> Claim:
    """Claim a directory for this process, once however many managers save there.

    Args:
      directory: It is made if it is not there.
      user: Who saves there; when all of them are gone, the claim is released.

    Returns:
      The claim.

    Raises:
      FileExistsError: Another job saves there.
      OSError: The file cannot be read or written.
    """
    where = os.path.realpath(directory)
    with _TAKING:
        claim = _HELD.get(where)
        if claim is not None:
            claim.users.add(id(user))
        if claim is None or claim.released:
            claim = Claim(Path(where))
            claim.users.add(id(user))
            claim.take()
            try:
                claim.keep()
            except RuntimeError:
                claim.release()
                why = "No thread can be started (ulimit -u, or pids.max of a container)"
                raise OSError(errno.EAGAIN, why) from None
            _HELD[where] = claim
    weakref.finalize(user, _drop, claim, id(user))
    return claim


def _drop(claim: Claim, user: int) -> None:
    """Release a claim whose last user is gone. It may run at any point, so it takes no lock."""
    claim.users.discard(user)
    if not claim.users:
        claim.release()


def check(directory: Path) -> None:
    """Raise FileExistsError if this process had claimed a directory, and another has it now."""
    claim = _HELD.get(os.path.realpath(directory))
    if claim is not None:
        claim.check()


def progress_of(directory: Path) -> int:
    """Return the step that the job of a directory has told last; -1 if none has."""
    content = None
    with contextlib.suppress(OSError):
        content = read(directory / NAME)
    step = (content or {}).get("saved_step")
    return step if isinstance(step, int) else -1

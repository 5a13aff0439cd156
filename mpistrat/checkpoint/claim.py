"""A file that says which job saves in a directory, and its progress.

It takes no lock. Its token says whose it is: each commit of a checkpoint reads the token, and so
does the owner before it rewrites the file, every 10 s and in place. A job that takes over puts
another file there. So a job that slept, and was taken for dead, saves nothing any more.
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
from typing import Any, NamedTuple, NoReturn, final

from mpistrat.checkpoint import atomic
from mpistrat.cluster.batch_job import get_job_id, get_restart_count
from mpistrat.watchdog.processes import Process, get_machine_id, is_process_finished, read_process

NAME = "job.json"
BEAT_SECONDS = 10.0  # between two rewritings
STALE_SECONDS = 30.0  # of the reader's own clock, after which an unchanged number is nobody's
_LOOK_SECONDS = 0.5  # between two looks at a number
_LASTING = ("saved", "saved_step", "save_seconds")  # until this job has saved itself
_ROOM = 8192  # bytes; always as many, so that rewriting changes no size
_TEXT = 400  # characters of one text; JSON may need six bytes for each
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


def this_process() -> Holder:
    """Return this process as a holder, with a token of its own."""
    process, pid = read_process(os.getpid()), os.getpid()
    host, job = _shortened(platform.node()), _shortened(get_job_id())
    born = process.start_ticks if process else 0
    return Holder(host, get_machine_id(), pid, born, job, get_restart_count(), secrets.token_hex(8))


def read(path: Path) -> dict[str, Any] | None:
    """Return what a claim says; None without a file.

    A file that is not as this library writes it is ``{"text": ..., "held": True}``, which says of
    no holder: it is watched, and then replaced. So is a link that leads nowhere.

    Raises:
      OSError: It cannot be read, or is a directory; the text names it.
    """
    try:
        with _open(path, os.O_RDONLY) as file:
            return _parse(file.read(_ROOM + 1))
    except FileNotFoundError:
        return _parse(b"") if path.is_symlink() else None
    except OSError as error:
        reason = f"{NAME} cannot be read ({error.strerror}); remove it"
        raise OSError(error.errno, reason, os.fspath(path)) from None


def _open(path: Path, flags: int) -> Any:
    # Not blocking: what has the name of a claim may be a pipe.
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    return os.fdopen(descriptor, "rb", buffering=0)


def _parse(text: bytes | None) -> dict[str, Any]:
    text = text or b""  # a pipe that is empty gives None
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


def holder(content: Mapping[str, Any]) -> Holder | None:
    """Return who holds a claim that was read; None if nobody can tell."""
    return Holder(*(content[name] for name in Holder._fields)) if "token" in content else None


def is_free_at_once(
    content: Mapping[str, Any], job: Holder, process: Callable[[int], Process | None] = read_process
) -> bool:
    """Tell whether a claim may be taken over without waiting.

    Args:
      content: What it says.
      job: Who wants it.
      process: What the system knows of a pid.
    """
    other = holder(content)
    if other is None or not content["held"]:
        return not content["held"]
    if other.job and other.job == job.job and job.restart > other.restart:
        return True
    return other.machine == job.machine and is_process_finished(process(other.pid), other.born)


@final
class Claim:
    """The claim of this process on one directory.

    Args:
      directory: Where checkpoints are saved; made if it is not there.
      job: Who this is; None for this process.
      clock: Seconds, monotonic.
      sleep: Sleeps so many seconds.

    Attributes:
      progress: What the file tells of the progress.
      previous_content: What the last job left.
      users: Ids of the objects of this process that save there.
    """

    def __init__(
        self,
        directory: Path,
        job: Holder | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ):
        """Create it; nothing is claimed yet."""
        self.path, self._job = directory / NAME, job or this_process()
        self._clock, self._sleep = clock, sleep
        self._pid, self._number = os.getpid(), 0
        self._is_torn = False  # only a part of the last rewriting was written
        self.progress: dict[str, Any] = {}
        self.previous_content: Mapping[str, Any] = {}
        self.users: set[int] = set()
        self._release_event = threading.Event()
        self._write_lock = threading.RLock()  # garbage collection may release it during a write

    def take(self) -> None:
        """Claim the directory; wait up to 30 s to see whether another job does.

        Raises:
          FileExistsError: Another job saves there.
          OSError: The file cannot be read or written.
        """
        content = read(self.path)
        if content is not None:
            self._watch(content)
            self.previous_content = content
            self.progress = {name: content[name] for name in _LASTING if name in content}
        self._put(replace=content is not None)

    def _watch(self, content: Mapping[str, Any]) -> None:
        """Return when the claim is free, or has not changed for long; raise if it changes."""
        end, current = self._clock() + STALE_SECONDS, content
        while self._clock() < end and not is_free_at_once(current, self._job):
            self._sleep(_LOOK_SECONDS)
            current = read(self.path) or {"held": False}
            if current != content and not is_free_at_once(current, self._job):
                self._refuse(current)

    def _refuse(self, content: Mapping[str, Any]) -> NoReturn:
        raise FileExistsError(
            errno.EEXIST,
            f"Another job saves here: {holder(content) or 'an unknown one'}, which has written "
            f"{NAME} while this one watched. Give each job a directory of its own, or end that one",
            os.fspath(self.path.parent),
        )

    def _put(self, replace: bool) -> None:
        """Put a file of this claim in its place; of several jobs that do so, the last has it."""
        part = atomic.Part(self.path)
        try:
            self._write(part.descriptor)
            part.commit(replace)
        except FileExistsError:  # another was quicker
            self._refuse(read(self.path) or {})
        finally:
            part.drop()

    def _write(self, descriptor: int) -> None:
        self._number, is_held = self._number + 1, not self.is_released
        claim = {**self._job._asdict(), "number": self._number, "held": is_held}
        text = json.dumps({**claim, **self.progress}, indent=1).encode()
        if len(text) >= _ROOM:  # a part of it could not be read, so that this job would stop
            text = json.dumps(claim, indent=1).encode()
        text, at = text.ljust(_ROOM - 1)[: _ROOM - 1] + b"\n", 0
        self._is_torn = True
        while at < _ROOM:  # a full disk takes a part first, and then raises
            at += os.pwrite(descriptor, text[at:], at)
        self._is_torn = False
        os.fsync(descriptor)
        if is_held and self.is_released:  # by garbage collection, meanwhile
            self._write(descriptor)

    def show(self, **progress: Any) -> None:
        """Say more of the job, from the next rewriting on: step, rate, last save and the like."""
        self.progress.update((name, _shortened(value)) for name, value in progress.items())

    def beat(self) -> None:
        """Rewrite it if it is still this claim's; nothing that fails matters to the job."""
        with contextlib.suppress(OSError), self._write_lock, _open(self.path, os.O_RDWR) as file:
            owner = holder(_parse(file.read(_ROOM + 1)))
            if owner == self._job or (owner is None and self._is_torn):
                self._write(file.fileno())

    def keep(self) -> None:
        """Rewrite it every 10 s, in a thread of its own."""

        def beats() -> None:
            while not self._release_event.wait(BEAT_SECONDS):
                self.beat()

        threading.Thread(target=beats, name="mpistrat-claim", daemon=True).start()

    def check(self) -> None:
        """Raise if it is no longer this process's.

        Raises:
          FileExistsError: Another job has taken it over, or it is gone.
        """
        content = read(self.path)
        owner = holder(content or {})
        if owner == self._job:
            return
        reason = f"it now belongs to {owner}, because "
        reason += f"both jobs began at once, or this one did not rewrite it for {STALE_SECONDS:g} s"
        act = "end it"
        if content is None:
            reason, act = "the file, or its whole directory, was removed", "start it again"
        elif owner is None:
            reason = "another program has overwritten the file"
            act = "remove it, start this job again"
        text = f"This job no longer holds {NAME}: {reason}. It may not save here; {act}, or "
        text += "save in another directory"
        raise FileExistsError(errno.EEXIST, text, os.fspath(self.path.parent))

    @property
    def is_released(self) -> bool:
        """Whether the next job may take it."""
        return self._release_event.is_set()

    def release(self) -> None:
        """Release the claim: the next job may take it at once. What the file says stays."""
        if self._release_event.is_set() or os.getpid() != self._pid:
            return
        self._release_event.set()
        self.beat()


# Of this process, by the real path of the directory.
_CLAIMS: dict[str, Claim] = {}
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
    path = os.path.realpath(directory)
    with _TAKING:
        claim = _CLAIMS.get(path)
        if claim is not None:
            claim.users.add(id(user))
        if claim is None or claim.is_released:
            claim = Claim(Path(path))
            claim.users.add(id(user))
            claim.take()
            try:
                claim.keep()
            except RuntimeError:
                claim.release()
                reason = "No thread can be started (ulimit -u, or pids.max of a container)"
                raise OSError(errno.EAGAIN, reason) from None
            _CLAIMS[path] = claim
    weakref.finalize(user, _drop, claim, id(user))
    return claim


def _drop(claim: Claim, user: int) -> None:
    """Release a claim whose last user is gone. It may run at any point, so it takes no lock."""
    claim.users.discard(user)
    if not claim.users:
        claim.release()


def check(directory: Path) -> None:
    """Raise FileExistsError if this process had claimed a directory, and another has it now."""
    claim = _CLAIMS.get(os.path.realpath(directory))
    if claim is not None:
        claim.check()


def progress_of(directory: Path) -> int:
    """Return the step that the job of a directory has told last; -1 if none has."""
    content = None
    with contextlib.suppress(OSError):
        content = read(directory / NAME)
    step = (content or {}).get("saved_step")
    return step if isinstance(step, int) else -1

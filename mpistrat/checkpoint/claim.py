"""The claim: a file that says which job saves in a directory, and its progress.

It uses no locks and no file times. Its token says which job owns it. Each commit of a checkpoint
reads the token; so does the owner before it rewrites the file, every 10 s and in place (another
name for each rewriting would reach other clients of NFS late). A job that takes over puts another
file there. So a job that slept, and was taken for dead, saves nothing any more. If two jobs take
over at once, the last one has the claim. After a crash of the node the claim lasts for 30 s, or not
at all if the restarted job has the same id.
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

CLAIM_FILE_NAME = "job.json"
HEARTBEAT_SECONDS = 10.0  # between two rewritings
STALE_SECONDS = 30.0  # of the reader's own clock, after which an unchanged claim is free
_POLL_SECONDS = 0.5  # between two looks at a number
_INHERITED_NAMES = ("saved", "saved_step", "save_seconds")  # until this job has saved itself
_FILE_NBYTES = 8192  # bytes; always as many, so that rewriting changes no size
_MAX_TEXT_LENGTH = 400  # characters of one text; JSON may need six bytes for each
# The types of the values, by name, in files that this library has written.
_TYPES_BY_NAME: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("host", "machine", "job", "token"), (str,)),
    **dict.fromkeys(("pid", "born", "restart", "number"), (int,)),
    "held": (bool,),
    "saved": (str,),
    "saved_step": (int, type(None)),
    "save_seconds": (int, float),
}
_MAX_SAVE_SECONDS = 1e9  # seconds; no save has taken longer


@final
class ClaimHolder(NamedTuple):
    """The process that holds a claim.

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


def describe_this_process() -> ClaimHolder:
    """Return this process as a holder, with a token of its own."""
    process, pid = read_process(os.getpid()), os.getpid()
    host, job = _shorten_text(platform.node()), _shorten_text(get_job_id())
    born = process.start_ticks if process else 0
    return ClaimHolder(
        host, get_machine_id(), pid, born, job, get_restart_count(), secrets.token_hex(8)
    )


def read_claim(path: Path) -> dict[str, Any] | None:
    """Return the content of a claim; None without a file.

    The content of a file that this library has not written is ``{"text": ..., "held": True}``,
    which names no holder: it is watched, and then replaced. So is a link that leads nowhere.

    Raises:
      OSError: It cannot be read, or is a directory; the text names it.
    """
    try:
        with _open_claim(path, os.O_RDONLY) as file:
            return _parse_claim(file.read(_FILE_NBYTES + 1))
    except FileNotFoundError:
        return _parse_claim(b"") if path.is_symlink() else None
    except OSError as error:
        reason = f"{CLAIM_FILE_NAME} cannot be read ({error.strerror}); remove it"
        raise OSError(error.errno, reason, os.fspath(path)) from None


def _open_claim(path: Path, flags: int) -> Any:
    # Not blocking: what has the name of a claim may be a pipe.
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    return os.fdopen(descriptor, "rb", buffering=0)


def _parse_claim(text: bytes | None) -> dict[str, Any]:
    text = text or b""  # a pipe that is empty gives None
    with contextlib.suppress(ValueError, RecursionError):
        content = json.loads(text)
        if len(text) <= _FILE_NBYTES and _is_claim_content(content):
            return dict(content)
    return {"text": text.decode(errors="replace"), "held": True}


def _is_claim_content(content: object) -> bool:
    """Return whether the content of a file has all names of a claim, and values of their types."""
    if not isinstance(content, dict) or not content.keys() >= {
        *ClaimHolder._fields,
        "number",
        "held",
    }:
        return False
    seconds = content.get("save_seconds", 0.0)
    return all(
        type(content.get(name, types[0]())) in types for name, types in _TYPES_BY_NAME.items()
    ) and (0.0 <= seconds <= _MAX_SAVE_SECONDS)


def _shorten_text(value: Any) -> Any:
    """Return a value as it is; of a long text, such as a path, the end."""
    return (
        f"...{value[-_MAX_TEXT_LENGTH:]}"
        if isinstance(value, str) and len(value) > _MAX_TEXT_LENGTH
        else value
    )


def parse_holder(content: Mapping[str, Any]) -> ClaimHolder | None:
    """Return the holder of a claim that was read; None for an unknown one."""
    return (
        ClaimHolder(*(content[name] for name in ClaimHolder._fields))
        if "token" in content
        else None
    )


def is_free_at_once(
    content: Mapping[str, Any],
    own_holder: ClaimHolder,
    look_up_process: Callable[[int], Process | None] = read_process,
) -> bool:
    """Return whether a claim may be taken over without waiting.

    Args:
      content: What it says.
      own_holder: Who wants it.
      look_up_process: Returns the process of a pid; None without one.
    """
    claim_holder = parse_holder(content)
    if claim_holder is None or not content["held"]:
        return not content["held"]
    if (
        claim_holder.job
        and claim_holder.job == own_holder.job
        and own_holder.restart > claim_holder.restart
    ):
        return True
    return claim_holder.machine == own_holder.machine and is_process_finished(
        look_up_process(claim_holder.pid), claim_holder.born
    )


@final
class Claim:
    """The claim of this process on one directory.

    Args:
      directory: Where checkpoints are saved; made if it is not there.
      holder: Who this is; None for this process.
      clock: Seconds, monotonic.
      sleep: Sleeps so many seconds.

    Attributes:
      progress: The progress, as the file shows it.
      previous_content: The content of the last job's claim.
      user_ids: Ids of the objects of this process that save there.
    """

    def __init__(
        self,
        directory: Path,
        holder: ClaimHolder | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ):
        """Create it; nothing is claimed yet."""
        self.path, self._holder = directory / CLAIM_FILE_NAME, holder or describe_this_process()
        self._clock, self._sleep = clock, sleep
        self._pid, self._number = os.getpid(), 0
        self._is_partly_written = False  # only a part of the last rewriting was written
        self.progress: dict[str, Any] = {}
        self.previous_content: Mapping[str, Any] = {}
        self.user_ids: set[int] = set()
        self._release_event = threading.Event()
        self._write_lock = threading.RLock()  # garbage collection may release it during a write

    def acquire(self) -> None:
        """Claim the directory; wait up to 30 s to see whether another job does.

        Raises:
          FileExistsError: Another job saves there.
          OSError: The file cannot be read or written.
        """
        content = read_claim(self.path)
        if content is not None:
            self._wait_until_free(content)
            self.previous_content = content
            self.progress = {name: content[name] for name in _INHERITED_NAMES if name in content}
        self._place_file(should_replace=content is not None)

    def _wait_until_free(self, content: Mapping[str, Any]) -> None:
        """Return when the claim is free, or has not changed for long; raise if it changes."""
        deadline, current_content = self._clock() + STALE_SECONDS, content
        while self._clock() < deadline and not is_free_at_once(current_content, self._holder):
            self._sleep(_POLL_SECONDS)
            current_content = read_claim(self.path) or {"held": False}
            if current_content != content and not is_free_at_once(current_content, self._holder):
                self._raise_held(current_content)

    def _raise_held(self, content: Mapping[str, Any]) -> NoReturn:
        raise FileExistsError(
            errno.EEXIST,
            f"Another job saves here: {parse_holder(content) or 'an unknown one'}, which has "
            f"written {CLAIM_FILE_NAME} while this one watched. Give each job a directory of its "
            "own, or end that one",
            os.fspath(self.path.parent),
        )

    def _place_file(self, should_replace: bool) -> None:
        """Put a file of this claim in its place; of several jobs that do so, the last has it."""
        staged_path = atomic.StagedPath(self.path)
        try:
            self._write_claim(staged_path.descriptor)
            staged_path.commit(should_replace)
        except FileExistsError:  # another was quicker
            self._raise_held(read_claim(self.path) or {})
        finally:
            staged_path.discard()

    def _write_claim(self, descriptor: int) -> None:
        self._number, is_held = self._number + 1, not self.is_released
        claim_content = {**self._holder._asdict(), "number": self._number, "held": is_held}
        text = json.dumps({**claim_content, **self.progress}, indent=1).encode()
        if len(text) >= _FILE_NBYTES:  # a part of it could not be read, so that this job would stop
            text = json.dumps(claim_content, indent=1).encode()
        text, offset = text.ljust(_FILE_NBYTES - 1)[: _FILE_NBYTES - 1] + b"\n", 0
        self._is_partly_written = True
        while offset < _FILE_NBYTES:  # a full disk takes a part first, and then raises
            offset += os.pwrite(descriptor, text[offset:], offset)
        self._is_partly_written = False
        os.fsync(descriptor)
        if is_held and self.is_released:  # by garbage collection, meanwhile
            self._write_claim(descriptor)

    def update_progress(self, **progress: Any) -> None:
        """Say more of the job, from the next rewriting on: step, rate, last save and the like."""
        self.progress.update((name, _shorten_text(value)) for name, value in progress.items())

    def rewrite(self) -> None:
        """Rewrite it if it is still this claim's; nothing that fails matters to the job."""
        with (
            contextlib.suppress(OSError),
            self._write_lock,
            _open_claim(self.path, os.O_RDWR) as file,
        ):
            owner = parse_holder(_parse_claim(file.read(_FILE_NBYTES + 1)))
            if owner == self._holder or (owner is None and self._is_partly_written):
                self._write_claim(file.fileno())

    def start_heartbeat(self) -> None:
        """Rewrite it every 10 s, in a thread of its own."""

        def rewrite_until_released() -> None:
            while not self._release_event.wait(HEARTBEAT_SECONDS):
                self.rewrite()

        threading.Thread(target=rewrite_until_released, name="mpistrat-claim", daemon=True).start()

    def check_ownership(self) -> None:
        """Raise if it is no longer this process's.

        Raises:
          FileExistsError: Another job has taken it over, or it is gone.
        """
        content = read_claim(self.path)
        owner = parse_holder(content or {})
        if owner == self._holder:
            return
        reason = f"it now belongs to {owner}, because "
        reason += f"both jobs began at once, or this one did not rewrite it for {STALE_SECONDS:g} s"
        advice = "end it"
        if content is None:
            reason, advice = "the file, or its whole directory, was removed", "start it again"
        elif owner is None:
            reason = "another program has overwritten the file"
            advice = "remove it, start this job again"
        text = f"This job no longer holds {CLAIM_FILE_NAME}: {reason}. It may not save here; "
        text += f"{advice}, or save in another directory"
        raise FileExistsError(errno.EEXIST, text, os.fspath(self.path.parent))

    @property
    def is_released(self) -> bool:
        """Whether the next job may take it."""
        return self._release_event.is_set()

    def release(self) -> None:
        """Release the claim: the next job may take it at once. The progress stays in the file."""
        if self._release_event.is_set() or os.getpid() != self._pid:
            return
        self._release_event.set()
        self.rewrite()


# Of this process, by the real path of the directory.
_CLAIMS_BY_PATH: dict[str, Claim] = {}
_CLAIMS_LOCK = threading.Lock()


def acquire_claim(directory: Path, user: object) -> Claim:
    """Claim a directory for this process, once however many managers save there.

    Args:
      directory: It is made if it is not there.
      user: The object that saves there; when all of them are gone, the claim is released.

    Returns:
      The claim.

    Raises:
      FileExistsError: Another job saves there.
      OSError: The file cannot be read or written.
    """
    path = os.path.realpath(directory)
    with _CLAIMS_LOCK:
        claim = _CLAIMS_BY_PATH.get(path)
        if claim is not None:
            claim.user_ids.add(id(user))
        if claim is None or claim.is_released:
            claim = Claim(Path(path))
            claim.user_ids.add(id(user))
            claim.acquire()
            try:
                claim.start_heartbeat()
            except RuntimeError:
                claim.release()
                reason = "No thread can be started (ulimit -u, or pids.max of a container)"
                raise OSError(errno.EAGAIN, reason) from None
            _CLAIMS_BY_PATH[path] = claim
    weakref.finalize(user, _remove_user, claim, id(user))
    return claim


def _remove_user(claim: Claim, user_id: int) -> None:
    """Release a claim whose last user is gone. It may run at any point, so it takes no lock."""
    claim.user_ids.discard(user_id)
    if not claim.user_ids:
        claim.release()


def check_claim(directory: Path) -> None:
    """Raise FileExistsError if this process had claimed a directory, and another has it now."""
    claim = _CLAIMS_BY_PATH.get(os.path.realpath(directory))
    if claim is not None:
        claim.check_ownership()


def read_saved_step(directory: Path) -> int:
    """Return the last step in the claim of a directory; -1 without one."""
    content = None
    with contextlib.suppress(OSError):
        content = read_claim(directory / CLAIM_FILE_NAME)
    step = (content or {}).get("saved_step")
    return step if isinstance(step, int) else -1

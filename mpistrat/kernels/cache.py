"""Where compiled kernels are kept between processes, and who compiles them.

Numba keeps machine code beside the source, or in a directory of the user's home, or where
``NUMBA_CACHE_DIR`` says. What is added here:

- Where none of these can be written, code goes to a directory of the node (`node_directory`).
- Code beside the source is found even where nothing can be written there, as in an installation
  for all users; ``mpistrat warm`` puts it there.
- Of the processes of a node one compiles, and the others wait for it, and load what it made.
- Files are kept apart by signature and by what the kernel is compiled from, and none is fatal.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

_LONGEST = 20.0  # seconds to wait for a process that compiles; then this one does it, too
_PAUSE = 0.02

# The locks of this process: one for each kernel that it is compiling.
held: dict[Path, int] = {}


def node_directory() -> Path | None:
    """Return a directory of this user on this node, made if need be; None if there cannot be one.

    It is in ``TMPDIR``, or ``/tmp``. Python runs what is read from it, so it is refused unless it
    belongs to this user and nobody else can write or read it.
    """
    import tempfile

    path = Path(tempfile.gettempdir(), f"mpistrat-{os.geteuid()}")
    try:
        path.mkdir(0o700, exist_ok=True)
        status = path.lstat()
    except OSError:
        return None
    safe = (
        stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o77
    )
    return path if safe and os.access(path, os.W_OK) else None


def cached(compiler: Callable[[bool], Any], config: Any) -> Any:
    """Return a function of Numba with a place on disk, if there is one at all.

    Args:
      compiler: Makes it, with a cache or without.
      config: Numba's own settings.
    """
    try:
        return compiler(True)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
    # A read-only installation of a user without a writable home.
    configured_directory, config.CACHE_DIR = config.CACHE_DIR, str(node_directory() or "")
    try:
        return compiler(bool(config.CACHE_DIR))
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        return compiler(False)  # each process compiles
    finally:
        config.CACHE_DIR = configured_directory


def attach(cache: Any, source: str, code: list[str], config: Any) -> None:
    """Put `_CacheFiles` in place of the files of a function.

    Args:
      cache: Numba's cache of the function; None, and others without files, are left alone.
      source: The file that the function is from.
      code: What it is compiled from.
      config: Numba's own settings; a directory that they name is the only one.
    """
    if hasattr(cache, "_cache_file"):
        source_cache = (
            cache.cache_path if config.CACHE_DIR else f"{Path(source).parent}/__pycache__"
        )
        cache._cache_file = _CacheFiles(cache._cache_file, source_cache, code)


@final
class _CacheFiles:
    """Numba's cache files of one function, kept apart by signature, and never fatal.

    Numba keeps one index per function and numbers the code files. Two ranks that compile different
    signatures at once both take number 1, and afterwards the index of one names the code of the
    other. With an index per signature they can only write the same thing. What the function is
    compiled from counts like the signature. A file that is torn, or cannot be read or written,
    costs a compilation and nothing else.
    """

    def __init__(self, cache_files: Any, source_cache: str, code: list[str]):
        self._whole = cache_files
        self._beside = source_cache
        self._code = code

    def _name(self, key: tuple[Any, ...]) -> str:
        # The key holds types, processor and bytecode; their text is the same in every process.
        digest = hashlib.sha256(repr((key, self._code)).encode()).hexdigest()[:16]
        return f"{self._whole._index_name.removesuffix('.nbi')}-{digest}"

    def _file(self, key: tuple[Any, ...], place: str | None = None) -> Any:
        cache_files = self._whole
        return type(cache_files)(
            place or cache_files._cache_path, self._name(key), cache_files._source_stamp
        )

    def load(self, key: tuple[Any, ...]) -> Any:
        """Return the code, or None if this process has to compile it."""
        compiled_code = self._read(key)
        if compiled_code is None and _acquire(self._name(key)):
            compiled_code = self._read(key)  # what another process has made meanwhile
            if compiled_code is not None:
                _release(self._name(key))
        return compiled_code

    def _read(self, key: tuple[Any, ...]) -> Any:
        file = self._file(key)
        try:
            compiled_code = file.load(key)
        except Exception:  # torn bytes make the reader raise almost anything
            with contextlib.suppress(OSError):
                file.flush()
            compiled_code = None
        if compiled_code is None and self._beside != self._whole._cache_path:
            with contextlib.suppress(Exception):
                return self._file(key, self._beside).load(key)
        return compiled_code

    def save(self, key: tuple[Any, ...], data: Any) -> None:
        """Write the code, and let those continue who wait for it."""
        # Disk full, read-only, or a torn index that could not be replaced: the code still runs.
        with contextlib.suppress(Exception):
            self._file(key).save(key, data)
        _release(self._name(key))

    def flush(self) -> None:
        """Do nothing: whoever recompiles overwrites the file of that signature."""


def _acquire(name: str) -> bool:
    """Take the lock of a kernel on this node, and wait for its holder; return whether it was taken.

    A process that ends gives its locks back, whatever it ends by.
    """
    directory = node_directory()
    if directory is None or directory / name in held:
        return False
    deadline = time.monotonic() + _LONGEST
    with contextlib.suppress(OSError):
        lock = os.open(directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW)
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(_PAUSE)
                    continue
                os.close(lock)
                return False
            held[directory / name] = lock
            return True
    return False


def _release(name: str) -> None:
    for path in [path for path in held if path.name == name]:
        with contextlib.suppress(OSError):
            path.unlink()  # before others get it: one who opens it now finds the code
        with contextlib.suppress(OSError):
            os.close(held.pop(path))

"""File operations that replica 0 does for all ranks, and their results on all ranks."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mpistrat.lockstep.lockstep import Lockstep
from mpistrat.lockstep.ranks import Caught

# Reading and writing may keep the other ranks waiting: seconds, and seconds for each byte.
PATIENCE, SLOWEST = 600.0, 1e-7
_ADVICE = "Fix that, or save elsewhere, and save again"
_OTHER = "Another job saves here; give each job its own directory"


def patient(lockstep: Lockstep, operation: str, nbytes: int = 0) -> Any:
    """Return a context manager in which this rank reads or writes, while the others wait."""
    return lockstep.session.board.long_operation(operation, PATIENCE + nbytes * SLOWEST)


@contextlib.contextmanager
def unwritten(path: Path, claims: bool = False) -> Iterator[None]:
    """Raise errors of writing a checkpoint, in the body, as users are to see them.

    Args:
      path: The file or directory that is written.
      claims: A FileExistsError of the body says by itself which job saves here.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or (claims and isinstance(error, FileExistsError)):
            raise
        text = f"{error.strerror}: {path} was not written; earlier checkpoints are unchanged. "
        text += _OTHER if isinstance(error, FileExistsError) else _ADVICE
        raise OSError(error.errno, text) from error


def on_replica0(
    lockstep: Lockstep, call: str, fn: Callable[[], Any], operation: str = "", nbytes: int = 0
) -> Any:
    """Return what a function returns on replica 0; the other ranks do not call it. Collective.

    Args:
      lockstep: Proves it.
      call: The text of the call, equal on all ranks.
      fn: The function. JSON has to know its result; its exceptions are raised on every rank.
      operation: A text for messages about waiting ranks; if empty, `call`.
      nbytes: How many it may read or write.
    """
    result = None
    with Caught() as caught:
        if lockstep.comm.rank == 0:
            with patient(lockstep, operation or call, nbytes):
                result = fn()
    return json.loads(
        lockstep.gather_payloads(call, json.dumps(result).encode(), caught.failure)[0]
    )

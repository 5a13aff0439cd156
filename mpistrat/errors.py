"""Every exception that mpistrat raises on purpose.

The tree; each class is also the built-in it refines, so code that knows only these works::

    MpistratError
    ├── ContextError    (RuntimeError)   replica code and cross-replica code were mixed up
    ├── StrategyError   (RuntimeError)   a value, variable or thread of another strategy
    ├── LockstepError   (RuntimeError, ValueError)   ranks made different collective calls
    ├── DivergenceError (RuntimeError)   what has to be equal on all ranks is not
    ├── NonFiniteError  (FloatingPointError)   a NaN or infinity was about to spread
    ├── RemoteError     (RuntimeError)   another rank failed; also the built-in it raised there
    ├── StructureError  (ValueError)     a tree has the wrong shape
    ├── AxisError       (ValueError)     an axis does not exist, or appears twice
    ├── CheckpointError (ValueError)     a file is not a checkpoint, or damaged
    ├── DataError       (ValueError)     a data source is ragged, empty or used up
    ├── OutOfRangeError (IndexError)     the data have ended, and another element was asked for
    ├── LeafTypeError   (TypeError)      a leaf is not an array, or cannot be reduced
    ├── RefusedError    (NotImplementedError)   a name of tf.distribute with no meaning here
    ├── OptionError     (ValueError)     an option or MPISTRAT_* variable cannot be used
    └── LaunchError     (RuntimeError)   launcher, MPI library and mpi4py do not fit
        └── PreflightError               the ranks run different versions or options
"""

from __future__ import annotations

import builtins
import contextlib
import functools
from typing import Any


class MpistratError(Exception):
    """Base of all exceptions that mpistrat raises on purpose."""


class ContextError(MpistratError, RuntimeError):
    """A call was made in the wrong context: replica code, cross-replica code or neither."""


class StrategyError(MpistratError, RuntimeError):
    """A value, variable or call belongs to another strategy, thread or process."""


class LockstepError(MpistratError, RuntimeError, ValueError):
    """The ranks made different collective calls; raised on every rank, before data moved."""


class RemoteError(MpistratError, RuntimeError):
    """Another rank failed in a call that this rank took part in.

    It also is an instance of the built-in exception class, or the class of mpistrat, that was
    raised there, so one ``except ValueError`` works on every rank.

    Attributes:
      rank: The rank that failed (the lowest one, if several did).
      kind: The name of the exception class that was raised there.
      remote_traceback: The text of the traceback on that rank, or an empty string.
    """

    def __init__(self, message: str, rank: int = -1, kind: str = "", remote_traceback: str = ""):
        """Create the exception."""
        # Not super().__init__: built-ins mixed in (UnicodeDecodeError) want other arguments.
        self.args = (message,)
        self.rank = rank
        self.kind = kind
        self.remote_traceback = remote_traceback

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to pickle it, as its class was made at run time."""
        names = tuple(cls.__name__ for cls in type(self).__bases__[1:])
        arguments = (str(self.args[0]), self.rank, self.kind, names, self.remote_traceback)
        return remote_error, arguments, vars(self)

    def __str__(self) -> str:
        """Return the message, not what the built-in class would print."""
        return str(self.args[0])


class DivergenceError(MpistratError, RuntimeError):
    """Copies of a variable, or of other state, are not equal on all ranks; raised on every rank."""


class NonFiniteError(MpistratError, FloatingPointError):
    """A rank was about to send a NaN or infinity to all; raised on every rank."""


class StructureError(MpistratError, ValueError):
    """A tree of values does not have the structure that the call needs."""


class AxisError(MpistratError, ValueError):
    """An axis is out of range, repeated, or not an integer."""


class CheckpointError(MpistratError, ValueError):
    """A file is not a checkpoint, is damaged, or has a newer format; nothing has been restored."""


class DataError(MpistratError, ValueError):
    """A dataset or data source cannot provide the requested elements."""


class OutOfRangeError(MpistratError, IndexError):
    """The data of all replicas have ended, and another element was requested."""


class LeafTypeError(MpistratError, TypeError):
    """A leaf is not an array that can be sent between ranks, or cannot be reduced this way."""


class OptionError(MpistratError, ValueError):
    """An option, or the MPISTRAT_* variable behind it, has a value that cannot be used."""


class RefusedError(MpistratError, NotImplementedError):
    """A name of tf.distribute without a meaning here was used; the message says what to use."""


class LaunchError(MpistratError, RuntimeError):
    """The launcher, the MPI library and mpi4py of this process do not fit together."""


class PreflightError(LaunchError):
    """The ranks of this job run different versions of packages, or with different options."""


@functools.cache
def _remote_class(name: str) -> type[RemoteError] | None:
    candidate = globals().get(name) if name in __all__ else getattr(builtins, name, None)
    if not isinstance(candidate, type) or not issubclass(candidate, Exception):
        return None
    if issubclass(RemoteError, candidate):
        return RemoteError
    return type("RemoteError", (RemoteError, candidate), {"__module__": RemoteError.__module__})


def text_of(exception: object) -> str:
    """Return the text of an exception, or of a program's exit code, whatever its class does.

    An exception of ``__str__``, a SystemExit too, would replace the text that users need.

    Example:
      >>> text_of(ValueError("no rows"))
      'no rows'
    """
    try:
        return str(exception)
    except BaseException as worse:
        return f"<no text: its __str__ raised {type(worse).__name__}>"


def remote_error(
    message: str, rank: int, kind: str, class_names: tuple[str, ...], remote_traceback: str
) -> RemoteError:
    """Make the exception that the healthy ranks raise when `rank` failed.

    Args:
      message: What to say.
      rank: The rank that failed.
      kind: Class name of the exception there.
      class_names: Names of the classes of mpistrat and of the built-in classes that it derives
        from, most derived first; the first usable one is mixed in.
      remote_traceback: Text of its traceback.

    Returns:
      A `RemoteError` that is also an instance of that class.

    Example:
      >>> isinstance(remote_error("rank 1 failed", 1, "KeyError", ("KeyError",), ""), KeyError)
      True
    """
    for name in class_names:
        error_class = _remote_class(name)
        if error_class is None:
            continue
        # Some built-ins cannot be made from a message alone, such as exception groups.
        with contextlib.suppress(TypeError):
            return error_class(message, rank, kind, remote_traceback)
    return RemoteError(message, rank, kind, remote_traceback)


_CLASSES = [kind for kind in globals().values() if isinstance(kind, type)]
__all__ = [kind.__name__ for kind in _CLASSES if issubclass(kind, MpistratError)]
__all__ += ["remote_error"]

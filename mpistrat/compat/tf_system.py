"""``tf.errors`` and ``tf.config`` as tables: exceptions of this library, and calls without effect.

An ``except tf.errors.X`` catches what happens here where X happens there. What a peer that failed
raises on the others, `RemoteError`, is Aborted and Unavailable.
"""

from __future__ import annotations

from concurrent.futures import CancelledError
from typing import Any, NamedTuple

from mpistrat.compat.absent import Names
from mpistrat.errors import (
    CheckpointError,
    ContextError,
    LockstepError,
    MpistratError,
    OutOfRangeError,
    RemoteError,
)

__all__ = ["config", "errors"]

errors = Names(
    "tf.errors",
    AbortedError=RemoteError,
    AlreadyExistsError=FileExistsError,
    CancelledError=CancelledError,
    DataLossError=CheckpointError,
    DeadlineExceededError=TimeoutError,
    FailedPreconditionError=ContextError,
    InternalError=LockstepError,
    InvalidArgumentError=ValueError,
    NotFoundError=FileNotFoundError,
    OpError=MpistratError,
    OperatorNotAllowedInGraphError=TypeError,
    OutOfRangeError=OutOfRangeError,
    PermissionDeniedError=PermissionError,
    ResourceExhaustedError=MemoryError,
    UnauthenticatedError=PermissionError,
    UnavailableError=RemoteError,
    UnimplementedError=NotImplementedError,
    UnknownError=OSError,
)


class _Device(NamedTuple):
    """A label for the processor of this rank.

    Attributes:
      name: Its name.
      device_type: Its kind.
    """

    name: str
    device_type: str = "CPU"


def _devices(prefix: str) -> Any:
    def listed(device_type: str | None = None) -> list[_Device]:
        return [_Device(f"/{prefix}:CPU:0")] if device_type in (None, "CPU") else []

    listed.__doc__ = "Return one CPU, for this rank is one replica, and none of another type."
    return listed


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing: MPI has connected the ranks, and nothing here has memory or threads to set."""


_physical, _logical = _devices("physical_device"), _devices("device")

config = Names(
    "tf.config",
    experimental=Names(
        "tf.config.experimental",
        enable_op_determinism=_nothing,
        list_logical_devices=_logical,
        list_physical_devices=_physical,
        set_memory_growth=_nothing,
        set_visible_devices=_nothing,
    ),
    experimental_connect_to_cluster=_nothing,
    experimental_connect_to_host=_nothing,
    get_visible_devices=_physical,
    list_logical_devices=_logical,
    list_physical_devices=_physical,
    optimizer=Names("tf.config.optimizer", set_jit=_nothing),
    run_functions_eagerly=_nothing,
    set_soft_device_placement=_nothing,
    set_visible_devices=_nothing,
    threading=Names(
        "tf.config.threading",
        set_inter_op_parallelism_threads=_nothing,
        set_intra_op_parallelism_threads=_nothing,
    ),
)

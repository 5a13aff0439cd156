"""``tf.errors`` and ``tf.config`` as tables, and functions for graphs, which have no effect here.

``tf.errors.X`` is the exception that comes closest to X here. A `RemoteError`, which other ranks
raise when one fails, is AbortedError and UnavailableError.
"""

from __future__ import annotations

import builtins
import contextlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from types import MethodType
from typing import Any, NamedTuple

from mpistrat.compat.absent import Namespace
from mpistrat.config import job_size
from mpistrat.errors import (
    CheckpointError,
    ContextError,
    LockstepError,
    MpistratError,
    OutOfRangeError,
    RemoteError,
)
from mpistrat.strategy.context_stack import explain_program_error

errors = Namespace(
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


def _make_device_list(prefix: str) -> Any:
    def list_devices(device_type: str | None = None) -> list[_Device]:
        return [_Device(f"/{prefix}:CPU:0")] if device_type in (None, "CPU") else []

    list_devices.__doc__ = "Return one CPU, because a rank is one replica; empty for other types."
    return list_devices


def _ignore_call(*args: Any, **kwargs: Any) -> None:
    """Do nothing: MPI connects the ranks, and there are no devices to configure."""


def _warn_devices(device: Any, logical_devices: Any) -> None:
    """Warn if more `logical_devices` are asked for than a launcher has started ranks."""
    device_count, ranks = len(logical_devices), job_size() or 1
    if device_count > ranks:
        warnings.warn(
            f"{device_count} logical devices would be {device_count} replicas; here each rank is "
            f"one, and this job has {ranks}. Start it with: mpistrat run -n {device_count} "
            "program.py",
            stacklevel=2,
        )


def _make_namespace(where: str, inert_names: str, **names: Any) -> Namespace:
    """Return a namespace whose names in `inert_names` are calls without effect."""
    return Namespace(where, **dict.fromkeys(inert_names.split(), _ignore_call), **names)


_physical, _logical = _make_device_list("physical_device"), _make_device_list("device")
_lists = {"list_logical_devices": _logical, "list_physical_devices": _physical}

config = _make_namespace(
    "tf.config",
    "LogicalDeviceConfiguration experimental_connect_to_cluster experimental_connect_to_host "
    "experimental_run_functions_eagerly run_functions_eagerly "
    "set_soft_device_placement set_visible_devices",
    experimental=_make_namespace(
        "tf.config.experimental",
        "VirtualDeviceConfiguration enable_op_determinism enable_tensor_float_32_execution "
        "set_memory_growth set_visible_devices",
        get_visible_devices=_physical,
        set_virtual_device_configuration=_warn_devices,
        **_lists,
    ),
    get_visible_devices=_physical,
    set_logical_device_configuration=_warn_devices,
    optimizer=_make_namespace("tf.config.optimizer", "set_experimental_options set_jit"),
    threading=_make_namespace(
        "tf.config.threading", "set_inter_op_parallelism_threads set_intra_op_parallelism_threads"
    ),
    **_lists,
)


class DataEnded(OutOfRangeError, StopIteration):
    """The end of data, as the caller of a `function` sees it; in TensorFlow an OutOfRangeError."""


class _Function:
    """A function as `function` returns it: calling it is calling the function.

    Attributes:
      python_function: The function itself.
    """

    def __init__(self, python_function: Callable[..., Any]):
        """Create one; nothing is traced."""
        self.python_function = self.__wrapped__ = python_function
        self.__doc__ = python_function.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the function returns.

        The AttributeError for an attribute that only TensorFlow's tensors have names a replacement.

        Raises:
          OutOfRangeError: ``next(iterator)`` in it has found no more; it is a StopIteration, too.
        """
        try:
            return self.python_function(*args, **kwargs)
        except StopIteration as error:
            raise DataEnded("End of sequence: an iterator has no more.") from error
        except AttributeError as error:
            explain_program_error(error)
            raise

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Return it as a method of `instance`."""
        return self if instance is None else _Function(MethodType(self.python_function, instance))

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the function."""
        if name == "python_function":  # it is being copied, and empty still
            raise AttributeError(name)
        return getattr(self.python_function, name)

    def get_concrete_function(self, *args: Any, **kwargs: Any) -> _Function:
        """Return itself: nothing is traced, so it takes the arguments that it always takes."""
        return self


def function(
    func: Any = None,
    input_signature: Any = None,
    autograph: Any = True,
    jit_compile: Any = None,
    reduce_retracing: Any = False,
    experimental_implements: Any = None,
    experimental_autograph_options: Any = None,
    experimental_attributes: Any = None,
    experimental_relax_shapes: Any = None,
    experimental_compile: Any = None,
    experimental_follow_type_hints: Any = None,
) -> Any:
    """Return `func` to be called; everything runs eagerly. A decorator, with or without arguments.

    Where `func` asks an iterator whose data have ended, that is an OutOfRangeError outside of it.

    Args:
      func: The function.
      input_signature: No effect, as nothing is traced.
      autograph: No effect.
      jit_compile: No effect.
      reduce_retracing: No effect.
      experimental_implements: No effect.
      experimental_autograph_options: No effect.
      experimental_attributes: No effect.
      experimental_relax_shapes: No effect.
      experimental_compile: No effect.
      experimental_follow_type_hints: No effect.

    Example:
      >>> twice = function(lambda x: 2 * x)
      >>> twice(3), twice.get_concrete_function(3)(4), twice.python_function(5)
      (6, 8, 10)
    """
    return function if func is None else _Function(func)


def get_logger() -> logging.Logger:
    """Return the logger ``tensorflow``; this library writes nothing to it."""
    return logging.getLogger("tensorflow")


def executing_eagerly() -> Any:
    """Return True."""
    return True


def group(*inputs: Any, name: Any = None) -> None:
    """Do nothing: values are computed when a call returns; `name` has no effect."""


def no_op(name: Any = None) -> None:
    """Do nothing; `name` has no effect."""


def print(*inputs: Any, output_stream: Any = None, **kwargs: Any) -> None:
    """Print `inputs`, as the built-in does, on every rank that calls it.

    Args:
      inputs: The values to print.
      output_stream: A file; None for stderr.
      kwargs: ``sep`` and ``end``; others have no effect.
    """
    print_options = {key: value for key, value in kwargs.items() if key in ("sep", "end")}
    file = sys.stderr if output_stream is None else output_stream
    builtins.print(*inputs, file=file, **print_options)


def device(device_name: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context without effect: `device_name` is a label here."""
    return contextlib.nullcontext()


def control_dependencies(control_inputs: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context without effect, as calls run in order; `control_inputs` are ignored."""
    return contextlib.nullcontext()


def init_scope() -> contextlib.AbstractContextManager[None]:
    """Return a context without effect: nothing is traced, so there is nothing to lift out of."""
    return contextlib.nullcontext()


@contextlib.contextmanager
def name_scope(name: str) -> Iterator[str]:
    """Return a context without effect; it yields `name` with a slash after it."""
    yield f"{name}/"

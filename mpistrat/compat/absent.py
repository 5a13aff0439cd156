"""Names that are missing or refused, with their replacements.

`REFUSED` has names of tf.distribute without a meaning where every rank runs the same program. They
exist, so that importing them and asking ``isinstance`` work; using one raises `RefusedError`. A
further name is one row. Other names of ``tf.*`` do not exist, and asking for one is an
AttributeError, whose advice is in `mpistrat.advice`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import numpy as np

from mpistrat.advice import ADVICE_BY_NAME, PARITY_ADVICE
from mpistrat.errors import RefusedError

__all__ = ["REFUSED", "Advised", "Namespace", "ParameterServerStrategy", "Refusal"]
__all__ += ["Server", "get_refused", "get_refused_names", "make_absence_error", "make_getattr"]
__all__ += ["make_refusal"]


class Refusal(NamedTuple):
    """Why a name has no meaning here, and what to use instead.

    Attributes:
      reason: The reason, as half a sentence.
      replacement: What to use, as sentences.
      is_function: The name is a function, not a class.
      static_methods: Methods that programs call on the class.
    """

    reason: str
    replacement: str
    is_function: bool = False
    static_methods: tuple[str, ...] = ()


_NO_REMOTE_VARIABLES = (
    "workers would change variables that live on servers, each at its own time, and here every "
    "rank holds a copy that all ranks change together"
)
_NO_WAITING = (
    "it gives work to processes that wait for it, and here every rank runs the same program"
)
_NO_SERVER = "ranks are started by an MPI launcher and talk through MPI, so there is no server"
_PER_WORKER = Refusal(
    _NO_WAITING,
    "A value of each replica is a PerReplica; "
    "strategy.experimental_distribute_values_from_function makes one.",
)
_RPC = Refusal(
    _NO_SERVER,
    "Use mpi4py's messages, or a library of remote calls.",
    static_methods=("create",),
)

REFUSED: dict[str, Refusal] = {  # by path below mpistrat
    "ParameterServerStrategy": Refusal(
        _NO_REMOTE_VARIABLES, "Use MultiWorkerMirroredStrategy or MirroredStrategy."
    ),
    "Server": Refusal(
        _NO_SERVER,
        "Start the program with `mpistrat run -n N program.py`; for TensorFlow's own servers "
        "cluster_resolver.write_tf_config names the ranks.",
        static_methods=("create_local_server",),
    ),
    "coordinator.ClusterCoordinator": Refusal(
        _NO_WAITING,
        "Let every rank call strategy.run. Tasks that do not depend on one another suit "
        "mpi4py.futures.MPIPoolExecutor.",
    ),
    "coordinator.PerWorkerValue": _PER_WORKER,
    "coordinator.RemoteValue": Refusal(_NO_WAITING, "strategy.run returns the values themselves."),
    "coordinator.experimental_get_current_worker_index": Refusal(
        _NO_WAITING, "Use get_replica_context().replica_id_in_sync_group.", is_function=True
    ),
    "experimental.coordinator.PerWorkerValues": _PER_WORKER,
    "experimental.rpc.Server": _RPC,
    "experimental.rpc.Client": _RPC,
}


def make_refusal(path: str, text: str = "") -> Callable[..., NoReturn]:
    """Return a function that raises `RefusedError`.

    Args:
      path: Its dotted name.
      text: The text of the error; empty for the text of `make_absence_error`.

    Raises:
      RefusedError: The returned function is called.
    """
    module_name, _, name = path.rpartition(".")
    text = text or str(make_absence_error(module_name, name))

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise RefusedError(text)

    refuse.__doc__ = f"{text}\n\nRaises:\n  RefusedError: It is used.\n"
    refuse.__name__ = refuse.__qualname__ = name
    return refuse


@functools.cache
def get_refused(path: str) -> Any:
    """Return the substitute of a refused name: a class or function that raises when it is used.

    Args:
      path: A key of `REFUSED`.

    Raises:
      KeyError: The table has no such row.

    Example:
      >>> try:
      ...     get_refused("Server").create_local_server()
      ... except RefusedError as error:
      ...     print(str(error)[:26])
      mpistrat.Server is refused
    """
    row = REFUSED[path]
    qualified_name = f"mpistrat.{path}"
    module_name, _, name = qualified_name.rpartition(".")
    refuse = make_refusal(
        qualified_name, f"{qualified_name} is refused: {row.reason}. {row.replacement}"
    )
    refuse.__module__ = module_name
    if row.is_function:
        return refuse
    facts = {"__module__": module_name, "__doc__": refuse.__doc__, "__new__": refuse}
    return type(name, (), {**facts, **dict.fromkeys(row.static_methods, staticmethod(refuse))})


def get_refused_names(module_name: str) -> dict[str, Any]:
    """Return the substitutes of the refused names of a module, by name.

    Args:
      module_name: The module, by its path below mpistrat, such as ``coordinator``.
    """
    parts_by_path = {path: path.rpartition(".") for path in REFUSED}
    return {
        name: get_refused(path)
        for path, (module_path, _, name) in parts_by_path.items()
        if module_path == module_name
    }


def make_absence_error(module_name: str, name: str) -> AttributeError:
    """Return the error that names a replacement for a missing name.

    Args:
      module_name: The module that was asked, such as ``tf.train`` or ``mpistrat.coordinator``.
      name: The name that it does not have.

    Example:
      >>> print(make_absence_error("tf", "TensorShape"))
      mpistrat.compat.tf has no tf.TensorShape. A shape is a tuple of integers.
    """
    if name.startswith("__"):  # Python itself looks for these
        return AttributeError(f"module {module_name!r} has no attribute {name!r}")
    if module_name.startswith("mpistrat"):
        return AttributeError(f"{module_name} has no {name}. {PARITY_ADVICE}")
    path = f"{module_name}.{name}"
    advice, rest = ADVICE_BY_NAME.get(path), path
    while advice is None and "." in rest:
        rest = rest.rpartition(".")[0]
        advice = ADVICE_BY_NAME.get(rest)
    if advice is None and callable(getattr(np, name, None)):
        advice = f"Tensors are NumPy arrays: numpy.{name} takes them."
    advice = advice or (
        "It has the few names that programs for tf.distribute without models need; "
        "docs/coming-from.md lists them."
    )
    return AttributeError(f"mpistrat.compat.tf has no {path}. {advice}")


def make_getattr(module_name: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module; its error is that of `make_absence_error`.

    Args:
      module_name: The TensorFlow name of the module, such as ``tf.data``.

    Raises:
      AttributeError: The returned function is called, as Python does for a missing name.
    """

    def __getattr__(name: str) -> Any:
        raise make_absence_error(module_name, name)

    return __getattr__


class Advised(type):
    """A metaclass: the error for an attribute that the class lacks names a replacement.

    The class has a text ``_where``: its name in TensorFlow.
    """

    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any], **more: Any) -> Any:
        """Make the class, whose instances raise the same errors."""
        advised_class: Any = super().__new__(cls, name, bases, body, **more)
        advised_class.__getattr__ = lambda self, name: cls.__getattr__(advised_class, name)
        return advised_class

    def __getattr__(cls, name: str) -> Any:
        """Raise an AttributeError that says what to use instead of `name`."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise make_absence_error(cls._where, name)


class Namespace(SimpleNamespace):
    """Some names of a module of TensorFlow; other names raise an error with a replacement.

    Args:
      where: The name of the module in TensorFlow.
      names: The names that it has.

    Example:
      >>> Namespace("tf.train", step=1).step
      1
    """

    def __init__(self, where: str, /, **names: Any):
        """Create the namespace."""
        super().__init__(**names)
        vars(self)["_where"] = where

    def __getattr__(self, name: str) -> Any:
        """Raise an AttributeError that says what to use instead of `name`."""
        raise make_absence_error(vars(self).get("_where", "tf"), name)


ParameterServerStrategy = get_refused("ParameterServerStrategy")
Server = get_refused("Server")

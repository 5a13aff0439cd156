"""Names that are missing or refused, with what to use instead.

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

__all__ = ["REFUSED", "Advised", "Names", "ParameterServerStrategy", "Refusal"]
__all__ += ["Server", "absent", "absent_from", "refused", "refused_in", "refusing"]


class Refusal(NamedTuple):
    """Why a name has no meaning here, and what to use instead.

    Attributes:
      why: The reason, as half a sentence.
      instead: What to use, as sentences.
      function: The name is a function, not a class.
      static: Methods that programs call on the class.
    """

    why: str
    instead: str
    function: bool = False
    static: tuple[str, ...] = ()


_APART = (
    "workers would change variables that live on servers, each at its own time, and here every "
    "rank holds a copy that all ranks change together"
)
_WAITS = "it gives work to processes that wait for it, and here every rank runs the same program"
_LAUNCHED = "ranks are started by an MPI launcher and talk through MPI, so there is no server"
_PER_WORKER = Refusal(
    _WAITS,
    "A value of each replica is a PerReplica; "
    "strategy.experimental_distribute_values_from_function makes one.",
)
_RPC = Refusal(
    _LAUNCHED, "Use mpi4py's messages, or a library of remote calls.", static=("create",)
)

REFUSED: dict[str, Refusal] = {  # by path below mpistrat
    "ParameterServerStrategy": Refusal(
        _APART, "Use MultiWorkerMirroredStrategy or MirroredStrategy."
    ),
    "Server": Refusal(
        _LAUNCHED,
        "Start the program with `mpistrat run -n N program.py`; for TensorFlow's own servers "
        "cluster_resolver.write_tf_config names the ranks.",
        static=("create_local_server",),
    ),
    "coordinator.ClusterCoordinator": Refusal(
        _WAITS,
        "Let every rank call strategy.run. Tasks that do not depend on one another suit "
        "mpi4py.futures.MPIPoolExecutor.",
    ),
    "coordinator.PerWorkerValue": _PER_WORKER,
    "coordinator.RemoteValue": Refusal(_WAITS, "strategy.run returns the values themselves."),
    "coordinator.experimental_get_current_worker_index": Refusal(
        _WAITS, "Use get_replica_context().replica_id_in_sync_group.", function=True
    ),
    "experimental.coordinator.PerWorkerValues": _PER_WORKER,
    "experimental.rpc.Server": _RPC,
    "experimental.rpc.Client": _RPC,
}


def refusing(path: str, text: str = "") -> Callable[..., NoReturn]:
    """Return a function that raises `RefusedError`.

    Args:
      path: Its dotted name.
      text: What the error says; empty for what `absent` says of the name.

    Raises:
      RefusedError: What is returned is called.
    """
    where, _, name = path.rpartition(".")
    text = text or str(absent(where, name))

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise RefusedError(text)

    refuse.__doc__ = f"{text}\n\nRaises:\n  RefusedError: It is used.\n"
    refuse.__name__ = refuse.__qualname__ = name
    return refuse


@functools.cache
def refused(path: str) -> Any:
    """Return what stands for a refused name: a class or function that raises when it is used.

    Args:
      path: A key of `REFUSED`.

    Raises:
      KeyError: The table has no such row.

    Example:
      >>> try:
      ...     refused("Server").create_local_server()
      ... except RefusedError as error:
      ...     print(str(error)[:26])
      mpistrat.Server is refused
    """
    row = REFUSED[path]
    qualified_name = f"mpistrat.{path}"
    module_name, _, name = qualified_name.rpartition(".")
    refuse = refusing(qualified_name, f"{qualified_name} is refused: {row.why}. {row.instead}")
    refuse.__module__ = module_name
    if row.function:
        return refuse
    facts = {"__module__": module_name, "__doc__": refuse.__doc__, "__new__": refuse}
    return type(name, (), {**facts, **dict.fromkeys(row.static, staticmethod(refuse))})


def refused_in(where: str) -> dict[str, Any]:
    """Return what stands for the refused names of a module, by name.

    Args:
      where: The module, by its path below mpistrat, such as ``coordinator``.
    """
    parts = {path: path.rpartition(".") for path in REFUSED}
    return {name: refused(path) for path, (home, _, name) in parts.items() if home == where}


def absent(module_name: str, name: str) -> AttributeError:
    """Return the error that says what to use instead of a name.

    Args:
      module_name: The module that was asked, such as ``tf.train`` or ``mpistrat.coordinator``.
      name: The name that it does not have.

    Example:
      >>> print(absent("tf", "TensorShape"))
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


def absent_from(where: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module; its error is that of `absent`.

    Args:
      where: What the module stands for, such as ``tf.data``.

    Raises:
      AttributeError: What is returned is called, as Python does for a name that is not there.
    """

    def __getattr__(name: str) -> Any:
        raise absent(where, name)

    return __getattr__


class Advised(type):
    """A metaclass: what neither the class nor its instances have says what to use instead.

    The class has a text ``_where``: what it is called there.
    """

    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any], **more: Any) -> Any:
        """Make the class, whose instances say the same."""
        advised_class: Any = super().__new__(cls, name, bases, body, **more)
        advised_class.__getattr__ = lambda self, name: cls.__getattr__(advised_class, name)
        return advised_class

    def __getattr__(cls, name: str) -> Any:
        """Raise an AttributeError that says what to use instead of `name`."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise absent(cls._where, name)


class Names(SimpleNamespace):
    """Some names of a module of TensorFlow; other names raise an error with a replacement.

    Args:
      where: What the module is called there.
      names: The names that there are.

    Example:
      >>> Names("tf.train", step=1).step
      1
    """

    def __init__(self, where: str, /, **names: Any):
        """Create the namespace."""
        super().__init__(**names)
        vars(self)["_where"] = where

    def __getattr__(self, name: str) -> Any:
        """Raise an AttributeError that says what to use instead of `name`."""
        raise absent(vars(self).get("_where", "tf"), name)


ParameterServerStrategy = refused("ParameterServerStrategy")
Server = refused("Server")

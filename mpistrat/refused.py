"""Names of tf.distribute that have no meaning where every rank runs the same program.

They exist, so that importing them and asking ``isinstance`` work; using one raises `RefusedError`,
which says why and what to use. A further name is one row of `REFUSED`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from mpistrat.errors import RefusedError

__all__ = ["REFUSED", "Refusal", "missing_from", "refused"]


class Refusal(NamedTuple):
    """Why there is no such thing, and what there is.

    Attributes:
      why: The reason, as half a sentence.
      instead: What to use, as sentences.
      function: It is a function, not a class.
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
_COORDINATOR = (
    "Let every rank call strategy.run. Tasks that do not depend on one another suit "
    "mpi4py.futures.MPIPoolExecutor."
)
_PER_WORKER = (
    "A value of each replica is a PerReplica; "
    "strategy.experimental_distribute_values_from_function makes one."
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
    "coordinator.ClusterCoordinator": Refusal(_WAITS, _COORDINATOR),
    "coordinator.PerWorkerValue": Refusal(_WAITS, _PER_WORKER),
    "coordinator.RemoteValue": Refusal(_WAITS, "strategy.run returns the values themselves."),
    "coordinator.experimental_get_current_worker_index": Refusal(
        _WAITS, "Use get_replica_context().replica_id_in_sync_group.", function=True
    ),
    "experimental.coordinator.PerWorkerValues": Refusal(_WAITS, _PER_WORKER),
    "experimental.rpc.Server": Refusal(
        _LAUNCHED, "Use mpi4py's messages, or a library of remote calls.", static=("create",)
    ),
    "experimental.rpc.Client": Refusal(
        _LAUNCHED, "Use mpi4py's messages, or a library of remote calls.", static=("create",)
    ),
}


@functools.cache
def refused(path: str) -> Any:
    """Return what stands for a name: a class or function that raises when it is used.

    Args:
      path: A key of `REFUSED`.

    Raises:
      KeyError: It is none.

    Example:
      >>> try:
      ...     refused("Server").create_local_server()
      ... except RefusedError as error:
      ...     print(str(error)[:26])
      mpistrat.Server is refused
    """
    row = REFUSED[path]
    where, _, name = f"mpistrat.{path}".rpartition(".")

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise RefusedError(f"{where}.{name} is refused: {row.why}. {row.instead}")

    told = f"Refuse: {row.why}.\n\n{row.instead}\n\nRaises:\n  RefusedError: It is used.\n"
    refuse.__doc__ = told
    facts: dict[str, Any] = {
        "__module__": where,
        "__doc__": told,
        "__qualname__": name,
    }
    if not row.function:
        methods = {method: staticmethod(refuse) for method in row.static}
        return type(name, (), {**facts, **methods, "__new__": refuse})
    for fact, value in {**facts, "__name__": name}.items():
        setattr(refuse, fact, value)
    return refuse


def missing_from(where: str) -> Callable[[str], NoReturn]:
    """Return the ``__getattr__`` of a module that tf.distribute has too: it says where to look.

    Args:
      where: The dotted name of the module.

    Raises:
      AttributeError: What is returned is called, as Python does for a name that is not there.

    Example:
      >>> try:
      ...     missing_from("mpistrat.coordinator")("Clock")
      ... except AttributeError as error:
      ...     print(str(error).partition("`")[0])
      mpistrat.coordinator has no Clock.
    """

    def __getattr__(name: str) -> NoReturn:
        if name.startswith("__"):  # Python itself looks for these
            raise AttributeError(f"module {where!r} has no attribute {name!r}")
        raise AttributeError(
            f"{where} has no {name}. docs/parity.md lists every name of tf.distribute."
        )

    return __getattr__


def __getattr__(name: str) -> Any:
    """Return what stands for a name of the package itself."""
    if name in REFUSED:
        return refused(name)
    raise AttributeError(f"module 'mpistrat.refused' has no attribute {name!r}")

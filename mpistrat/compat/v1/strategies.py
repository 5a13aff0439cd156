"""Strategies with the signatures of ``tf.compat.v1``; they do what the newer ones do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, final

from mpistrat import experimental
from mpistrat.data.dataset import Dataset
from mpistrat.kernels.ops import ReduceOp
from mpistrat.strategy import strategies, strategy, topology

__all__ = ["CentralStorageStrategy", "MirroredStrategy", "MultiWorkerMirroredStrategy"]
__all__ += ["OneDeviceStrategy", "Strategy", "TPUStrategy", "get_loss_reduction"]


class _NewerMethod:
    """A method of the newer strategies that the older ones do not have."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> NoReturn:
        raise AttributeError(
            f"{owner.__name__} of tf.compat.v1 has no {self._name}; the strategies of mpistrat "
            "itself do."
        )


class Strategy(strategy.Strategy):
    """A strategy whose methods have the older signatures.

    `reduce` needs no axis, `experimental_run_v2` is another name of `run`, and there are neither
    ``gather`` nor ``experimental_distribute_values_from_function``. In all else it is the strategy
    that it is made of, over the same ranks; both may be used, as two strategies.

    Args:
      newer: That strategy.

    Raises:
      TypeError: `newer` is not a strategy.

    Like: ``tf.compat.v1.distribute.Strategy``.

    Example:
      >>> import mpistrat as ms
      >>> older = Strategy(ms.OneDeviceStrategy("cpu"))
      >>> older.reduce("SUM", older.experimental_run_v2(lambda x: x + 1, args=(2,)))
      3
    """

    gather: Any = _NewerMethod()
    experimental_distribute_values_from_function: Any = _NewerMethod()

    def __init__(self, newer: strategy.Strategy):
        """Create a strategy over the same ranks as `newer`."""
        if not isinstance(newer, strategy.Strategy):
            raise TypeError(
                f"Strategy() of tf.compat.v1 needs a strategy, not {newer!r:.60}. Make a "
                "MirroredStrategy(), or one of the others."
            )
        vars(self).update(vars(newer))

    def __dir__(self) -> list[str]:
        """Return the names of attributes, without those that only the newer strategies have."""
        newer = {name for name, value in vars(Strategy).items() if isinstance(value, _NewerMethod)}
        return [name for name in super().__dir__() if name not in newer]

    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        """Reduce the values of the replicas, elementwise without an axis; as `Strategy.reduce`."""
        return super().reduce(reduce_op, value, axis)

    def experimental_run_v2(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `fn` on every replica; an older name of `run`. Collective."""
        return self.run(fn, args, kwargs)

    def experimental_make_numpy_dataset(self, numpy_input: Any, session: Any = None) -> Dataset:
        """Return an unbatched dataset of the rows of a tree of arrays; a list is stacked.

        Args:
          numpy_input: The tree.
          session: Ignored.

        Raises:
          ContextError: Called in replica code.
        """
        return super().experimental_make_numpy_dataset(numpy_input)


def _wrap_constructor(newer: type[strategy.Strategy]) -> Callable[..., None]:
    """Return the constructor of `newer`, for a strategy that does what `newer` does."""

    @functools.wraps(newer.__init__)
    def __init__(self: Strategy, *args: Any, **kwargs: Any) -> None:
        Strategy.__init__(self, newer(*args, **kwargs))

    return __init__


@final
class MirroredStrategy(Strategy):
    """As `mpistrat.MirroredStrategy`, with the older methods.

    Args:
      devices: As there.
      cross_device_ops: As there.
      comm: As there.

    Raises:
      TypeError: `cross_device_ops` is not a `CrossDeviceOps`, or `devices` is not a list of labels.
      ValueError: A label appears twice.

    Like: ``tf.compat.v1.distribute.MirroredStrategy``.

    Example:
      >>> strategy = MirroredStrategy()
      >>> float(strategy.reduce("MEAN", strategy.run(lambda: 2.5)))
      2.5
    """

    __init__ = _wrap_constructor(strategies.MirroredStrategy)


@final
class OneDeviceStrategy(Strategy):
    """As `mpistrat.OneDeviceStrategy`, with the older methods.

    Args:
      device: As there.

    Like: ``tf.compat.v1.distribute.OneDeviceStrategy``.
    """

    __init__ = _wrap_constructor(strategies.OneDeviceStrategy)


@final
class MultiWorkerMirroredStrategy(Strategy):
    """As `mpistrat.experimental.MultiWorkerMirroredStrategy`, with the older methods.

    Args:
      communication: As there.
      cluster_resolver: As there.
      comm: As there.

    Raises:
      ValueError: `communication` or `cluster_resolver` cannot be used; see there.

    Like: ``tf.compat.v1.distribute.experimental.MultiWorkerMirroredStrategy``.
    """

    __init__ = _wrap_constructor(experimental.MultiWorkerMirroredStrategy)


@final
class CentralStorageStrategy(Strategy):
    """As `mpistrat.experimental.CentralStorageStrategy`, with the older methods.

    Args:
      compute_devices: As there.
      parameter_device: As there.
      comm: As there.

    Raises:
      TypeError: `compute_devices` is not a list of labels.
      ValueError: A label appears twice.

    Like: ``tf.compat.v1.distribute.experimental.CentralStorageStrategy``.
    """

    __init__ = _wrap_constructor(strategies.CentralStorageStrategy)


@final
class TPUStrategy(Strategy, topology.PlacedStrategy):
    """As `mpistrat.TPUStrategy`, with the older methods and several steps per call.

    Args:
      tpu_cluster_resolver: As there.
      steps_per_run: How many steps ``extended.experimental_run_steps_on_iterator`` makes; None
        for one.
      device_assignment: As there, or None for rank order.
      comm: As there.

    Raises:
      TypeError: `tpu_cluster_resolver`, `device_assignment` or `steps_per_run` has another type.
      ValueError: The assignment is for another number of ranks, or `steps_per_run` is less than 1.

    Like: ``tf.compat.v1.distribute.experimental.TPUStrategy``.

    Example:
      >>> TPUStrategy(steps_per_run=4).steps_per_run
      4
    """

    __init__ = _wrap_constructor(topology.PlacedStrategy)


def get_loss_reduction() -> ReduceOp:
    """Return how losses of replicas are added up: SUM, always.

    Example:
      >>> get_loss_reduction().name
      'SUM'
    """
    return ReduceOp.SUM

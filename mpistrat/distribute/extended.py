"""The finer calls of a strategy, for those who write optimizers and layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np

from mpistrat import nest
from mpistrat.arrays import as_array, is_scalar, spec_text
from mpistrat.comm.codec import decode, encode
from mpistrat.distribute import writes
from mpistrat.distribute.default import default_strategy
from mpistrat.distribute.mode import Mode, cross_replica, current, entered
from mpistrat.distribute.reductions import reduce_over_replicas
from mpistrat.distribute.regroup import select
from mpistrat.distribute.values import DistributedValues, Mirrored, PerReplica
from mpistrat.distribute.variables import Variable
from mpistrat.errors import ContextError, StrategyError, StructureError

if TYPE_CHECKING:
    from mpistrat.distribute.strategy import Strategy

__all__ = ["StrategyExtended"]


@final
@dataclass(frozen=True)
class StrategyExtended:
    """The finer calls of one strategy; get it as ``strategy.extended``.

    As: ``tf.distribute.StrategyExtended``.

    Attributes:
      strategy: The strategy whose calls these are.
    """

    strategy: Strategy

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The label of every replica's device, such as ``"rank:0"``.

        Raises:
          ContextError: This is the default strategy, which has none.
        """
        if self.strategy is default_strategy():
            raise ContextError("the default strategy has no worker_devices; make a strategy.")
        return self.strategy.device_labels

    @property
    def should_checkpoint(self) -> bool:
        """Whether this rank is the one to write files: rank 0."""
        return self.strategy.parts.lockstep.comm.rank == 0

    @property
    def should_save_summary(self) -> bool:
        """Whether this rank is the one to report: rank 0."""
        return self.should_checkpoint

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `fn` on every replica; an older spelling of `Strategy.run`. Collective."""
        return self.strategy.run(fn, args, kwargs)

    def _cross(self, name: str, instead: str) -> Any:
        return cross_replica(self.strategy, f"StrategyExtended.{name}()", instead)

    def reduce_to(self, reduce_op: Any, value: Any, destinations: Any) -> Any:
        """Fold the values of all replicas.

        Collective: all ranks call it, in cross-replica code.

        Args:
          reduce_op: ``"SUM"``, ``"MEAN"``, ``"MIN"``, ``"MAX"`` or ``"PROD"``.
          value: Tree of `PerReplica`.
          destinations: A variable or distributed value, or the label of a device. The result is on
            every rank in any case.

        Returns:
          The same tree: `Mirrored` leaves where all replicas are seen (`MirroredStrategy`) and
          `destinations` is no label; plain arrays elsewhere.

        Raises:
          ContextError: Called in replica code.
          StructureError: A leaf is not a value per replica, or there are no destinations.

        Cost: as `ReplicaContext.all_reduce`.
        """
        with self._cross("reduce_to", "get_replica_context().all_reduce(...)"):
            parts = self.strategy.parts
            with parts.lockstep.preparing("reduce_to"):
                _check_destinations(destinations)
            mirrors = parts.view.mirrors and not isinstance(destinations, str)
            to = _place(destinations)
            return reduce_over_replicas(parts, "reduce_to", reduce_op, value, mirrors, to)

    def batch_reduce_to(
        self, reduce_op: Any, value_destination_pairs: Sequence[tuple[Any, Any]]
    ) -> list[Any]:
        """Fold several values at once; see `reduce_to`.

        Collective. Cost: that of one `reduce_to` of all values together.

        Args:
          reduce_op: As in `reduce_to`.
          value_destination_pairs: Tuples of value and destinations.

        Returns:
          A list with one result per pair.

        Raises:
          StructureError: A pair is no tuple of two.
        """
        with self._cross("batch_reduce_to", "get_replica_context().all_reduce(...)"):
            parts = self.strategy.parts
            with parts.lockstep.preparing("batch_reduce_to"):
                pairs = list(value_destination_pairs)
                if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
                    raise StructureError(
                        "batch_reduce_to: wanted a list of tuples (value, destinations), got "
                        f"{value_destination_pairs!r:.80}."
                    )
                for _, destinations in pairs:
                    _check_destinations(destinations)
            values = [value for value, _ in pairs]
            mirrors = parts.view.mirrors
            to = "".join(_place(destinations) for _, destinations in pairs)
            name = "batch_reduce_to"
            reduced = reduce_over_replicas(parts, name, reduce_op, values, mirrors, to)
            return [
                select(one) if isinstance(destinations, str) else one
                for one, (_, destinations) in zip(reduced, pairs, strict=True)
            ]

    def _mirrored(self, tree: Any, destinations: Any) -> Any:
        if not self.strategy.parts.view.mirrors or isinstance(destinations, str):
            return tree
        size = self.strategy.num_replicas_in_sync
        return nest.map(lambda leaf: Mirrored(leaf, size) if _is_data(leaf) else leaf, tree)

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Give replica 0's value to every replica.

        Collective under `MirroredStrategy`; elsewhere the value is returned as it is.

        Args:
          tensor: Array or number; equal shape and dtype on all ranks.
          destinations: As in `reduce_to`.

        Returns:
          `Mirrored`, or a plain array if `destinations` is a label; a Python number stays one.

        Raises:
          ContextError: Called in replica code.
        """
        with self._cross("broadcast_to", "get_replica_context().merge_call(...)"):
            parts = self.strategy.parts
            with parts.lockstep.preparing("broadcast_to"):
                _check_destinations(destinations)
                array = np.array(as_array(select(tensor)), order="C")
            if not parts.view.mirrors:
                return tensor
            if isinstance(tensor, int | float):
                kind, data = encode(tensor, whole=True)
                call = f"broadcast_to({type(tensor).__name__})"
                return decode(kind, parts.lockstep.share(call, data)[0])
            parts.lockstep.prove(f"broadcast_to({spec_text(array)}){_place(destinations)}")
            parts.lockstep.comm.bcast(array, 0)
            return self._mirrored(array, destinations)

    def update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call ``fn(var, *args, **kwargs)`` on every rank, where it may write its copy of `var`.

        Collective: all ranks call it, with the same arguments; from replica code too.

        Args:
          var: A variable of this strategy.
          fn: The function; what it writes to `var` is written to this rank's copy.
          args: Further arguments. `Mirrored` ones arrive as their value; plain arrays and numbers
            must have the same contents on all ranks.
          kwargs: The same by name.
          group: Return one tree; otherwise a tuple with the result of every replica that is seen.

        Returns:
          What `fn` returned: arrays as `Mirrored` under `MirroredStrategy`.

        Raises:
          ValueError: An argument is a value per replica: the copies would drift apart.
          StrategyError: `var` is no variable of this strategy.
          LockstepError: An argument differs between ranks.

        Cost: one proof, with a hash of the variable, and a copy of it until then.
        """
        mode = current()
        if mode is not None and mode.replica is not None:
            # Not through merge_call, which would make values per replica of the arguments: they
            # are proved to be the same on all replicas, as in cross-replica code.
            with entered(Mode(self.strategy)):
                return select(self.update(var, fn, args, kwargs, group))
        with self._cross("update", "get_replica_context().merge_call(...)"):
            lockstep = self.strategy.parts.lockstep
            given = (tuple(args), dict(kwargs or {}))
            with lockstep.preparing("update"):
                self._check_update(var, given)
                undo = var.restorer()
            failure, result, call = None, None, f"update({var.spec()})"
            try:
                mine, named = select(given)
                with entered(Mode(self.strategy, updating=var)):
                    result = fn(var, *mine, **named)
                call += f" of {nest.describe(nest.flatten((given, result))[1])}"
                contents = _contents(var, (given, result))
            except Exception as error:
                failure, contents = error, b""
            try:
                advice = "fn must write, and return, the same on every rank."
                # Undone by the proof if that fails, before what was written earlier in the run.
                lockstep.session.unproved.append((f"{call} itself", undo))
                writes.prove_same(lockstep, call, contents, advice, failure)
            except Exception:
                lockstep.session.unproved.clear()
                undo()
                raise
            return self._mirrored(result, None) if group else self._ungrouped(result)

    def _check_update(self, var: Any, given: Any) -> None:
        if not isinstance(var, Variable) or var.strategy is not self.strategy:
            raise StrategyError(
                f"update: wanted a variable created in the scope of {self.strategy!r}, got "
                f"{var!r:.80}."
            )
        if not var.on_read and any(isinstance(leaf, PerReplica) for leaf in nest.flatten(given)[0]):
            raise StructureError(
                f"update of {var.name!r}: an argument is a value per replica, which would make "
                "the copies differ. Reduce it first: extended.reduce_to(op, value, variable)."
            )

    def _ungrouped(self, result: Any) -> tuple[Any, ...]:
        seen = self.strategy.num_replicas_in_sync if self.strategy.parts.view.mirrors else 1
        return (result,) * seen


def _is_data(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) or is_scalar(leaf)


def _contents(var: Variable, given_and_result: Any) -> bytes:
    """Return digests of what has to be alike on all ranks after an update of `var`."""
    digests = [] if var.on_read else [writes.digest(var.component())]
    for leaf in nest.flatten(given_and_result)[0]:
        unproved = isinstance(leaf, Mirrored) and not leaf.proved
        if (_is_data(leaf) or unproved) and not var.on_read:
            digests.append(writes.digest(as_array(leaf)))
    return b"".join(digests)


def _place(destinations: Any) -> str:
    if isinstance(destinations, Variable):
        return f" to {destinations.spec()}"
    return f" to {destinations!r}" if isinstance(destinations, str) else " to a value"


def _check_destinations(destinations: Any) -> None:
    if isinstance(destinations, DistributedValues | Variable):
        return
    if not isinstance(destinations, str) or not destinations:
        raise StructureError(
            "destinations must be a variable, a distributed value or the label of a device, not "
            f"{destinations!r}."
        )

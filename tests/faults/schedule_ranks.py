"""One rank of a random program: makes the calls, and the faults."""

from __future__ import annotations

import contextvars
import functools
import threading
from typing import Any

import numpy as np
from schedule_programs import (
    ON_READ,
    ON_WRITE,
    Op,
    Program,
    Step,
    batches,
    leaves,
    start,
    value,
)

import mpistrat as ms

_OTHER = {"SUM": "MAX", "assign": "assign_add", "assign_add": "assign", "assign_sub": "assign"}


class Injected(ValueError):
    """A fault on purpose."""


class Record:
    """What one rank has seen.

    Attributes:
      seen: Numbers of calls, and the leaves that they gave.
      error: The exception that ended the program here, if one did.
      at: The step in which this rank was last.
      bits: The copies of the ON_WRITE variables afterwards.
      later: What the program without a fault that followed gave, by number of the call.
      probe: What a call gave after other ranks had left.
    """

    def __init__(self) -> None:
        """Have seen nothing."""
        self.seen: list[tuple[int, list[np.ndarray]]] = []
        self.error: BaseException | None = None
        self.at = -1
        self.bits: dict[str, bytes] = {}
        self.later: list[tuple[int, list[np.ndarray]]] = []
        self.probe: BaseException | None = None


def play(comm: Any, program: Program, records: dict[int, Record]) -> Any:
    """Play a program on this rank, and what follows a fault; return the world."""
    record = records[comm.rank] = Record()
    player = Player(comm, program, record)
    try:
        for record.at, step in enumerate(program.steps):
            if not player.step(step):
                return comm.world
        record.at = len(program.steps)
        player.fence()
    except Exception as error:
        record.error = error
        if comm.rank in program.leavers:
            raise
    finally:
        record.bits = {v: player.variables[v]._component().tobytes() for v in ON_WRITE}
    if program.leavers:
        try:
            player.fence()
        except Exception as error:
            record.probe = error
    elif record.error is not None:
        player.reset()
        for step in program.after:
            player.step(step)
    return comm.world


def _variables(strategy: Any) -> dict[str, Any]:
    kinds, ways = ms.VariableSynchronization, ms.VariableAggregation
    found = {}
    for name in ON_WRITE + ON_READ:
        way = name.removeprefix("read_").upper()
        with strategy.scope():
            found[name] = ms.Variable(
                start(name),
                name=name,
                synchronization=kinds.ON_READ if name in ON_READ else kinds.ON_WRITE,
                aggregation=ways.ONLY_FIRST_REPLICA if way == "FIRST" else ways[way],
            )
    return found


class Player:
    """Makes the calls of one rank, and keeps what they give in its record."""

    def __init__(self, comm: Any, program: Program, record: Record):
        """Make the strategy and the variables."""
        view = ms.MultiWorkerMirroredStrategy if program.local else ms.MirroredStrategy
        self.rank, self.seen, self.fault = comm.rank, record.seen, program.fault
        self.record = record
        self.strategy = view()
        self.variables = _variables(self.strategy)

    def step(self, step: Step) -> bool:
        """Do a step; tell whether the program continues."""
        if not step.inside:
            return self._op(step.ops[0], self._cross)
        swallows = self.fault is not None and self.rank in self.fault.swallow

        def fn() -> None:
            for op in step.ops:
                try:
                    if not self._op(op, self._inside):
                        break
                except Exception as error:
                    if not swallows or isinstance(error, Injected):
                        raise

        self.strategy.run(fn)
        return True

    def fence(self) -> None:
        """Make a last call, in which the others are found that have another one to make."""
        self.strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", {"fence": 1}))

    def reset(self) -> None:
        """Put all variables back to what they began with, and make no more faults."""
        self.fault, self.seen = None, self.record.later
        for name in ON_WRITE:
            self.variables[name].assign(start(name))
        self.strategy.run(lambda: [self.variables[v].assign(start(v)) for v in ON_READ])

    def _kind(self, op: Op) -> str:
        hit = self.fault is not None and self.fault.key == op.key
        return self.fault.kinds.get(self.rank, "") if hit else ""

    def _op(self, op: Op, do: Any) -> bool:
        kind = self._kind(op)
        if kind == "return":
            return False
        if kind == "raise":
            raise Injected(f"on purpose, at call {op.key}")
        if kind == "exit":
            raise SystemExit(3)
        if kind == "thread":
            self._from_another_thread()
        if kind == "extra":
            self._extra(do == self._inside)
        if kind != "skip":
            self.seen.append((op.key, [leaf.copy() for leaf in leaves(do(op))]))
        return True

    def _from_another_thread(self) -> None:
        errors: list[BaseException] = []

        def body() -> None:
            try:
                ms.get_replica_context().all_reduce("SUM", 1)
            except Exception as error:
                errors.append(error)

        run = contextvars.copy_context().run
        thread = threading.Thread(target=run, args=(body,), name=f"odd {self.rank}")
        thread.start()
        thread.join()
        assert len(errors) == 1 and isinstance(errors[0], ms.StrategyError), errors
        raise Injected("a call from another thread") from errors[0]

    def _extra(self, inside: bool) -> None:
        def fn() -> Any:
            return ms.get_replica_context().all_reduce("SUM", {"extra": 1})

        fn() if inside else self.strategy.run(fn)

    def _given(self, op: Op) -> Any:
        """Return what this rank gives to a call, with its fault."""
        tree, kind = value(op, self.rank), self._kind(op)
        if kind == "other_value":
            return tree + 60
        changes = {
            "bad_leaf": lambda leaf: Injected,
            "other_shape": lambda leaf: np.zeros((2, 7, 1), np.asarray(leaf).dtype),
            "other_dtype": lambda leaf: np.asarray(leaf).astype(np.complex64),
        }
        return _first(tree, changes[kind]) if kind in changes else tree

    def _how(self, op: Op) -> str:
        return _OTHER.get(op.how, "SUM") if self._kind(op) == "other_op" else op.how

    def _inside(self, op: Op) -> Any:
        ctx = ms.get_replica_context()
        if op.kind == "all_reduce":
            return ctx.all_reduce(self._how(op), self._given(op))
        if op.kind == "all_gather":
            return ctx.all_gather(self._given(op), axis=0)
        if op.kind == "merge":
            return ctx.merge_call(functools.partial(self._merge, op), args=(self._given(op),))
        if op.kind == "update":
            return self._update(op)
        variable = self.variables[op.var]
        getattr(variable, self._how(op))(self._given(op))
        return variable.numpy()

    def _cross(self, op: Op) -> Any:
        if op.kind == "reduce":
            per = self.strategy.run(lambda: self._given(op))
            return self.strategy.reduce(self._how(op), per, axis=None)
        if op.kind == "create":
            with self.strategy.scope():
                return ms.Variable(self._given(op), name=f"c{op.key}").numpy()
        if op.kind == "data":
            return self._data(op)
        variable = self.variables[op.var]
        if op.kind == "update":
            return self._update(op)
        if op.kind == "read":
            return variable.numpy()
        getattr(variable, self._how(op))(self._given(op))
        return []

    def _merge(self, op: Op, strategy: Any, tree: Any) -> Any:
        if self._kind(op) == "raise_merge":
            raise Injected("in merge_fn")
        variable = self.variables[op.var]
        (total,) = strategy.extended.reduce_to("SUM", tree, variable).values()
        variable.assign(total)
        return variable.numpy()

    def _update(self, op: Op) -> Any:
        def write(variable: Any, given: Any) -> None:
            getattr(variable, op.how)(given)
            if self._kind(op) == "raise_update":
                raise Injected("in update")

        variable = self.variables[op.var]
        self.strategy.extended.update(variable, write, args=(self._given(op),))
        return variable.numpy()

    def _data(self, op: Op) -> Any:
        rows, size = batches(op)

        def mapped(batch: Any) -> Any:
            if self._kind(op) == "bad_data":
                raise Injected("reading data")
            return batch

        def total(batch: Any) -> Any:
            sums = ms.get_replica_context().all_reduce("SUM", {"x": batch.sum(axis=0)})
            totals.append(sums["x"])

        totals: list[Any] = []
        dataset = ms.Dataset(rows).batch(size).map(mapped)
        for batch in self.strategy.experimental_distribute_dataset(dataset):
            self.strategy.run(total, args=(batch,))
        return totals


def _first(tree: Any, change: Any) -> Any:
    """Return the tree with its first leaf changed."""
    if isinstance(tree, dict):
        return {k: _first(v, change) if i == 0 else v for i, (k, v) in enumerate(tree.items())}
    if isinstance(tree, list):
        return [_first(tree[0], change), *tree[1:]]
    return change(tree)

"""Random programs, and the faults in them: plain data, all of it a function of the seed.

All values are multiples of 60 and small, so sums, means over up to five ranks and divisions are
exact, and results can be compared bit by bit.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

ON_WRITE = ("none", "sum", "mean", "first")
ON_READ = ("read_sum", "read_mean", "read_first")
SHAPES = {name: (3,) for name in ON_WRITE + ON_READ} | {"sum": (40,)}
DTYPES = {"mean": np.float64, "read_mean": np.float64}
HOWS = ("SUM", "MEAN", "MIN", "MAX", "PROD")
WRITES = ("assign", "assign_add", "assign_sub")
INSIDE = ("all_reduce", "all_reduce", "all_gather", "merge", "write", "write", "update", "own")
CROSS = ("reduce", "update", "assign", "assign", "read", "data", "create")

# Faults that a rank knows of itself; of all others the handshake tells.
FAILING = frozenset({"raise", "raise_merge", "raise_update", "bad_leaf", "exit", "thread"})
FAILING |= {"bad_data"}
_SHAPED = ("bad_leaf", "other_shape", "other_dtype", "extra")
# A write, a read or a dataset left out just before its like would show later, at the one that is
# then missing; `return` leaves those out.
FAULTS: dict[str, tuple[str, ...]] = {
    "all_reduce": (*_SHAPED, "other_op", "skip"),
    "all_gather": (*_SHAPED, "skip"),
    "merge": (*_SHAPED, "raise_merge", "skip"),
    "write": (*_SHAPED, "other_op"),
    "update": ("bad_leaf", "other_shape", "other_value", "raise_update", "skip", "extra"),
    "own": ("extra",),
    "reduce": (*_SHAPED, "other_op", "skip"),
    "assign": (*_SHAPED, "other_op", "other_value", "skip"),
    "read": ("extra",),
    "data": ("bad_data", "extra"),
    "create": (*_SHAPED, "skip"),
}


class Op(NamedTuple):
    """One call: its number in the program, what it is, and on what."""

    key: int
    kind: str
    var: str = ""
    how: str = ""
    form: str = ""


class Step(NamedTuple):
    """Calls in one function of ``Strategy.run``, or one call in cross-replica code."""

    inside: bool
    ops: tuple[Op, ...]


class Fault(NamedTuple):
    """What goes wrong at the call `key`: a kind for each rank; some ranks swallow exceptions."""

    key: int
    inside: bool
    kinds: dict[int, str]
    swallow: frozenset[int]

    @property
    def leavers(self) -> frozenset[int]:
        """The ranks that leave the program."""
        ways = {"exit"} if self.inside else {"exit", "raise", "return"}
        return frozenset(rank for rank, kind in self.kinds.items() if kind in ways)


class Program(NamedTuple):
    """What all ranks run, and `after` a fault; `local`: by the strategy that sees one replica."""

    size: int
    local: bool
    steps: tuple[Step, ...]
    after: tuple[Step, ...]
    fault: Fault | None = None

    def ops(self) -> Iterator[tuple[Step, Op]]:
        """Yield every call with its step."""
        for step in self.steps:
            for op in step.ops:
                yield step, op

    @property
    def leavers(self) -> frozenset[int]:
        """The ranks that leave before the end."""
        return frozenset() if self.fault is None else self.fault.leavers


def is_local(step: Step, op: Op) -> bool:
    """Tell whether the call has no handshake of its own."""
    return op.kind == "own" or (step.inside and op.kind == "write" and op.var == "none")


def draw(seed: int) -> Program:
    """Return the program of a seed; four in five have a fault."""
    rng = random.Random(seed)
    size, local = rng.choice((1, 2, 2, 3, 3, 3, 4, 5)), rng.random() < 0.25
    count = min(20, 3 + int(rng.expovariate(0.35)))
    program = Program(size, local, _steps(rng, count, 0), _steps(rng, 2, 1000))
    return program._replace(fault=_fault(rng, program)) if rng.random() < 0.8 else program


def _steps(rng: random.Random, count: int, key: int) -> tuple[Step, ...]:
    steps = []
    for _ in range(count):
        inside = rng.random() < 0.6
        number = rng.randint(1, 4) if inside else 1
        steps.append(Step(inside, tuple(_op(rng, key + i, inside) for i in range(number))))
        key += number
    return tuple(steps)


def _op(rng: random.Random, key: int, inside: bool) -> Op:
    kind = rng.choice(INSIDE if inside else CROSS)
    how, var = rng.choice(HOWS), ""
    form = rng.choices(("scalar", "floats", "mixed", "large"), (4, 4, 4, 1))[0]
    if kind in ("write", "update"):
        var, how = rng.choice(ON_WRITE), rng.choice(WRITES)
    elif kind == "own":
        var, how = rng.choice(ON_READ), rng.choice(WRITES[:2])
    elif kind == "merge":
        var, how = rng.choice(("sum", "mean")), "assign"
    elif kind == "assign":
        var, how = rng.choice(ON_WRITE + ON_READ), "assign"
    elif kind == "read":
        var = rng.choice(ON_READ)
    return Op(key, kind, var, how, form)


def _fault(rng: random.Random, program: Program) -> Fault:
    step, op = rng.choice(list(program.ops()))
    size = program.size
    ranks = sorted(rng.sample(range(size), rng.randint(1, size) if rng.random() < 0.3 else 1))
    kinds = _kinds(step, op)
    if len(ranks) == size:  # a call that all ranks change alike is not a fault
        kinds = [kind for kind in kinds if kind in FAILING]
    one, several = rng.choice(kinds), rng.random() < 0.5
    chosen = {rank: rng.choice(kinds) if several else one for rank in ranks}
    swallow = frozenset(rank for rank in range(size) if step.inside and rng.random() < 0.25)
    return Fault(op.key, step.inside, chosen, swallow)


def _kinds(step: Step, op: Op) -> list[str]:
    kinds = {*FAULTS[op.kind], "raise", "exit", "return"}
    if step.inside:
        kinds.add("thread")
        if all(later.kind == "own" for later in step.ops if later.key >= op.key):
            kinds.discard("return")  # each replica may write its own copy as often as it likes
        if op.kind == "write" and op.var == "none":
            kinds.add("other_value")
    return sorted(kinds)


def value(op: Op, rank: int) -> Any:
    """Return what a rank gives to a call: a tree, or an array for a variable."""
    if op.kind in ("write", "own"):
        alike = op.var == "none"
        number = op.key + 1 if alike else (op.key * 7 + rank * 5) % 11 - 3
        return (60 * (number + np.arange(np.prod(SHAPES[op.var])))).reshape(SHAPES[op.var])
    if op.kind in ("update", "assign"):
        return np.full(SHAPES[op.var], 60 * (op.key + 1))
    if op.kind == "create":
        return np.full(40 if op.form == "floats" else 2, 60.0 * (op.key + rank))
    if op.kind == "merge":
        number, dtype = 60 * (op.key % 5 + rank), DTYPES.get(op.var, np.int64)
        return {f"s{op.key}": np.full(SHAPES[op.var], number, dtype)}
    if op.kind == "all_gather":
        rows = (op.key + rank) % 3 * (20 if op.form == "large" else 1)
        return {f"s{op.key}": 60.0 * (np.arange(rows * 2).reshape(rows, 2) % 7 + rank)}
    return {f"s{op.key}": _tree(op, rank)}


def _tree(op: Op, rank: int) -> Any:
    def number(leaf: int) -> int:
        least = (op.key * 7 + rank * 5 + leaf * 3) % 11
        return least % 3 + 1 if op.how == "PROD" else 60 * (least - 3)

    if op.form == "scalar":
        return number(0)
    if op.form == "floats":
        return np.array([number(i) for i in range(40)], np.float64)
    if op.form == "large":
        return np.resize(np.array([number(i) for i in range(7)], np.float32), (17000,))
    return {
        "a": np.array([number(0), number(1)], np.int32),
        "b": [np.full((2, 2), number(2), np.float32), np.int16(number(3))],
    }


def batches(op: Op) -> tuple[np.ndarray, int]:
    """Return the rows of the dataset of a call, and the size of its global batches."""
    rows = op.key % 6 + 1
    return 60.0 * np.arange(rows * 2).reshape(rows, 2), op.key % 4 + 1


def start(name: str) -> np.ndarray:
    """Return the value that a variable begins with."""
    return np.full(SHAPES[name], 60 * len(name), DTYPES.get(name, np.int64))


def leaves(tree: Any) -> list[np.ndarray]:
    """Return the leaves of a tree as arrays."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        return [leaf for one in tree for leaf in leaves(one)]
    return [np.asarray(tree)]

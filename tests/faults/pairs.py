"""Pairs of calls that differ in exactly one field: is every one found, on every rank?

``mpiexec -n N python tests/faults/pairs.py --pairs 20000 --good 100000 --seed 0``

All ranks draw the same calls from the seed. In a pair one rank, drawn too, makes the same call with
one field changed. Found means: every rank raises `LockstepError`, what it was about to give is
untouched, and the next calls work. Between the pairs come good calls, none of which may raise.
The table is printed by rank 0; the exit code is 1 if a pair was missed or a good call refused.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

import mpistrat as ms
from mpistrat import pytree

SYNC, AGG = ms.VariableSynchronization, ms.VariableAggregation
OPS = ("SUM", "MEAN", "MIN", "MAX", "PROD")
DTYPES = ("f4", "f8", "i4", "i8", "u4", "f2")
TREES = ("all_reduce", "all_gather", "merge_call", "reduce", "reduce axis", "gather", "reduce_to")
WRITES = ("assign", "assign_add", "assign_sub")
OWNED: dict[str, Any] = {"synchronization": SYNC.ON_READ, "aggregation": AGG.SUM}
GATHERS = ("all_gather", "gather")
# Which calls have which field. A name changes within its family, so that nothing else changes.
FIELDS: dict[str, tuple[str, ...]] = {
    "sequence number": (*TREES, *WRITES, "update", "broadcast_to", "local_results"),
    "API name": ("all_reduce", "all_gather", "merge_call", "reduce_to", "batch", *WRITES),
    "reduce op": ("all_reduce", "reduce", "reduce axis", "reduce_to", "batch"),
    "destination": ("reduce_to", "batch", "broadcast_to"),
    "axis": ("all_gather", "gather", "reduce axis"),
    "tree structure": TREES,
    "leaf key": TREES,
    "shape": (*(api for api in TREES if api != "merge_call"), "broadcast_to", "create"),
    "dtype": (*(api for api in TREES if api != "merge_call"), "broadcast_to", "create"),
    "variable identity": (*WRITES, "update", "local_results", "merge_call", "read", "gather owned"),
    "weight": ("all_reduce",),
    "options": ("create",),
}
GOOD = (*FIELDS["sequence number"], "batch")
FAMILIES = (("all_reduce", "all_gather", "merge_call"), ("reduce_to", "batch"), WRITES)
KINDS: list[dict[str, Any]] = [
    {"synchronization": sync, "aggregation": aggregation, "trainable": trainable}
    for sync in (SYNC.ON_WRITE, SYNC.ON_READ)
    for aggregation in (AGG.NONE, AGG.SUM)
    for trainable in (True, False)
]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An array to be made: its shape and dtype."""

    shape: tuple[int, ...]
    dtype: str

    def made(self, rank: int) -> Any:
        return np.full(self.shape, rank + 1, self.dtype)


@dataclasses.dataclass(frozen=True)
class Call:
    """Everything that a call is made of; each API uses what it has."""

    api: str
    op: str
    axis: int
    tree: Any
    variable: int
    to: int
    weight: float | None
    kind: int


class Missed(AssertionError):
    """A pair was not found, or a good call refused."""


def draw(rng: random.Random, api: str, field: str = "") -> Call:
    """Return a random good call."""
    size = rng.choices((2, 3, 12, 120), (6, 6, 3, 1))[0]

    def leaf() -> Leaf:
        return Leaf((size, size), rng.choice(DTYPES))

    shape = "dict" if field == "leaf key" else rng.choice(("leaf", "dict", "list", "deep"))
    if api in ("broadcast_to", "create"):
        shape = "leaf"
    tree: Any = leaf()
    if shape == "dict":
        tree = {key: leaf() for key in rng.sample("abcdef", rng.randint(1, 3))}
    elif shape == "list":
        tree = [leaf() for _ in range(rng.randint(1, 3))]
    elif shape == "deep":
        tree = {"x": [leaf(), (leaf(),)], "y": leaf()}
    op = "MEAN" if field == "weight" else rng.choice(OPS)
    weight = rng.choice((None, 2.0)) if op == "MEAN" and api == "all_reduce" else None
    which, to, kind = rng.randrange(2), rng.randrange(3), rng.randrange(len(KINDS))
    return Call(api, op, rng.randrange(2), tree, which, to, weight, kind)


def other(rng: random.Random, options: Any, than: Any) -> Any:
    """Return one of the options, but not that one."""
    return rng.choice([option for option in options if option != than])


def _restructured(rng: random.Random, tree: Any) -> Any:
    if isinstance(tree, Leaf):
        return rng.choice(([tree], (tree,), {"x": tree}))
    if isinstance(tree, dict):
        return {**tree, "new": Leaf((2, 2), "f4")} if rng.random() < 0.5 else [tree]
    return tuple(tree) if rng.random() < 0.5 else [*tree, tree[0]]


def _renamed(rng: random.Random, tree: Any) -> Any:
    gone = rng.choice(sorted(tree))
    name = rng.choice([key for key in [*"abcdefg", 7, ("a",)] if key not in tree])
    return {name if key == gone else key: leaf for key, leaf in tree.items()}


def _reshaped(rng: random.Random, call: Call, sides: list[int]) -> tuple[int, ...]:
    axis = call.axis if call.api in (*GATHERS, "reduce axis") else None
    if axis is None and rng.random() < 0.3:
        return (sides[0] * sides[1],)  # as many elements
    # Sizes along the axis of a gather may differ between ranks.
    sides[rng.randint(0, 1) if axis is None else 1 - axis] += rng.choice((-1, 1))
    return tuple(sides)


def mutate(rng: random.Random, call: Call, field: str) -> Call:
    """Return `call` with that field changed; a change of the sequence number is made elsewhere."""
    if field in ("shape", "dtype"):
        leaves, structure = pytree.flatten(call.tree)
        at = rng.randrange(len(leaves))
        if field == "shape":
            leaves[at] = Leaf(_reshaped(rng, call, list(leaves[at].shape)), leaves[at].dtype)
        else:
            leaves[at] = Leaf(leaves[at].shape, other(rng, DTYPES, leaves[at].dtype))
        return dataclasses.replace(call, tree=pytree.unflatten(structure, leaves))
    family = next((family for family in FAMILIES if call.api in family), ())
    changes: dict[str, Callable[[], dict[str, Any]]] = {
        "sequence number": lambda: {},
        "API name": lambda: {"api": other(rng, family, call.api)},
        "reduce op": lambda: {"op": other(rng, OPS, call.op), "weight": None},
        "destination": lambda: {"to": other(rng, range(3), call.to)},
        "axis": lambda: {"axis": 1 - call.axis},
        "tree structure": lambda: {"tree": _restructured(rng, call.tree)},
        "leaf key": lambda: {"tree": _renamed(rng, call.tree)},
        "variable identity": lambda: {"variable": 1 - call.variable},
        "weight": lambda: {"weight": 2.0 if call.weight is None else None},
        "options": lambda: {"kind": other(rng, range(len(KINDS)), call.kind)},
    }
    return dataclasses.replace(call, **changes[field]())


class World:
    """A strategy, and twins of variables: alike in all but their number."""

    def __init__(self, comm: Any = None):
        self.strategy = ms.MirroredStrategy(comm=comm)
        self.rank = self.strategy._replicas.lockstep.comm.rank
        with self.strategy.scope():
            self.twins = [ms.Variable(np.ones(3), name="twin") for _ in range(2)]
            self.owned = [ms.Variable(np.ones(3), name="own", **OWNED) for _ in range(2)]
        self.tree: Any = None

    def state(self) -> bytes:
        """Everything that a refused call must leave as it is."""
        held = [v._component() for v in (*self.twins, *self.owned)] + pytree.flatten(self.tree)[0]
        return b"".join(value.tobytes() for value in held)

    def prepare(self, call: Call) -> None:
        self.tree = pytree.map(lambda leaf: leaf.made(self.rank), call.tree)

    def perform(self, call: Call) -> None:
        strategy, tree, ctx = self.strategy, self.tree, ms.get_replica_context
        twin, owned = self.twins[call.variable], self.owned[call.variable]
        to: Any = (*self.twins, "cpu:0")[call.to]
        per = pytree.map(ms.PerReplica, tree)
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: run(lambda: _all_reduce(call, tree)),
            "all_gather": lambda: run(lambda: ctx().all_gather(tree, call.axis)),
            "merge_call": lambda: run(lambda: ctx().merge_call(lambda s, *a: None, (tree, twin))),
            "reduce": lambda: strategy.reduce(call.op, per, None),
            "reduce axis": lambda: strategy.reduce(call.op, per, call.axis),
            "gather": lambda: strategy.gather(per, call.axis),
            "reduce_to": lambda: strategy.extended.reduce_to(call.op, per, to),
            "batch": lambda: strategy.extended.batch_reduce_to(call.op, [(per, to)]),
            "broadcast_to": lambda: strategy.extended.broadcast_to(tree, to),
            "assign": lambda: twin.assign(np.ones(3)),
            "assign_add": lambda: twin.assign_add(np.ones(3)),
            "assign_sub": lambda: twin.assign_sub(np.ones(3)),
            "update": lambda: strategy.extended.update(twin, lambda v: None),
            "local_results": lambda: strategy.experimental_local_results(owned),
            "read": lambda: owned.read_value(),
            "gather owned": lambda: strategy.gather(owned, 0),
            "create": lambda: self._create(call),
        }
        run = strategy.run
        calls[call.api]()

    def _create(self, call: Call) -> None:
        with self.strategy.scope():
            ms.Variable(self.tree, name="made", **KINDS[call.kind])


def _all_reduce(call: Call, tree: Any) -> None:
    # Not returned: what run returns would be one more call.
    ms.get_replica_context().all_reduce(call.op, tree, weight=call.weight)


def pair(world: World, rng: random.Random, field: str) -> str:
    """Play one pair; return what went wrong on this rank, or an empty string."""
    call = draw(rng, rng.choice(FIELDS[field]), field)
    changed, odd = mutate(rng, call, field), rng.randrange(world.strategy.num_replicas_in_sync)
    mine = changed if world.rank == odd else call
    session = world.strategy._replicas.lockstep.session
    world.prepare(mine)
    before = world.state()
    shift = int(field == "sequence number" and world.rank == odd)
    session.calls += shift
    try:
        world.perform(mine)
        wrong = "passed"
    except ms.LockstepError:
        session.calls -= shift
        wrong = "" if world.state() == before else "changed something"
    except Exception as error:
        wrong = f"raised {type(error).__name__}: {error}"
    return wrong and f"{call} against {changed} {wrong}"


def good(world: World, rng: random.Random) -> str:
    """Make one good call; return what went wrong."""
    call = draw(rng, rng.choice(GOOD))
    world.prepare(call)
    try:
        world.perform(call)
    except Exception as error:
        return f"{call} raised {type(error).__name__}: {error}"
    return ""


def play(
    world: World, pairs: int, goods: int, seed: int, fields: Any = tuple(FIELDS)
) -> tuple[Counter[str], int]:
    """Play all; return how many pairs of each field were made, and good calls.

    Raises:
      Missed: At the first pair that was not found and the first good call that was refused: after
        it the ranks may be in different places for good.
    """
    rng, made, done = random.Random(seed), Counter[str](), 0
    for number in range(1, pairs + 1):
        field = rng.choice(fields)
        made[field] += 1
        wrong = pair(world, rng, field)
        if wrong:
            raise Missed(f"missed: pair {number}, {field}, rank {world.rank}: {wrong}")
        while done * pairs < goods * number:
            done += 1
            wrong = good(world, rng)
            if wrong:
                raise Missed(f"false alarm: after pair {number}, rank {world.rank}: {wrong}")
    return made, done


def main() -> None:
    """Play on the ranks of this job, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=20_000)
    parser.add_argument("--good", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    world, start = World(), time.monotonic()
    try:
        made, done = play(world, given.pairs, given.good, given.seed)
    except Missed as error:
        print(error, flush=True)
        sys.exit(1)
    if world.rank == 0:
        print(f"{'field':20} injected detected missed")
        for field in FIELDS:
            print(f"{field:20} {made[field]:8} {made[field]:8} {0:6}")
        size, seconds = world.strategy.num_replicas_in_sync, time.monotonic() - start
        print(f"{size} ranks, {given.pairs} pairs, {done} good calls, 0 false alarms")
        print(f"{seconds:.1f} s")


if __name__ == "__main__":
    main()

"""What an optimizer remembers of variables: counters, and slots as large as they are.

All of it is variables of the strategy of the weights. A slot of a large variable is stored once per
node, as that does, and each rank updates its own part of both; or once for all nodes, with a slice
for each rank (``shard="all"``), while the variable stays whole on each node. `Checkpoint` saves and
restores it like any other, at any number of ranks.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
from numpy.lib.array_utils import byte_bounds

from mpistrat.arrays import Array
from mpistrat.errors import LeafTypeError, StrategyError
from mpistrat.optim.base import Progress
from mpistrat.optim.fused import fuse_small_variables
from mpistrat.optim.passes import BLOCK
from mpistrat.shm.storage import NodeStorage, Slices, slices_of_ranks
from mpistrat.strategy.context_stack import CodeContext
from mpistrat.variables.variable import Variable, create_spread_slot, move_to_memory

if TYPE_CHECKING:
    from mpistrat.optim.base import OptimizerSettings, Rule

__all__ = ["State", "StateTree", "Target", "check_variable"]

_LISTS = 64  # lists of variables that are remembered
_ITERATIONS = "iterations"  # what Keras calls the step


class Target(NamedTuple):
    """A variable, and the part of it and of its slots that this rank updates.

    Attributes:
      variable: The variable.
      optimizer: Its optimizer: with the changes of its groups.
      slots: All its slots, by name.
      shared: Each rank updates a part, and others update the rest; else the part is all of it.
      low: The first element of the part.
      w: The part of the weights; flat, to be written to.
      mine: That of each slot of the rule.
      pending: That of the slot of accumulated gradients, if there is one.
      ema: That of the average, if there is one.
      rule: That of its optimizer.
      like: The dtype and the shape of the variable.
      slices: Which elements each rank of all nodes updates; None if the ranks of a node update all.
      twins: With these, the weights that this rank and its twins update, in the memory of the node.
    """

    variable: Variable
    optimizer: OptimizerSettings
    slots: dict[str, Variable]
    shared: bool
    low: int
    w: Array
    mine: tuple[Array, ...]
    pending: Array | None
    ema: Array | None
    rule: Rule
    like: tuple[np.dtype[Any], tuple[int, ...]]
    slices: Slices | None = None
    twins: Array | None = None


class Listed(NamedTuple):
    """A list of variables that calls give.

    Attributes:
      variables: The variables; while it has them, no other object gets their identity.
      targets: Of each; None where the state was not built for it.
      likes: The dtype and the shape of each.
    """

    variables: list[Variable]
    targets: list[Target | None]
    likes: list[tuple[np.dtype[Any], tuple[int, ...]] | None]


def check_variable(strategy: Any, variable: Any, call: str, expected_text: str) -> None:
    """Raise what makes something unfit to be updated.

    Args:
      strategy: Whose variable it has to be.
      variable: What was given.
      call: The call, for messages.
      expected_text: What the call takes, for messages.
    """
    if not isinstance(variable, Variable):
        raise TypeError(f"{call}: {variable!r:.60} is not a Variable; expected {expected_text}.")
    if variable.strategy is not strategy:
        raise StrategyError(
            f"{call}: {variable._label} belongs to {variable.strategy!r}, and others to another "
            f"strategy, {strategy!r}. Create all of them in one `with strategy.scope()`."
        )
    if variable._is_on_read:
        raise ValueError(
            f"{call}: {variable._label} is ON_READ: each replica has its own. Optimizers update "
            "variables that are the same on all ranks."
        )
    if variable.dtype.char not in "fd":
        raise LeafTypeError(
            f"{call}: {variable._label} is {variable.dtype}; optimizers update float32 and "
            "float64. Create it from floating-point values, such as np.zeros(3)."
        )


class StateTree(dict[str, Any]):
    """The variables of a state by the names that programs know them by.

    Attributes:
      state: The state. Checkpoints name slots by the places of their variables.
    """

    state: State


@final
class State:
    """Counters and slots of one optimizer, for the variables that it was built for.

    Collective: creation is. Cost: that of creating so many variables.

    Args:
      optimizer: The optimizer.
      strategy: The strategy of the variables.
      variables: What it is to update, in an order that is the same on all ranks.

    Attributes:
      counters: Its counters, as variables.
      targets: Its variables, by number.
      listed: The lists of variables that calls have given, by the identities of these.
      fused: Those of them that are updated in one call, alone or several as one.
      bases: The identities of the arrays whose views all views of weights and slots are.
      buffers: Memory that gradients pass through, by the number of the variable.
      accumulates: Several calls make one update.
      text: The optimizer, with the options that are not as by default.

    Raises:
      MemoryError: There is memory to share for the weights, but not for slots; on all ranks.
    """

    def __init__(self, optimizer: OptimizerSettings, strategy: Any, variables: Sequence[Variable]):
        """Create counters and slots."""
        kind, self.strategy = type(optimizer).__name__, strategy
        lockstep = strategy._replicas.lockstep
        with lockstep.preparing(f"{kind}.build"):
            self.names = _names(variables)
            shapes = [variable.shape for variable in variables]
            candidates = optimizer.of_all(list(zip(self.names, shapes, strict=True)))
            # One object for those that are equal, so that who shares one is seen at once.
            optimizers = [candidates[candidates.index(candidate)] for candidate in candidates]
            # Groups may choose by functions, of which the text of the optimizer does not tell all.
            suffixes = [f" by {o.chosen()}" if optimizer.groups else "" for o in optimizers]
            texts = [v._spec() + suffix for v, suffix in zip(variables, suffixes, strict=True)]
        lockstep.handshake(f"{optimizer.chosen()}.build({', '.join(texts)})")
        self.calls: dict[Any, Any] = {}  # what `mpistrat.optim.gradient_validation` knows of calls
        # Of the newest call: its variables, whether it was in replica code, its weight (in replica
        # code whether it had one), and what is known of such calls.
        self.last: tuple[Listed, bool, float | bool | None, Any] | None = None
        self.listed: dict[tuple[int, ...], Listed] = {}
        self.buffers: dict[int, Array] = {}
        self._refused = False
        self.accumulates = optimizer.accumulate > 1
        self.text, self._start = optimizer.chosen(), Progress.start(optimizer)
        self._scales = optimizer.loss_scale is not None
        with CodeContext(strategy):
            self.counters = _counters(kind, self._start)
            self.targets: dict[int, Target] = {}
            for name, variable, settings in zip(self.names, variables, optimizers, strict=True):
                slices = _slices(variable, settings)
                slots = {
                    slot: _slot(f"{name}/{kind}/{slot}", slot, variable, slices)
                    for slot in settings.slots()
                }
                self.targets[variable._number] = _target(variable, settings, slots, slices)
        self.fused = fuse_small_variables(self.targets.values())
        for target in [target for group in self.fused for target in group.targets]:
            self.targets[target.variable._number] = target
        self.bases, self._memory = _memory_of(self.targets.values())
        # Where programs or tests have had even the smallest variables shared.
        self._shares_counters = any(map(_shared, self.counters.values()))
        self._form, self._cells = self._side_by_side()

    def copy_own_views(self, arrays: Sequence[Array]) -> list[Array]:
        """Return arrays, with copies of those that are views of a weight or slot, by address.

        Hundreds of buffers come this way in each step, so it calls no Python for each.
        """
        spans, bisect_spans = self._memory, bisect.bisect_left
        results = []
        for array in arrays:
            is_view = id(array.base) in self.bases
            if not (is_view or array.flags.owndata) and array.size:
                start: int = array.__array_interface__["data"][0]
                stop = start + array.nbytes
                if not array.flags.c_contiguous:
                    start, stop = byte_bounds(array)
                number = bisect_spans(spans, (stop, 0)) - 1
                is_view = number >= 0 and spans[number][1] > start
            results.append(array.copy() if is_view else array)
        return results

    def find(self, variables: Sequence[Variable]) -> Listed:
        """Return what is known of variables that are good."""
        targets = [self.targets.get(variable._number) for variable in variables]
        if len(self.listed) > _LISTS:
            self.listed.clear()
        likes = [None if target is None else target.like for target in targets]
        listed = Listed(list(variables), targets, likes)
        self.listed[tuple(map(id, variables))] = listed
        return listed

    def has_buffers(self, call: str) -> bool:
        """Tell whether there is memory for gradients that the ranks of a node can read.

        Collective the first time, which reserves it.

        Args:
          call: What it is for; equal on all ranks.
        """
        if not self.buffers and not self._refused:
            group, variables = self.strategy._replicas, [t.variable for t in self.targets.values()]
            group.lockstep.handshake(f"{call}, memory for gradients")
            buffers = group.reducer.node.buffers(tuple((v.dtype, v.shape) for v in variables))
            self._refused = buffers is None
            numbers = [variable._number for variable in variables]
            self.buffers = dict(zip(numbers, buffers or (), strict=False))
        return not self._refused

    def buffers_of(self, targets: Sequence[Target]) -> list[Array]:
        """Return the memory for gradients of these."""
        return [self.buffers[target.variable._number] for target in targets]

    def _side_by_side(self) -> tuple[struct.Struct, memoryview]:
        """Return how counters are in memory, one after the other, and that memory."""
        counters = self.counters.values()
        form = struct.Struct("=" + "".join("q" if v.dtype.kind == "i" else "d" for v in counters))
        memory = np.empty(form.size, np.uint8)
        if not self._shares_counters:
            for counter, low in zip(counters, range(0, form.size, 8), strict=True):
                move_to_memory(counter, memory[low : low + 8].view(counter.dtype))
        return form, memory.data

    @property
    def progress(self) -> Progress:
        """The current counters. Never communicates."""
        if self._shares_counters:
            return Progress(*[counter._storage.array.item() for counter in self.counters.values()])
        return Progress(*self._form.unpack_from(self._cells))

    def keep(self, progress: Progress) -> None:
        """Write the counters; alike on all ranks."""
        if not self._shares_counters:
            self._form.pack_into(self._cells, 0, *progress)
            return
        for counter, number in zip(self.counters.values(), progress, strict=True):
            counter._storage.part(1)[1][...] = number
        self.strategy._replicas.reducer.node.arena.nodes().node.barrier()

    @property
    def variables(self) -> tuple[Variable, ...]:
        """All variables that are state: counters, then the slots of each variable."""
        slots = [slot for target in self.targets.values() for slot in target.slots.values()]
        return (*self.counters.values(), *slots)

    def tree(self) -> StateTree:
        """Return the variables by the names that programs know them by."""
        named_targets = zip(self.names, self.targets.values(), strict=True)
        slots = {name: dict(target.slots) for name, target in named_targets if target.slots}
        tree = StateTree({**self.counters, "slots": slots} if slots else self.counters)
        tree.state = self
        return tree

    def saved_counters(self) -> dict[str, Variable]:
        """Return the counters that checkpoints have: those of options only with the option."""
        absent = {"calls", "weight"} if not self.accumulates else set()
        absent |= set() if self._scales else {"scale"}
        return {name: v for name, v in self.counters.items() if name not in absent}

    def begin_counter(self, name: str) -> None:
        """Give a counter the value that it has in a new optimizer. Collective.

        Args:
          name: One of `counters`. The count of good updates begins with the scale of the loss.
        """
        fields = ("scale", "good") if name == "scale" else (name.replace(_ITERATIONS, "step"),)
        fresh = {field: getattr(self._start, field) for field in fields}
        self.keep(self.progress._replace(**fresh))

    def begin_slot(self, target: Target, name: str) -> None:
        """Give a slot the values that it has in a new optimizer of these weights. Collective.

        Args:
          target: The variable.
          name: Of the slot.
        """
        weights = target.variable._component()
        first = weights if name == "ema" else np.zeros_like(weights)
        target.slots[name]._store("assign", first, None)


def _names(variables: Sequence[Variable]) -> list[str]:
    """Return the names without ``:0``; the second of one name gets a number."""
    names: dict[str, None] = {}
    for variable in variables:
        base = name = variable.name.removesuffix(":0")
        count = 0
        while name in names:
            count += 1
            name = f"{base}_{count}"
        names[name] = None
    return list(names)


def _memory_of(targets: Iterable[Target]) -> tuple[frozenset[int], list[tuple[int, int]]]:
    """Return where weights and slots are in memory.

    Returns:
      The identities of the arrays whose views all views of them are; and the addresses of these
      arrays, from where to where, sorted.
    """
    variables = [variable for t in targets for variable in (t.variable, *t.slots.values())]
    arrays = [array for v in variables for array in (v._storage.base, v._storage.array)]
    spans = {byte_bounds(array) for array in arrays if array.size}
    return frozenset(id(variable._storage.base) for variable in variables), sorted(spans)


def _counters(kind: str, start: Progress) -> dict[str, Variable]:
    counters = {}
    for name, value in start._asdict().items():
        name = _ITERATIONS if name == "step" else name
        dtype = np.int64 if isinstance(value, int) else np.float64
        counters[name] = Variable(dtype(value), trainable=False, name=f"{kind}/{name}")
    return counters


def _slices(variable: Variable, optimizer: OptimizerSettings) -> Slices | None:
    """Return who has which elements of the slots, if all ranks have a slice each; alike on all.

    Collective the first time.
    """
    if optimizer.shard != "all" or not variable._is_large or not optimizer.slots():
        return None
    node = variable.strategy._replicas.reducer.node
    nodes = node.arena.nodes()
    if not node.twins or not (_shared(variable) or nodes.node.size == 1):
        return None
    return slices_of_ranks(nodes, variable.size, BLOCK)


def _slot(name: str, slot: str, variable: Variable, slices: Slices | None) -> Variable:
    if slices is None:
        zeros = np.zeros(variable.shape, variable.dtype)
        first = variable._component() if slot == "ema" else zeros
        return Variable(first, trainable=False, name=name)
    spread_slot = create_spread_slot(variable, name, slices)
    if slot == "ema":
        spread_slot._storage.part(BLOCK)[1][:] = variable._component().reshape(-1)[
            slices.low : slices.high
        ]
    return spread_slot


def _shared(variable: Variable) -> bool:
    return isinstance(variable._storage, NodeStorage)


def _target(
    variable: Variable,
    optimizer: OptimizerSettings,
    slots: dict[str, Variable],
    slices: Slices | None,
) -> Target:
    shared = _shared(variable)
    if slices is None and any(_shared(slot) != shared for slot in slots.values()):
        raise MemoryError(
            f"the ranks of a node share memory for {variable._label}, but there is too little "
            f"for the state of {type(optimizer).__name__}. Provide more (/dev/shm, or the "
            "limit of the container), or use less state: an optimizer with fewer slots, no "
            "ema."
        )
    low, w = variable._storage.part(BLOCK)
    twins = None
    if slices is not None:
        shared, twins = True, w
        w, low = w[slices.low - low : slices.high - low], slices.low
    slot_parts = {name: slot._storage.part(BLOCK)[1] for name, slot in slots.items()}
    rule = optimizer.rule
    parts = tuple(slot_parts[name] for name in rule.slots)
    like = (variable.dtype, variable.shape)
    remaining_fields = (slot_parts.get("pending"), slot_parts.get("ema"), rule, like, slices, twins)
    return Target(variable, optimizer, slots, shared, low, w, parts, *remaining_fields)

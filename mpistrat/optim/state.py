"""The state of an optimizer: counters, and slots that are as large as their variables.

All of it consists of variables of the strategy of the weights. A slot of a large variable is stored
once per node, as the variable itself, and each rank updates its own part of both. `Checkpoint`
saves and restores it like any other variable, at any number of ranks.

With ``shard="all"`` a slot is stored once for all nodes, while the variable stays whole on each
node. A rank's part of a large variable is cut again, in blocks, between the rank and its peers on
the other nodes (`Slices`); a rank has its slice of each slot in memory of its own, which no other
rank reads. Each read of such a slot is a handshake and two gathers (peers, then the node),
`component` raises, and `compare_copies` leaves it out. A checkpoint reads one such slot at a time,
and only replica 0 keeps the arrays. Nodes of different sizes have no peers, and stay with
``"node"``.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, final
from weakref import WeakSet

import numpy as np
from numpy.lib.array_utils import byte_bounds

from mpistrat.arrays import Array
from mpistrat.errors import LeafTypeError, StrategyError
from mpistrat.optim.base import Progress
from mpistrat.optim.fused import fuse_small_variables
from mpistrat.optim.passes import BLOCK
from mpistrat.shm.storage import NodeStorage, Slices, slices_of_ranks
from mpistrat.strategy.context_stack import CodeContext, StrategyLike
from mpistrat.variables.variable import Variable, create_spread_slot, move_to_memory

if TYPE_CHECKING:
    from mpistrat.optim.base import OptimizerSettings, Rule

__all__ = [
    "LastCall",
    "State",
    "StateRegistry",
    "StateTree",
    "Target",
    "VariableList",
    "check_variable",
]

_LISTS = 64  # lists of variables that are remembered
_ITERATIONS = "iterations"  # what Keras calls the step


class Target(NamedTuple):
    """A variable, and the part of it and of its slots that this rank updates.

    Attributes:
      variable: The variable.
      optimizer: Its optimizer: with the changes of its groups.
      slots: All its slots, by name.
      is_shared: Each rank updates a part, and others update the rest; else the part is all of it.
      low: The first element of the part.
      w: The part of the weights; flat and writable.
      slot_parts: The part of each slot of the rule.
      pending: The part of the slot of accumulated gradients, if there is one.
      ema: The part of the average, if there is one.
      rule: The rule of its optimizer.
      dtype_and_shape: The dtype and the shape of the variable.
      slices: The elements that each rank of all nodes updates; None if the ranks of a node update
        all.
      peer_weights: With `slices`, the weights that this rank and its peers update, in the memory of
        the node.
    """

    variable: Variable
    optimizer: OptimizerSettings
    slots: dict[str, Variable]
    is_shared: bool
    low: int
    w: Array
    slot_parts: tuple[Array, ...]
    pending: Array | None
    ema: Array | None
    rule: Rule
    dtype_and_shape: tuple[np.dtype[Any], tuple[int, ...]]
    slices: Slices | None = None
    peer_weights: Array | None = None


class VariableList(NamedTuple):
    """A list of variables of calls.

    Attributes:
      variables: The variables; as long as the list has them, no other object gets their identity.
      targets: The target of each; None where the state was not built for it.
      dtypes_and_shapes: The dtype and the shape of each.
    """

    variables: list[Variable]
    targets: list[Target | None]
    dtypes_and_shapes: list[tuple[np.dtype[Any], tuple[int, ...]] | None]


class LastCall(NamedTuple):
    """The newest call of `Optimizer.apply_gradients`; the next one is nearly always like it.

    Attributes:
      listing: Its variables.
      is_replica_code: Whether replica code made it.
      weight_key: Its weight; in replica code whether it had one.
      update_plan: Its plan, a `mpistrat.optim.update_plan.UpdatePlan`.
    """

    listing: VariableList
    is_replica_code: bool
    weight_key: float | bool | None
    update_plan: Any


def check_variable(strategy: object, variable: object, call: str, expected_text: str) -> None:
    """Raise an error if an object is no variable that an optimizer can update.

    Args:
      strategy: The strategy that the variable has to belong to.
      variable: The argument of the program.
      call: The call, for messages.
      expected_text: The type of its argument, for messages.
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
    """The variables of a state by the names that programs use.

    Attributes:
      state: The state. Checkpoints name a slot by the name that its variable has in them.
    """

    state: State


@final
class StateRegistry:
    """The states of optimizers of one session.

    Attributes:
      states: The states that live.
    """

    def __init__(self) -> None:
        """Create an empty registry."""
        self.states: WeakSet[State] = WeakSet()


@final
class State:
    """Counters and slots of one optimizer, for the variables that it was built for.

    Collective: creation is. Cost: that of creating so many variables.

    Args:
      optimizer: The optimizer.
      strategy: The strategy of the variables.
      variables: The variables that it updates, in an order that is the same on all ranks.

    Attributes:
      optimizer: The optimizer.
      call_name: The name of the call that updates, for messages.
      counters: Its counters, as variables.
      targets: Its variables, by number.
      update_plans: The plans of calls, by replica code, weight and variables.
      last_call: The newest call, if its plan serves for the next one.
      variable_lists: The lists of variables that calls have given, by the identities of these.
      fused: The groups of small variables, and single variables, that are updated in one call.
      base_ids: The identities of the arrays that own the memory of weights and slots.
      buffers: Memory that gradients pass through, by the number of the variable.
      accumulates: Several calls make one update.
      text: The optimizer, with the options that differ from the defaults.

    Raises:
      MemoryError: There is memory to share for the weights, but not for slots; on all ranks.
    """

    def __init__(
        self, optimizer: OptimizerSettings, strategy: StrategyLike, variables: Sequence[Variable]
    ):
        """Create counters and slots."""
        kind, lockstep = type(optimizer).__name__, strategy._replicas.lockstep
        self.optimizer, self.strategy = optimizer, strategy
        self.text, self.call_name = optimizer._describe_options(), f"{kind}.apply_gradients"
        with lockstep.validating_collectively(f"{kind}.build"):
            self.names = _make_unique_names(variables)
            shapes = [variable.shape for variable in variables]
            candidates = optimizer._resolve_all_settings(list(zip(self.names, shapes, strict=True)))
            # Equal optimizers become one object, so that identity shows which variables share one.
            optimizers = [candidates[candidates.index(candidate)] for candidate in candidates]
            # The text of the optimizer does not show all of the functions of groups.
            suffixes = [f" by {o._describe_options()}" * bool(optimizer.groups) for o in optimizers]
            texts = [v._spec() + suffix for v, suffix in zip(variables, suffixes, strict=True)]
        lockstep.handshake(f"{self.text}.build({', '.join(texts)})")
        self.update_plans: dict[tuple[object, ...], Any] = {}
        self.last_call: LastCall | None = None
        self.variable_lists: dict[tuple[int, ...], VariableList] = {}
        self.buffers: dict[int, Array] = {}
        self._lacks_buffers = False
        self.accumulates, self._start = optimizer.accumulate > 1, Progress.start(optimizer)
        with CodeContext(strategy):
            self.counters = _create_counters(kind, self._start)
            self.targets: dict[int, Target] = {}
            for name, variable, settings in zip(self.names, variables, optimizers, strict=True):
                slices = _divide_slots(variable, settings)
                slots = {
                    slot: _create_slot(f"{name}/{kind}/{slot}", slot, variable, slices)
                    for slot in settings.slots()
                }
                self.targets[variable._number] = _create_target(variable, settings, slots, slices)
        self.fused = fuse_small_variables(self.targets.values())
        for target in [target for group in self.fused for target in group.targets]:
            self.targets[target.variable._number] = target
        self.base_ids, self._memory = _find_memory(self.targets.values())
        # True where a program or a test has made even the smallest variables shared.
        self._shares_counters = any(map(_is_shared, self.counters.values()))
        self._form, self._cells = self._store_contiguously()
        lockstep.session.get_instance(StateRegistry).states.add(self)

    def copy_own_views(self, arrays: Sequence[Array]) -> list[Array]:
        """Return arrays, with copies of those that are views of a weight or slot, by address.

        Hundreds of buffers come this way in each step, so it calls no Python for each.
        """
        spans, bisect_spans = self._memory, bisect.bisect_left
        results = []
        for array in arrays:
            is_view = id(array.base) in self.base_ids
            if not (is_view or array.flags.owndata) and array.size:
                start_address: int = array.__array_interface__["data"][0]
                end_address = start_address + array.nbytes
                if not array.flags.c_contiguous:
                    start_address, end_address = byte_bounds(array)
                number = bisect_spans(spans, (end_address, 0)) - 1
                is_view = number >= 0 and spans[number][1] > start_address
            results.append(array.copy() if is_view else array)
        return results

    def record_list(self, variables: Sequence[Variable]) -> VariableList:
        """Return the list of valid variables, and remember it."""
        targets = [self.targets.get(variable._number) for variable in variables]
        if len(self.variable_lists) > _LISTS:
            self.variable_lists.clear()
        dtypes_and_shapes = [
            None if target is None else target.dtype_and_shape for target in targets
        ]
        listing = VariableList(list(variables), targets, dtypes_and_shapes)
        self.variable_lists[tuple(map(id, variables))] = listing
        return listing

    def has_buffers(self, call: str) -> bool:
        """Return whether there is memory for gradients that the ranks of a node can read.

        Collective the first time, which reserves it.

        Args:
          call: The text of the call that needs it; equal on all ranks.
        """
        if not self.buffers and not self._lacks_buffers:
            group, variables = self.strategy._replicas, [t.variable for t in self.targets.values()]
            group.lockstep.handshake(f"{call}, memory for gradients")
            buffers = group.reducer.node.create_buffers(
                tuple((v.dtype, v.shape) for v in variables)
            )
            self._lacks_buffers = buffers is None
            numbers = [variable._number for variable in variables]
            self.buffers = dict(zip(numbers, buffers or (), strict=False))
        return not self._lacks_buffers

    def buffers_of(self, targets: Sequence[Target]) -> list[Array]:
        """Return the memory for gradients of these targets."""
        return [self.buffers[target.variable._number] for target in targets]

    def _store_contiguously(self) -> tuple[struct.Struct, memoryview]:
        """Make counters contiguous in memory, and return their format and the memory."""
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

    def store_progress(self, progress: Progress) -> None:
        """Write the counters, which are equal on all ranks."""
        if not self._shares_counters:
            self._form.pack_into(self._cells, 0, *progress)
            return
        for counter, number in zip(self.counters.values(), progress, strict=True):
            counter._storage.part(1)[1][...] = number
        self.strategy._replicas.reducer.node.arena.nodes().node.barrier()

    @property
    def variables(self) -> tuple[Variable, ...]:
        """All variables of the state: counters, then the slots of each variable."""
        slots = [slot for target in self.targets.values() for slot in target.slots.values()]
        return (*self.counters.values(), *slots)

    def tree(self) -> StateTree:
        """Return the variables by the names that programs use."""
        named_targets = zip(self.names, self.targets.values(), strict=True)
        slots = {name: dict(target.slots) for name, target in named_targets if target.slots}
        tree = StateTree({**self.counters, "slots": slots} if slots else self.counters)
        tree.state = self
        return tree

    def saved_counters(self) -> dict[str, Variable]:
        """Return the counters for checkpoints: a counter of an option only with the option."""
        absent = {"calls", "weight"} if not self.accumulates else set()
        absent |= set() if self.optimizer.loss_scale else {"scale"}
        return {name: v for name, v in self.counters.items() if name not in absent}

    def begin_counter(self, name: str) -> None:
        """Give a counter the value that it has in a new optimizer. Collective.

        Args:
          name: One of `counters`. The count of good updates begins with the scale of the loss.
        """
        fields = ("scale", "good") if name == "scale" else (name.replace(_ITERATIONS, "step"),)
        fresh = {field: getattr(self._start, field) for field in fields}
        self.store_progress(self.progress._replace(**fresh))

    def begin_slot(self, target: Target, name: str) -> None:
        """Give a slot the values that it has in a new optimizer of these weights. Collective.

        Args:
          target: The variable.
          name: The name of the slot.
        """
        weights = target.variable._component()
        initial_value = weights if name == "ema" else np.zeros_like(weights)
        target.slots[name]._store("assign", initial_value, None)


def _make_unique_names(variables: Sequence[Variable]) -> list[str]:
    """Return the names without ``:0``; the second variable of a name gets a number."""
    names: dict[str, None] = {}
    for variable in variables:
        base = name = variable.name.removesuffix(":0")
        count = 0
        while name in names:
            count += 1
            name = f"{base}_{count}"
        names[name] = None
    return list(names)


def _find_memory(targets: Iterable[Target]) -> tuple[frozenset[int], list[tuple[int, int]]]:
    """Return the memory of weights and slots.

    Returns:
      The identities of the arrays that own it; and the addresses of their first bytes and of the
      bytes after their last ones, sorted.
    """
    variables = [variable for t in targets for variable in (t.variable, *t.slots.values())]
    arrays = [array for v in variables for array in (v._storage.base, v._storage.array)]
    spans = {byte_bounds(array) for array in arrays if array.size}
    return frozenset(id(variable._storage.base) for variable in variables), sorted(spans)


def _create_counters(kind: str, start: Progress) -> dict[str, Variable]:
    counters = {}
    for name, value in start._asdict().items():
        name = _ITERATIONS if name == "step" else name
        dtype = np.int64 if isinstance(value, int) else np.float64
        counters[name] = Variable(dtype(value), trainable=False, name=f"{kind}/{name}")
    return counters


def _divide_slots(variable: Variable, optimizer: OptimizerSettings) -> Slices | None:
    """Return the slices of the slots if each rank of all nodes has one, else None.

    All ranks return the same. Collective the first time.
    """
    if optimizer.shard != "all" or not variable._is_large or not optimizer.slots():
        return None
    node = variable.strategy._replicas.reducer.node
    nodes = node.arena.nodes()
    if not node.has_peers_for_all_ranks or not (_is_shared(variable) or nodes.node.size == 1):
        return None
    return slices_of_ranks(nodes, variable.size, BLOCK)


def _create_slot(name: str, slot: str, variable: Variable, slices: Slices | None) -> Variable:
    if slices is None:
        zeros = np.zeros(variable.shape, variable.dtype)
        initial_value = variable._component() if slot == "ema" else zeros
        return Variable(initial_value, trainable=False, name=name)
    spread_slot = create_spread_slot(variable, name, slices)
    if slot == "ema":
        spread_slot._storage.part(BLOCK)[1][:] = variable._component().reshape(-1)[
            slices.low : slices.high
        ]
    return spread_slot


def _is_shared(variable: Variable) -> bool:
    return isinstance(variable._storage, NodeStorage)


def _create_target(
    variable: Variable,
    optimizer: OptimizerSettings,
    slots: dict[str, Variable],
    slices: Slices | None,
) -> Target:
    is_shared = _is_shared(variable)
    if slices is None and any(_is_shared(slot) != is_shared for slot in slots.values()):
        raise MemoryError(
            f"the ranks of a node share memory for {variable._label}, but there is too little "
            f"for the state of {type(optimizer).__name__}. Provide more (/dev/shm, or the "
            "limit of the container), or use less state: an optimizer with fewer slots, no "
            "ema."
        )
    low, w = variable._storage.part(BLOCK)
    peer_weights = None
    if slices is not None:
        is_shared, peer_weights = True, w
        w, low = w[slices.low - low : slices.high - low], slices.low
    slot_parts = {name: slot._storage.part(BLOCK)[1] for name, slot in slots.items()}
    rule = optimizer.rule
    parts = tuple(slot_parts[name] for name in rule.slots)
    dtype_and_shape = (variable.dtype, variable.shape)
    remaining_fields = (
        slot_parts.get("pending"),
        slot_parts.get("ema"),
        rule,
        dtype_and_shape,
        slices,
        peer_weights,
    )
    return Target(variable, optimizer, slots, is_shared, low, w, parts, *remaining_fields)

"""The state that a program gives to a checkpoint, by name.

A name is the path to a value: keys of mappings, places in sequences and attributes of objects,
with ``/`` between them. It does not depend on the order in which things were made.

Slots of optimizers are named by the place of their variable in the checkpoint, as the weights are,
so that they go together. State of an option that only the file or only the program has is an error;
a partial restore resets the state that the file lacks, as in a new optimizer of the restored
weights.
"""

from __future__ import annotations

import functools
import sys
import types
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence, Set
from typing import Any, NamedTuple, final

import numpy as np

from mpistrat.arrays import Array, as_array, find_array_kind
from mpistrat.checkpoint.values import (
    VALUES_NAME,
    Cell,
    ProgramValues,
    Value,
    decode_value,
    encode_value,
    is_generator,
    make_generator_value,
)
from mpistrat.data.dataset import Dataset
from mpistrat.data.distributed import DistributedDataset
from mpistrat.errors import StructureError
from mpistrat.lockstep.guards import warn
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.metrics.metric import Metric
from mpistrat.optim.optimizer import Optimizer
from mpistrat.optim.state import State, StateTree
from mpistrat.strategy.strategy import Strategy
from mpistrat.variables.variable import Variable

_SLOTS = "slots"
_ITERATIONS = "iterations"
# The options that state is of; other slots are named themselves.
_OPTIONS_BY_STATE = {
    "scale": "loss_scale",
    **dict.fromkeys(("calls", "weight", "pending"), "accumulate"),
    "ema": "ema",
}


@final
class SavedOptimizer(NamedTuple):
    """The state of an optimizer in a checkpoint.

    Attributes:
      path: The prefix of the names of its state.
      text: The optimizer, with the options that are not as by default.
      slots: The slots, by name.
      resets: Functions that reset state to that of a new optimizer, by name.
    """

    path: str
    text: str
    slots: dict[str, Variable]
    resets: dict[str, Callable[[], None]]


def collect_optimizer(
    path: str,
    state: State,
    names_by_variable: Mapping[tuple[int, int], str],
    quote_name: Callable[[Any], str],
) -> SavedOptimizer:
    """Return the state of an optimizer by the names that it has in a checkpoint.

    Args:
      path: Where the optimizer is.
      state: Its state.
      names_by_variable: The names of the checkpoint's variables, by their `identify_variable`.
      quote_name: Returns a part of a name.

    Raises:
      StructureError: Variables that are not in the checkpoint have the same name, so that slots
        would go by the order in which the variables were made.
    """
    targets = list(state.targets.values())
    variable_names = [
        names_by_variable.get(identify_variable(target.variable)) for target in targets
    ]
    own_names = [target.variable.name.removesuffix(":0") for target in targets]
    named_targets = zip(targets, variable_names, own_names, strict=True)
    counts = Counter(
        own_name
        for target, variable_name, own_name in named_targets
        if variable_name is None and target.slots
    )
    ambiguous_names = sorted(own_name for own_name, count in counts.items() if count > 1)
    if ambiguous_names:
        raise StructureError(
            f"the optimizer {path!r} of the checkpoint has state of several variables named "
            f"{', '.join(map(repr, ambiguous_names))}, which only the order tells apart in which "
            "they were made. Put the variables into the checkpoint too, or give them names of "
            "their own: Variable(..., name=...)."
        )
    saved_optimizer = SavedOptimizer(path, state.text, {}, {})
    for counter in state.saved_counters():
        saved_optimizer.resets[_join_names(path, counter)] = functools.partial(
            state.begin_counter, counter
        )
    for target, variable_name, own_name in zip(targets, variable_names, own_names, strict=True):
        for slot, variable in target.slots.items():
            name = _join_names(
                path, _SLOTS, quote_name(own_name) if variable_name is None else variable_name, slot
            )
            saved_optimizer.slots[name] = variable
            saved_optimizer.resets[name] = functools.partial(state.begin_slot, target, slot)
    return saved_optimizer


def identify_variable(variable: Variable) -> tuple[int, int]:
    """Return a key of a variable, unique among those that live; equal for its copies."""
    return id(variable.strategy), variable._number


def describe_option_changes(
    optimizers: Iterable[SavedOptimizer], missing: Sequence[str], unused: Sequence[str]
) -> str:
    """Return which options of optimizers only the file or only the program has; empty for none.

    Args:
      optimizers: Those of the program.
      missing: The names that only the program has.
      unused: The names that only the file has.
    """
    sentences = []
    for saved_optimizer in optimizers:
        if _join_names(saved_optimizer.path, _ITERATIONS) in missing:
            sentences.append(
                f"{saved_optimizer.path!r}, here {saved_optimizer.text}, is not in the file"
            )
            continue
        options_of_file, options_of_program = (
            _list_changed_options(saved_optimizer.path, unused),
            _list_changed_options(saved_optimizer.path, missing),
        )
        sides = [f"with {', '.join(options_of_file)}"] if options_of_file else []
        sides += [f"without {', '.join(options_of_program)}"] if options_of_program else []
        if sides:
            sentences.append(
                f"{saved_optimizer.path!r}, here {saved_optimizer.text}, was saved "
                f"{' and '.join(sides)}"
            )
    return "; ".join(sentences)


def _list_changed_options(path: str, names: Sequence[str]) -> list[str]:
    """Return the options of an optimizer that state is of which one side has alone.

    The slots of variables that one side has alone are no matter of options.

    Args:
      path: Where the optimizer is.
      names: All names that this side has alone.
    """
    prefix, lone_names = _join_names(path, ""), set(names)
    options: dict[str, None] = {}
    for name in names:
        parent_name, _, state_name = name.removeprefix(prefix).rpartition("/")
        is_slot = parent_name.startswith(f"{_SLOTS}/")
        is_state = name.startswith(prefix) and (is_slot or state_name in _OPTIONS_BY_STATE)
        if is_state and parent_name.removeprefix(f"{_SLOTS}/") not in lone_names:
            options[_OPTIONS_BY_STATE.get(state_name, f"slot {state_name!r}")] = None
    return list(options)


def reset_missing_state(optimizers: Sequence[SavedOptimizer], missing_names: Sequence[str]) -> None:
    """Reset the state of optimizers that a file does not have, after all else is restored.

    Collective.

    Args:
      optimizers: The optimizers of the program.
      missing_names: The names that only the program has; equal on all ranks.
    """
    resets = {
        name: reset
        for saved_optimizer in optimizers
        for name, reset in saved_optimizer.resets.items()
    }
    for name in missing_names:
        if name in resets:
            resets[name]()


def warn_of_option_changes(lockstep: Lockstep, call: str, path: str, option_changes: str) -> None:
    """Warn once that options of optimizers are not those of a file. Collective.

    Args:
      lockstep: The lockstep of all ranks.
      call: The call that restores.
      path: The file.
      option_changes: The result of `describe_option_changes`; without changes nothing is done.
    """
    if option_changes:
        text = (
            f"{call}: options of an optimizer are not those of {path}: {option_changes}. State "
            "that the file lacks begins afresh, averages as copies of the restored weights. State "
            "that only the file has is dropped. All else goes on, such as iterations, which "
            "schedules and corrections of a bias count."
        )
        warn(lockstep, call, text)


def _join_names(*parts: str) -> str:
    return "/".join(parts[not parts[0] :])


# The attributes of their objects, as of those of Python's own modules, are their own affair.
_CLOSED_LIBRARIES = {"mpistrat", "numpy", "numba", "mpi4py"}
_TEXT_TYPES = (str, bytes, bytearray, memoryview, range)  # sequences that hold no variables
_CONTENTS_ADVICE = (
    "Variables, arrays, numbers, strings, generators of NumPy, datasets, metrics, optimizers and "
    "checkpoints are saved, and dicts, lists and tuples of them. Give a class of your own the "
    "methods checkpoint_state() and restore_state(state), or leave it out."
)
_Assign = Callable[[Any], None]


class NestedTrees:
    """A holder of trees by name, which may be in a tree itself: a checkpoint in another one."""

    _root: Any

    def _trees(self) -> dict[str, Any]:
        return {name: tree for name, tree in vars(self).items() if not name.startswith("_")}


@final
class ProgramState(NamedTuple):
    """The state that a program gives to a checkpoint.

    Attributes:
      entries: The arrays to save, by name; numbers and strings are one of them.
      optimizers: The optimizers.
      stateful: Objects with ``restore_state``, and a function that calls it once all values are
        there, by the prefix of the names in them.
      failure: The error for values that cannot be saved; None without any. `entries` has the others
        all the same: the other ranks may have found no error, and wait for their strategy.
    """

    entries: dict[str, Variable | Cell]
    optimizers: list[SavedOptimizer]
    stateful: dict[str, tuple[Any, Callable[[], None]]]
    failure: Exception | None


def collect_program_state(root: Any, trees: Mapping[str, Any], assign: Any) -> ProgramState:
    """Return all that is to be saved below an object and some trees, by name, sorted.

    Mappings, lists and tuples are looked into. So are the attributes of objects of the program's
    own classes, but of these only variables are taken, and objects with ``checkpoint_state``; other
    attributes are passed over.

    Args:
      root: Values in it have names without a prefix; None for nothing.
      trees: Values in each tree have names that begin with its key.
      assign: ``assign(key, value)`` puts a value in place of one of `trees`.
    """
    walk, failure = _TreeWalk(), None
    prefixed_trees = [("", "", root), *((quote_key(key), key, tree) for key, tree in trees.items())]
    for prefix, key, tree in prefixed_trees:
        try:
            if tree is not None or key:
                walk.visit_root(tree, prefix, functools.partial(assign, key))
        except Exception as error:
            failure = error if failure is None else failure
    try:
        optimizers = walk.collect_optimizers()
    except Exception as error:
        optimizers, failure = [], error if failure is None else failure
    if walk.values:
        walk.arrays[VALUES_NAME] = ProgramValues(walk.values).make_cell()
    return ProgramState(dict(sorted(walk.arrays.items())), optimizers, walk.stateful, failure)


def _refuse_assignment(*_: object) -> None:
    raise StructureError(
        "a saved value cannot be put back: the object that held it cannot be assigned to."
    )


class _TreeWalk:
    """Visits the trees of a program, and collects the entries to save."""

    def __init__(self) -> None:
        self.arrays: dict[str, Variable | Cell] = {}
        self.values: dict[str, Value] = {}
        self.stateful: dict[str, tuple[Any, Callable[[], None]]] = {}
        self.states: dict[str, State] = {}  # of optimizers
        self.names: set[str] = set()
        self.visited_objects: dict[int, Any] = {}
        # Below an object with restore_state: arrays may have other shapes; those of some objects
        # may differ between ranks.
        self.can_change_shape = self.can_differ = False

    def add_entry(self, name: str, entry: Variable | Cell | Value) -> None:
        if name in self.names or name == VALUES_NAME:
            raise StructureError(
                f"two variables of the checkpoint have the name {name!r}. Keys of a dict are told "
                "apart by str(key) there: take other keys where these are equal, as of 1 and '1'."
            )
        self.names.add(name)
        if isinstance(entry, Value):
            self.values[name] = entry
        else:
            self.arrays[name] = entry

    def visit_root(self, tree: Any, path: str, assign: _Assign) -> None:
        """Add the entries of a tree of the program; raise StructureError without any."""
        previous_count, self.visited_objects = len(self.names), {}
        self.visit(tree, path, True, assign)
        if len(self.names) > previous_count:
            return
        description = f"{path or 'the root'} of the checkpoint ({type(tree).__name__})"
        if isinstance(tree, Optimizer):
            text = "has no state yet; create it first: optimizer.build(variables)."
        else:
            text = f"holds no variable, so nothing of it would be saved. {_CONTENTS_ADVICE}"
        raise StructureError(f"{description} {text}")

    def visit(self, value: Any, path: str, is_explicit: bool, assign: _Assign) -> None:
        """Add the entries in `value`.

        With `is_explicit` the program has asked to save all of it.
        """
        if isinstance(value, DistributedDataset):
            value = value._origin
        if isinstance(value, Variable | Cell):
            self.add_entry(path, value)
        elif is_explicit and (leaf_entry := self._make_leaf(value, path, assign)) is not None:
            self.add_entry(path, leaf_entry)
        elif value is not None and id(value) not in self.visited_objects:
            # Kept alive: another object could have its number.
            self.visited_objects[id(value)] = value
            if isinstance(value, NestedTrees):
                if value._root is not None:
                    self.visit(value._root, path, True, _refuse_assignment)
                for key, tree in value._trees().items():
                    child_path = f"{path}/{quote_key(key)}" if path else quote_key(key)
                    self.visit(tree, child_path, True, functools.partial(setattr, value, key))
                return
            if _has_state_methods(value) and (is_explicit or not isinstance(value, Dataset)):
                self._visit_state(value, path)
                return
            children = _list_children(value)
            if isinstance(children, StateTree):
                self.states[path] = optimizer_state = children.state
                other_names = children.keys() - optimizer_state.counters.keys() - {"slots"}
                children = optimizer_state.saved_counters() | {
                    name: children[name] for name in other_names
                }
            if children is None and is_explicit:
                raise StructureError(
                    f"{path!r} of the checkpoint is {value!r:.60} ({type(value).__name__}), which "
                    f"cannot be saved. {_CONTENTS_ADVICE}"
                )
            is_explicit = is_explicit and isinstance(value, Mapping | Sequence)
            make_setter = _make_item_setter(value, assign) if is_explicit else _refuse_assignment
            for key in sorted(children or (), key=str):
                child_path = f"{path}/{quote_key(key)}" if path else quote_key(key)
                child = (children or {})[key]
                self.visit(child, child_path, is_explicit, functools.partial(make_setter, key))

    def collect_optimizers(self) -> list[SavedOptimizer]:
        """Add the slots of optimizers, once the names of all variables are known."""
        names_by_variable: dict[tuple[int, int], str] = {}
        for name, entry in sorted(self.arrays.items()):
            if isinstance(entry, Variable):  # of several names the first
                names_by_variable.setdefault(identify_variable(entry), name)
        states_by_path = self.states.items()
        optimizers = [
            collect_optimizer(path, state, names_by_variable, quote_key)
            for path, state in states_by_path
        ]
        for optimizer in optimizers:
            for name, slot in optimizer.slots.items():
                self.add_entry(name, slot)
        return optimizers

    def _make_leaf(self, value: Any, path: str, assign: _Assign) -> Value | Cell | None:
        if is_generator(value):
            try:
                return make_generator_value(value)
            except TypeError as error:
                raise StructureError(f"{path!r} of the checkpoint: {error}.") from None
        if isinstance(value, np.ndarray):
            has_free_first_axis = self.can_change_shape and value.ndim > 0
            return _make_array_cell(value, path, assign, has_free_first_axis, self.can_differ)
        try:
            encoded_value = encode_value(value)
        except TypeError:
            return None

        def write(restored_value: Any) -> None:
            if isinstance(value, list) and isinstance(restored_value, list):
                value[:] = restored_value  # whoever else has it sees it, too
            elif isinstance(value, dict) and isinstance(restored_value, dict):
                value.clear()
                value.update(restored_value)
            else:
                assign(restored_value)

        return Value(encoded_value, decode_value, write)

    def _visit_state(self, value: Any, path: str) -> None:
        state_holder = [value.checkpoint_state()]
        previous_flags = self.can_change_shape, self.can_differ
        self.can_change_shape, self.can_differ = True, hasattr(value, "_can_differ_between_ranks")
        previous_names = set(self.names)
        self.visit(state_holder[0], path, True, functools.partial(state_holder.__setitem__, 0))
        self.can_change_shape, self.can_differ = previous_flags
        if self.names == previous_names:
            raise StructureError(
                f"checkpoint_state() of {path!r} ({type(value).__name__}) returned nothing to save."
            )
        self.stateful[path] = value, lambda: value.restore_state(state_holder[0])


def _make_array_cell(
    value: Array, path: str, assign: _Assign, has_free_first_axis: bool, can_differ: bool
) -> Cell:
    read = functools.partial(as_array, value, path)
    read()  # raises now if the array cannot be saved

    def write(restored_value: Array) -> None:
        if has_free_first_axis or restored_value.shape != value.shape or not value.flags.writeable:
            assign(restored_value.copy())
        else:
            np.copyto(value, restored_value)

    return Cell(path, read, write, has_free_first_axis=has_free_first_axis, can_differ=can_differ)


def _make_item_setter(container: Any, assign: _Assign) -> Callable[[Any, Any], None]:
    """Return a function that puts an item in its place in a container."""
    if isinstance(container, tuple):
        field_names = getattr(container, "_fields", range(len(container)))
        fields = dict(zip(field_names, container, strict=True))

        def put_field(key: Any, field: Any) -> None:
            fields[key] = field
            assign(
                container._replace(**fields)
                if hasattr(container, "_replace")
                else tuple(fields.values())
            )

        return put_field
    if isinstance(container, MutableMapping | list) or hasattr(type(container), "__setitem__"):
        return container.__setitem__  # type: ignore[no-any-return]
    if isinstance(container, Mapping):  # to be read only: a dict takes its place
        entries = dict(container)

        def put_entry(key: Any, entry: Any) -> None:
            entries[key] = entry
            assign(entries)

        return put_entry
    return _refuse_assignment


def _has_state_methods(value: object) -> bool:
    """Return whether an object has the two methods for its state."""
    kind = type(value)
    return callable(getattr(kind, "checkpoint_state", None)) and hasattr(kind, "restore_state")


def _list_children(value: Any) -> Mapping[Any, Any] | None:
    """Return the children of a value by key, place or attribute; None for a closed one."""
    object_kind = find_array_kind(value)
    if object_kind is not None and (parts := object_kind.parts_of(value)) is not None:
        return parts
    attributes = _list_attributes(value)
    is_of_library = type(value).__module__.startswith("mpistrat.") and hasattr(value, "tree")
    if isinstance(value, Optimizer | Metric) or is_of_library:
        children: Mapping[str, Any] = value.tree()
        return children
    if isinstance(value, Mapping):
        return {**(attributes or {}), **value}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return dict(value._asdict())
    if isinstance(value, Sequence) and not isinstance(value, _TEXT_TYPES):
        return {**(attributes or {}), **dict(enumerate(value))}
    if isinstance(value, Set) and any(isinstance(member, Variable) for member in value):
        raise StructureError(
            "a set of the checkpoint holds variables, which have no names there. Give a dict or a "
            "list of them."
        )
    return attributes


def _list_attributes(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object; None if it has none, or they are its own affair."""
    module = type(value).__module__.partition(".")[0]
    is_closed = module in _CLOSED_LIBRARIES or module in sys.stdlib_module_names
    is_closed = is_closed and not isinstance(value, types.SimpleNamespace)
    slots = [vars(cls)["__slots__"] for cls in type(value).__mro__ if "__slots__" in vars(cls)]
    has_no_attributes = not slots and not hasattr(value, "__dict__")
    if is_closed or has_no_attributes or isinstance(value, type | Strategy):
        return None
    names = [
        name
        for slot_names in slots
        for name in ([slot_names] if isinstance(slot_names, str) else slot_names)
    ]
    slot_values = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return {
        **{k: v for k, v in slot_values.items() if not k.startswith("__")},
        **getattr(value, "__dict__", {}),
    }


def make_readable(name: str) -> str:
    """Return a name with its keys as the program has them, where that is clear and printable.

    Example:
      >>> make_readable("gr%C3%B6%C3%9Fe/dense%2Fkernel/a%3Ab")
      'größe/dense%2Fkernel/a:b'
    """
    parts = [(text, urllib.parse.unquote(text)) for text in name.split("/")]
    return "/".join(
        unquoted_text
        if unquoted_text.isprintable() and not set("/%\ufffd") & set(unquoted_text)
        else text
        for text, unquoted_text in parts
    )


def quote_key(key: object) -> str:
    """Return a key as a part of a name: no ``/``, and nothing that leads out of a directory."""
    text = urllib.parse.quote(str(key), safe=" ")
    return f"%2E{text[1:]}" if text.startswith(".") else text

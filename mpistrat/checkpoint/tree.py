"""What a program gives to a checkpoint, by name.

A name is the way to a value: keys of mappings, places in sequences and attributes of objects,
with ``/`` between them. It does not depend on the order in which things were made.

Optimizers in a checkpoint: what their state is called, and options that a file lacks or adds.

Slots are named by the place of their variable in the checkpoint, as the weights are, so that they
go together. State of an option that only the file or only the program has is an error; what a
partial restore leaves of it begins afresh, as of a new optimizer of the restored weights.
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
    NAME,
    Cell,
    Value,
    Values,
    decode,
    encode,
    generator_value,
    is_generator,
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
_OPTIONS = {
    "scale": "loss_scale",
    **dict.fromkeys(("calls", "weight", "pending"), "accumulate"),
    "ema": "ema",
}


@final
class SavedOptimizer(NamedTuple):
    """The state of an optimizer in a checkpoint.

    Attributes:
      path: What the names of its state begin with.
      text: The optimizer, with the options that are not as by default.
      slots: The slots, by name.
      resets: By name, what gives state the value that it has in a new optimizer.
    """

    path: str
    text: str
    slots: dict[str, Variable]
    resets: dict[str, Callable[[], None]]


def saved_optimizer(
    path: str, state: State, names: Mapping[tuple[int, int], str], quote: Callable[[Any], str]
) -> SavedOptimizer:
    """Return the state of an optimizer by the names that it has in a checkpoint.

    Args:
      path: Where the optimizer is.
      state: Its state.
      names: Of the variables of the checkpoint, by their `identity_of`.
      quote: Returns a part of a name.

    Raises:
      StructureError: Variables that are not in the checkpoint have the same name, so that slots
        would go by the order in which the variables were made.
    """
    targets = list(state.targets.values())
    places = [names.get(identity_of(target.variable)) for target in targets]
    bases = [target.variable.name.removesuffix(":0") for target in targets]
    triples = zip(targets, places, bases, strict=True)
    counts = Counter(base for target, place, base in triples if place is None and target.slots)
    shared = sorted(base for base, count in counts.items() if count > 1)
    if shared:
        raise StructureError(
            f"the optimizer {path!r} of the checkpoint has state of several variables named "
            f"{', '.join(map(repr, shared))}, which only the order tells apart in which they were "
            "made. Put the variables into the checkpoint too, or give them names of their own: "
            "Variable(..., name=...)."
        )
    saved = SavedOptimizer(path, state.text, {}, {})
    for counter in state.saved_counters():
        saved.resets[_join(path, counter)] = functools.partial(state.begin_counter, counter)
    for target, place, base in zip(targets, places, bases, strict=True):
        for slot, variable in target.slots.items():
            name = _join(path, _SLOTS, quote(base) if place is None else place, slot)
            saved.slots[name] = variable
            saved.resets[name] = functools.partial(state.begin_slot, target, slot)
    return saved


def identity_of(variable: Variable) -> tuple[int, int]:
    """Return what tells a variable from all others that live; equal for its copies."""
    return id(variable.strategy), variable.number


def changes_text(
    optimizers: Iterable[SavedOptimizer], missing: Sequence[str], unused: Sequence[str]
) -> str:
    """Return which options of optimizers only the file or only the program has; empty for none.

    Args:
      optimizers: Those of the program.
      missing: The names that only the program has.
      unused: The names that only the file has.
    """
    sentences = []
    for saved in optimizers:
        if _join(saved.path, _ITERATIONS) in missing:
            sentences.append(f"{saved.path!r}, here {saved.text}, is not in the file")
            continue
        of_file, of_program = _options(saved.path, unused), _options(saved.path, missing)
        sides = [f"with {', '.join(of_file)}"] if of_file else []
        sides += [f"without {', '.join(of_program)}"] if of_program else []
        if sides:
            sentences.append(f"{saved.path!r}, here {saved.text}, was saved {' and '.join(sides)}")
    return "; ".join(sentences)


def _options(path: str, names: Sequence[str]) -> list[str]:
    """Return the options of an optimizer that state is of which one side has alone.

    The slots of variables that one side has alone are no matter of options.

    Args:
      path: Where the optimizer is.
      names: All names that this side has alone.
    """
    begin, lone_names = _join(path, ""), set(names)
    options: dict[str, None] = {}
    for name in names:
        above, _, last = name.removeprefix(begin).rpartition("/")
        is_slot = above.startswith(f"{_SLOTS}/")
        is_state = name.startswith(begin) and (is_slot or last in _OPTIONS)
        if is_state and above.removeprefix(f"{_SLOTS}/") not in lone_names:
            options[_OPTIONS.get(last, f"slot {last!r}")] = None
    return list(options)


def begin_afresh(
    lockstep: Lockstep,
    call: str,
    path: str,
    optimizers: Sequence[SavedOptimizer],
    missing: Sequence[str],
    unused: Sequence[str],
) -> None:
    """Let state of optimizers that a file does not have begin anew, and warn of options once.

    Collective, after everything else is restored.

    Args:
      lockstep: That of the ranks.
      call: The call that restores.
      path: The file.
      optimizers: Those of the program.
      missing: The names that only the program has; equal on all ranks.
      unused: The names that only the file has; equal on all ranks.
    """
    resets = {name: reset for saved in optimizers for name, reset in saved.resets.items()}
    for name in missing:
        if name in resets:
            resets[name]()
    changes = changes_text(optimizers, missing, unused)
    if changes:
        text = (
            f"{call}: options of an optimizer are not those of {path}: {changes}. State that the "
            "file lacks begins afresh, averages as copies of the restored weights. State that only "
            "the file has is dropped. All else goes on, such as iterations, which schedules and "
            "corrections of a bias count."
        )
        warn(lockstep, call, text, stacklevel=5)


def _join(*parts: str) -> str:
    return "/".join(parts[not parts[0] :])


# The attributes of their objects, as of those of Python's own modules, are their own affair.
_CLOSED = {"mpistrat", "numpy", "numba", "mpi4py"}
_TEXTS = (str, bytes, bytearray, memoryview, range)  # sequences that hold no variables
_ADVICE = (
    "Variables, arrays, numbers, strings, generators of NumPy, datasets, metrics, optimizers and "
    "checkpoints are saved, and dicts, lists and tuples of them. Give a class of your own the "
    "methods checkpoint_state() and restore_state(state), or leave it out."
)
_Assign = Callable[[Any], None]


class Nested:
    """What holds trees by name, and may be in a tree itself: a checkpoint in another one."""

    _root: Any

    def _trees(self) -> dict[str, Any]:
        return {name: tree for name, tree in vars(self).items() if not name.startswith("_")}


@final
class ProgramState(NamedTuple):
    """What a program gives to save.

    Attributes:
      entries: What is saved as arrays, by name; numbers and strings are one of them.
      optimizers: The optimizers.
      stateful: Objects with ``restore_state``, by the name that what is in them begins with, and
        what calls it once all values are there.
      failure: What cannot be saved, if anything; `entries` has what was found all the same, as the
        other ranks may have found it in good trees, and wait for its strategy.
    """

    entries: dict[str, Variable | Cell]
    optimizers: list[SavedOptimizer]
    stateful: dict[str, tuple[Any, Callable[[], None]]]
    failure: Exception | None


def entries(root: Any, trees: Mapping[str, Any], assign: Any) -> ProgramState:
    """Return all that is to be saved below an object and some trees, by name, sorted.

    Mappings, lists and tuples are looked into. So are the attributes of objects of the program's
    own classes, but of these only variables are taken, and objects with ``checkpoint_state``; other
    attributes are passed over.

    Args:
      root: Values in it have names without a prefix; None for nothing.
      trees: Values in each tree have names that begin with its key.
      assign: ``assign(key, value)`` puts a value in place of one of `trees`.
    """
    walk, failure = _Walk(), None
    rooted_trees = [("", "", root), *((part(key), key, tree) for key, tree in trees.items())]
    for begin, key, tree in rooted_trees:
        try:
            if tree is not None or key:
                walk.root(tree, begin, functools.partial(assign, key))
        except Exception as error:
            failure = error if failure is None else failure
    try:
        optimizers = walk.named_optimizers()
    except Exception as error:
        optimizers, failure = [], error if failure is None else failure
    if walk.values:
        walk.arrays[NAME] = Values(walk.values).cell()
    return ProgramState(dict(sorted(walk.arrays.items())), optimizers, walk.stateful, failure)


def _refuse_assignment(*_: Any) -> None:
    raise StructureError(
        "a saved value cannot be put back: the object that held it cannot be assigned to."
    )


class _Walk:
    """Goes through what is given, and notes what is to be saved."""

    def __init__(self) -> None:
        self.arrays: dict[str, Variable | Cell] = {}
        self.values: dict[str, Value] = {}
        self.stateful: dict[str, tuple[Any, Callable[[], None]]] = {}
        self.states: dict[str, State] = {}  # of optimizers
        self.names: set[str] = set()
        self.visited_objects: dict[int, Any] = {}
        self.loose = False  # below an object that is told of its state: arrays may change in shape

    def note(self, name: str, entry: Any) -> None:
        if name in self.names or name == NAME:
            raise StructureError(
                f"two variables of the checkpoint have the name {name!r}. Keys of a dict are told "
                "apart by str(key) there: take other keys where these are equal, as of 1 and '1'."
            )
        self.names.add(name)
        (self.values if isinstance(entry, Value) else self.arrays)[name] = entry

    def root(self, tree: Any, path: str, assign: _Assign) -> None:
        """Note what is in a tree that the program gave; raise StructureError if that is nothing."""
        previous_count, self.visited_objects = len(self.names), {}
        self.visit(tree, path, True, assign)
        if len(self.names) > previous_count:
            return
        description = f"{path or 'the root'} of the checkpoint ({type(tree).__name__})"
        if isinstance(tree, Optimizer):
            text = "has no state yet; create it first: optimizer.build(variables)."
        else:
            text = f"holds no variable, so nothing of it would be saved. {_ADVICE}"
        raise StructureError(f"{description} {text}")

    def visit(self, value: Any, path: str, is_explicit: bool, assign: _Assign) -> None:
        """Note what is in `value`.

        With `is_explicit` the program has asked to save all of it.
        """
        if isinstance(value, DistributedDataset):
            value = value.origin
        if isinstance(value, Variable | Cell):
            self.note(path, value)
        elif is_explicit and (leaf := self._leaf(value, path, assign)) is not None:
            self.note(path, leaf)
        elif value is not None and id(value) not in self.visited_objects:
            # Kept alive: another object could have its number.
            self.visited_objects[id(value)] = value
            if isinstance(value, Nested):
                if value._root is not None:
                    self.visit(value._root, path, True, _refuse_assignment)
                for key, tree in value._trees().items():
                    child_path = f"{path}/{part(key)}" if path else part(key)
                    self.visit(tree, child_path, True, functools.partial(setattr, value, key))
                return
            if _has_state_methods(value) and (is_explicit or not isinstance(value, Dataset)):
                self._visit_state(value, path)
                return
            children = _children(value)
            if isinstance(children, StateTree):
                self.states[path] = state = children.state
                other_names = children.keys() - state.counters.keys() - {"slots"}
                children = state.saved_counters() | {name: children[name] for name in other_names}
            if children is None and is_explicit:
                raise StructureError(
                    f"{path!r} of the checkpoint is {value!r:.60} ({type(value).__name__}), which "
                    f"cannot be saved. {_ADVICE}"
                )
            is_explicit = is_explicit and isinstance(value, Mapping | Sequence)
            places = _places(value, assign) if is_explicit else _refuse_assignment
            for key in sorted(children or (), key=str):
                child_path = f"{path}/{part(key)}" if path else part(key)
                child = (children or {})[key]
                self.visit(child, child_path, is_explicit, functools.partial(places, key))

    def named_optimizers(self) -> list[SavedOptimizer]:
        """Note the slots of optimizers, once the names of all variables are known."""
        names: dict[tuple[int, int], str] = {}
        for name, array in sorted(self.arrays.items()):
            if isinstance(array, Variable):  # of several names the first
                names.setdefault(identity_of(array), name)
        states = self.states.items()
        optimizers = [saved_optimizer(path, state, names, part) for path, state in states]
        for optimizer in optimizers:
            for name, slot in optimizer.slots.items():
                self.note(name, slot)
        return optimizers

    def _leaf(self, value: Any, path: str, assign: _Assign) -> Value | Cell | None:
        if is_generator(value):
            try:
                return generator_value(value)
            except TypeError as error:
                raise StructureError(f"{path!r} of the checkpoint: {error}.") from None
        if isinstance(value, np.ndarray):
            return _array(value, path, assign, self.loose and value.ndim > 0)
        try:
            encoded_value = encode(value)
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

        return Value(encoded_value, decode, write)

    def _visit_state(self, value: Any, path: str) -> None:
        holder = [value.checkpoint_state()]
        was_loose, self.loose = self.loose, True
        previous_names = set(self.names)
        self.visit(holder[0], path, True, functools.partial(holder.__setitem__, 0))
        self.loose = was_loose
        if self.names == previous_names:
            raise StructureError(
                f"checkpoint_state() of {path!r} ({type(value).__name__}) returned nothing to save."
            )
        self.stateful[path] = value, lambda: value.restore_state(holder[0])


def _array(value: Array, path: str, assign: _Assign, free: bool) -> Cell:
    read = functools.partial(as_array, value, path)
    read()  # raises now if the array cannot be saved

    def write(restored_value: Array) -> None:
        if free or restored_value.shape != value.shape or not value.flags.writeable:
            assign(restored_value.copy())
        else:
            np.copyto(value, restored_value)

    return Cell(path, read, write, free=free)


def _places(value: Any, assign: _Assign) -> Callable[[Any, Any], None]:
    """Return what puts an item in its place in a container."""
    if isinstance(value, tuple):
        names = getattr(value, "_fields", range(len(value)))
        items = dict(zip(names, value, strict=True))

        def put(key: Any, item: Any) -> None:
            items[key] = item
            assign(value._replace(**items) if hasattr(value, "_replace") else tuple(items.values()))

        return put
    if isinstance(value, MutableMapping | list) or hasattr(type(value), "__setitem__"):
        return value.__setitem__  # type: ignore[no-any-return]
    if isinstance(value, Mapping):  # to be read only: a dict takes its place
        entries = dict(value)

        def put_entry(key: Any, entry: Any) -> None:
            entries[key] = entry
            assign(entries)

        return put_entry
    return _refuse_assignment


def _has_state_methods(value: Any) -> bool:
    """Tell whether an object says by itself what its state is."""
    kind = type(value)
    return callable(getattr(kind, "checkpoint_state", None)) and hasattr(kind, "restore_state")


def _children(value: Any) -> Mapping[Any, Any] | None:
    """Return what a value holds by key, place or attribute; None if it is not to be looked into."""
    kind = find_array_kind(value)
    if kind is not None and (parts := kind.parts_of(value)) is not None:
        return parts
    attributes = _attributes(value)
    is_of_library = type(value).__module__.startswith("mpistrat.") and hasattr(value, "tree")
    if isinstance(value, Optimizer | Metric) or is_of_library:
        children: Mapping[str, Any] = value.tree()
        return children
    if isinstance(value, Mapping):
        return {**(attributes or {}), **value}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return dict(value._asdict())
    if isinstance(value, Sequence) and not isinstance(value, _TEXTS):
        return {**(attributes or {}), **dict(enumerate(value))}
    if isinstance(value, Set) and any(isinstance(member, Variable) for member in value):
        raise StructureError(
            "a set of the checkpoint holds variables, which have no names there. Give a dict or a "
            "list of them."
        )
    return attributes


def _attributes(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object; None if it has none, or they are its own affair."""
    module = type(value).__module__.partition(".")[0]
    is_closed = module in _CLOSED or module in sys.stdlib_module_names
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


def readable(name: str) -> str:
    """Return a name with its keys as the program has them, where that is clear and printable.

    Example:
      >>> readable("gr%C3%B6%C3%9Fe/dense%2Fkernel/a%3Ab")
      'größe/dense%2Fkernel/a:b'
    """
    parts = [(text, urllib.parse.unquote(text)) for text in name.split("/")]
    return "/".join(
        unquoted_text
        if unquoted_text.isprintable() and not set("/%\ufffd") & set(unquoted_text)
        else text
        for text, unquoted_text in parts
    )


def part(key: Any) -> str:
    """Return a key as a part of a name: no ``/``, and nothing that leads out of a directory."""
    text = urllib.parse.quote(str(key), safe=" ")
    return f"%2E{text[1:]}" if text.startswith(".") else text

"""Optimizers in a checkpoint: what their state is called, and options that a file lacks or adds.

Slots are named by the place of their variable in the checkpoint, as the weights are, so that they
go together. State of an option that only the file or only the program has is an error; what a
partial restore leaves of it begins afresh, as of a new optimizer of the restored weights.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, final

from mpistrat.distribute.variables import Variable
from mpistrat.errors import StructureError
from mpistrat.lockstep.guards import warn
from mpistrat.lockstep.lockstep import Lockstep
from mpistrat.optim.state import State

__all__ = ["SavedOptimizer", "begin_afresh", "changes_text", "saved_optimizer"]

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

"""The state of a run before its steps and after rows.

Steps change it, alike on all ranks, and checkpoints hold all that optimizers change.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final
from weakref import WeakKeyDictionary

import xxhash

from mpistrat.arrays import digest
from mpistrat.checkpoint.saving import list_compared_names, warn_differing_cells
from mpistrat.checkpoint.tree import collect_program_state, identify_variable
from mpistrat.comm.callsite import ranks_text, shorten
from mpistrat.lockstep.guards import warn
from mpistrat.optim.state import State, StateRegistry
from mpistrat.optim.update_plan import has_rates
from mpistrat.strategy.strategy import Strategy
from mpistrat.variables.variable import Variable

_MAX_NAMES = 4
# More steps than a program accumulates gradients over, or begins with at a learning rate of 0.
_MAX_UNCHANGED_STEPS = 1000
_UNCHANGED = (
    "fit: no step so far has changed {names}, so nothing is learned. A step writes to variables by "
    "optimizer.apply_gradients, w.assign_sub(x) or w.assign(x). w.numpy() is a copy, and "
    "`w = w - x` makes w the name of a new array."
)
_REPLACED = (
    "fit: {place}arrays have taken the place of variables in the state, {names}: "
    "`model['w'] = w - x` writes to no variable. Write by optimizer.apply_gradients, "
    "w.assign_sub(x) or w.assign(x)."
)
_UNSAVED = (
    "fit: checkpoints of this run lack {subjects}, which steps have changed, so a program that is "
    "started again continues without these values. Name in state all that steps change: "
    "state={{..., 'optimizer': optimizer}}, after optimizer.build(variables)."
)


@final
class StateCheck:
    """The state of a run before its first step.

    Collective: creation is.

    Args:
      strategy: The strategy.
      state: As `fit` takes it.
      prefix: Where the run is saved, without the number; None for nowhere.
      callbacks: The callbacks that are saved with it, by name.

    Cost: a pass over the state, and another one in each `warn`.
    """

    def __init__(
        self,
        strategy: Strategy,
        state: Mapping[str, Any],
        prefix: Path | None,
        callbacks: Mapping[str, Any],
    ):
        """Keep digests of the state, and how many updates optimizers have made."""
        self._lockstep, self._state = strategy._replicas.lockstep, state
        self._prefix, self._callbacks = prefix, callbacks
        self._optimizer_states = self._lockstep.session.get_instance(StateRegistry).states
        self._update_counts = WeakKeyDictionary(
            {s: s.progress.step for s in self._optimizer_states}
        )
        self._has_unsaved = False
        with self._lockstep.validating_collectively("fit, the state before its first step"):
            entries = self._collect_entries()
            self._digests = _digest_entries(entries)
            self._variable_names = {n for n, e in entries.items() if isinstance(e, Variable)}

    def _collect_entries(self) -> dict[str, Any]:
        """Return the values of the state that a checkpoint could save, by name."""
        return collect_program_state(None, self._state, lambda *_: None).entries

    def warn(self, step_count: int, is_end: bool) -> bool:
        """Warn of a state that no step has changed, and of changes that differ or are not saved.

        Collective. Cost: one handshake, and others to warn.

        Args:
          step_count: How many steps were made.
          is_end: There are no more. Before the end, only 1,000 steps without a change are too many:
            a program may accumulate gradients, or begin with a learning rate of 0.

        Returns:
          Whether there is nothing more to check: the state has changed, or there was a warning.
        """
        lockstep, call = self._lockstep, "fit, the state after a row"
        with lockstep.validating_collectively(call):
            entries = self._collect_entries()
            digests = _digest_entries(entries)
            replaced_names = sorted(
                name
                for name in self._variable_names & entries.keys()
                if not isinstance(entries[name], Variable)
            )
            unsaved_subjects = self._list_unsaved()
            # A replaced variable may be one on other ranks, which compare the same names.
            compared_names = [n for n in list_compared_names(entries) if n not in replaced_names]
            compared_digests = {name: digests[name] for name in compared_names}
            own_digest = xxhash.xxh3_64_digest(b"".join(compared_digests.values()))
            is_changed = not digests or digests != self._digests
        names_digest = xxhash.xxh3_64_hexdigest(repr([[*entries], compared_names]).encode())
        payloads = lockstep.gather_payloads(
            f"{call} of {len(entries)} values {names_digest}",
            bytes([is_changed])
            + own_digest
            + json.dumps([replaced_names, unsaved_subjects]).encode(),
        )
        name_lists = [json.loads(payload[9:]) for payload in payloads]
        names_by_rank, subjects_by_rank = zip(*name_lists, strict=True)
        has_differences = len({payload[1:9] for payload in payloads}) > 1
        is_unchanged = not (any(names_by_rank) or any(payload[0] for payload in payloads))
        is_due = is_end or step_count >= _MAX_UNCHANGED_STEPS
        if any(subjects_by_rank):
            self._has_unsaved = True
            self._warn(_UNSAVED.format(subjects=next(", ".join(s) for s in subjects_by_rank if s)))
        if any(names_by_rank):
            self._warn_replaced(names_by_rank)
        elif is_unchanged and is_due and not self._has_unsaved:
            self._warn(_UNCHANGED.format(names=_join_names([*entries])))
        if has_differences:
            warn_differing_cells(lockstep, "fit", compared_digests, self._prefix)
        return is_due or has_differences or not is_unchanged

    def _list_unsaved(self) -> list[str]:
        """Return what optimizers have changed and checkpoints lack; nothing after a warning."""
        if self._prefix is None or self._has_unsaved:
            return []
        trees = {**self._state, "callbacks": self._callbacks}
        entries = collect_program_state(None, trees, lambda *_: None).entries
        saved_ids = {identify_variable(e) for e in entries.values() if isinstance(e, Variable)}
        subjects: set[str] = set()
        for state in self._optimizer_states:
            if state.progress.step == self._update_counts.get(state, 0):
                continue
            variables = [target.variable for target in state.targets.values()]
            subjects.update(v._label for v in variables if identify_variable(v) not in saved_ids)
            is_saved = identify_variable(state.counters["iterations"]) in saved_ids
            if not is_saved and _needs_saving(state):
                subjects.add(f"the state of {type(state.optimizer).__name__}")
        return shorten(sorted(subjects), _MAX_NAMES)

    def _warn_replaced(self, names_by_rank: Sequence[Sequence[str]]) -> None:
        names = [*dict.fromkeys(itertools.chain(*names_by_rank))]
        pairs = zip(self._lockstep.ranks, names_by_rank, strict=True)
        ranks = [rank for rank, rank_names in pairs if rank_names]
        place_text = "" if len(ranks) == len(names_by_rank) else f"on {ranks_text(ranks)} "
        self._warn(_REPLACED.format(place=place_text, names=_join_names(names)))

    def _warn(self, text: str) -> None:
        warn(self._lockstep, "fit", text)


def _needs_saving(state: State) -> bool:
    """Return whether updates depend on those before by more than the weights."""
    optimizer, targets = state.optimizer, state.targets.values()
    return has_rates(optimizer) or bool(optimizer.loss_scale) or any(t.slots for t in targets)


def _join_names(names: Sequence[str]) -> str:
    return ", ".join(shorten([repr(name) for name in names], _MAX_NAMES))


def _digest_entries(entries: Mapping[str, Any]) -> dict[str, bytes]:
    return {name: digest([entry._storage.array]) for name, entry in entries.items()}

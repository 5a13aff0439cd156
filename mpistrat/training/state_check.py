"""The state of a run before and after its first row: that steps change it, alike on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import xxhash

from mpistrat.arrays import digest
from mpistrat.checkpoint.saving import digest_cells, warn_differing_cells
from mpistrat.checkpoint.tree import collect_program_state
from mpistrat.comm.callsite import get_program_stacklevel, shorten
from mpistrat.lockstep.guards import warn
from mpistrat.strategy.strategy import Strategy
from mpistrat.variables.variable import Variable

_MAX_NAMES = 4
_UNCHANGED = (
    "fit: no step of the first row has changed {names}, so nothing is learned. A step writes to "
    "variables by optimizer.apply_gradients, w.assign_sub(x) or w.assign(x). w.numpy() is a "
    "copy, and `w = w - x` makes w the name of a new array."
)
_REPLACED = (
    "fit: arrays have taken the place of variables in the state, {names}: `model['w'] = w - x` "
    "writes to no variable. Write by optimizer.apply_gradients, w.assign_sub(x) or w.assign(x)."
)


@final
class StateCheck:
    """The state of a run before its first step.

    Args:
      strategy: The strategy.
      state: As `fit` takes it.

    Cost: a pass over the state, and another one in `warn`.
    """

    def __init__(self, strategy: Strategy, state: Mapping[str, Any]):
        """Keep digests of the state."""
        self._lockstep, self._state = strategy._replicas.lockstep, state
        entries = self._collect_entries()
        self._digests = _digest_entries(entries)
        self._variable_names = {n for n, entry in entries.items() if isinstance(entry, Variable)}

    def _collect_entries(self) -> dict[str, Any]:
        """Return the values of the state that a checkpoint could save, by name."""
        return collect_program_state(None, self._state, lambda *_: None).entries

    def warn(self) -> None:
        """Warn of a state that no step has changed, and of values that differ between ranks.

        Collective. Cost: one handshake, and others to warn.
        """
        lockstep, call = self._lockstep, "fit, the state after its first row"
        with lockstep.validating_collectively(call):
            entries = self._collect_entries()
            digests = _digest_entries(entries)
            cell_digests = digest_cells(entries)
            own_digest = xxhash.xxh3_64_digest(b"".join(cell_digests.values()))
            is_changed = not digests or digests != self._digests
        call += f" of {len(entries)} values {xxhash.xxh3_64_hexdigest(repr([*entries]).encode())}"
        payloads = lockstep.gather_payloads(call, bytes([is_changed]) + own_digest)
        replaced_names = [
            name
            for name, entry in entries.items()
            if name in self._variable_names and not isinstance(entry, Variable)
        ]
        if replaced_names:
            self._warn(_REPLACED, replaced_names)
        elif not any(payload[0] for payload in payloads):
            self._warn(_UNCHANGED, [*entries])
        if len({payload[1:] for payload in payloads}) > 1:
            warn_differing_cells(lockstep, "fit", cell_digests)

    def _warn(self, text: str, names: list[str]) -> None:
        names_text = ", ".join(shorten([repr(name) for name in names], _MAX_NAMES))
        stacklevel = 1 + get_program_stacklevel()
        warn(self._lockstep, "fit", text.format(names=names_text), stacklevel=stacklevel)


def _digest_entries(entries: Mapping[str, Any]) -> dict[str, bytes]:
    return {name: digest([entry._storage.array]) for name, entry in entries.items()}

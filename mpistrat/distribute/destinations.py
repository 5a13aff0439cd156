"""Where results are wanted: checked, and as the proof of a call names it."""

from __future__ import annotations

from typing import Any

from mpistrat.distribute.values import DistributedValues
from mpistrat.distribute.variables import Variable
from mpistrat.errors import StructureError

__all__ = ["check_destinations", "checked_pairs", "place"]


def check_destinations(destinations: Any) -> None:
    """Raise StructureError unless results can be wanted there."""
    if isinstance(destinations, DistributedValues | Variable):
        return
    if not isinstance(destinations, str) or not destinations:
        raise StructureError(
            "destinations must be a variable, a distributed value or the label of a device, not "
            f"{destinations!r:.80}."
        )


def checked_pairs(name: str, value_destination_pairs: Any) -> list[tuple[Any, Any]]:
    """Return the pairs of value and destinations as a list.

    Args:
      name: The call that they were given to.
      value_destination_pairs: What was given.

    Raises:
      StructureError: These are no tuples of two, or there are no such destinations.
    """
    try:
        pairs = list(value_destination_pairs)
    except TypeError:
        pairs = [None]
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise StructureError(
            f"{name}: wanted a list of tuples (value, destinations), got "
            f"{value_destination_pairs!r:.80}."
        )
    for _, destinations in pairs:
        check_destinations(destinations)
    return pairs


def place(destinations: Any) -> str:
    """Return what the proof says of the destinations."""
    if isinstance(destinations, Variable):
        return f" to {destinations.spec()}"
    return f" to {destinations!r}" if isinstance(destinations, str) else " to a value"

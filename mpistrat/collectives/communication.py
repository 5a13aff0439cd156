"""What programs can ask of a collective: the size of its messages, its time, its algorithm."""

from __future__ import annotations

import enum
import numbers
from dataclasses import dataclass
from typing import Any, final

__all__ = [
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "as_implementation",
]


class CommunicationImplementation(enum.Enum):
    """Which algorithm moves values.

    - ``AUTO``: whatever is best for the sizes at hand; results may ride in the proof.
    - ``RING``: a reduce-scatter around the ring of ranks, then the sums go around once more.
    - ``NCCL``: the MPI library's own all-reduce, one per message.

    As: ``tf.distribute.experimental.CommunicationImplementation``.
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


CollectiveCommunication = CommunicationImplementation


@final
@dataclass(frozen=True)
class CommunicationOptions:
    """How a collective is to move values; equal on all ranks, and part of what they prove.

    Args:
      bytes_per_pack: Leaves travel together, in reverse order, until a message is larger than this
        many bytes; then the next one begins. A leaf is never cut. 0: the library decides.
      timeout_seconds: Seconds that the collective may take; given to a strategy, that each of its
        calls may take that waits for other ranks, the end of `Strategy.run` too. Then the watchdog
        names the ranks that the others wait for, and the job ends with exit code 75: a rank that is
        blocked inside MPI cannot raise. None: ``MPISTRAT_TIMEOUT`` rules. What takes longer on
        purpose is declared by `Strategy.long_operation`.
      implementation: A `CommunicationImplementation`, or its name in any case.

    Raises:
      ValueError: A number is negative, or the implementation is unknown.

    As: ``tf.distribute.experimental.CommunicationOptions``.

    Example:
      >>> print(CommunicationOptions(bytes_per_pack=1024, implementation="ring"))
      Options(bytes_per_pack=1024,timeout_seconds=None, \
implementation=CommunicationImplementation.RING)
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation = CommunicationImplementation.AUTO

    def __post_init__(self) -> None:
        """Check the values; see the class."""
        nbytes: Any = self.bytes_per_pack
        if isinstance(nbytes, bool) or not isinstance(nbytes, numbers.Integral):
            raise ValueError(f"bytes_per_pack must be an integer, got {nbytes!r:.80}.")
        if nbytes < 0:
            raise ValueError(f"bytes_per_pack must be 0 or more, got {nbytes}.")
        object.__setattr__(self, "bytes_per_pack", int(nbytes))
        seconds: Any = self.timeout_seconds
        if seconds is not None:
            number = isinstance(seconds, numbers.Real) and not isinstance(seconds, bool)
            if not number or not seconds > 0:
                raise ValueError(
                    f"timeout_seconds must be a positive number or None, got {seconds!r:.80}."
                )
            # A whole number stays one, as programs print it.
            whole = isinstance(seconds, numbers.Integral)
            object.__setattr__(self, "timeout_seconds", int(seconds) if whole else float(seconds))
        object.__setattr__(self, "implementation", as_implementation(self.implementation))

    def merge(self, options: CommunicationOptions | None) -> CommunicationOptions:
        """Return these options, with those of `options` that are no defaults in their place.

        Example:
          >>> CommunicationOptions(10, 5.0).merge(CommunicationOptions(7)).timeout_seconds
          5.0
        """
        if options is None:
            return self
        auto = CommunicationImplementation.AUTO
        seconds = options.timeout_seconds
        return CommunicationOptions(
            options.bytes_per_pack or self.bytes_per_pack,
            self.timeout_seconds if seconds is None else seconds,
            self.implementation if options.implementation is auto else options.implementation,
        )

    def __str__(self) -> str:
        """Return all options, as the reference prints them."""
        return (
            f"Options(bytes_per_pack={self.bytes_per_pack},"
            f"timeout_seconds={self.timeout_seconds}, implementation={self.implementation})"
        )


def as_implementation(given: Any) -> CommunicationImplementation:
    """Return the implementation that `given` is or names.

    Raises:
      ValueError: It is unknown.
    """
    if isinstance(given, str):
        found = CommunicationImplementation.__members__.get(given.upper())
        if found is None:
            known = ", ".join(CommunicationImplementation.__members__)
            raise ValueError(
                f"{given!r} is not a valid CommunicationImplementation. Known: {known}."
            )
        return found
    if not isinstance(given, CommunicationImplementation):
        raise ValueError(
            "implementation must be a CommunicationImplementation or its name, not "
            f"{given!r} ({type(given).__name__})."
        )
    return given


def CollectiveHints(
    bytes_per_pack: int = 0, timeout_seconds: float | None = None
) -> CommunicationOptions:
    """Return options; an older name of `CommunicationOptions`.

    As: ``tf.distribute.experimental.CollectiveHints``.
    """
    return CommunicationOptions(bytes_per_pack, timeout_seconds)

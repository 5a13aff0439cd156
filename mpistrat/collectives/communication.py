"""The options of a collective: its time limit, and the dtype between nodes."""

from __future__ import annotations

import enum
import numbers
from dataclasses import dataclass, field
from typing import Any, final

from mpistrat.arrays import is_real


class CommunicationImplementation(enum.Enum):
    """Names of algorithms, which all stand for the library's own: it chooses by sizes and nodes.

    Like: ``tf.distribute.experimental.CommunicationImplementation``.
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


CollectiveCommunication = CommunicationImplementation

# The dtypes in which float32 may be sent between nodes: itself (the default), or one of half the
# size.
WIRES = ("float32", "bfloat16")


@final
@dataclass(frozen=True)
class CommunicationOptions:
    """How a collective moves values.

    Timeout and wire must be equal on all ranks; each call checks this.

    Args:
      bytes_per_pack: A number that is not negative. It has no effect: the library decides.
      timeout_seconds: The seconds that the collective may take. In the options of a strategy, the
        seconds of each of its calls that waits for other ranks, also at the end of `Strategy.run`.
        After that time the watchdog names the ranks that the others wait for, and the job ends with
        exit code 75: a rank that is blocked inside MPI cannot raise. None: ``MPISTRAT_TIMEOUT``
        applies. `Strategy.long_operation` declares operations that take longer on purpose.
      implementation: A `CommunicationImplementation`, or its name in any case. All stand for the
        library's algorithm. In the options of one call, a name other than AUTO also takes the place
        of a `CrossDeviceOps` of the program's own.
      wire: The dtype in which float32 is sent between nodes, in sums and means, also of gradients
        in `Optimizer.apply_gradients`: ``"float32"``, or ``"bfloat16"`` in half the time. With
        bfloat16 the float32 sum of each node is rounded to bfloat16, these sums are added in
        float32 in the order of the nodes, and the result is rounded to bfloat16 once more; 8 bits
        are exact, numbers beyond 3.39e38 become infinite, and all ranks get the same bits. float16
        and bfloat16, which are added in float32, travel in this dtype too. The option does not
        change: reductions on one node, values that are sent with the handshake (about 200 bytes),
        other dtypes (float64, complex, integers), other operations, gathers, `IndexedSlices`,
        weights of an optimizer, and any value where the ranks of a node cannot share memory.

    Raises:
      ValueError: A number is negative, or the implementation or the wire is unknown.

    Like: ``tf.distribute.experimental.CommunicationOptions``.

    Example:
      >>> print(CommunicationOptions(bytes_per_pack=1024, implementation="ring"))
      Options(bytes_per_pack=1024,timeout_seconds=None, \
implementation=CommunicationImplementation.RING)
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation = CommunicationImplementation.AUTO
    wire: str = field(default=WIRES[0], kw_only=True)

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
            if not is_real(seconds) or not seconds > 0:
                raise ValueError(
                    f"timeout_seconds must be a positive number or None, got {seconds!r:.80}."
                )
            # A whole number stays one, as programs print it.
            is_integer = isinstance(seconds, numbers.Integral)
            object.__setattr__(
                self, "timeout_seconds", int(seconds) if is_integer else float(seconds)
            )
        object.__setattr__(self, "implementation", as_implementation(self.implementation))
        if self.wire not in WIRES:
            raise ValueError(f"wire must be one of {', '.join(WIRES)}, got {self.wire!r:.80}.")

    def merge(self, options: CommunicationOptions | None) -> CommunicationOptions:
        """Return these options, overridden by those of `options` that are not defaults.

        Raises:
          ValueError: `options` is of another class.

        Example:
          >>> CommunicationOptions(10, 5.0).merge(CommunicationOptions(7)).timeout_seconds
          5.0
        """
        if options is None:
            return self
        if not isinstance(options, CommunicationOptions):
            raise ValueError(
                f"options must be an instance of CommunicationOptions, got {options!r:.80}."
            )
        auto = CommunicationImplementation.AUTO
        seconds = options.timeout_seconds
        return CommunicationOptions(
            options.bytes_per_pack or self.bytes_per_pack,
            self.timeout_seconds if seconds is None else seconds,
            self.implementation if options.implementation is auto else options.implementation,
            wire=self.wire if options.wire == WIRES[0] else options.wire,
        )

    def __str__(self) -> str:
        """Return all options, as the reference prints them; and the wire, if it is another."""
        wire = "" if self.wire == WIRES[0] else f", wire={self.wire}"
        return (
            f"Options(bytes_per_pack={self.bytes_per_pack},"
            f"timeout_seconds={self.timeout_seconds}, implementation={self.implementation}{wire})"
        )


def as_implementation(implementation: object) -> CommunicationImplementation:
    """Return the member of `CommunicationImplementation` that is given, or named, by a value.

    Raises:
      ValueError: The value is neither a member nor the name of one.
    """
    if isinstance(implementation, str):
        member = CommunicationImplementation.__members__.get(implementation.upper())
        if member is None:
            names = ", ".join(CommunicationImplementation.__members__)
            raise ValueError(
                f"{implementation!r} is not a valid CommunicationImplementation. Known: {names}."
            )
        return member
    if not isinstance(implementation, CommunicationImplementation):
        raise ValueError(
            "implementation must be a CommunicationImplementation or its name, not "
            f"{implementation!r} ({type(implementation).__name__})."
        )
    return implementation


def CollectiveHints(
    bytes_per_pack: int = 0, timeout_seconds: float | None = None
) -> CommunicationOptions:
    """Return options; an older name of `CommunicationOptions`.

    Like: ``tf.distribute.experimental.CollectiveHints``.
    """
    return CommunicationOptions(bytes_per_pack, timeout_seconds)

"""The options of mpistrat, their defaults and their environment variables.

Each field of `Options` is one option. ``MPISTRAT_<FIELD>`` sets it for a process; an unknown
``MPISTRAT_`` name or a value that cannot be read is an error, never ignored.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

from mpistrat.errors import OptionError

PREFIX = "MPISTRAT_"

KEEP = -1  # threads of BLAS: as many as there are without mpistrat

_LONGEST = 1e9  # seconds, which is 31 years; clocks of the system overflow beyond 9.2e9


def _flag(text: str) -> bool:
    flag_values = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
    return flag_values[text.strip().lower()]


def _alarm(text: str) -> str:
    if text not in ("off", "report", "raise"):
        raise ValueError(text)
    return text


def _length(text: str) -> str:
    if text not in ("short", "full"):
        raise ValueError(text)
    return text


def _pairs(text: str) -> str:
    if text and any(pair.count("=") != 1 for pair in text.split(";")):
        raise ValueError(text)
    return text


def _count(text: str) -> int:
    count = int(text)
    if not 0 <= count < 1 << 63:  # more cannot be given to the other ranks
        raise ValueError(text)
    return count


def _blas_threads(text: str) -> int:
    return KEEP if text.strip().lower() == "keep" else _count(text)


def _count_or_none(text: str) -> int:
    return _count(text) if text.strip() else 0  # as a script leaves it that knows of none


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise ValueError(text)
    return min(seconds, _LONGEST)


def _knob(default: Any, parse: Callable[[str], Any], requirement: str) -> Any:
    """Return a field: its default, and how its variable is read."""
    return dataclasses.field(default=default, metadata={"parse": parse, "wanted": requirement})


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of one process.

    Attributes:
      ranks: How many ranks the launcher was asked for; a job of another size does not start.
        0 for what its variables say; 1 if its processes are meant to be jobs of their own, as a
        program that a rank starts.
        ``MPISTRAT_RANKS``; `mpistrat run` sets it.
      record: A file for the exit code, written when all ranks have left. ``MPISTRAT_RECORD``;
        `mpistrat run` sets it, and counts a job that has not written it as failed.
      measure: A file for what the job came to: ranks, nodes, seconds, steps. ``MPISTRAT_MEASURE``;
        `mpistrat scaling` sets it.
      grace: Seconds that a rank which leaves with a failure waits for the others to make a call,
        before it ends the job; in a job of several groups also for other signs of life.
        ``MPISTRAT_GRACE``.
      warn: Seconds after which a rank that the others wait for is named. ``MPISTRAT_WARN``.
      timeout: Seconds after which a job whose ranks wait for one another is ended, with exit code
        75. ``MPISTRAT_TIMEOUT``.
      nan: What happens when a rank is about to give a NaN or infinity to a reduction: ``off``,
        values are not checked; ``report``, a line on stderr says which rank, leaf, index and step;
        ``raise``, every rank raises `NonFiniteError`. ``MPISTRAT_NAN``.
      check_every: Every so many steps (calls of ``run``) the copies of one variable are compared,
        another variable each time; and every so many steps of an iterator, from its first, the
        contents of the batch, if all ranks hold it whole. 0 for never. ``MPISTRAT_CHECK_EVERY``.
      ranks_per_node: Treat so many consecutive ranks as one node, to test what happens between
        nodes. 0 asks MPI which ranks share memory. ``MPISTRAT_RANKS_PER_NODE``.
      map_private: Each rank maps the weights of a `mpistrat.torch.FusedOptimizer` privately, so
        that a node has them once. Off, each rank has its own copy. ``MPISTRAT_MAP_PRIVATE``: 0 or
        1.
      terminal: Whether the output of the job goes to a terminal, although a rank sees a pipe.
        ``MPISTRAT_TERMINAL``: 0 or 1; `mpistrat run` sets it.
      fault: A fault to inject on one rank, for tests of programs; see `mpistrat.testing.inject`.
        ``MPISTRAT_FAULT``.
      traceback: How much is printed of an exception: ``short``, the frames of the program, and two
        of mpistrat at most; ``full``, all. ``MPISTRAT_TRACEBACK``.
      numba: Use the compiled kernels. Off, their NumPy twins do the same work.
        ``MPISTRAT_NUMBA``: 0 or 1.
      threads: How many threads the kernels of a rank may use at once; 0 for its share of the cores
        that it may run on. Results are the same with any number. ``MPISTRAT_THREADS``.
      blas_threads: How many threads BLAS, OpenMP and PyTorch may use at most in a rank. 0 for its
        share of the cores where several ranks of the job may run on the same ones, unless
        ``OMP_NUM_THREADS`` or a variable like it is set; `KEEP` for what they would use otherwise.
        ``MPISTRAT_BLAS_THREADS``: a number, or ``keep``.
    """

    traceback: str = _knob("short", _length, "short or full")
    numba: bool = _knob(True, _flag, "0 or 1")
    threads: int = _knob(0, _count, "a number of threads, or 0 for the cores of the rank")
    blas_threads: int = _knob(0, _blas_threads, "a number of threads, 0 for a share, or keep")
    ranks: int = _knob(0, _count_or_none, "a number of ranks, or empty")
    record: str = _knob("", str, "a file name")
    measure: str = _knob("", str, "a file name")
    grace: float = _knob(30.0, _seconds, "seconds, more than 0")
    warn: float = _knob(60.0, _seconds, "seconds, more than 0")
    timeout: float = _knob(1800.0, _seconds, "seconds, more than 0")
    nan: str = _knob("off", _alarm, "off, report or raise")
    check_every: int = _knob(100, _count, "a number of steps, or 0")
    ranks_per_node: int = _knob(0, _count, "a number of ranks, or 0")
    map_private: bool = _knob(True, _flag, "0 or 1")
    terminal: bool = _knob(False, _flag, "0 or 1")
    fault: str = _knob("", _pairs, "rank=R;call=N;phase=P;do=ACTION")


_KNOBS = {field.name: field.metadata for field in dataclasses.fields(Options)}


def read(env: Mapping[str, str] = os.environ) -> Options:
    """Return the options that an environment asks for.

    Args:
      env: The environment; that of this process if not given.

    Returns:
      Defaults, overridden by the ``MPISTRAT_*`` variables.

    Raises:
      OptionError: A name is unknown or a value does not parse.

    Example:
      >>> read({"MPISTRAT_NUMBA": "0"}).numba
      False
    """
    values: dict[str, Any] = {}
    for name, text in env.items():
        if not name.startswith(PREFIX):
            continue
        field = name[len(PREFIX) :].lower()
        if field not in _KNOBS:
            import difflib  # of no use to a program whose options are known

            close_matches = difflib.get_close_matches(field, _KNOBS, n=1)
            known_names = ", ".join(PREFIX + f.upper() for f in sorted(_KNOBS))
            hint = f" Did you mean {PREFIX}{close_matches[0].upper()}?" if close_matches else ""
            raise OptionError(f"{name} is not an option of mpistrat. Known: {known_names}.{hint}")
        try:
            values[field] = _KNOBS[field]["parse"](text)
        except (KeyError, ValueError):
            raise OptionError(
                f"{name}={text!r} cannot be used; it must be {_KNOBS[field]['wanted']}."
            ) from None
    return Options(**values)


def patience() -> Options:
    """Return the options, or the defaults if they cannot be read.

    The first handshake tells all ranks what is wrong with them.
    """
    try:
        return read()
    except OptionError:
        return Options()

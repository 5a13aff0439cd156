"""Injects faults, to test what a program does when a rank fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mpistrat.comm.session import Session
from mpistrat.comm.world import default_parent
from mpistrat.lockstep.inject import Injection, parse


@contextmanager
def inject(fault: str, comm: Any = None) -> Iterator[Injection]:
    """Make one rank fail in the calls of the body.

    All ranks make this call. It communicates only when a communicator is first used.
    For a whole job, without a change of its program, set ``MPISTRAT_FAULT`` to the same text; calls
    are then numbered as in the messages of mpistrat, from the start of the program.

    Args:
      fault: Pairs ``key=value`` with semicolons between them, such as
        ``rank=1;call=5;phase=proof;do=kill``:

        - ``rank``: the rank that fails.
        - ``call``: in which call of mpistrat, counted from 1 in the body. The end of ``run`` is one
          too.
        - ``phase``: ``before`` the call, which the other ranks do not notice (the default); in its
          ``proof``, the handshake; on the way into its ``payload``; ``after`` the first message
          of the payload has arrived, before it is used; in ``fn``, the function of
          ``run``, of which `call` then is the number; ``exit``, in the last handshake. Small
          values are sent in the handshake, and have no ``payload`` and no ``after``.
        - ``do``: ``raise`` an `InjectedError` or ``exit:K`` by ``sys.exit``, where the code of a
          program runs (``fn``, ``before``, ``after``); ``sleep:S`` seconds; ``bitflip``, in what
          has arrived (``after``); ``kill``, ``stop`` or ``os_exit:K`` the process, which ranks that
          are threads refuse.
      comm: The ranks; None for the default ones.

    Yields:
      An object whose attribute ``happened`` says whether the fault happened on this rank.

    Raises:
      OptionError: The fault cannot be parsed, or cannot happen on these ranks.
      AssertionError: The body ended without the fault having happened.

    Example:
      >>> import mpistrat as ms
      >>> from mpistrat.testing import run_ranks
      >>> def program(comm):
      ...     strategy = ms.MirroredStrategy()
      ...     with inject("rank=1;call=1;do=raise"):
      ...         try:
      ...             strategy.run(lambda: ms.get_replica_context().all_reduce("sum", 1))
      ...         except RuntimeError as error:
      ...             return type(error).__name__
      >>> run_ranks(program, 3)
      ['RemoteError', 'InjectedError', 'RemoteError']
    """
    session = Session.on(default_parent() if comm is None else comm)
    parsed_fault = parse(fault, session.comm)
    if parsed_fault is None:
        raise ValueError("inject needs a fault, got an empty string.")
    injection = Injection(session, parsed_fault, before=session.calls)
    try:
        yield injection
    finally:
        injection.remove()
    if injection.here and not injection.happened and parsed_fault.phase != "exit":
        raise AssertionError(
            f"rank {parsed_fault.rank}: the fault {fault!r} has not happened; the body made "
            f"{session.calls - injection.before} calls."
        )

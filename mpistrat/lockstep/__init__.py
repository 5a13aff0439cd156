"""Agreement: all ranks make the same call, or all of them raise.

Every collective call begins with the *handshake*, one small exchange of one MPI signature whatever
a rank calls, so it cannot hang itself. The rooms above are promised that after a handshake all
ranks are in the same call, with the same structure, shapes and dtypes, or all have raised: a rank
that fails while it prepares a call (a bad dtype, a bad axis) still takes part in the handshake with
an error flag (`Lockstep.validating_collectively`), so an error on one rank is an error on all, and
the process continues. A failure after the handshake, mostly lack of memory, comes while others wait
in the middle of the same call and cannot learn of it: the rank prints it and ends the job.

A collective belongs to the thread that made the first strategy of the session, and to its process;
another one gets `StrategyError` at once. The first handshake of a session compares versions and
options. The last one is leaving: normal end, exception, ``sys.exit`` and Ctrl-C all lead through
it, and the ranks agree on one exit code. Every ``MPISTRAT_CHECK_EVERY`` steps the copies of one
variable are compared by checksum, another one each time.

Begin with `frame`, which has the bytes of a handshake, then `handshake.Lockstep.handshake`.

- `ranks`: the ranks that make the calls, the state of these, Ctrl-C, and the watched communicator.
- `frame`: the bytes of a handshake. `handshake`: the handshake itself.
- `mismatch`: the errors of calls that differ or fail. `tracebacks`: how exceptions are shown.
- `startup`: the first handshake. `shutdown`: the last one.
- `exits`: the ways to the last handshake. `ending`: the end of a process and of the job.
- `guards`: copies that drift, and warnings for all ranks. `inject`: faults on purpose.
"""

"""Agreeing: all ranks make the same call, or all of them raise.

Before each collective call the ranks exchange 256 bytes each. This handshake shows that they make
the same call, with the same structure, shapes and dtypes.

- `ranks`: the ranks that make the calls, and the state that these have come to.
- `lockstep`: the handshake; `frame`: its bytes; `mismatch`: the error when it fails.
- `startup`, `shutdown`, `exits`: the first handshake, the last one, and the ways to it.
- `interrupts`: Ctrl-C, kept until a call. `abort`: what fails between a handshake and the end of
  its call. `guards`: copies that drift, and warnings of all ranks. `watched`: the communicator, as
  the board sees it used. `inject`: faults on purpose.
"""

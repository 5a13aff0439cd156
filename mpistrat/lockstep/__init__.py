"""Agreeing: all ranks make the same call, or all of them raise.

- `ranks`: who makes the calls, and what they have come to.
- `lockstep`: the proof, before any payload moves; `frame`: its bytes.
- `mismatch`: what to say when it fails.
- `startup`, `shutdown`, `exits`: the first proof, the last one, and the ways to it.
- `interrupts`: Ctrl-C, kept until a call. `abort`: what fails between a proof and the end of its
  call. `guards`: copies that drift, and warnings of all ranks. `watched`: the communicator, as the
  board sees it used. `inject`: faults on purpose.
"""

"""Agreeing: all ranks make the same call, or all of them raise.

- `lockstep`: the proof, before any payload moves.
- `mismatch`: what to say when it fails.
- `startup`, `shutdown`, `exits`: the first proof, the last one, and the ways to it.
- `interrupts`: Ctrl-C, kept until a call. `abort`: what fails between a proof and the end of its
  call. `guards`: copies that drift, and warnings of all ranks. `watched`: the communicator, as the
  board sees it used. `inject`: faults on purpose.
"""

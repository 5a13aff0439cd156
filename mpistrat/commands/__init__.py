"""The subcommands of ``mpistrat``, one module each.

A module has a docstring, whose first line is the help, `options`, which declares the arguments, and
`main`, which returns the exit code. The work itself is done by the library, where a test can call
it; a subcommand imports it when it runs, so that ``mpistrat --help`` answers at once.
"""

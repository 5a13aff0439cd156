"""Whole programs to run, read and copy.

- `digits`: trains a classifier of handwritten digits: ``python -m mpistrat.examples.digits``.

Modules beside it hold what has nothing to do with ranks: `mlp` the mathematics, `progress` what is
shown while it runs, `curves` the picture.
"""

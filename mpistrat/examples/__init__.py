"""Whole programs to run, read and copy.

- `digits`: trains a classifier of handwritten digits: ``python -m mpistrat.examples.digits``.
- `text`: trains a language model on Python's source text, with all that a longer run wants:
  ``python -m mpistrat.examples.text``.

Modules beside them hold what has nothing to do with ranks: `mlp` and `text_model` the mathematics,
`progress` what is shown while they run, `curves` the pictures.
"""

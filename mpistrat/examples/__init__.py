"""Whole programs to run, read and copy: data, a model, a step, options, a call of `mpistrat.fit`.

- `digits`: trains a classifier of handwritten digits: ``python -m mpistrat.examples.digits``.
- `digits_jax`: the same with JAX and optax: ``python -m mpistrat.examples.digits_jax``.
- `text`: trains a language model on Python's source text, with schedule, clipping, averages of the
  weights and early stopping: ``python -m mpistrat.examples.text``.
- `language_model_torch`: trains a transformer of PyTorch on the same text:
  ``python -m mpistrat.examples.language_model_torch``.

All of them give the same result on any number of ranks, and continue with ``--checkpoint`` where
they were stopped. Begin with `digits`. The other modules know nothing of training: `mlp` and
`text_model` have the mathematics, `text_data` the text, `settings` the options of a command line.
"""

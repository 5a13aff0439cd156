"""A callback of `fit` that writes the rows of the history as TensorBoard files."""

from __future__ import annotations

import importlib
import os
from typing import Any, final

from mpistrat.strategy.shared_state import once
from mpistrat.training.run import TrainingRun

_FLUSH_SECONDS = 5  # until a row can be seen


@final
class TensorBoard:
    """Writes each row of the history to TensorBoard files; the first rank does.

    It needs tensorboardX (``pip install 'mpistrat[tensorboard]'``), and neither TensorFlow nor
    PyTorch. A run that continues hides the points that come after its checkpoint.

    Args:
      directory: Where the files go.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        """Remember the directory; files are made with the first row."""
        self._directory = os.fspath(directory)
        self._writer: Any = None

    def on_epoch(self, run: TrainingRun) -> None:
        """Write a row. Collective; an error on the first rank is raised on all.

        Args:
          run: The training run.
        """
        once(self._write, run)

    def _write(self, run: TrainingRun) -> None:
        library: Any = importlib.import_module("tensorboardX")
        number = int(run.history["seconds"][0][-1])
        if self._writer is None:
            self._writer = library.SummaryWriter(
                self._directory, purge_step=number, flush_secs=_FLUSH_SECONDS
            )
        for name, value in run.metrics.items():
            self._writer.add_scalar(name, value, number)

    def on_end(self, run: TrainingRun) -> None:
        """Close the file, so that the last row is in it.

        Args:
          run: The training run.
        """
        if self._writer is not None:
            self._writer.close()
            self._writer = None

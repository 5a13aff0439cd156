"""One training run: its steps, the rows of its history, its checkpoints, and its end."""

from __future__ import annotations

import importlib.util
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np

from mpistrat.checkpoint.atomic import find_best_index
from mpistrat.checkpoint.checkpoint import Checkpoint
from mpistrat.checkpoint.history import History
from mpistrat.checkpoint.manager import CheckpointManager, read_notice_flag, save_and_leave
from mpistrat.checkpoint.planned import format_duration, preemption
from mpistrat.data.distributed import DistributedIterator
from mpistrat.errors import CheckpointError, StructureError
from mpistrat.lockstep.ranks import is_interrupt_unhandled
from mpistrat.metrics import Mean
from mpistrat.strategy.strategy import Strategy
from mpistrat.training.evaluation import WeightedSums
from mpistrat.training.progress import ProgressBar
from mpistrat.training.results import add_results, count_rows
from mpistrat.training.state_check import StateCheck

# Names that a run gives to what it saves itself.
RESERVED = ("callbacks", "data", "epoch", "history", "is_stopped", "metrics", "settings", "step")
_NO_LIMIT = 10**15  # epochs, where steps end the run


class Interval(NamedTuple):
    """How often something is done.

    Attributes:
      period: Every so many.
      unit: ``"epoch"`` or ``"step"``.
    """

    period: int
    unit: str


class FitOptions(NamedTuple):
    """The arguments of `fit` that say how to train; see there.

    Attributes:
      epochs: The last epoch; None where `steps` end the run.
      steps: The last step, or None.
      metrics: Names of the results of the step.
      validate_every: When a row of the history is complete.
      directory: Where checkpoints and curves go; None for nowhere.
      save_interval: How often the run is saved, as `CheckpointManager` takes it.
      max_to_keep: How many checkpoints stay.
      monitor: The curve that says which weights are best.
      mode: ``"min"`` if its low values are good, ``"max"`` if its high ones are.
      patience: How many rows without a better one end the run; None for any number.
      keep_best: Whether the best weights are saved too.
      restore_best: Whether they are restored at the end.
      verbose: Whether the first rank shows progress.
    """

    epochs: int | None
    steps: int | None
    metrics: tuple[str, ...]
    validate_every: Interval
    directory: Path | None
    save_interval: Any
    max_to_keep: int | None
    monitor: str
    mode: str
    patience: int | None
    keep_best: bool
    restore_best: bool
    verbose: bool


@final
class TrainingRun:
    """A training run, as callbacks of `fit` see it.

    Attributes:
      strategy: The strategy.
      directory: Where checkpoints and curves go, or None.
      history: The rows so far.
      metrics: The newest row: means by name.
      step: How many steps were made, those of earlier starts included.
      epoch: How many whole epochs were passed.
      is_stopped: Whether `stop` was called, in this start or an earlier one.
    """

    def __init__(self, strategy: Strategy, directory: Path | None):
        """Begin a run; `fit` does.

        Args:
          strategy: The strategy.
          directory: Where checkpoints and curves go, or None.
        """
        self.strategy, self.directory = strategy, directory
        with strategy.scope():
            self.history = History()
        self.metrics: dict[str, float] = {}
        self.step = self.epoch = 0
        self.is_stopped = False

    def stop(self) -> None:
        """End the run after this step, or this row; call it alike on all ranks."""
        self.is_stopped = True


class ReplicaFunction(NamedTuple):
    """A function and the batches that it gets.

    Attributes:
      function: Replica code: called with a part of a batch, it returns a dict of results.
      batches: Distributed batches.
    """

    function: Callable[[Any], Any]
    batches: Any


class SavedObjects(NamedTuple):
    """What a run saves of the program's.

    Attributes:
      state: What the step changes, by name.
      callbacks: Objects that are called.
      settings: Options of the program that the run must keep.
    """

    state: Mapping[str, Any]
    callbacks: Sequence[Any]
    settings: Mapping[str, Any]


@final
class TrainingLoop:
    """The loop of `fit`.

    Collective: creation is.

    Args:
      training: The step, and what it is trained on.
      validation: The function that judges, and its batches; or None.
      objects: What is saved of the program's.
      options: How to train.
      strategy: The strategy.
    """

    def __init__(
        self,
        training: ReplicaFunction,
        validation: ReplicaFunction | None,
        objects: SavedObjects,
        options: FitOptions,
        strategy: Strategy,
    ):
        """Create what the run saves."""
        self.run = TrainingRun(strategy, options.directory)
        self._strategy, self._options, self._objects = strategy, options, objects
        self._training, self._validation = training, validation
        with strategy.scope():
            self._means = {name: Mean(name) for name in options.metrics}
        batches = getattr(training.batches, "distributed", training.batches)
        self._dataset = getattr(batches, "_origin", batches)  # one replica alone gets the dataset
        self._manager: CheckpointManager | None = None
        self._is_stale = self._has_unsaved = self._is_best = False
        self._rows_since_best = 0
        self._best_value: float | None = None
        self._last_save: Any = None
        if options.directory is not None:
            self._create_manager(options.directory)
        self._row_start = (0.0, 0.0, 0.0)
        self._row_step = self._first_step = 0
        self._state_check: StateCheck | None = None

    def _create_manager(self, directory: Path) -> None:
        options = self._options
        stateful = {
            f"{number} {type(callback).__name__}": callback
            for number, callback in enumerate(self._objects.callbacks)
            if hasattr(callback, "checkpoint_state")
        }
        self._checkpoint: Any = Checkpoint(
            **self._objects.state,
            metrics=self._means,
            history=self.run.history,
            data=self._dataset,
            callbacks=stateful,
            settings=dict(self._objects.settings),  # restoring changes it
            step=0,
            epoch=0,
            is_stopped=0,
        )
        save_interval, validation_interval = options.save_interval, options.validate_every
        if save_interval is None and validation_interval.unit == "step":
            save_interval = f"{validation_interval.period} steps"
        self._manager = CheckpointManager(
            self._checkpoint,
            directory,
            options.max_to_keep,
            every=save_interval,
            keep_best=options.monitor if options.keep_best else None,
            best_mode=options.mode,
        )
        self._last_save = self._manager.last_save

    @property
    def _has_all_steps(self) -> bool:
        options = self._options
        return (options.steps is not None and self.run.step >= options.steps) or (
            options.epochs is not None and self.run.epoch >= options.epochs
        )

    @property
    def is_over(self) -> bool:
        """Whether all steps or epochs were made, the monitored curve is stale, or `stop` came."""
        return self.run.is_stopped or self._has_all_steps or self._is_stale

    def _explain_early_end(self) -> str:
        """Why the run is over before its last step; empty if it is not."""
        if self._has_all_steps or not self.is_over:
            return ""
        monitor, unit = self._options.monitor, self._options.validate_every.unit
        if self.run.is_stopped:
            return "run.stop() was called"
        if self._best_value is None:
            return f"{monitor} has had no value but NaN"
        numbers, values = self.run.history[monitor]
        best_number = int(numbers[values.tolist().index(self._best_value)])
        count = int(numbers[-1]) - best_number
        return (
            f"{monitor} has had no new best value for {count} {unit}{'s' * (count > 1)}; "
            f"the best is that of {unit} {best_number}"
        )

    def _report_start(self, path: str) -> None:
        """Print that the run continues, or why it does not."""
        directory, reason = self.run.directory, self._explain_early_end()
        if not self.is_over:
            text = f"continues after step {self.run.step}, as saved in {path}"
        elif not reason:
            text = f"the run in {directory} has ended after step {self.run.step}; "
            text += "give more epochs or steps to continue it"
        elif self.run.is_stopped:
            text = f"the run in {directory} ended early: {reason}; give another directory"
        else:
            text = f"the run in {directory} ended early: {reason}; give a larger patience to "
            text += "continue it"
        self._progress.print_line(text)

    def _report_early_end(self) -> None:
        """Print why the run stops before its last step, if it does."""
        if reason := self._explain_early_end():
            unit = "step" if self.run.is_stopped else self._options.validate_every.unit
            number = self.run.epoch if unit == "epoch" else self.run.step
            note = " (restored)" if self._options.restore_best and not self.run.is_stopped else ""
            self._progress.print_line(f"stops after {unit} {number}: {reason}{note}")

    def restore(self) -> str | None:
        """Restore the newest checkpoint, if there is one; its path. Collective.

        Raises:
          StructureError: The run was begun with other objects.
          ValueError: The run was begun with other settings.
        """
        if self._manager is None:
            return None
        try:
            path = self._manager.restore_or_initialize()
        except StructureError as error:
            reason = str(error).partition(". ")[0]
            raise StructureError(
                f"fit: the run in {self.run.directory} was begun with other state, metrics or "
                f"callbacks: {reason}. Continue it with the same ones; or begin another run from "
                "its weights, in another directory: call ms.Checkpoint(**state).restore("
                f"{self._manager.latest_checkpoint!r}, partial=True) before fit."
            ) from error
        saved = self._checkpoint
        if saved.settings != dict(self._objects.settings):
            names = sorted({*saved.settings, *self._objects.settings})
            differences = ", ".join(
                f"{name}={saved.settings.get(name)!r}, not {self._objects.settings.get(name)!r}"
                for name in names
                if saved.settings.get(name) != self._objects.settings.get(name)
            )
            raise ValueError(
                f"fit: the run in {self.run.directory} was begun with {differences}. Give the same "
                "settings, or another directory."
            )
        self.run.step, self.run.epoch = int(saved.step), int(saved.epoch)
        self.run.is_stopped = bool(saved.is_stopped)
        self._find_best_row()
        return path

    def _find_best_row(self) -> None:
        """Count the values of the monitored curve after the best one, all while they are NaN."""
        monitor, mode, patience = self._options.monitor, self._options.mode, self._options.patience
        if monitor in self.run.history.names:
            values = self.run.history[monitor][1].tolist()
            best_index = find_best_index(values, mode)
            self._best_value = None if best_index is None else values[best_index]
            self._rows_since_best = len(values) - (0 if best_index is None else 1 + best_index)
        self._is_stale = patience is not None and self._rows_since_best >= patience

    def train(self) -> None:
        """Make all steps that are left. Collective."""
        path = self.restore()
        options, total = self._options, self._total_steps()
        is_shown = options.verbose and self._strategy.rank == 0
        with self._leaving(), ProgressBar(total, is_shown, self.run.step) as self._progress:
            if path is not None:
                self._report_start(path)
            is_over_at_start = self.is_over
            self._begin_row()
            if self._is_row_open():
                self._close_row()
                self._save_best()
            if not self.is_over:
                manager, self._first_step = self._manager, self.run.step
                prefix = None if manager is None else manager._directory / manager._name
                callbacks = {} if manager is None else self._checkpoint.callbacks
                state = self._objects.state
                self._state_check = StateCheck(self._strategy, state, prefix, callbacks)
                self._make_steps()
            self._finish()
            if not is_over_at_start:
                self._report_early_end()

    def _is_row_open(self) -> bool:
        """Whether the last start ended between a row's last step and its validation."""
        rows = [self.run.history[name][0][-1] for name in self.run.history.names]
        last_row = max(rows, default=0)
        interval = self._options.validate_every
        if interval.unit == "epoch":
            return self.run.epoch > last_row
        return self.run.step > last_row and self.run.step % interval.period == 0

    def _total_steps(self) -> int | None:
        options = self._options
        if options.steps is not None:
            return options.steps
        count = self._dataset.cardinality()
        return None if count < 0 or options.epochs is None else count * options.epochs

    def _leaving(self) -> AbstractContextManager[Any]:
        """A context in which a notice of preemption, or Ctrl-C, saves the run and ends the job."""
        if self._manager is None:
            return nullcontext()
        signals = ["SIGUSR1", "SIGTERM"]
        if is_interrupt_unhandled():
            signals.append("SIGINT")
        # Ranks that are threads of one process get no signals.
        is_main = threading.current_thread() is threading.main_thread()
        leaving = preemption(self._manager, signals=signals if is_main else ())
        leaving._is_of_fit = True
        return leaving

    def _remaining_batches(self) -> Iterator[Any]:
        epochs = self._options.epochs
        left = _NO_LIMIT if epochs is None else epochs - self.run.epoch
        if self._manager is not None:
            epochs = self._dataset.epoch + left
            yield from self._manager.resume(
                self._training.batches, epochs, on_epoch_end=self._end_epoch
            )
            return
        for _ in itertools.repeat(None, left):
            yield from self._training.batches
            if self._end_epoch():
                return

    def _make_steps(self) -> None:
        means, step_function = self._means, self._training.function
        interval, has_manager = self._options.validate_every, self._manager is not None
        run, training_run, progress = self._strategy.run, self.run, self._progress
        observers = [c.on_step for c in self._objects.callbacks if hasattr(c, "on_step")]

        def replica_step(batch: Any) -> None:
            add_results("step", means, step_function(batch), count_rows(batch))

        for batch in self._remaining_batches():
            if has_manager:
                self._note_save()
            if self.is_over:  # before the batch is used, so it does not count
                break
            run(replica_step, args=(batch,))
            training_run.step += 1
            progress.advance()
            if has_manager:
                self._checkpoint.step = training_run.step
                self._has_unsaved = True
            if interval.unit == "step" and training_run.step % interval.period == 0:
                self._close_row()
            for observe in observers:
                observe(training_run)
            if has_manager:
                self._checkpoint.is_stopped = int(training_run.is_stopped)
            if self._is_best:
                self._save_best()

    def _end_epoch(self) -> bool:
        """Count the epoch, complete its row; whether the run is over. Collective."""
        self.run.epoch += 1
        if self._manager is not None:
            self._checkpoint.epoch = self.run.epoch
        if self._options.validate_every.unit == "epoch":
            self._close_row()
            self._save_best()
        return self.is_over

    def _begin_row(self) -> None:
        self._row_start = (time.perf_counter(), *self._strategy.time_spent())
        self._row_step = self.run.step

    def _close_row(self) -> None:
        """Append a row to the history: means of the steps since the last, and the validation."""
        self._check_state()
        interval = self._options.validate_every
        times = np.subtract((time.perf_counter(), *self._strategy.time_spent()), self._row_start)
        number = self.run.epoch if interval.unit == "epoch" else self.run.step
        row = {name: float(mean.result()) for name, mean in self._means.items()}
        is_due = interval.unit == "step" or number % interval.period == 0
        if self._validation is not None and is_due:
            row |= {f"validation/{name}": value for name, value in self._validate().items()}
        self.run.metrics = row
        names = ("seconds", "waiting", "communicating")
        self.run.history.append(number, **row, **dict(zip(names, times.tolist(), strict=True)))
        for mean in self._means.values():
            mean.reset_state()
        self._has_unsaved = True
        self._find_best_row()
        self._check_monitor(row, is_validated=self._validation is None or is_due)
        self._is_best = (
            self._options.keep_best and self._options.monitor in row and self._rows_since_best == 0
        )
        if self.run.directory is not None:
            self.run.history.write_csv(self.run.directory / "history.csv")
        self._progress.print_line(self._line(number, float(times[0])))
        for callback in self._objects.callbacks:
            if hasattr(callback, "on_epoch"):
                callback.on_epoch(self.run)
        self._begin_row()

    def _check_state(self, is_end: bool = False) -> None:
        """Warn of steps that change nothing, or not alike on all ranks."""
        step_count = self.run.step - self._first_step
        if (
            self._state_check is not None
            and step_count  # none where a start ended before its row
            and self._state_check.warn(step_count, is_end)
        ):
            self._state_check = None

    def _save_best(self) -> None:
        """Save the run if its last row is the best; called when callbacks have seen that row."""
        if self._is_best and self._manager is not None:
            self._is_best = False
            self._checkpoint.is_stopped = int(self.run.is_stopped)
            self._manager.save(metrics=self.run.metrics)
            self._note_save()

    def _check_monitor(self, row: Mapping[str, float], is_validated: bool) -> None:
        """Raise where the curve that says which weights are best does not exist."""
        options = self._options
        needs_monitor = options.patience is not None or options.keep_best
        if needs_monitor and is_validated and options.monitor not in row:
            raise StructureError(
                f"fit: monitor={options.monitor!r} is not a curve of this run; it has {[*row]}."
            )

    def _validate(self) -> dict[str, float]:
        """Means of the validation data. A notice of preemption saves the run at once."""
        if self._validation is None:
            return {}
        score, batches = self._validation
        sums, manager = WeightedSums("validate"), self._manager

        def add_part(part: Any) -> None:
            sums.add(score(part), count_rows(part))

        convert = getattr(batches, "convert", lambda element: element)
        iterator = iter(getattr(batches, "distributed", batches))
        is_distributed = isinstance(iterator, DistributedIterator)
        if manager is not None and is_distributed:
            iterator._get_local_bits = lambda: read_notice_flag(manager)
        for element in iterator:
            if manager is not None:
                flags = iterator._all_bits if is_distributed else read_notice_flag(manager)
                if flags:
                    save_and_leave(manager)
            self._strategy.run(add_part, args=(convert(element),))
        return sums.means(self._strategy)

    def _line(self, number: int, seconds: float) -> str:
        """What is printed about a row."""
        options, unit = self._options, self._options.validate_every.unit
        last = options.epochs if unit == "epoch" else options.steps
        text = f"{unit} {number:{len(str(last or number))}}" + (f" of {last}" if last else "")
        text += "".join(f"   {name} {value:.4f}" for name, value in self.run.metrics.items())
        rate = (self.run.step - self._row_step) / seconds if seconds > 0 else 0.0
        total = self._total_steps()
        if rate:
            text += f"   {rate:,.1f} steps/s"
        if rate and total is not None and total > self.run.step:
            text += f"   {format_duration((total - self.run.step) / rate)} left"
        return text

    def _note_save(self) -> None:
        """Call the callbacks, if the manager has saved since the last step."""
        manager = self._manager
        if manager is not None and manager.last_save is not self._last_save:
            self._last_save, self._has_unsaved = manager.last_save, False
            for callback in self._objects.callbacks:
                if hasattr(callback, "on_save"):
                    callback.on_save(self.run, manager.latest_checkpoint)

    def _finish(self) -> None:
        """Complete the last row, save, draw the curves, and restore the best weights."""
        interval = self._options.validate_every
        if interval.unit == "step" and self.run.step > self._row_step:
            self._close_row()
        self._check_state(is_end=True)
        if self._manager is not None and self._options.directory is not None:
            self._note_save()
            self._save_best()
            if self._has_unsaved:
                self._manager.save()
                self._note_save()
            self._manager.wait()
            if self.run.history.names and importlib.util.find_spec("matplotlib") is not None:
                self._draw(self._options.directory / "curves.png")
        if self._options.restore_best:
            self._restore_best()
        for callback in self._objects.callbacks:
            if hasattr(callback, "on_end"):
                callback.on_end(self.run)

    def _restore_best(self) -> None:
        """Restore the state of the best row; the position in the data and the history stay."""
        manager, best_value = self._manager, self._best_value
        path = None if manager is None else manager.best_checkpoint
        if manager is None or path is None or manager._best_value != best_value:
            monitor = self._options.monitor
            reason = (
                f"the curve {monitor!r} has no value but NaN"
                if best_value is None
                else f"the best row, with {monitor} {best_value:.6g}, was made without keep_best, "
                "or its checkpoint was removed or is damaged"
            )
            raise CheckpointError(
                f"fit: restore_best: {self.run.directory} has no checkpoint of the best row: "
                f"{reason}. The variables have the last weights."
            )
        with self._strategy.scope():
            Checkpoint(**self._objects.state).restore(path, partial=True)

    def _draw(self, path: Path) -> None:
        names = [
            name
            for name in self.run.history.names
            if name not in ("seconds", "waiting", "communicating")
        ]
        panels: dict[str, list[str]] = {}
        for name in names:
            panels.setdefault(name.removeprefix("validation/"), []).append(name)
        self.run.history.draw(path, panels, x=self._options.validate_every.unit)


def refuse_reserved(state: Mapping[str, Any]) -> None:
    """Raise where a program uses a name that a run uses itself.

    Raises:
      StructureError: There is such a name in `state`.
    """
    reserved = [name for name in state if name in RESERVED]
    if reserved:
        raise StructureError(
            f"fit: state has the names {reserved}, which the run uses for what it saves itself: "
            f"{', '.join(RESERVED)}. Give other names."
        )

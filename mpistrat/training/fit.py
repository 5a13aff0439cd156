"""`fit`: trains a model for some epochs or steps, with all that a training program repeats."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpistrat.arrays import check_int
from mpistrat.checkpoint.atomic import check_mode
from mpistrat.checkpoint.history import History
from mpistrat.data.sources import INFINITE
from mpistrat.errors import DataError
from mpistrat.strategy.strategies import resolve_strategy
from mpistrat.strategy.strategy import Strategy
from mpistrat.training.evaluation import REMEDY, distribute
from mpistrat.training.run import (
    FitOptions,
    Interval,
    ReplicaFunction,
    SavedObjects,
    TrainingLoop,
    refuse_reserved,
)

_INTERVAL = re.compile(r"([1-9]\d*) *(epoch|step)s?")
_HISTORY_COLUMNS = ("step", "seconds", "waiting", "communicating")  # beside metrics
_HOOKS = ("on_step", "on_epoch", "on_save", "on_end")


def parse_interval(text: Any) -> Interval:
    """An interval from a text such as ``"1 epoch"`` or ``"500 steps"``.

    Raises:
      ValueError: It is another text.

    Example:
      >>> parse_interval("500 steps")
      Interval(period=500, unit='step')
    """
    match = _INTERVAL.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise ValueError(
            f"fit: validate_every must be as '1 epoch' or '500 steps', got {text!r:.60}."
        )
    return Interval(int(match[1]), match[2])


def fit(
    step: Callable[[Any], Any],
    data: Any,
    *,
    state: Mapping[str, Any],
    epochs: int | None = None,
    steps: int | None = None,
    metrics: Sequence[str] = ("loss",),
    validate: Callable[[Any], Any] | None = None,
    validation_data: Any = None,
    validate_every: str = "1 epoch",
    directory: str | os.PathLike[str] | None = None,
    every: float | str | None = None,
    max_to_keep: int | None = 2,
    monitor: str | None = None,
    mode: str = "min",
    patience: int | None = None,
    keep_best: bool = False,
    restore_best: bool = False,
    callbacks: Sequence[Any] = (),
    settings: Mapping[str, Any] | None = None,
    strategy: Strategy | None = None,
    verbose: bool = True,
) -> History:
    """Train, validate, save and continue.

    Collective: all ranks call it with the same arguments, in cross-replica code. ::

        def step(batch):
            losses, gradients = model_gradients(batch)
            optimizer.apply_gradients(zip(gradients, model), weight=len(losses))
            return {"loss": losses}

        optimizer.build(model)  # its state is part of the checkpoint
        history = ms.fit(step, dataset, epochs=20, directory="runs/a",
                         state={"model": model, "optimizer": optimizer})

    With a directory the run is saved there, and a program that is started again continues after the
    step that was saved last, in the middle of an epoch too, with any number of ranks. A job that is
    about to be ended saves and exits with code 42 (see `preemption`), also during a validation,
    which then comes first in the next start. So does Ctrl-C, with KeyboardInterrupt in place of the
    exit; a second Ctrl-C does not wait for the save. The directory also gets ``history.csv`` after
    each row, and ``curves.png`` at the end if matplotlib is installed.

    Args:
      step: Replica code. It is called with this replica's part of each batch, which may have no
        rows, and changes `state`. It returns a dict with a value for each name in `metrics`: an
        array with one number for each example, or a pair ``(mean, weight)``.
      data: A batched `Dataset`, which is distributed here, or what
        ``strategy.experimental_distribute_dataset`` or ``mpistrat.torch.batches`` returned.
      state: All objects that `step` changes, by name, as `Checkpoint` takes them. Without a
        directory too, their ``checkpoint_state`` is called before the first step and after rows,
        until the state has changed.
      epochs: The number of the last epoch, those of earlier starts included.
      steps: The number of the last step, in place of `epochs` or before their end.
      metrics: Names of the results of `step`.
      validate: Replica code as `step`, which changes nothing. The history gets its results as
        ``"validation/NAME"``.
      validation_data: A batched `Dataset`, or one that is distributed already.
      validate_every: ``"1 epoch"``, ``"2 epochs"``, ``"500 steps"``. In epochs, the history has a
        row for each epoch; in steps, a row for each of these intervals.
      directory: Where checkpoints, ``history.csv`` and ``curves.png`` go. None saves nothing.
      every: How often the run is saved, as `CheckpointManager` takes it: ``"10 min"``, ``"500
        steps"``. None for the end of each epoch, or each interval of steps. The end of the run is
        saved too.
      max_to_keep: How many checkpoints stay; None for all.
      monitor: The curve that says which weights are best, such as ``"validation/loss"``; None for
        ``"validation/loss"`` or ``"loss"`` where `patience` or `keep_best` need one.
      mode: ``"min"`` if its low values are good, ``"max"`` if its high ones are.
      patience: After how many values of that curve without a new best one the run ends. A run that
        has ended so does not continue when it is started again.
      keep_best: Save the run at each new best value too. The best checkpoint stays beside the
        `max_to_keep` newest, as with ``CheckpointManager(keep_best=monitor, best_mode=mode)``.
      restore_best: Restore `state` from it at the end of this call; it is saved as by `keep_best`.
      callbacks: Objects with some of the methods ``on_step(run)``, ``on_epoch(run)`` (after each
        row of the history), ``on_save(run, path)`` and ``on_end(run)``; `run` is a `TrainingRun`.
        All ranks call them. One with ``checkpoint_state`` and ``restore_state`` is saved too.
      settings: Options of the program that a run must keep, such as the learning rate: a start with
        other ones is refused.
      strategy: The strategy; None for the current one.
      verbose: Show progress on the first rank: a bar on a terminal, and a line for each row.

    Returns:
      The `History`: a curve for each name in `metrics`, for each result of `validate`, and
      ``seconds``, ``waiting`` and ``communicating`` of the first rank. Its steps are the numbers of
      epochs, or of steps.

    Raises:
      ValueError: Neither `epochs` nor `steps` says where the end is, an argument is out of range,
        or the run in the directory was begun with other `settings`.
      TypeError: `step` or `validate` returns a single number, or no dict.
      StructureError: Results have other names than `metrics`, or not one number for each row;
        `state` has a name that the run uses itself, or the checkpoint does not fit.
      DataError: `data` has no batches.
      CheckpointError: `restore_best`: there is no checkpoint of the best row, because an earlier
        start made it without `keep_best`, or because all values are NaN.
      SystemExit: With code 42, on every rank, after a notice of preemption.
      KeyboardInterrupt: On every rank, after Ctrl-C.

    Warns:
      UserWarning: After a row: arrays have taken the place of variables, or a part of `state` that
        is no variable differs between ranks; or an optimizer of `mpistrat.optim` has made updates,
        and checkpoints lack its state, or a variable that it updates. At the end, or after 1,000
        steps: no step has changed `state`.

    Cost: for each step what a loop by hand costs, and at most 20 calls of Python functions; for
    each row one handshake for each metric, and the validation; a pass over `state` at the
    beginning, and one after each row until it has changed.

    Example:
      >>> import numpy as np, mpistrat as ms
      >>> w = ms.Variable(0.0)
      >>> optimizer = ms.optim.SGD(0.25)
      >>> def step(x):
      ...     error = np.asarray(w) - x
      ...     optimizer.apply_gradients([(2 * error.mean(), w)], weight=len(x))
      ...     return {"loss": error**2}
      >>> data = ms.Dataset(np.full(4, 3.0)).batch(2)
      >>> history = ms.fit(step, data, epochs=3, state={"w": w}, verbose=False)
      >>> history["loss"][1].round(3).tolist()
      [5.625, 0.352, 0.022]
    """
    strategy = resolve_strategy(strategy, "fit", REMEDY.format("fit"))
    if not isinstance(state, Mapping):
        raise TypeError(f"fit: state must be a dict of objects by name, got {state!r:.60}.")
    refuse_reserved(state)
    options = FitOptions(
        epochs=_check_limit("epochs", epochs),
        steps=_check_limit("steps", steps),
        metrics=_check_metric_names(metrics),
        validate_every=parse_interval(validate_every),
        directory=None if directory is None else Path(directory),
        save_interval=every,
        max_to_keep=max_to_keep,
        monitor=monitor or ("loss" if validate is None else "validation/loss"),
        mode=mode,
        patience=None if patience is None else check_int("fit: patience", patience, 1, ValueError),
        keep_best=keep_best or restore_best,
        restore_best=restore_best,
        verbose=verbose,
    )
    _check_together(options, validate, validation_data)
    batches = distribute(strategy, data, "fit", is_read_once=False)
    validation = None
    if validate is not None:
        tests = distribute(strategy, validation_data, "fit(validation_data)")
        if tests is batches:
            raise DataError(
                "fit: validation_data is the distributed dataset that is trained on, so a "
                "validation would count as an epoch of training. Give the Dataset itself."
            )
        validation = ReplicaFunction(validate, tests)
    _check_end(options, batches)
    period, unit = options.validate_every
    kept_settings = {"validate_every": f"{period} {unit}", **(settings or {})}
    objects = SavedObjects(state, _check_callbacks(callbacks), kept_settings)
    loop = TrainingLoop(ReplicaFunction(step, batches), validation, objects, options, strategy)
    loop.train()
    return loop.run.history


def _check_limit(name: str, number: int | None) -> int | None:
    return None if number is None else check_int(f"fit: {name}", number, 0, ValueError)


def _check_together(
    options: FitOptions, validate: Callable[[Any], Any] | None, validation_data: object
) -> None:
    """Raise where arguments need others."""
    if options.epochs is None and options.steps is None:
        raise ValueError("fit: give epochs=, or steps=; otherwise training has no end.")
    check_mode("fit: mode", options.mode)
    if options.keep_best and options.directory is None:
        raise ValueError("fit: keep_best and restore_best need a directory.")
    if (validate is None) != (validation_data is None):
        raise ValueError("fit: give both validate= and validation_data=, or neither of them.")


def _check_metric_names(metrics: Sequence[str]) -> tuple[str, ...]:
    if isinstance(metrics, str) or not all(isinstance(name, str) for name in metrics):
        raise TypeError(f"fit: metrics must be names, such as ('loss',), got {metrics!r:.60}.")
    reserved_names = [
        name for name in metrics if name in _HISTORY_COLUMNS or name.startswith("validation/")
    ]
    if reserved_names or len(set(metrics)) < len(metrics) or not metrics:
        raise ValueError(
            f"fit: metrics must be different names, and not {', '.join(_HISTORY_COLUMNS)} or "
            f"validation/..., which the history uses; got {tuple(metrics)!r:.80}."
        )
    return tuple(metrics)


def _check_callbacks(callbacks: Sequence[Any]) -> tuple[Any, ...]:
    if not isinstance(callbacks, list | tuple):
        raise TypeError(f"fit: callbacks must be a list of objects, got {callbacks!r:.60}.")
    for callback in callbacks:
        if isinstance(callback, type) or not any(hasattr(callback, name) for name in _HOOKS):
            raise TypeError(
                f"fit: a callback must be an object with one of the methods {', '.join(_HOOKS)}, "
                f"got {callback!r:.60}."
            )
    return tuple(callbacks)


def _check_end(options: FitOptions, batches: Any) -> None:
    """Raise where data without an end are trained on in epochs, or validated after epochs."""
    dataset = getattr(getattr(batches, "distributed", batches), "_origin", batches)
    if dataset.cardinality() != INFINITE:
        return
    if options.steps is None:
        raise ValueError("fit: the data have no end, so epochs= never ends. Give steps=.")
    if options.validate_every.unit == "epoch":
        raise ValueError(
            "fit: the data have no end, so no epoch ends, and the history would stay empty. Give "
            "validate_every='500 steps', or another number."
        )

"""`History`: curves of a training run, which continue where a checkpoint was saved."""

from __future__ import annotations

import csv
import io
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.checkpoint import atomic
from mpistrat.checkpoint.checkpoint import check_all_ranks_save
from mpistrat.checkpoint.files import on_replica0
from mpistrat.strategy.strategies import current_strategy

_Path = str | os.PathLike[str]


def _convert_value(
    convert: Callable[[Any], Any], name: str, number_like: object, expected_kind: str
) -> Any:
    try:
        return convert(number_like)
    except (TypeError, ValueError, OverflowError) as error:
        text = f"History.append: {name} must be {expected_kind}, got {number_like!r:.60}: {error}"
        raise TypeError(text) from None


def _convert_to_int64(step: Any) -> int:
    return int(np.int64(operator.index(step)))


@final
class History:
    """Named curves: one number for each step or epoch that was recorded.

    A `Checkpoint` restores it as it was saved, so values recorded after the save are dropped.
    Created in a strategy's scope it belongs to that strategy, whose replica 0 writes its files;
    elsewhere to the default strategy.

    Example:
      >>> history = History()
      >>> for epoch in range(3):
      ...     history.append(epoch, loss=1 / (epoch + 1))
      >>> history.append(2, accuracy=0.9)
      >>> steps, values = history["loss"]
      >>> steps.tolist(), history.last("accuracy")
      ([0, 1, 2], 0.9)
      >>> history.table()
      array([[0.        , 1.        ,        nan],
             [1.        , 0.5       ,        nan],
             [2.        , 0.33333333, 0.9       ]])
    """

    _can_differ_between_ranks = True  # as times do: the file has replica 0's

    def __init__(self) -> None:
        """Create one without curves."""
        self._curves: dict[str, tuple[list[int], list[float]]] = {}
        self._strategy: Any = current_strategy()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the curves, in the order in which they came."""
        return tuple(self._curves)

    def append(self, step: int, **values: Any) -> None:
        """Record values. Never communicates: call it with the same values on all ranks.

        Args:
          step: The number of the step or epoch; for each curve it grows.
          **values: A number for each curve, float64; a new name begins a new curve.

        Raises:
          ValueError: A curve has that step already, or a later one. Nothing is recorded then.
          TypeError: `step` is not an integer of 64 bits, or a value is no number of float64.
        """
        step_number = _convert_value(_convert_to_int64, "step", step, "an integer of 64 bits")
        numbers = {
            name: _convert_value(float, name, value, "a number") for name, value in values.items()
        }
        for name in numbers:
            steps = self._curves.get(name, ([], []))[0]
            if steps and steps[-1] >= step_number:
                raise ValueError(
                    f"History.append({step_number}, {name}=...): {name!r} has step {steps[-1]} "
                    "already, and steps grow. Restore the history together with the number of "
                    "the step."
                )
        for name, number in numbers.items():
            steps, curve = self._curves.setdefault(name, ([], []))
            steps.append(step_number)
            curve.append(number)

    def __getitem__(self, name: str) -> tuple[Array, Array]:
        """Return the steps of a curve, int64, and its values, float64; both are copies.

        Raises:
          KeyError: There is no curve of that name.
        """
        steps, values = self._curve(name)
        return np.array(steps, np.int64), np.array(values, np.float64)

    def _curve(self, name: str) -> tuple[list[int], list[float]]:
        if name not in self._curves:
            raise KeyError(f"{name!r} is not a curve of this history; it has {list(self._curves)}")
        return self._curves[name]

    def last(self, name: str) -> float:
        """Return the newest value of a curve.

        Args:
          name: Of the curve.

        Raises:
          KeyError: There is none.
        """
        return self._curve(name)[1][-1]

    def table(self, *names: str) -> Array:
        """Return a row for each step, (steps, 1 + curves), float64: the step, then the values.

        Args:
          *names: Of the curves; none for all. A value that was not recorded is NaN.

        Raises:
          KeyError: There is no such curve.
        """
        names = names or self.names
        steps_of_rows = sorted({step for name in names for step in self._curve(name)[0]})
        row_by_step = {step: row_index for row_index, step in enumerate(steps_of_rows)}
        table = np.full((len(steps_of_rows), 1 + len(names)), np.nan)
        table[:, 0] = steps_of_rows
        for column, name in enumerate(names, 1):
            steps, values = self._curves[name]
            table[[row_by_step[step] for step in steps], column] = values
        return table

    def write_csv(self, path: _Path) -> None:
        """Write all curves: a line with ``step`` and the names, then one for each step.

        Collective; replica 0 writes the whole file again and replaces an existing one. Values that
        were not recorded are empty; numbers are read back as the same float64.

        Args:
          path: The file; only replica 0 needs to see it.

        Raises:
          OSError: It cannot be written; on every rank. An existing file is unchanged.
          StrategyError: It belongs to a strategy that knows one rank of several.
        """
        lines: dict[int, dict[str, Any]] = {}
        for name, (steps, values) in self._curves.items():
            for step, value in zip(steps, values, strict=True):
                lines.setdefault(step, {"step": step})[name] = repr(value)

        def write() -> None:
            text = io.StringIO()
            table = csv.DictWriter(text, ["step", *self._curves], lineterminator="\n")
            table.writeheader()
            table.writerows(lines[step] for step in sorted(lines))
            with atomic.open_atomically(Path(path), True) as file:
                file.write(text.getvalue().encode())

        self._run_on_replica0("write_csv", path, write)

    def draw(
        self,
        path: _Path,
        panels: Mapping[str, Sequence[str]] | None = None,
        *,
        title: str = "",
        x: str = "step",
    ) -> None:
        """Draw the curves with matplotlib.

        Collective; replica 0 draws. A panel whose values are positive and differ by a factor of
        ten or more has a logarithmic axis.

        Args:
          path: The picture; its ending names the format.
          panels: For each panel the label of its axis, and the names of its curves; the legend has
            spaces in place of underscores. None for one panel of all curves.
          title: The title of the picture.
          x: The label of the axis of steps.

        Raises:
          OSError: It cannot be written; on every rank, as all of these.
          ImportError: There is no matplotlib.
          KeyError: There is no such curve.
          StrategyError: As of `write_csv`.
          TypeError: `panels` is not a dict.
        """
        if not isinstance(panels, Mapping | None):
            raise TypeError(f"History.draw: panels must be a dict, got {panels!r:.60}.")
        self._run_on_replica0(
            "draw", path, lambda: self._draw(path, panels or {"": self.names}, title, x)
        )

    def _draw(self, path: _Path, panels: Mapping[str, Sequence[str]], title: str, x: str) -> None:
        from matplotlib.figure import Figure  # of its own it opens no window
        from matplotlib.ticker import LogLocator, MaxNLocator

        figure = Figure(figsize=(1.5 + 4 * len(panels), 4), dpi=120, layout="constrained")
        figure.suptitle(title)
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axis, (label, names) in zip(axes, panels.items(), strict=True):
            for name in names:
                axis.plot(*self[name], label=name.replace("_", " "), marker="o", markersize=3.5)
            values = np.concatenate([self[name][1] for name in names] or [np.ones(1)])
            axis.set(xlabel=x, ylabel=label)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
            if len(values) and values.min() > 0 and values.max() >= 10 * values.min():
                axis.set_yscale("log")
                axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axis.yaxis.set_major_formatter("{x:g}")
                axis.yaxis.set_minor_formatter("")
            axis.grid(alpha=0.3, which="both")
            if names:
                axis.legend()
        Path(path).parent.mkdir(parents=True, exist_ok=True)  # as `write_csv` does
        figure.savefig(path)

    def _run_on_replica0(
        self, method_name: str, path: _Path, replica0_function: Callable[[], None]
    ) -> None:
        """Do it on replica 0; what it raises is raised on every rank."""
        call, lockstep = (
            f"History.{method_name}({os.fspath(path)!r})",
            self._strategy._replicas.lockstep,
        )
        check_all_ranks_save(self._strategy, call)
        on_replica0(lockstep, call, replica0_function)

    def checkpoint_state(self) -> dict[str, Any]:
        """Return all curves, as a `Checkpoint` saves them: names, and arrays of all points."""
        steps, values = (
            [number for curve in self._curves.values() for number in curve[i]] for i in (0, 1)
        )
        curves = np.repeat(np.arange(len(self._curves)), [len(c[0]) for c in self._curves.values()])
        return {
            "names": list(self._curves),
            "curves": curves.astype(np.int64),
            "steps": np.array(steps, np.int64),
            "values": np.array(values, np.float64),
        }

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Take the curves that `checkpoint_state` returned; those that are here are dropped.

        Args:
          state: The result of `checkpoint_state`.
        """
        self._curves = {
            name: tuple(
                state[column][state["curves"] == curve_index].tolist()
                for column in ("steps", "values")
            )
            for curve_index, name in enumerate(state["names"])
        }

    def __repr__(self) -> str:
        """Return the names of the curves."""
        return f"History({', '.join(self._curves)})"

"""The pictures that benchmarks draw, if they are given a path to draw to."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class Panel(NamedTuple):
    """One part of a picture: bars by name, or for `curves` points by name."""

    title: str
    label: str
    values: Mapping[str, Any]


def points(rows: Sequence[dict[str, Any]], key: str) -> dict[str, list[tuple[int, float]]]:
    """Return for each way of these rows its values over sizes in bytes."""
    names = dict.fromkeys(row["way"] for row in rows)
    return {w: [(r["bytes"], r[key]) for r in rows if r["way"] == w] for w in names}


def bars(
    path: str | None,
    facts: dict[str, Any],
    title: str,
    panels: Sequence[Panel],
    ours: Collection[str],
) -> None:
    """Draw one bar for each value, ours in another color, if there is a path to draw to."""
    if not path:
        return
    figure, parts = _figure(facts, title, len(panels), 3.4)
    for part, panel in zip(parts, panels, strict=True):
        names = list(panel.values)[::-1]
        colors = [
            "C0" if name in ours else "0.6" if name in ("copy", "own memory") else "C1"
            for name in names
        ]
        part.barh(names, [panel.values[name] for name in names], color=colors)
        part.set(title=panel.title, xlabel=panel.label)
    figure.savefig(path)


def curves(
    path: str | None,
    facts: dict[str, Any],
    title: str,
    panels: Sequence[Panel],
    ours: Collection[str],
) -> None:
    """Draw one curve over sizes in bytes for each name, ours thicker, if there is a path."""
    if not path:
        return
    figure, parts = _figure(facts, title, len(panels), 5.2)
    for part, panel in zip(parts, panels, strict=True):
        for name, points in panel.values.items():
            style = "-" if name in ours else "--"
            part.plot(*zip(*points, strict=True), style, label=name, marker="o", markersize=3)
        part.set_xscale("log", base=2)
        if panel.label.endswith("us"):
            part.set_yscale("log")
        ticks = sorted({size for points in panel.values.values() for size, _ in points})
        part.set_xticks(ticks[::2], [short(size) for size in ticks[::2]])
        part.minorticks_off()
        part.set(title=panel.title, xlabel="bytes", ylabel=panel.label)
        part.grid(alpha=0.3)
    parts[0].legend(fontsize="small")
    figure.savefig(path)


def _figure(facts: dict[str, Any], title: str, panels: int, width: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(width * panels, 5), 4.2), dpi=120, layout="constrained")
    library = " ".join(facts["mpi"].split(",")[0].replace("Version:", "").split())
    figure.suptitle(f"{title}, {facts['ranks']} rank(s), {library}")
    return figure, np.atleast_1d(figure.subplots(1, panels))


def short(size: int) -> str:
    """Return a number of bytes in few letters."""
    for unit, name in ((2**20, " Mi"), (2**10, " Ki")):
        if size >= unit:
            return f"{size // unit}{name}"
    return str(size)

"""The pictures at the beginning of DESIGN.md, made from the code.

    python tests/tools/house_picture.py           write it
    python tests/tools/house_picture.py --check   exit code 1 if it is not current

The packages and their imports are those that ``tests/test_house.py`` holds. A gradient's path is
what one rank calls, recorded while two ranks run as threads.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
DESIGN = ROOT / "DESIGN.md"
PACKAGE = ROOT / "mpistrat"
FACES = ("__init__", "__main__")  # they import whatever they show
# Files that move bytes or compute are shown even if they call no other; lookups are not shown.
BYTES = ("comm/loopback", "kernels/loops", "kernels/rows")
LOOKUPS = ("comm/session", "comm/base", "kernels/elementwise", "shm/segments")
BEGIN = "<!-- {}: made by tests/tools/house_picture.py -->\n"
END = "\n<!-- end of {} -->"


def graph() -> dict[str, set[str]]:
    """Return which lower packages each package imports, without those reached through others."""
    import test_house

    lower_rooms: dict[str, set[str]] = {}
    for module, names in test_house.imported().items():
        room = test_house.here(module)
        lower = {test_house.here(name) for name in names} - {*FACES}
        lower = {x for x in lower if test_house.LAYER[x] < test_house.LAYER[room]}
        lower_rooms.setdefault(room, set()).update(lower)
    reached: dict[str, set[str]] = {}

    def rooms_below(room: str) -> set[str]:
        if room not in reached:
            reached[room] = set().union(
                *(lower_rooms[x] | rooms_below(x) for x in lower_rooms[room])
            )
        return reached[room]

    return {
        room: {x for x in rooms if not any(x in rooms_below(y) for y in rooms)}
        for room, rooms in lower_rooms.items()
        if room not in FACES
    }


def rooms() -> str:
    """Return the packages, from the top down, as a Mermaid diagram."""
    import test_house

    edges = graph()
    lines = ["```mermaid", "flowchart TD"]
    for row in reversed(test_house.ROWS):
        names = [room for room in row if room in edges]
        lines += [f"    {room}" for room in names if not edges[room]]
        lines += [
            f"    {room} --> {' & '.join(sorted(edges[room]))}" for room in names if edges[room]
        ]
    return "\n".join([*lines, "```"])


def calls(function: Callable[[], Any]) -> list[tuple[int, str, str]]:
    """Return what a call enters of the package: how deep, which file, which function."""
    entered_calls: list[tuple[int, str, str]] = []
    stack: list[bool] = []

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if event == "return" and stack:
            stack.pop()
        if event != "call":
            return
        code = frame.f_code
        ours = code.co_filename.startswith(f"{PACKAGE}{os.sep}") and code.co_name[0] not in "<_"
        if ours:
            path = Path(code.co_filename).relative_to(PACKAGE).as_posix()
            entered_calls.append((sum(stack), path, code.co_name))
        stack.append(ours)

    sys.setprofile(look)
    try:
        function()
    finally:
        sys.setprofile(None)
    return entered_calls


def leading_calls(entered_calls: list[tuple[int, str, str]]) -> list[str]:
    """Return the calls that lead to other files, and those that move bytes or compute."""
    lines: list[str] = []
    above: list[tuple[int, str]] = []  # what is shown around a call: its depth, its file
    for number, (depth, path, name) in enumerate(entered_calls):
        while above and above[-1][0] >= depth:
            above.pop()
        paths_inside = []
        for deeper, other, _ in entered_calls[number + 1 :]:
            if deeper <= depth:
                break
            paths_inside.append(other)
        same = bool(above) and above[-1][1] == path
        leads = path.startswith(BYTES) or set(paths_inside) - {path}
        if same or not leads or path.startswith(LOOKUPS):
            continue
        line = f"{'  ' * len(above)}{path.removesuffix('.py')}.{name}"
        above.append((depth, path))
        if not lines or lines[-1] != line:
            lines.append(line)
    return lines


def program(comm: Any) -> list[list[str]]:
    """Reduce a gradient in place, and then reduce and apply it; return the calls of each."""
    import numpy as np

    import mpistrat as ms

    strategy = ms.MirroredStrategy()
    with strategy.scope():
        w = ms.Variable(np.zeros(100_000), name="w")
    (g,) = strategy.gradient_buffers([w])
    optimizer = ms.optim.SGD(0.1)
    call_lists = []

    def step() -> None:
        context = ms.get_replica_context()
        for call in (
            lambda: context.all_reduce("mean", g, weight=8, out=g),
            lambda: optimizer.apply_gradients([(g, w)], weight=8),
        ):
            for _ in range(3):  # what is found out once is known then
                call()
            call_lists.append(leading_calls(calls(call)))

    strategy.run(step)
    return call_lists


def gradient_path() -> str:
    """Return the way of a gradient, in a job of two ranks that share memory."""
    from mpistrat.testing import run_ranks

    reduced, applied = run_ranks(program, 2)[0]
    return "\n".join(["```text", *reduced, "", *applied, "```"])


def renewed(text: str) -> str:
    """Return the text of DESIGN.md with the parts between its marks renewed."""
    for name, picture in (("rooms", rooms()), ("way", gradient_path())):
        head, begin, rest = text.partition(BEGIN.format(name))
        _, end, tail = rest.partition(END.format(name))
        assert begin and end, f"DESIGN.md has no place for {name}"
        text = f"{head}{begin}{picture}{end}{tail}"
    return text


def main() -> int:
    """Write the picture, or compare it."""
    old = DESIGN.read_text(encoding="utf-8")
    new = renewed(old)
    if "--check" in sys.argv:
        return int(old != new)
    DESIGN.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # this tree, whatever is installed
    # The cache of this machine decides whether compiled loops are called: so compile none.
    if os.environ.get("MPISTRAT_NUMBA") != "0":
        os.execve(
            sys.executable, [sys.executable, *sys.argv], {**os.environ, "MPISTRAT_NUMBA": "0"}
        )
    sys.exit(main())

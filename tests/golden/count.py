"""Prints how many cases are equal, differ by decision, or come later."""

from __future__ import annotations

from collections import Counter

from .decisions import DECISIONS
from .harness import results
from .judge import BY_DECISION, judge
from .record import SIZES, cases


def count() -> str:
    """Return the table of counts, at both sizes, and by decision."""
    kinds: Counter[tuple[str, int]] = Counter()
    decisions: Counter[str] = Counter()
    for case in cases():
        verdict = judge(case, results(case.program, case.size))
        kinds["WRONG" if verdict.problem else verdict.kind, case.size] += 1
        if verdict.kind == BY_DECISION:
            decisions[verdict.decision] += 1
    names = sorted({kind for kind, _ in kinds})
    lines = [f"{'':22}" + "".join(f"{f'n={size}':>8}" for size in SIZES) + f"{'all':>8}"]
    for name in names:
        row = [kinds[name, size] for size in SIZES]
        lines.append(f"{name:22}" + "".join(f"{number:8}" for number in (*row, sum(row))))
    for key, meaning in DECISIONS.items():
        lines.append(f"  {decisions[key]:4} by {key}: {meaning}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(count())

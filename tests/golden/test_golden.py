"""Every recorded case, at 2 and 4 replicas, on thread ranks."""

from __future__ import annotations

import pytest

from .count import count
from .decisions import DECISIONS, DIFFERS, WRAPPED
from .errors import ROWS, row_for
from .harness import outcome, results
from .judge import judge, listed
from .later import LATER, exists
from .patterns import matches
from .programs import PROGRAMS
from .record import cases

KEYS = sorted({case.key for case in cases()})


@pytest.mark.parametrize(
    ("program", "size"), sorted({(case.program, case.size) for case in cases()})
)
def test_cases_are_equal_or_differ_by_decision_or_come_later(program, size):
    mine = [case for case in cases() if (case.program, case.size) == (program, size)]
    problems = [(case, judge(case, results(program, size)).problem) for case in mine]
    wrong = [f"{case}: {problem}" for case, problem in problems if problem]
    if wrong:
        pytest.fail(f"{len(wrong)} of {len(mine)} cases:\n" + "\n".join(wrong), pytrace=False)


def test_patterns_name_cases():
    patterns = [*DIFFERS, *WRAPPED, *LATER]
    assert [p for p in patterns if not any(matches(p, key) for key in KEYS)] == []


def test_no_case_is_named_twice():
    assert [key for key in KEYS if len(listed(key)) > 1] == []


def test_every_difference_names_a_decision_and_says_why():
    assert {difference.decision for difference in DIFFERS.values()} | {"D2"} == set(DECISIONS)
    assert all(difference.why for difference in DIFFERS.values())


def test_what_comes_later_is_not_there_yet():
    there = {later.missing for later in LATER.values() if exists(later.missing)}
    assert not there, "these exist: compare their cases"


def test_what_is_there_is_found():
    assert exists("Strategy.run")
    assert exists("compat.tf.distribute")
    assert exists("cluster_resolver.TFConfigClusterResolver")


def test_programs_give_no_case_that_is_not_recorded():
    recorded = {(case.program, case.name.replace("@function", "")) for case in cases()}
    given = {
        (program, name.replace("@function", ""))
        for program in PROGRAMS
        for name in results(program, 2)
    }
    assert given - recorded == set()


def test_every_row_of_the_table_of_errors_is_needed():
    needed = set()
    for case in cases():
        ours = outcome(case, results(case.program, case.size))
        if "error" in case.recorded and ours is not None and "error" in ours:
            needed.add(row_for(case.recorded["error"]))
    assert set(ROWS) - needed == set()


def test_counts():
    """Shown with ``-rA``."""
    text = count()
    print(text)
    assert "WRONG" not in text

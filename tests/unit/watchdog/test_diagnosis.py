"""Who keeps whom waiting."""

import pytest
from status_tables import Row, make_table

from mpistrat.watchdog import observer
from mpistrat.watchdog.observer import format_ending, format_warning
from mpistrat.watchdog.status_board import (
    BETWEEN_CALLS,
    DEAD,
    IN_CALL,
    IN_OTHER_CALL,
    LEAVING,
    LEFT,
    NOT_RUNNING_PYTHON,
    SILENT,
    STOPPED,
)


def row(ranks, call, state, age, part=0, **more):
    more = {"position": f"train.py:{call}"} | more
    ranks = (ranks,) if isinstance(ranks, int) else tuple(ranks)
    if state == IN_CALL:
        more.setdefault("call_text", f"call no. {call}")
    return Row(ranks, key=call << 20 | part, state=state, age=age, **more)


def diagnose(rows, size=0):
    return observer.diagnose(make_table(rows), size)


def missing(found):
    return sorted(found.table.layout.ranks[found.missing].tolist())


def test_nobody_waits_while_all_compute():
    assert diagnose([row(0, 4, BETWEEN_CALLS, 9e9), row(1, 5, BETWEEN_CALLS, 9e9)]) is None
    assert diagnose([]) is None


def test_who_has_not_come_to_the_call_is_missing():
    found = diagnose([row(range(3), 5, IN_CALL, 70), row(3, 4, BETWEEN_CALLS, 90)])
    assert missing(found) == [3]
    assert found.seconds == 70


def test_seconds_count_from_the_last_thing_the_missing_rank_did():
    assert diagnose([row(0, 5, IN_CALL, 70), row(1, 4, BETWEEN_CALLS, 20)]).seconds == 20


def test_the_longest_missing_rank_counts():
    found = diagnose(
        [row(0, 5, IN_CALL, 70), row(1, 4, BETWEEN_CALLS, 1), row(2, 4, BETWEEN_CALLS, 60)]
    )
    assert found.seconds == 60
    assert missing(found) == [1, 2]


def test_who_is_done_with_the_call_is_not_missing():
    found = diagnose([row(0, 5, IN_CALL, 70), row(1, 5, BETWEEN_CALLS, 2)])
    assert (missing(found), found.seconds) == ([], 2)


def test_who_is_still_in_the_call_before_is_missing():
    found = diagnose([row(0, 5, IN_CALL, 70), row(1, 4, IN_CALL, 80)])
    assert missing(found) == [1]
    text = format_warning(found, 60, 1800)
    assert "rank 1 (n1) has not reached call 5 for 70 s. It is in train.py:4 of call 4" in text


def test_between_two_parts_of_a_call_a_rank_can_be_missing_too():
    found = diagnose([row(0, 5, IN_CALL, 70, part=1), row(1, 5, BETWEEN_CALLS, 80, part=0)])
    assert missing(found) == [1]
    assert "rank 1 (n1) has made no progress in call 5 for 70 s." in format_warning(found, 60, 1800)


@pytest.mark.parametrize("activity", [STOPPED, NOT_RUNNING_PYTHON, DEAD, SILENT])
def test_a_rank_in_trouble_inside_the_call_is_the_missing_one(activity):
    found = diagnose([row([0, 2], 5, IN_CALL, 70), row(1, 5, IN_CALL, 69, activity=activity)])
    assert missing(found) == [1]


def test_of_a_silent_node_only_those_count_that_had_not_come():
    rows = [
        row(0, 5, IN_CALL, 70),
        row(1, 5, IN_CALL, 70, activity=SILENT),
        row(2, 4, BETWEEN_CALLS, 70, activity=SILENT),
    ]
    assert missing(diagnose(rows)) == [2]


def test_if_all_are_inside_and_well_the_last_one_counts():
    found = diagnose([row(0, 5, IN_CALL, 70), row(1, 5, IN_CALL, 61, position="b.py:1")])
    assert (missing(found), found.seconds) == ([], 61)
    assert "ranks 0, 1 have come to call 5 and not out of it for 61 s." in format_warning(
        found, 60, 1800
    )


def test_what_is_not_known_is_said():
    found = diagnose([row(0, 5, IN_CALL, 70)], size=3)
    assert found.unknown_count == 2
    assert "Nothing is known here about the other 2." in format_warning(found, 60, 1800)


def test_only_ranks_in_trouble_inside_do_not_wait():
    assert diagnose([row([0, 1], 5, IN_CALL, 70, activity=STOPPED)]) is None


def test_a_declared_operation_excuses_its_rank_only():
    operation = row(1, 4, BETWEEN_CALLS, 0, operation="evaluate")
    assert diagnose([row(0, 5, IN_CALL, 70), operation]) is None
    both = diagnose([row(0, 5, IN_CALL, 70), operation, row(2, 4, BETWEEN_CALLS, 65)])
    assert (missing(both), both.seconds) == ([2], 65)


def test_a_declared_operation_that_is_over_time_excuses_nothing():
    late = row(1, 4, BETWEEN_CALLS, 61, operation="evaluate", is_overdue=True)
    found = diagnose([row(0, 5, IN_CALL, 700), late])
    assert found.seconds == 61
    assert "over the time declared for 'evaluate'" in format_warning(found, 60, 1800)


def test_who_has_left_will_never_come():
    found = diagnose([row([0, 1], 5, IN_CALL, 61), row([2, 3], 5, LEFT, 70)])
    said = "ranks 2, 3 (n1) have left the program or finalized MPI before call 5."
    assert said in format_warning(found, 60, 1800)


TEXTS = {
    STOPPED: "It is in data.py:31 (stopped by a signal).",
    DEAD: "It was last seen in data.py:31 (its process is gone).",
    NOT_RUNNING_PYTHON: "It was last seen in data.py:31 (its Python does not run",
    SILENT: "It was last seen in data.py:31 (its node does not answer",
    "R": "It is in data.py:31 (computing).",
    "D": "It is in data.py:31 (waiting for a disk or a device).",
}


@pytest.mark.parametrize("activity", TEXTS)
def test_the_text_says_what_the_rank_does(activity):
    rows = [
        row(
            [0, 1, 2, 3, 4, 6, 7],
            412,
            IN_CALL,
            60,
            position="train.py:88",
            call_text="all_reduce(SUM)",
        ),
        row(5, 411, BETWEEN_CALLS, 80, position="data.py:31", activity=activity, node="node12"),
    ]
    lines = format_warning(diagnose(rows), 60, 1800).splitlines()
    assert lines[0].startswith("mpistrat: rank 5 (node12) has not reached call 412 for 60 s. ")
    assert TEXTS[activity] in lines[0]
    assert lines[1] == (
        "  ranks 0-4, 6, 7 wait in train.py:88 all_reduce(SUM). The job ends after 1800 s of this; "
        "MPISTRAT_TIMEOUT changes that."
    )


def test_many_missing_ranks_are_shown_in_few_lines():
    rows = [
        row(0, 5, IN_CALL, 70),
        *(row(r, 4, BETWEEN_CALLS, 70, position=f"a.py:{r}") for r in range(1, 40)),
    ]
    text = format_warning(diagnose(rows), 60, 1800)
    assert len(text.splitlines()) == 17
    assert "... and 24 more" in text


def test_the_end_says_why_with_its_code():
    text = format_ending(diagnose([row(0, 5, IN_CALL, 70), row(1, 4, BETWEEN_CALLS, 80)]), 60, 75)
    assert text.startswith("mpistrat: the job ends with exit code 75: nothing moved for 60 s.\n")
    assert "rank 1 (n1) has not reached call 5" in text


def test_a_call_may_say_how_long_it_may_take():
    waiting = [row(0, 5, IN_CALL, 70, patience=4.0), row(1, 5, IN_CALL, 70, patience=3.0)]
    found = diagnose([*waiting, row(2, 4, BETWEEN_CALLS, 90)])
    assert found.patience == 3.0
    assert "of this; timeout_seconds says so." in format_warning(found, 60, 3)
    # Of who is missing, or in an earlier call, it does not count.
    rows = [row(0, 5, IN_CALL, 70), row(1, 4, IN_CALL, 90, patience=3.0)]
    assert diagnose(rows).patience == 0.0
    assert diagnose([row(range(2), 5, IN_CALL, 70, patience=2.0)]).patience == 2.0


def test_who_waits_to_leave_waits():
    found = diagnose([row([0, 1], 5, LEAVING, 70), row(2, 4, BETWEEN_CALLS, 65)])
    assert (missing(found), found.seconds) == ([2], 65)


def test_who_is_in_a_call_of_another_communicator_is_said_to_be():
    rows = [
        row(0, 5, IN_CALL, 70),
        row(1, 4, BETWEEN_CALLS, 80, activity=IN_OTHER_CALL, call_text="all_reduce of a trial"),
    ]
    assert (
        "It is in train.py:4, all_reduce of a trial (waiting in a call on another communicator)."
        in format_warning(diagnose(rows), 60, 1800)
    )

"""The diagnosis of many ranks beside a slow one of the same ranks, and how many calls it takes."""

import random

import numpy as np
import pytest
from growth_rank0 import SimulatedJob
from python_calls import calls_of
from status_tables import Row, make_table

from mpistrat.comm.callsite import ranks_text
from mpistrat.watchdog.observer import diagnose, format_ending, format_warning
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
    TROUBLES,
)

STATES = (IN_CALL, IN_CALL, IN_CALL, LEAVING, BETWEEN_CALLS, BETWEEN_CALLS, LEFT)
ACTIVITIES = (*"RRRSSSD", IN_OTHER_CALL, STOPPED, DEAD, NOT_RUNNING_PYTHON, SILENT)
WARN, TIMEOUT = 60.0, 1800.0
ENDING = "mpistrat: the job ends with exit code 75: nothing moved for 65 s.\n  "


def random_rows(seed):
    """Up to 24 ranks on up to 4 nodes, most of them in the newest call, in few places."""
    rng = random.Random(seed)
    troubled, late = rng.random() / 2, rng.random()
    rows = []
    for rank in rng.sample(range(24), rng.randint(1, 24)):
        is_late = rng.random() < late
        state = rng.choice(STATES) if is_late else IN_CALL
        operation = rng.choice(("", "", "evaluate")) if is_late else ""
        rows.append(
            Row(
                (rank,),
                ((4 if is_late else 5) + rng.choice((0, 0, 0, 1))) << 20 | rng.choice((0, 0, 1)),
                state,
                rng.choice((0.0, 59.0, 61.0, 70.0)) + rng.choice((0.0, 0.5, rank / 100)),
                rng.choice(ACTIVITIES) if rng.random() < troubled else "S",
                position=f"a.py:{rng.choice((1, 1, 2, rank))}",
                call_text=rng.choice(("", "reduce")),
                operation=operation,
                is_overdue=bool(operation) and rng.random() < 0.5,
                patience=rng.choice((0.0, 0.0, 0.0, 90.0, 100.0)) if state == IN_CALL else 0.0,
                node=f"n{rng.randrange(4)}",
            )
        )
    return rows


def slow_diagnosis(rows):
    """The key, the seconds, the missing and the waiting ranks, and the patience; rank by rank."""
    inside = [r for r in rows if r.state in (IN_CALL, LEAVING) and r.activity not in TROUBLES]
    if not inside:
        return None
    key = max(row.key for row in inside)
    waiting = [row for row in inside if row.key == key]
    patience = min((row.patience for row in waiting if row.patience), default=0.0)
    missing = [
        row
        for row in rows
        if row not in waiting and (row.key < key or row.state == LEFT or row.activity in TROUBLES)
    ]
    missing = [row for row in missing if row.activity != SILENT or row.key < key] or missing
    if not missing:
        return key, min(row.age for row in rows), [], waiting, patience
    missing = [row for row in missing if not row.operation or row.is_overdue]
    if not missing:
        return None
    seconds = min(max(row.age for row in waiting), max(row.age for row in missing))
    return key, seconds, missing, waiting, patience


def slow_names(rows, min_seconds):
    """The ranks of each line about missing ranks, the longest first."""
    groups = {}
    for row in rows:
        if row.age >= min_seconds or row.activity == DEAD:
            alike = row._replace(ranks=(), age=0.0, patience=0.0)
            groups.setdefault(alike, []).append(row)
    ranks_of = lambda group: sorted(row.ranks[0] for row in group)  # noqa: E731
    lines = sorted(groups.values(), key=lambda g: (-min(row.age for row in g), ranks_of(g)))
    return [f"{ranks_text(ranks_of(group))} ({group[0].node}) ha" for group in lines]


def slow_waits(rows):
    groups = {}
    for row in sorted(rows):
        groups.setdefault((row.position, row.call_text), []).append(row.ranks[0])
    return [
        f"{ranks_text(ranks)} wait{'s' * (len(ranks) == 1)} in {' '.join(filter(None, place))}"
        for place, ranks in groups.items()
    ]


def ranks_of(rows):
    return sorted(row.ranks[0] for row in rows)


def test_a_diagnosis_is_that_of_a_loop_over_the_ranks():
    kinds = {"nobody waits": 0, "missing": 0, "all have come": 0}
    for seed in range(1500):
        rows = random_rows(seed)
        table, wanted = make_table(rows), slow_diagnosis(rows)
        found = diagnose(table, 30)
        if wanted is None:
            assert found is None, seed
            kinds["nobody waits"] += 1
            continue
        key, seconds, missing, waiting, patience = wanted
        named = [sorted(table.layout.ranks[r].tolist()) for r in (found.missing, found.waiting)]
        assert named == [ranks_of(missing), ranks_of(waiting)], seed
        assert (found.key, found.seconds, found.patience) == (key, seconds, patience), seed
        assert found.unknown_count == 30 - len(rows)
        kinds["missing" if missing else "all have come"] += 1
    assert min(kinds.values()) > 25, kinds


def test_messages_name_the_ranks_of_a_loop_in_its_order():
    named_count = 0
    for seed in range(600):
        rows = random_rows(seed)
        wanted = slow_diagnosis(rows)
        if wanted is None or not wanted[2]:
            continue
        found = diagnose(make_table(rows))
        for least, head, text in (
            (WARN, "mpistrat: ", format_warning(found, WARN, TIMEOUT)),
            (65.0, ENDING, format_ending(found, 65.0, 75)),
        ):
            names, places = slow_names(wanted[2], least), slow_waits(wanted[3])
            if not names:
                continue  # it is not printed
            assert text.startswith(head)
            *lines, waits = text.removeprefix(head).split("\n  ")
            assert len(names) <= 16 or lines.pop() == f"... and {len(names) - 15} more"
            for line, name in zip(lines, names[: len(lines)], strict=True):
                assert line.startswith(name), (seed, text)
            assert len(places) > 16 or waits.startswith("; ".join(places)), (seed, text)
            named_count += len(names)
    assert named_count > 500


@pytest.mark.parametrize("case", ["nobody", "stopped", "apart"])
def test_a_look_makes_as_many_calls_for_any_number_of_ranks(case):
    counts = {}
    for rank_count in (128, 256, 4096, 16_384):
        job = SimulatedJob(rank_count, case)
        job.look()  # which warns
        assert bool(job.reports) == (case != "nobody")
        counts[rank_count] = calls_of(job.look)
    assert len(set(counts.values())) == 1, counts


def test_a_message_from_a_node_makes_as_many_calls_for_any_number_of_its_ranks():
    counts = {}
    for size in (2, 64, 1024):
        job = SimulatedJob(4 * size, "apart", ranks_per_node=size)
        counts[size] = calls_of(job.exchange)
    assert len(set(counts.values())) == 1, counts


def test_all_stopped_ranks_of_other_nodes_are_named():
    """Each in a place of its own, with a long text: no message is too short for that."""
    job = SimulatedJob(1024, "apart", text_length=512)
    job.look()
    diagnosis = diagnose(job.table())
    assert diagnosis.unknown_count == 0
    assert np.array_equal(diagnosis.table.layout.ranks[diagnosis.missing], job.culprits)
    statuses, hidden_count = diagnosis.table.join(diagnosis.missing, diagnosis.table.decode_texts())
    assert len(statuses) + hidden_count == len(job.culprits)
    assert all(status.position for status in statuses)


def test_a_warning_makes_calls_for_places_that_differ_between_nodes_only():
    warnings = {}
    for rank_count in (256, 4096, 16_384):
        job = SimulatedJob(rank_count, "stopped")
        warnings[rank_count] = calls_of(job.look)
        assert job.reports[0].startswith(f"mpistrat: rank {rank_count - 1} (node")
        assert f"ranks 0-{rank_count - 2} wait in train.py:88" in job.reports[0]
    assert len(set(warnings.values())) == 1, warnings

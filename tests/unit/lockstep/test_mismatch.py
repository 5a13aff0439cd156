"""What messages say, and where they say that it happened."""

from __future__ import annotations

import re

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.comm.callsite import ranks_text
from mpistrat.testing import run_ranks


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([0], "rank 0"),
        ([3, 1], "ranks 1, 3"),
        ([0, 1], "ranks 0, 1"),
        ([2, 1, 0], "ranks 0-2"),
        ([0, 1, 2, 3, 7, 9, 10, 11], "ranks 0-3, 7, 9-11"),
        (range(0, 32, 2), "ranks " + ", ".join(map(str, range(0, 32, 2)))),
        (range(1, 512, 2), "ranks 1, 3, 5, 7, 9, 11, 13, 15, ..., 511 (256 ranks)"),
    ],
)
def test_ranks(ranks, text):
    assert ranks_text(ranks) == text


def test_many_calls_that_differ_are_shown_in_few_lines():
    def rank(comm):
        strategy = ms.MirroredStrategy()
        with pytest.raises(ms.LockstepError) as caught:
            strategy.all_reduce("sum", np.ones(comm.rank))
        return str(caught.value).splitlines()

    for lines in run_ranks(rank, 20):
        assert len(lines) == 18
        assert lines[15].startswith("  rank 14: ")
        assert lines[16] == "  ... and 5 more"


def test_a_mismatch_shows_both_calls_with_their_lines():
    def rank(comm):
        strategy = ms.MirroredStrategy()
        with pytest.raises(ms.LockstepError) as caught:
            if comm.rank == 1:
                strategy.reduce("MAX", ms.PerReplica(np.ones(9, np.float32)), None)
            else:
                strategy.reduce("SUM", ms.PerReplica(np.ones(12, np.float32)), None)
        return str(caught.value).splitlines()

    for at, lines in enumerate(run_ranks(rank, 3)):
        assert f"this is rank {at} of 3" in lines[0]
        assert re.search(r"ranks 0, 2:.*test_mismatch\.py:\d+.*SUM.*float32\[12\]", lines[1])
        assert re.search(r"rank 1:.*test_mismatch\.py:\d+.*MAX.*float32\[9\]", lines[2])
        assert "if rank ==" in lines[-1]


def test_who_broadcasts_what_one_rank_alone_has_is_told_of_once():
    def rank(comm):
        strategy = ms.MirroredStrategy()
        with pytest.raises(ms.LockstepError, match=r"ms\.once\(fn\) calls fn there"):
            strategy.broadcast("a path" if comm.rank == 0 else None)
        return ms.once(lambda: "a path")

    assert run_ranks(rank, 2) == ["a path"] * 2


@pytest.mark.parametrize("where", ["fn", "leaf", "axis"])
def test_a_remote_error_names_rank_file_and_text(where):
    def rank(comm):
        strategy = ms.MirroredStrategy()

        def fn():
            if comm.rank == 1 and where == "fn":
                raise ValueError("the text")
            leaf = "the text" if comm.rank == 1 and where == "leaf" else 1.0
            ms.get_replica_context().all_reduce("SUM", {"w": leaf})

        with pytest.raises((ValueError, TypeError)) as caught:
            if where == "axis":
                axis = 5 if comm.rank else 0
                strategy.reduce("SUM", ms.PerReplica(np.ones(2)), axis=axis)
            else:
                strategy.run(fn)
        return caught.value

    error, _ = run_ranks(rank, 2)
    first = str(error).splitlines()[0]
    assert re.search(
        r"replica 1 raised (ValueError|LeafTypeError|AxisError) in test_mismatch\.py:", first
    )
    assert ("5" if where == "axis" else "the text") in first
    assert "This is replica 0 of 2" in str(error)


def test_errors_with_traceback_texts_of_surrogates_and_newlines():
    def rank(comm):
        def fn():
            if comm.rank == 1:
                raise ValueError("a\nb\udcff\0")

        with pytest.raises(ValueError, match="a\nb") as caught:
            ms.MirroredStrategy().run(fn)
        return str(caught.value)

    zero, _ = run_ranks(rank, 2)
    assert "a\nb\udcff\0" in zero


@pytest.mark.parametrize("value", ["\udcff", 10**5000, "x" * 10**6], ids=["text", "number", "long"])
def test_results_that_are_hard_to_send_never_hang(value):
    def rank(comm):
        strategy = ms.MirroredStrategy()
        outcome = "fine"
        try:
            got = strategy.run(lambda: value if comm.rank == 1 else "a")
            assert strategy.experimental_local_results(got) == ("a", value)
        except ValueError:
            outcome = "refused"
        return outcome, strategy.run(lambda: comm.rank).values

    zero, one = run_ranks(rank, 2)
    assert zero == one
    assert zero[1] == (0, 1)


def test_a_very_long_text_is_cut_where_it_travels_and_whole_where_it_was_raised():
    def rank(comm):
        def fn():
            if comm.rank == 1:
                raise ValueError("begin" + "x" * 10**7 + "end")

        with pytest.raises(ValueError, match="begin") as caught:
            ms.MirroredStrategy().run(fn)
        return caught.value

    told, own = run_ranks(rank, 2)
    assert len(str(own)) == 10**7 + 8
    assert len(str(told)) < 300_000
    assert re.search(r"\.\.\. 9,9\d\d,\d\d\d characters are cut here \.\.\.", str(told))
    assert len(told.remote_traceback) < 70_000
    assert told.remote_traceback.startswith("Traceback")
    assert told.remote_traceback.rstrip().endswith("end")


@pytest.mark.parametrize("other", ["leaves", "calls"])
def test_a_save_on_one_rank_says_to_save_on_all(other, tmp_path):
    def program(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            checkpoint = ms.Checkpoint(v=ms.Variable(0.0))
        if comm.rank == 0:
            with pytest.raises(ms.LockstepError) as told:
                checkpoint.save(tmp_path / "c")
            return str(told.value)
        if other == "calls":
            with pytest.raises(ms.LockstepError):
                strategy.run(int)
        return ""

    text = run_ranks(program, 2)[0]
    assert "Save and restore on all ranks, not under `if rank == 0`: replica 0 writes" in text


def test_other_calls_on_one_rank_say_nothing_of_saving():
    def program(comm):
        strategy = ms.MirroredStrategy()
        with pytest.raises(ms.LockstepError) as told:
            strategy.run(int) if comm.rank else strategy.all_reduce("sum", 1)
        return str(told.value)

    assert not any("Save and restore" in text for text in run_ranks(program, 2))

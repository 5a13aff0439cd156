"""The rows of the fault table: which test shows each; and how the tests of a class run.

A, mismatched calls; B, processes and hangs; C, arrays; D, numbers; E, checkpoints. `test_rows.py`
checks the table.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mpistrat.config import launched_by
from mpistrat.launch.process import run_job
from mpistrat.testing import run_ranks

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SIZES = {"A": 15, "B": 24, "C": 16, "D": 11, "E": 20}
ROWS = [f"{letter}{number}" for letter, count in SIZES.items() for number in range(1, count + 1)]

# Rows without a test, and why. At most eight.
REASONS = {
    "C14": (
        "A buffer that another thread of the program writes during a call: NumPy itself gives no "
        "meaning to that, and a checksum before and after costs a pass over all data in each call. "
        "What MPISTRAT_CHECK_EVERY compares finds a copy of a variable that was torn this way."
    ),
    "D6": (
        "The same bits for any number of ranks need sums that do not depend on their order. They "
        "are not offered: measured, they cost 6 times an all-reduce. For one number of ranks the "
        "bits are equal on all ranks, see D5."
    ),
    "D9": (
        "A payload that is changed in transit: all networks that MPI runs on have checksums of "
        "their own. What arrives wrong on one rank only makes its copies differ, see D8."
    ),
    "D11": (
        "Ranks whose processors round denormals or fused products otherwise: each reduction gives "
        "all ranks the bits of one fold, and copies that come to differ are found, see D8."
    ),
}

# Rows that tests elsewhere show, instead of one in the file of their class or besides.
ELSEWHERE: dict[str, tuple[str, ...]] = {
    "A1": ("tests/unit/lockstep/test_lockstep.py::test_a_difference_raises_on_every_rank",),
    "A2": ("tests/faults/test_pairs.py::test_pairs_on_mpi",),
    "A7": (
        "tests/unit/lockstep/test_lockstep.py::test_what_only_looks_different_is_no_difference",
    ),
    "A8": ("tests/unit/collectives/test_gather.py::test_uneven_and_empty_parts",),
    "A12": ("tests/mpi/test_session.py::test_traffic_of_the_program_itself_is_undisturbed",),
    "A13": (
        "tests/unit/collectives/test_failures.py::test_two_hundred_rounds_of_random_faults_never_hang",
    ),
    "B14": (
        "tests/unit/data/test_distributed.py::test_means_over_a_last_batch_count_its_examples",
    ),
    "B22": ("tests/mpi/test_session.py::test_more_strategies_than_communicators",),
    "B23": ("tests/faults/test_rows.py::test_b23_no_operation_of_our_own_runs_inside_mpi",),
    "C1": ("tests/unit/collectives/test_all_reduce.py::test_every_dtype_and_layout",),
    "C8": ("tests/unit/collectives/test_bad_leaves.py::test_a_bad_leaf_raises_on_every_rank",),
    "C13": ("tests/mpi/test_pieces.py::test_uneven_gathers",),
    "C15": (
        "tests/unit/variables/test_values.py::test_what_cannot_be_sent_is_a_type_error_everywhere",
    ),
    "D1": ("tests/unit/lockstep/test_guards.py::test_a_bad_number_is_named_on_every_rank",),
    "D2": ("tests/mpi/test_collectives.py::test_nan_and_infinity_are_never_lost",),
    "D4": ("tests/unit/collectives/test_weights.py::test_all_weights_zero_gives_nan_everywhere",),
    "D8": ("tests/unit/lockstep/test_guards.py::test_a_flipped_bit_is_found_within_one_round",),
    "D10": (
        "tests/unit/data/test_distributed.py::test_each_example_once_an_epoch_in_a_new_order",
        "tests/unit/data/test_distributed.py::test_the_order_does_not_depend_on_the_number_of_ranks",
    ),
    "E1": (
        "tests/unit/checkpoint/test_files.py::test_a_process_that_ends_at_any_step_leaves_the_old_or_the_new",
        "tests/unit/checkpoint/test_shares.py::test_a_process_that_ends_at_any_step_leaves_old_and_new_whole",
    ),
    "E2": (
        "tests/unit/checkpoint/test_shares.py::test_what_is_all_old_or_new_reaches_the_disk_before_its_name",
    ),
    "E3": (
        "tests/unit/checkpoint/test_format.py::test_every_truncation_is_found",
        "tests/unit/checkpoint/test_shares.py::test_every_flip_and_truncation_is_found",
    ),
    "E4": (
        "tests/unit/checkpoint/test_format.py::test_every_flipped_bit_is_found",
        "tests/unit/checkpoint/test_shares.py::test_every_flip_and_truncation_is_found",
    ),
    "E5": (
        "tests/unit/checkpoint/test_shares.py::test_the_newest_good_one_is_restored_or_none",
        "tests/unit/checkpoint/test_shares.py::test_what_does_not_belong_there_is_found",
    ),
    "E6": (
        "tests/unit/checkpoint/test_shares.py::test_an_error_at_any_step_is_raised_on_all_ranks_or_does_no_harm",
        "tests/mpi/test_checkpoint.py::test_a_disk_that_is_full",
    ),
    "E7": (
        "tests/unit/checkpoint/test_shares.py::test_an_error_at_any_step_is_raised_on_all_ranks_or_does_no_harm",
        "tests/unit/checkpoint/test_files.py::test_an_error_at_any_step_leaves_what_was",
    ),
    "E8": (
        "tests/unit/checkpoint/test_shares.py::test_an_error_at_any_step_is_raised_on_all_ranks_or_does_no_harm",
        "tests/unit/checkpoint/test_shares.py::test_an_error_in_the_background_is_raised_by_the_next_call",
    ),
    "E9": ("tests/unit/checkpoint/test_shares.py::test_what_was_saved_is_what_reads",),
    "E10": (
        "tests/unit/checkpoint/test_checkpoint.py::test_another_model_is_told_what_differs_and_nothing_is_written",
    ),
    "E11": ("tests/unit/checkpoint/test_shared.py::test_four_jobs_lose_no_save_without_a_word",),
    "E12": (
        "tests/unit/checkpoint/test_files.py::test_left_overs_of_other_numbers_go_and_what_is_no_file_stays",
    ),
    "E13": ("tests/unit/checkpoint/test_files.py::test_numbers_are_ordered_as_numbers",),
    "E14": (
        "tests/unit/checkpoint/test_shares.py::test_a_process_that_ends_at_any_step_leaves_old_and_new_whole",
    ),
    "E15": (
        "tests/unit/checkpoint/test_shares.py::test_an_error_in_the_background_is_raised_by_the_next_call",
        "tests/unit/checkpoint/test_shares.py::test_the_process_waits_for_what_is_on_its_way",
    ),
    "E16": (
        "tests/unit/checkpoint/test_format.py::test_a_newer_format_is_named",
        "tests/unit/checkpoint/test_shares.py::test_a_newer_format_is_named",
    ),
    "E17": ("tests/unit/checkpoint/test_shares.py::test_what_was_copied_in_part_is_no_checkpoint",),
    "E18": ("tests/unit/checkpoint/test_shares.py::test_the_newest_good_one_is_restored_or_none",),
    "E19": ("tests/unit/checkpoint/test_shares.py::test_the_newest_good_one_is_restored_or_none",),
    "E20": ("tests/unit/checkpoint/test_inspection.py::test_what_is_not_finite_is_told",),
}
FILES = {
    "A": "test_mismatch.py",
    "B": "test_processes.py",
    "C": "test_arrays.py",
    "D": "test_numbers.py",
    "E": "../unit/checkpoint/test_shares.py",
}


def shown_by(row: str) -> tuple[str, ...]:
    """Return the tests of a row; of the one in the file of its class how its name begins."""
    return (f"tests/faults/{FILES[row[0]]}::test_{row.lower()}_", *ELSEWHERE.get(row, ()))


def exists(test: str) -> bool:
    """Tell whether there is a test of that name, or, if it ends in ``_``, one that begins so.

    Before it may stand other rows that the same test shows: ``test_b1_b2_...`` shows B2.
    """
    file, _, name = test.partition("::")
    begun = re.escape(name.removeprefix("test_"))
    pattern = rf"^def test_([a-e]\d+_)*{begun}\w+\(" if name.endswith("_") else rf"^def {name}\("
    path = ROOT / file
    return path.exists() and re.search(pattern, path.read_text(), re.MULTILINE) is not None


def starts_jobs(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that starts jobs, which cannot be started from a rank of another."""
    unless = pytest.mark.skipif(launched_by() is not None, reason="this is a rank of a job")
    return pytest.mark.job(unless(test))


# Two ranks show every class; three are more of the same.
JOB_SIZES = pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.mpi)])


class Class:
    """The tests of one class: each is what one rank does, on threads here and on MPI in one job."""

    def __init__(self, file: str):
        self.file = file
        self.bodies: list[Callable[[Any], None]] = []

    def row(self, body: Callable[[Any], None]) -> Callable[[int], None]:
        """Make of what a rank does a test on two and on three thread ranks."""
        self.bodies.append(body)

        @pytest.mark.parametrize("size", [2, 3])
        def test(size: int) -> None:
            run_ranks(body, size)

        test.__name__ = body.__name__
        return test

    def on_mpi(self, size: int, directory: Path, *words: str) -> str:
        """Run all of them in one job of MPI, or what the words say; return what it printed."""
        from crowded import command  # ranks, which import this too, do not find it

        printed = directory / "printed"
        program = [sys.executable, self.file, *words]
        with printed.open("wb") as output:
            outcome = run_job(command(size, program), 240, output, cwd=ROOT)
        text = printed.read_text(errors="replace")
        assert outcome.code == 0, text
        assert words or f"{len(self.bodies)} tests passed" in text
        return text

    def main(self) -> None:
        """Be one rank of that job. Each test has a communicator, and so a session, of its own."""
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        for body in self.bodies:
            failure = ""
            try:
                body(world.Dup())
            except BaseException:
                failure = traceback.format_exc()
            failures = world.allgather(failure)
            if any(failures):
                if world.rank == 0:
                    rank = next(r for r, text in enumerate(failures) if text)
                    print(f"{body.__name__}, rank {rank}:\n{failures[rank]}", flush=True)
                sys.exit(1)
        if world.rank == 0:
            print(f"{len(self.bodies)} tests passed")

"""Which ends of a job a batch script answers by starting it again."""

from __future__ import annotations

import json

import pytest

from mpistrat.launch.cli import main
from mpistrat.launch.requeue import End, decide_restart, record_end


@pytest.mark.parametrize(
    ("codes", "yes"),
    [
        ([42], True),
        ([42] * 50, True),
        ([75], True),
        ([75, 42, 75], True),
        ([75, 42, 75, 75], False),
        *(([code], False) for code in (0, 1, 2, 70, 76, 77, 78, 79, 124, 130, 137, 143)),
        ([42, 77], False),
    ],
)
def test_codes(codes, yes):
    assert decide_restart([End(code, 10 * number) for number, code in enumerate(codes)])[0] is yes
    assert not decide_restart([End(code, 10) for code in codes], "CANCELLED")[0]


@pytest.mark.parametrize(
    ("steps", "yes"),
    [
        ([5, 5, 5], True),
        ([5, 5, 5, 5], False),  # the first start, and three more
        ([4, 5, 5, 5], True),
        ([5, 5, 5, 6], True),
        ([9, 5, 5, 5], False),
        ([-1] * 20, True),  # nobody tells steps
    ],
)
def test_three_restarts_without_a_new_step(steps, yes):
    assert decide_restart([End(42, step) for step in steps])[0] is yes


@pytest.fixture
def _no_job(monkeypatch):
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("_no_job")
def test_the_command(tmp_path, capsys):
    record = tmp_path / "exit-code"
    words = ["requeue", "--record", str(record), "--checkpoint", str(tmp_path), "--code"]
    record.write_text("42\n")
    assert main([*words, "137"]) == 0  # srun's own; the record knows better
    assert not record.exists()
    assert main([*words, "137"]) == 1  # nothing was recorded
    assert capsys.readouterr().out.splitlines() == [
        "yes: it left with 42 after saving",
        "no: exit code 137 would occur again",
    ]


@pytest.mark.usefixtures("_no_job")
def test_the_step_is_that_of_the_claim(tmp_path):
    claimed = {"host": "n", "machine": "b", "pid": 1, "born": 1, "job": "", "restart": 0}
    claimed |= {"token": "t", "number": 1, "held": False, "saved_step": 40}
    (tmp_path / "job.json").write_text(json.dumps(claimed))
    words = ["requeue", "--record", str(tmp_path / "r"), "--checkpoint", str(tmp_path)]
    assert [main([*words, "--code", "42"]) for _ in range(4)] == [0, 0, 0, 1]


def test_ends_of_another_job_are_forgotten(tmp_path):
    record = tmp_path / "r"
    assert record_end(record, 75, "1", 3) == [(75, 3)]
    assert record_end(record, 75, "1", 4) == [(75, 3), (75, 4)]
    assert record_end(record, 42, "2", 4) == [(42, 4)]
    damaged = ["half a te", '{"job": "2"}', '{"job": "2", "ends": [[Infinity, 1]]}', "[" * 9000]
    for text in damaged:
        (tmp_path / "r.ends").write_text(text)
        assert record_end(record, 42, "2", 4) == [(42, 4)]


def test_notes_that_cannot_be_written_are_a_no(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for record in (str(tmp_path / "a" / "r"), "."):
        assert main(["requeue", "--record", record, "--code", "42"]) == 1
        assert capsys.readouterr().out.startswith("no: ")


@pytest.mark.usefixtures("_no_job")
def test_jobs_of_a_chain_count_as_one(tmp_path, monkeypatch):
    record = tmp_path / "exit-code"
    words = ["requeue", "--record", str(record), "--code", "75", "--job", "11"]
    found = []
    for number in ("11", "12", "13"):
        monkeypatch.setenv("PBS_JOBID", number)
        found.append(main(words))
    assert found == [0, 0, 1]

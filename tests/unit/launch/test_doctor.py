"""The report of `mpistrat doctor`, with the MPI of this environment and without one."""

from __future__ import annotations

import sys
from importlib.metadata import version

import pytest

from mpistrat.cli import main
from mpistrat.errors import LaunchError
from mpistrat.launch import doctor
from mpistrat.launch.flavours import FLAVOURS

pytestmark = pytest.mark.job


def test_this_environment_is_well(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "BAD" not in out
    for name in ("NumPy", "Numba", "mpi4py"):
        assert any(name in line and version(name) in line for line in out.splitlines())
    assert "found each other" in out
    assert sys.executable in out


def test_every_check_is_one_finding():
    assert [finding.name for finding in doctor.examine()] == [name for name, _ in doctor.CHECKS]


def test_what_is_wrong_gives_exit_code_1(monkeypatch, capsys):
    def broken():
        raise LaunchError("no launcher at all")

    monkeypatch.setattr(doctor, "CHECKS", (("mpiexec", broken), ("cores", doctor._cores)))
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("BAD mpiexec:")
    assert "no launcher at all" in lines[0]
    assert lines[1].startswith("ok  cores:")


def test_package_that_cannot_be_loaded_is_bad():
    finding = doctor._package("Nothing", "no_such_package_at_all")
    assert not finding.ok
    assert "ModuleNotFoundError" in finding.text


def test_jobs_are_not_started_from_a_rank(monkeypatch):
    monkeypatch.setattr(doctor, "launched_by", lambda: "srun")
    assert "srun" in doctor._two_ranks().text


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("Open MPI", None, "mpistrat run"),
        ("Open MPI", "0", "does not overlap"),
        ("MPICH", None, "overlaps with computation"),
    ],
)
def test_whether_calls_overlap_is_told(name, value, says, monkeypatch):
    row = next(row for row in reversed(FLAVOURS) if row.name == name)
    launcher, loaded = doctor.find()
    known = launcher._replace(flavour=row), loaded._replace(flavour=row)
    monkeypatch.setattr(doctor, "find", lambda: known)
    monkeypatch.delenv("OMPI_MCA_mpi_yield_when_idle", raising=False)
    if value is not None:
        monkeypatch.setenv("OMPI_MCA_mpi_yield_when_idle", value)
    assert says in doctor._overlap().text


@pytest.mark.parametrize("says", ["size 1\nsize 1\n", "size 2\n"])
def test_ranks_that_do_not_find_each_other_are_bad(says, tmp_path, monkeypatch):
    script = tmp_path / "mpiexec"
    script.write_text(f"#!/bin/sh\nprintf '{says}'\n")
    script.chmod(0o755)
    launcher, loaded = doctor.find()
    monkeypatch.setattr(doctor, "find", lambda: (launcher._replace(path=str(script)), loaded))
    assert not doctor._two_ranks().ok

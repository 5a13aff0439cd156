"""The rows against what libraries and launchers print: first lines, recorded.

Except for MVAPICH 3 and ParaStation MPI, whose lines follow the form of MVAPICH2's and MPICH's.
"""

from __future__ import annotations

import pytest

from mpistrat.launch.mpi_libraries import (
    FLAVOURS,
    UNKNOWN,
    find_version,
    recognize_launcher,
    recognize_library,
)

LIBRARIES = {
    "MPICH Version:      5.0.2\nMPICH Release date: Fri Sep 25 20:45:26 UTC 2026\n": "MPICH",
    "Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11": "Open MPI",
    "Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4, repo rev: v4.1.4": "Open MPI",
    "Intel(R) MPI Library 2021.18.1 for Linux* OS\n": "Intel MPI",
    "MPI VERSION    : CRAY MPICH version 8.1.25.17 (ANL base 3.4a2)\nMPI BUILD INFO : Sun Feb 26 "
    "16:42 2023 (git hash aecd99f)\n": "Cray MPICH",
    "MVAPICH2 Version      :\t2.3.5\nMVAPICH2 Release date :\tMon November 30 22:00:00 EST 2020\n"
    "MVAPICH2 Device       :\tch3:mrail\n": "MVAPICH",
    "MVAPICH Version:\t3.0\nMVAPICH Device:\tch4:ofi\n": "MVAPICH",
    "MPICH Version:\t3.4.1\nMPICH Release date:\tFri\nMPICH ABI:\t13:11:1\n"
    "MPICH Device:\tch3:psp\n": "ParaStation MPI",
    "MPICH Version:\t3.3.2\nMPICH Device:\tch3:nemesis\nMPICH configure:\t--x": "MPICH",
}
LAUNCHERS = {
    "HYDRA build details:\n    Version:                                 5.0.2\n": "MPICH",
    "mpiexec (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org\n": "Open MPI",
    "mpiexec (OpenRTE) 4.1.4\n\nReport bugs to http://www.open-mpi.org\n": "Open MPI",
    "prterun (PRRTE) 3.0.12\n": "Open MPI",
    "Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626\n": "Intel MPI",
    "mpiexec version 1.8.0 revision 5d1e3a0\n": "Cray MPICH",
    "mpiexec: illegal option -- version": "unknown",
}


@pytest.mark.parametrize(("text", "name"), LIBRARIES.items())
def test_library_is_recognised(text, name):
    assert recognize_library(text).name == name


@pytest.mark.parametrize(("text", "name"), LAUNCHERS.items())
def test_launcher_is_recognised(text, name):
    assert recognize_launcher(text).name == name


def test_generations_of_open_mpi_differ_in_flags():
    old, new = (
        recognize_launcher("mpiexec (OpenRTE) 4.1.4"),
        recognize_launcher("mpiexec (Open MPI) 5.0.11"),
    )
    assert "--oversubscribe" in old.flags
    assert "--oversubscribe" not in new.flags
    assert new.variables == {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    assert not old.variables


def test_last_row_takes_what_no_other_knows():
    assert FLAVOURS[-1] is UNKNOWN
    assert recognize_library("") is recognize_launcher("") is UNKNOWN


@pytest.mark.parametrize("text", ["MPICH Version:   5.0.2", "mpiexec (X) 5.0.2", "v5.0.2, 4.1"])
def test_version_is_the_first_number_with_a_dot(text):
    assert find_version(text) == "5.0.2"


def test_version_of_a_text_without_one_is_empty():
    assert find_version("MPICH, release 5") == ""

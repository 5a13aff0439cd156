"""Which launcher is taken, how it is called, and what is said when none fits."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from mpistrat.errors import LaunchError
from mpistrat.launch import mpi_libraries
from mpistrat.launch.mpi_libraries import (
    FLAVOURS,
    UNKNOWN,
    Launcher,
    find_launcher,
    find_library,
    is_same_mpi,
    recognize_launcher,
    recognize_library,
)

TEXTS = {
    "MPICH": "HYDRA build details:\n    Version:  9.9.9",
    "Open MPI": "mpiexec (Open MPI) 9.9.9",
    "Intel MPI": "Intel(R) MPI Library for Linux* OS, Version 2099.9",
}


def pretender(directory, text):
    """A launcher that only prints."""
    directory.mkdir(exist_ok=True)
    path = directory / "mpiexec"
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    path.chmod(0o755)
    return str(path)


def other_text():
    return next(text for name, text in TEXTS.items() if name != find_library().flavour.name)


@pytest.fixture
def fresh_probe():
    find_library.cache_clear()
    yield
    find_library.cache_clear()


def test_the_library_is_found_whatever_encoding_python_is_told_to_print_in(monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "utf-16")
    assert find_library.__wrapped__() == find_library()


def test_launcher_of_this_environment_fits_its_library():
    launcher, loaded = find_launcher()
    assert is_same_mpi(launcher.flavour, loaded.flavour)
    assert loaded.version_text
    assert Path(launcher.path).is_file()


def test_launcher_beside_the_interpreter_comes_before_path(tmp_path, monkeypatch):
    near = pretender(tmp_path / "near", "x")
    far = pretender(tmp_path / "far", "x")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "near" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "far"))
    found = mpi_libraries.list_launchers(mpi_libraries.Library(UNKNOWN, "", ""))
    assert found[0] == near
    assert found[-1] == far


def test_launcher_of_another_mpi_is_passed_over(tmp_path):
    wrong = pretender(tmp_path, other_text())
    right, _ = find_launcher()
    assert find_launcher([wrong, right.path])[0] == right


def test_a_launcher_of_the_same_version_comes_before_a_nearer_one(tmp_path, monkeypatch):
    """As with Debian's library in an environment with the wheel's."""
    texts = {"hangs": "", "wheel": "mpiexec (Open MPI) 5.0.11", "site": "mpiexec (OpenRTE) 4.1.4"}
    made = {}
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        made[name] = pretender(tmp_path / name, text)
    Path(made["hangs"]).write_text("no program")
    library = "Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4"
    loaded = mpi_libraries.Library(recognize_library(library), library, "/usr/lib/libmpi.so.40")
    monkeypatch.setattr(mpi_libraries, "find_library", lambda: loaded)
    assert find_launcher(list(made.values()))[0].path == made["site"]
    assert find_launcher([made["hangs"], made["wheel"]])[0].path == made["wheel"]
    with pytest.raises(LaunchError, match="none that answers"):
        find_launcher([made["hangs"]])


def test_only_launchers_of_another_mpi_is_an_error_that_names_both(tmp_path):
    wrong = pretender(tmp_path, other_text())
    with pytest.raises(LaunchError) as error:
        find_launcher([wrong])
    text = str(error.value)
    assert wrong in text
    assert str(find_library()) in text
    assert recognize_launcher(other_text()).name in text
    assert "To fix it" in text


def test_no_launcher_is_an_error_that_says_what_to_install():
    with pytest.raises(LaunchError, match="there is no mpiexec for"):
        find_launcher([])


def test_interpreter_without_mpi_is_an_error_that_says_what_to_install(tmp_path, fresh_probe):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ModuleNotFoundError: no mpi4py' >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(LaunchError, match=r"ModuleNotFoundError: no mpi4py") as error:
        find_library(str(python))
    assert "pip install 'mpistrat[mpich]'" in str(error.value)


def test_what_a_library_prints_as_it_is_loaded_is_no_answer(tmp_path, fresh_probe):
    python = tmp_path / "python"
    warning = "printf 'UCX  WARN of \\351\\n'"  # as UCX does, to its standard output; and no UTF-8
    answer = 'echo \'["MPICH Version: 4.0", "/usr/lib/libmpi.so"]\''
    python.write_text(f"#!/bin/sh\n{warning}\n{answer}\n")
    python.chmod(0o755)
    assert find_library(str(python)).file_path == "/usr/lib/libmpi.so"


@pytest.mark.parametrize("row", FLAVOURS)
def test_unknown_may_fit_everything_and_others_only_their_name(row):
    assert is_same_mpi(UNKNOWN, row)
    assert is_same_mpi(row, UNKNOWN)
    for other in FLAVOURS[:-1]:
        known = row is UNKNOWN or row.name in (other.name, *other.started_by_names)
        assert is_same_mpi(row, other) == known


def test_a_library_without_a_launcher_takes_that_of_its_family():
    hydra = recognize_launcher("HYDRA build details:")
    assert is_same_mpi(hydra, recognize_library("MVAPICH2 Version      :\t2.3.5"))
    assert not is_same_mpi(
        hydra, recognize_library("MPI VERSION    : CRAY MPICH version 8.1.25.17")
    )


def command(text, ranks, program=("python", "x y.py"), cores=2, uid=1000, monkeypatch=None):
    monkeypatch.setattr(mpi_libraries, "count_cores", lambda: cores)
    monkeypatch.setattr(os, "getuid", lambda: uid)
    return Launcher("/bin/mpiexec", recognize_launcher(text), text).build_command(ranks, program)


def test_hydra_needs_no_flags(monkeypatch):
    got = command(TEXTS["MPICH"], 64, uid=0, monkeypatch=monkeypatch)
    assert str(got) == "/bin/mpiexec -n 64 python 'x y.py'"
    assert not got.env


def test_open_mpi_yields_only_when_crowded(monkeypatch):
    flag = ("--mca", "mpi_yield_when_idle", "1")
    assert flag[1] not in command(TEXTS["Open MPI"], 2, monkeypatch=monkeypatch).argv
    argv = command(TEXTS["Open MPI"], 3, monkeypatch=monkeypatch).argv
    assert argv[:7] == ("/bin/mpiexec", "--bind-to", "none", *flag, "-n")


@pytest.mark.parametrize("text", [TEXTS["Open MPI"], "mpiexec (OpenRTE) 4.1.4"])
def test_open_mpi_yields_unless_the_user_has_chosen(text, monkeypatch):
    monkeypatch.delenv("OMPI_MCA_mpi_yield_when_idle", raising=False)
    got = command(text, 1, monkeypatch=monkeypatch)
    assert got.env["OMPI_MCA_mpi_yield_when_idle"] == "1"
    assert "OMPI_MCA_mpi_yield_when_idle=1" in str(got)
    monkeypatch.setenv("OMPI_MCA_mpi_yield_when_idle", "0")
    assert "OMPI_MCA_mpi_yield_when_idle" not in command(text, 1, monkeypatch=monkeypatch).env


@pytest.mark.parametrize("uid", [0, 1000])
def test_open_mpi_runs_as_root_only_for_root(uid, monkeypatch):
    got = command(TEXTS["Open MPI"], 1, uid=uid, monkeypatch=monkeypatch)
    assert ("OMPI_ALLOW_RUN_AS_ROOT" in got.env) == (uid == 0)
    assert got.env["PRTE_MCA_rmaps_default_mapping_policy"] == ":oversubscribe"


def test_printed_line_is_what_a_shell_takes_apart_again(monkeypatch):
    got = command(TEXTS["Open MPI"], 1, ["a;b", "it's", ""], monkeypatch=monkeypatch)
    words = shlex.split(str(got))
    assert words[-3:] == ["a;b", "it's", ""]
    assert words[0] == "PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe"


@pytest.mark.parametrize("ranks", [0, -1])
def test_less_than_one_rank_is_refused(ranks, monkeypatch):
    with pytest.raises(LaunchError, match=f"{ranks} were asked for"):
        command(TEXTS["MPICH"], ranks, monkeypatch=monkeypatch)


def test_library_is_named_on_one_line():
    text = "MPICH Version:      5.0.2\nMPICH Release date: x"
    loaded = mpi_libraries.Library(recognize_library(text), text, "/lib/libmpi.so")
    assert str(loaded) == "MPICH Version: 5.0.2 (/lib/libmpi.so)"


@pytest.mark.parametrize("name", ["struct", "json"])
def test_a_file_that_shadows_a_module_is_named(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(f"{name}.py").write_text("x = 1\n")
    with pytest.raises(LaunchError, match=rf"Error: .*\n.*{name}\.py\. Rename") as caught:
        mpi_libraries.find_library.__wrapped__()
    assert "no working MPI" not in str(caught.value)


def test_the_launcher_of_a_library_is_looked_for_where_the_library_is(tmp_path, monkeypatch):
    """As Debian has it: below lib; launchers of several MPIs, with their names, in bin."""
    (tmp_path / "lib" / "arch").mkdir(parents=True)
    wrong = pretender(tmp_path / "bin", TEXTS["MPICH"])
    right = Path(pretender(tmp_path / "other", "mpiexec (OpenRTE) 4.1.4"))
    right = right.rename(tmp_path / "bin" / "mpiexec.openmpi")
    text = "Open MPI v4.1.4"
    loaded = mpi_libraries.Library(
        recognize_library(text), text, str(tmp_path / "lib" / "arch" / "libmpi.so")
    )
    monkeypatch.setattr(mpi_libraries, "find_library", lambda: loaded)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    found = mpi_libraries.list_launchers(loaded)
    assert found.index(wrong) < found.index(str(right))
    assert find_launcher(found)[0].path == str(right)


def test_the_library_of_debians_mpich_is_explained(tmp_path, fresh_probe):
    python = tmp_path / "python"
    text = "ImportError: libmpi.so.12: cannot open shared object file: No such file or directory"
    python.write_text(f"#!/bin/sh\necho '{text}' >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(LaunchError, match=r"ln -sf .*libmpich\.so\.12"):
        find_library(str(python))

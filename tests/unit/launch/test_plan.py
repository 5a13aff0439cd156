"""From an allocation, an MPI and what a user wants to the call of a launcher: one row per case."""

import pytest

from mpistrat.cluster.allocation import Allocation
from mpistrat.errors import LaunchError
from mpistrat.launch import mpi_libraries
from mpistrat.launch.mpi_libraries import (
    BINDINGS,
    FLAVOURS,
    Launcher,
    recognize_launcher,
    recognize_library,
)
from mpistrat.launch.plan import (
    LOCAL_HOST,
    LaunchOptions,
    build_mpiexec_command,
    build_srun_command,
    choose_pmi,
    fit_shape,
    forward_variables,
)

SLURM = Allocation("Slurm", ("n1", "n2"), (4, 4))
PBS = Allocation("PBS", ("n1", "n2"), (4, 4), hostfile="nodes")
FILE = Allocation("", ("n1", "n2"), (4, 4), hostfile="hosts")
TEXTS = {
    "MPICH": "HYDRA build details:\n    Version: 5.0.2",
    "Intel MPI": "Intel(R) MPI Library for Linux* OS, Version 2021.18.1",
    "Cray MPICH": "mpiexec version 1.8.0 revision 5d1e3a0",
    "Open MPI 4": "mpiexec (OpenRTE) 4.1.4",
    "Open MPI 5": "mpiexec (Open MPI) 5.0.11",
}
# Of `srun --mpi=list`: Debian's, and as sites show theirs.
DEBIAN = """MPI plugin types are...
\tpmix
\tnone
\tcray_shasta
\tpmi2
specific pmix plugin versions available: pmix_v4
"""
OLD = "srun: MPI types are...\nsrun: none\nsrun: pmi2\nsrun: openmpi\n"
JSC = "MPI plugin types are...\n\tpspmix\n\tnone\n\tpspmi\n"


@pytest.mark.parametrize(
    ("place", "launch_options", "wanted"),
    [
        (SLURM, LaunchOptions(), "--nodes=2 --ntasks=8"),
        (SLURM, LaunchOptions(ranks=2), "--nodes=2 --ntasks=2"),
        (SLURM, LaunchOptions(ranks=1), "--nodes=1 --ntasks=1"),
        (SLURM, LaunchOptions(nodes=1), "--nodes=1 --ntasks=4"),
        (SLURM, LaunchOptions(per_node=2), "--nodes=2 --ntasks=4 --ntasks-per-node=2"),
        (SLURM, LaunchOptions(ranks=3, per_node=4), "--nodes=1 --ntasks=3 --ntasks-per-node=4"),
        (
            SLURM._replace(is_step_shell=True),
            LaunchOptions(ranks=2),
            "--overlap --nodes=2 --ntasks=2",
        ),
        (
            SLURM._replace(cpus_per_task=3),
            LaunchOptions(),
            "--nodes=2 --ntasks=8 --cpus-per-task=3",
        ),
        (
            SLURM._replace(hostfile="h"),
            LaunchOptions(nodes=1),
            "--nodes=1 --ntasks=4 --nodelist=n1",
        ),
        (SLURM, LaunchOptions(bind="numa"), "--nodes=2 --ntasks=8 --cpu-bind=ldoms"),
    ],
)
def test_srun(place, launch_options, wanted):
    call = str(build_srun_command("pmix", place, launch_options, ["a b"], {}))
    assert call == f"srun --mpi=pmix -K1 -X --export=ALL {wanted} --distribution=block 'a b'"


def test_words_for_srun_come_last_so_that_they_win():
    call = build_srun_command(
        "", SLURM, LaunchOptions(extra=("--distribution=cyclic",)), ["x"], {"A": "1"}
    )
    assert str(call).startswith("A=1 srun -K1 ")
    assert call.argv[-3:] == ("--distribution=block", "--distribution=cyclic", "x")


@pytest.mark.parametrize(
    ("mpi", "place", "launch_options", "wanted"),
    [
        ("MPICH", LOCAL_HOST, LaunchOptions(2), "-n 2"),
        ("MPICH", LOCAL_HOST, LaunchOptions(2, bind="core"), "-bind-to core -n 2"),
        ("MPICH", LOCAL_HOST, LaunchOptions(per_node=2), "-n 2"),
        ("MPICH", SLURM, LaunchOptions(), "-n 8"),
        ("MPICH", SLURM, LaunchOptions(nodes=1), "-hosts n1:4 -n 4"),
        ("MPICH", SLURM, LaunchOptions(per_node=2, extra=("-l",)), "-ppn 2 -n 4 -l"),
        ("MPICH", PBS, LaunchOptions(), "-hosts n1:4,n2:4 -n 8"),
        (
            "Intel MPI",
            FILE,
            LaunchOptions(2, bind="socket"),
            "-genv I_MPI_PIN_DOMAIN socket -hosts n1,n2 -ppn 1 -n 2",
        ),
        ("Intel MPI", SLURM, LaunchOptions(bind="none"), "-genv I_MPI_PIN off -n 8"),
        ("Cray MPICH", PBS, LaunchOptions(per_node=2), "--hosts n1,n2 --ppn 2 -n 4"),
        (
            "Cray MPICH",
            PBS,
            LaunchOptions(nodes=1, bind="core"),
            "--cpu-bind core --hosts n1 --ppn 4 -n 4",
        ),
        ("Open MPI 4", LOCAL_HOST, LaunchOptions(2), "--bind-to none --oversubscribe -n 2"),
        (
            "Open MPI 4",
            LOCAL_HOST,
            LaunchOptions(2, bind="socket"),
            "--oversubscribe --bind-to socket -n 2",
        ),
        ("Open MPI 5", LOCAL_HOST, LaunchOptions(2), "--bind-to none -n 2"),
        ("Open MPI 5", SLURM, LaunchOptions(bind="socket"), "--bind-to package -n 8"),
        ("Open MPI 5", SLURM, LaunchOptions(nodes=1), "--bind-to none --host n1:4 -n 4"),
        (
            "Open MPI 5",
            FILE,
            LaunchOptions(per_node=9),
            "--bind-to none --mca mpi_yield_when_idle 1 --host n1:9,n2:9 "
            "--map-by ppr:9:node:oversubscribe -n 18",
        ),
    ],
)
def test_mpiexec(mpi, place, launch_options, wanted, monkeypatch):
    monkeypatch.setattr(mpi_libraries.os, "getuid", lambda: 1000)
    launcher = Launcher("mpiexec", recognize_launcher(TEXTS[mpi]), TEXTS[mpi])
    call = build_mpiexec_command(
        launcher, place, launch_options, ["train"], {"A": "1"}, core_count=8
    )
    assert " ".join(call.argv) == f"mpiexec {wanted} train"
    assert call.env["A"] == "1"


@pytest.mark.parametrize("row", FLAVOURS, ids=lambda row: row.name)
def test_every_row_binds(row):
    assert set(row.bind_flags) == set(BINDINGS)


@pytest.mark.parametrize(
    ("library", "listed", "env", "wanted"),
    [
        ("MPICH Version:      5.0.2", DEBIAN, {}, "pmi2"),
        ("MPICH Version:      5.0.2", OLD, {}, "pmi2"),
        ("MPICH Version:      5.0.2", "", {}, None),
        ("MVAPICH2 Version      :\t2.3.5", DEBIAN, {}, "pmi2"),
        ("MPI VERSION    : CRAY MPICH version 8.1", DEBIAN, {}, "cray_shasta"),
        ("MPI VERSION    : CRAY MPICH version 8.1", OLD, {}, None),
        ("MPICH Version:\t3.4.1\nMPICH Device:\tch3:psp", JSC, {}, "pspmi"),
        ("Open MPI v5.0.11", DEBIAN, {}, "pmix"),
        ("Open MPI v5.0.11", OLD, {}, None),
        ("Open MPI v4.1.4", JSC, {}, "pspmix"),
        ("Intel(R) MPI Library 2021", DEBIAN, {}, None),
        ("Intel(R) MPI Library 2021", DEBIAN, {"I_MPI_PMI_LIBRARY": "libpmi2.so"}, "pmi2"),
        ("another", DEBIAN, {}, None),
    ],
)
def test_what_srun_and_a_library_speak(library, listed, env, wanted):
    assert choose_pmi(recognize_library(library), listed, env) == wanted


@pytest.mark.parametrize(
    ("place", "launch_options", "says"),
    [
        (LOCAL_HOST, LaunchOptions(), "how many ranks"),
        (LOCAL_HOST, LaunchOptions(0), "how many ranks"),
        (LOCAL_HOST, LaunchOptions(2, nodes=2), "--nodes 2: here is 1"),
        (SLURM, LaunchOptions(nodes=3), "--nodes 3: Slurm gives 2"),
        (FILE, LaunchOptions(nodes=3), "the file of hosts gives 2"),
        (
            SLURM,
            LaunchOptions(ranks=5, nodes=1, per_node=4),
            "-n 5 does not fit 1 node with 4 on each",
        ),
        (SLURM, LaunchOptions(ranks=1, nodes=2), "-n 1 does not fit 2 nodes"),
        (SLURM, LaunchOptions(ranks=9, per_node=4), "-n 9 does not fit"),
    ],
)
def test_launch_options_that_do_not_fit(place, launch_options, says):
    with pytest.raises(LaunchError, match=says):
        fit_shape(launch_options, place)


def test_variables_are_handed_on_where_a_launcher_has_to_be_told():
    call = build_srun_command("", SLURM, LaunchOptions(), ["x"], {})
    names = ["MPISTRAT_NAN", "HOME", "PYTHONPATH", "MPISTRAT_NAN"]
    assert forward_variables(call, "", names) == call
    assert forward_variables(call, "-x", names).argv[1:5] == (
        "-x",
        "MPISTRAT_NAN",
        "-x",
        "PYTHONPATH",
    )

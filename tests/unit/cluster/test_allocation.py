"""What batch systems say of the hosts of a job; the variables as recorded."""

import pytest

from mpistrat.cluster.allocation import Allocation, find_allocation, read_hostfile

SBATCH = {  # sbatch -N2 --ntasks-per-node=2 --cpus-per-task=3
    **{"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]"},
    **{"SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_CPUS_PER_TASK": "3", "SLURM_PROCID": "0"},
}
NODES = ("node1", "node2")
PTY = {"SLURM_PTY_PORT": "43375", "SLURM_STEP_NUM_TASKS": "1", "PMI_SIZE": "1"}


def without(name):
    return {key: text for key, text in SBATCH.items() if key != name}


@pytest.mark.parametrize(
    ("env", "wanted"),
    [
        (SBATCH, Allocation("Slurm", NODES, (2, 2), 3)),
        (without("SLURM_CPUS_PER_TASK"), Allocation("Slurm", NODES, (2, 2))),
        ({**SBATCH, "SLURM_TASKS_PER_NODE": "2,1"}, Allocation("Slurm", NODES, (2, 1), 3)),
        # The shell of a step of one node: its cores are its own, not those of each rank.
        (
            {**SBATCH, **PTY, "SLURM_TASKS_PER_NODE": "1"},
            Allocation("Slurm", NODES, (1, 1), is_step_shell=True),
        ),
        ({}, None),
        (without("SLURM_JOB_ID"), None),
        (without("SLURM_JOB_NODELIST"), None),
        (without("SLURM_TASKS_PER_NODE"), None),
        ({**SBATCH, "SLURM_JOB_NUM_NODES": "3"}, None),
        ({**SBATCH, "SLURM_JOB_NODELIST": "node["}, None),
        ({**SBATCH, "SLURM_JOB_NODELIST": ""}, None),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"}, None),
        ({"PBS_JOBID": "1.head"}, None),
    ],
    ids=str,
)
def test_variables(env, wanted):
    assert find_allocation(env) == wanted


def test_pbs_lists_a_host_once_for_each_rank(tmp_path):
    file = tmp_path / "nodes"
    file.write_text("a\na\nb\nb\n")
    env = {"PBS_JOBID": "1.head", "PBS_NODEFILE": str(file)}
    assert find_allocation(env) == Allocation("PBS", ("a", "b"), (2, 2), hostfile=str(file))
    file.unlink()
    with pytest.raises(FileNotFoundError):
        find_allocation(env)


def test_a_file_of_hosts(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# ours\na:4\nb slots=2  # slow\n\nc\n")
    assert read_hostfile(str(file)).task_counts == (4, 2, 1)


@pytest.mark.parametrize("text", ["", "# none\n", "a:none\n", "a:0\n", "a 1 2\n"])
def test_a_file_that_cannot_be_used(text, tmp_path):
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(ValueError, match="hosts"):
        read_hostfile(str(file))

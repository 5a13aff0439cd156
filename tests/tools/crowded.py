"""Jobs of more ranks than cores."""

from mpistrat.launch.mpi_libraries import count_cores, find_launcher


def command(ranks, program):
    """Return how to start a job; where ranks share cores, those of MPICH sleep while they wait.

    Else they give up the core at each look, which takes it from the ranks that they wait for:
    `test_rung[4]` on two busy cores took 157 s instead of 97, and 119 s of the processor, not 65.
    """
    call = find_launcher()[0].build_command(ranks, program)
    asleep = {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"} if ranks > count_cores() else {}
    return call._replace(env={**call.env, **asleep})

"""A real Slurm on virtual hosts: its controller on the head, one daemon on each node."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

from hosts import HEAD, die_with_parent

NEEDED = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")


def missing():
    """Why Slurm cannot be started here; an empty string if it can."""
    absent = [name for name in NEEDED if shutil.which(name, path=PATH) is None]
    return f"there is no {' '.join(absent)}: apt-get install slurm-wlm munge" if absent else ""


class Slurm:
    """The daemons, and what is asked of them.

    Attributes:
      env: The variables with which its commands and jobs run.
    """

    def __init__(self, hosts, directory, env, cpus=4, few=2):
        """Start all of them, and wait until the nodes are idle.

        The first `few` nodes are the partitions `main` and `high`, all of them `wide`.
        """
        self.hosts, self.directory = hosts, Path(directory)
        self.env = {**env, "SLURM_CONF": str(self.directory / "slurm.conf")}
        for name in ("state", "log"):
            (self.directory / name).mkdir()
        names = {"nodes": ",".join(hosts.names), "few": ",".join(hosts.names[:few])}
        (self.directory / "slurm.conf").write_text(
            _CONF.format(directory=self.directory, head=HEAD, cpus=cpus, **names)
        )
        # Where the ranks of Open MPI meet Slurm: on a file system of the host, by a short path.
        (self.directory / "mpi.conf").write_text("PMIxCliTmpDirBase=/run\n")
        self._daemons = []
        self._munge()
        self._daemon(hosts.on(HEAD, "slurmctld", "-D", "-c"))
        for name in hosts.names:
            self.join(name)
        self.until_idle()

    def _munge(self):
        place = self.directory / "munge"
        place.mkdir(mode=0o700)
        key = place / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        words = [f"--{name}-file={place / name}" for name in ("key", "pid", "log", "seed")]
        words += [f"--socket={self.directory}/munge.sock", "--force", "--foreground"]
        self._daemon(["munged", *words])
        _wait(lambda: (self.directory / "munge.sock").exists(), 10, "munged does not answer")

    def _daemon(self, argv):
        nowhere = subprocess.DEVNULL  # each has a log of its own
        self._daemons.append(
            subprocess.Popen(
                argv,
                env=self.env,
                stdin=nowhere,
                stdout=nowhere,
                stderr=nowhere,
                preexec_fn=die_with_parent,
            )
        )

    def join(self, name):
        """Start the daemon of a node; it ends with the node."""
        spool = self.directory / "state" / name
        shutil.rmtree(spool, ignore_errors=True)  # as after a start from the network
        spool.mkdir()
        done = self.hosts.run(name, "slurmd", "-N", name, "-c", env=self.env)
        assert done.returncode == 0, f"slurmd on {name}: {done.stderr}"

    def until_idle(self, timeout=60):
        """Wait until no node runs anything, and all are there."""
        every = str(len(self.hosts.names))

        def idle():
            return self("sinfo", "-h", "-p", "wide", "-t", "idle", "-o", "%D").strip() == every

        _wait(idle, timeout, lambda: f"no idle nodes: {self.state()}")

    def state(self):
        """Nodes, jobs and steps, and what runs on each node: for a test whose wait fails."""
        asked = (["sinfo", "-N", "-l"], ["squeue"], ["squeue", "-s"], ["scontrol", "show", "job"])
        told = [self(*words, check=False) for words in asked]
        for name in self.hosts.names:
            if name in self.hosts.running:
                words = ["ps", "-eo", "pid,ppid,stat,wchan:24,etimes,args", "--forest"]
                told += [name, self.hosts.run(name, *words).stdout]
        return "\n".join(told)

    def close(self):
        """End the daemons; those of the nodes end with them."""
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()

    def __call__(self, *argv, cwd=None, check=True, timeout=60):
        """Run a command on the head; return what it prints."""
        done = self.hosts.run(HEAD, *argv, cwd=cwd, timeout=timeout, env=self.env)
        assert done.returncode == 0 or not check, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout

    def command(self, *argv, cwd=None, timeout=120, env=None):
        """Run a command on the head; return code, output and errors."""
        kept = {**self.env, **(env or {})}
        try:
            return self.hosts.run(HEAD, *argv, cwd=cwd, timeout=timeout, env=kept)
        except subprocess.TimeoutExpired as late:
            said = b"".join(filter(None, (late.stdout, late.stderr))).decode(errors="replace")
            state = self.state()
            raise AssertionError(f"{argv} continues after {timeout} s: {said}\n{state}") from None

    def submit(self, directory, body, *options):
        """Hand in a script of bash in `directory`; return the job."""
        script = Path(directory, "job.sh")
        script.write_text(f"#!/bin/bash\n{body}\n")
        words = ["--parsable", "--open-mode=append", "--output=log", *options]
        return Job(self, self("sbatch", *words, str(script), cwd=directory).strip(), directory)


class Job:
    """One job that was handed in."""

    def __init__(self, slurm, number, directory):
        """Take its number."""
        self.slurm, self.number, self.directory = slurm, number, Path(directory)

    @property
    def log(self):
        """What it has printed so far."""
        path = self.directory / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def facts(self):
        """What Slurm says of it, by name; of an array, of its last task."""
        line = self.slurm("scontrol", "show", "job", self.number, "-o").strip().splitlines()[-1]
        return dict(re.findall(r"(\w+)=(\S*)", line))

    def states(self):
        """The state of each task."""
        return re.findall(
            r"JobState=(\w+)", self.slurm("scontrol", "show", "job", self.number, "-o")
        )

    def until(self, *wanted, timeout=400):
        """Wait until its state is one of these, and return it; an end that is not is a failure."""
        found = []

        def there():
            found[:] = self.states()
            assert not set(found) & set(ENDED) - set(wanted), self.story()
            return set(found) <= set(wanted)

        _wait(there, timeout, self.story)
        return found[0]

    def until_says(self, text, timeout=180, times=1):
        """Wait until its log holds a text so many times."""

        def said():
            return self.log.count(text) >= times

        _wait(said, timeout, lambda: f"{text!r} is not said: {self.story()}")

    def story(self):
        """All that may explain what it did."""
        return f"{self.facts()}\n{self.log}"


def _wait(condition, timeout, why):
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"{timeout} s: {why() if callable(why) else why}")
        time.sleep(0.2)


# `cred_expire`: without it a job that was requeued waits for over a minute before it starts again.
_CONF = """\
ClusterName=test
SlurmctldHost={head}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.sock,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/state/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/log/slurmctld
SlurmdLogFile={directory}/log/slurmd-%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=5
InactiveLimit=0
KillWait=10
MinJobAge=3600
JobRequeue=1
NodeName={nodes} CPUs={cpus} RealMemory=2000 State=UNKNOWN
PartitionName=main Nodes={few} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 \
PreemptMode=REQUEUE
PartitionName=high Nodes={few} Default=NO MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=wide Nodes=ALL Default=NO MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE
"""

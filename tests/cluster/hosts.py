"""Virtual hosts on this machine: each has a network, a name, processes and memory of its own.

A host is a set of Linux namespaces, held by one process that sleeps. All that runs on a host ends
when that process is killed, which is what pulling the plug is here, and it is killed when the
process that made it ends. No namespace has a name, so nothing is left behind and two sets of hosts
do not meet.

The head keeps the process numbers of this machine, so that it can reach the other hosts, as `rsh`
does in place of ssh.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

NEEDED = ("ip", "nsenter", "unshare")
HEAD = "head"
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def die_with_parent():
    """Between fork and exec: let the kernel end this process when its parent ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def missing():
    """Why virtual hosts cannot be made here; an empty string if they can."""
    if os.geteuid():
        return "virtual hosts need root"
    absent = [name for name in NEEDED if shutil.which(name) is None]
    if absent:
        return f"there is no {' '.join(absent)}: apt-get install iproute2 util-linux"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "true"],
        capture_output=True,
        text=True,
    )
    return f"namespaces cannot be made: {tried.stderr.strip()}" if tried.returncode else ""


class Hosts:
    """A head and some nodes, in one network.

    Attributes:
      names: Those of the nodes.
      rsh: A program that runs a command on a host, as ssh does; `mpiexec` takes it.
    """

    def __init__(self, directory, count):
        """Start them; `directory` is for files of their own."""
        self.directory = Path(directory)
        self.names = [f"node{number}" for number in range(1, count + 1)]
        self._holders = {}
        rows = ["127.0.0.1 localhost"]
        rows += [f"10.88.0.{place} {name}" for place, name in enumerate([HEAD, *self.names], 1)]
        (self.directory / "hosts").write_text("\n".join(rows) + "\n")
        (self.directory / "pids").mkdir()
        self.rsh = self.directory / "rsh"
        self.rsh.write_text(_RSH.format(pids=self.directory / "pids"))
        self.rsh.chmod(0o755)
        self._start(HEAD, own_processes=False)
        self._ip(HEAD, "link add br0 type bridge")
        self._ip(HEAD, "link set br0 up")
        self._ip(HEAD, "addr add 10.88.0.1/24 dev br0")
        for name in self.names:
            self.power_on(name)

    @property
    def running(self):
        """Those that have power."""
        return self._holders.keys()

    def power_on(self, name):
        """Start a node, and plug it in."""
        self._start(name, own_processes=True)
        place = self.names.index(name) + 2
        cable = f"port{place}"
        self._ip(HEAD, f"link add {cable} type veth peer name eth0 netns {self._pid(name)}")
        self._ip(HEAD, f"link set {cable} master br0 up")
        self._ip(name, f"addr add 10.88.0.{place}/24 dev eth0")
        self._ip(name, "link set eth0 up")

    def power_off(self, name):
        """End all that runs on a host, at once."""
        os.kill(self._pid(name), signal.SIGKILL)
        holder = self._holders.pop(name)
        holder.wait()
        if name != HEAD:  # its end of the cable goes with the network of the node, but not at once
            end = time.monotonic() + 10
            cable = f"port{self.names.index(name) + 2}"
            while self.run(HEAD, "ip", "link", "show", cable).returncode == 0:
                assert time.monotonic() < end, f"{cable} stays"
                self.run(HEAD, "ip", "link", "del", cable)

    def close(self):
        """End all of them."""
        for name in [*self.names, HEAD]:
            if name in self._holders:
                os.kill(self._pid(name), signal.SIGKILL)
                self._holders.pop(name).wait()

    def on(self, name, *argv, cwd=None):
        """The call that runs `argv` on a host."""
        inside = ["--pid"] if name != HEAD else []
        where = cwd or self.directory
        spaces = ["--net", "--uts", "--ipc", "--mount", *inside, f"--wd={where}"]
        words = [str(word) for word in argv]
        return ["nsenter", "-t", str(self._pid(name)), *spaces, "env", "TMPDIR=/run", *words]

    def run(self, name, *argv, cwd=None, timeout=60, **options):
        """Run `argv` on a host to its end; its output is text."""
        return subprocess.run(
            self.on(name, *argv, cwd=cwd),
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            **options,
        )

    def _pid(self, name):
        return int((self.directory / "pids" / name).read_text())

    def _ip(self, name, words):
        done = self.run(name, "ip", *words.split())
        assert done.returncode == 0, f"{name}: ip {words}: {done.stderr}"

    def _start(self, name, own_processes):
        spaces = ["--net", "--uts", "--ipc", "--mount", "--propagation", "private"]
        if own_processes:
            spaces += ["--pid", "--mount-proc", "--fork", "--kill-child"]
        script = (
            f"hostname {name} && mount --bind {self.directory}/hosts /etc/hosts && "
            "mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs /run && "
            "ip link set lo up && echo ready && exec sleep infinity"
        )
        holder = subprocess.Popen(
            ["unshare", *spaces, "bash", "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # that its child was killed
            stdin=subprocess.DEVNULL,
            preexec_fn=die_with_parent,
        )
        self._holders[name] = holder
        with holder.stdout as output:
            assert output.readline() == b"ready\n", f"{name} does not start"
        pid = holder.pid
        if own_processes:  # the first process of the host is the only child of unshare
            pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
        (self.directory / "pids" / name).write_text(f"{pid}\n")


_RSH = """#!/bin/bash
# Runs a command on a virtual host: rsh [options of ssh] HOST COMMAND...
while [[ ${{1-}} == -* ]]; do case $1 in -o|-l|-p|-i) shift 2;; *) shift;; esac; done
pid=$(cat {pids}/"$1") && shift || exit 255
exec nsenter -t "$pid" --net --uts --ipc --mount --pid --wd="$PWD" env TMPDIR=/run bash -c "$*"
"""

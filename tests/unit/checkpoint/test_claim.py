"""One directory, one job: who may take a claim over, and who may not save any more."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import mpistrat as ms
from mpistrat.checkpoint import claim
from mpistrat.checkpoint.claim import Claim, ClaimHolder
from mpistrat.testing import run_ranks
from mpistrat.watchdog.processes import Process

OTHER = ClaimHolder("n1", "boot-1/7", 100, 5, "4711", 0, "aa")
MINE = ClaimHolder("n2", "boot-2/7", 200, 9, "4712", 0, "bb")


def process(born, state="S"):
    return lambda pid: Process(state, 1, born, "python")


def told(holder, number=1, held=True):
    return {**holder._asdict(), "number": number, "held": held}


@pytest.mark.parametrize(
    ("found", "mine", "look", "free"),
    [
        (told(OTHER), MINE, process(5), False),  # another host: nobody can tell at once
        (told(OTHER, held=False), MINE, process(5), True),
        (told(OTHER), MINE._replace(machine="boot-1/7"), process(5), False),
        (told(OTHER), MINE._replace(machine="boot-1/7"), lambda pid: None, True),
        (told(OTHER), MINE._replace(machine="boot-1/7"), process(6), True),  # the pid is another's
        (told(OTHER), MINE._replace(machine="boot-1/7"), process(5, "Z"), True),
        (told(OTHER), MINE._replace(machine="boot-1/7"), process(5, "T"), False),
        (told(OTHER), MINE._replace(machine="boot-1/8"), lambda pid: None, False),  # a container
        (told(OTHER), MINE._replace(job="4711"), process(5), False),
        (told(OTHER), MINE._replace(job="4711", restart=1), process(5), True),
        (told(OTHER._replace(restart=2)), MINE._replace(job="4711", restart=1), process(5), False),
        (told(OTHER._replace(job="")), MINE._replace(job="", restart=1), process(5), False),
        ({"text": "no claim", "held": True}, MINE, process(5), False),
    ],
)
def test_who_may_take_it_at_once(found, mine, look, free):
    assert claim.is_free_at_once(found, mine, look) is free


class Time:
    """A clock that continues when somebody sleeps; then others may do something."""

    def __init__(self, at=lambda now: None):
        self.now, self._at = 0.0, at

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self._at(self.now)


def made(directory, mine, at=lambda now: None):
    clock = Time(at)
    return Claim(directory, mine, clock.clock, clock.sleep), clock


def test_a_job_that_rewrites_its_number_keeps_the_directory(tmp_path):
    first, _ = made(tmp_path, OTHER)
    first.acquire()
    second, time = made(tmp_path, MINE, lambda now: first.rewrite() if now == 10 else None)
    with pytest.raises(FileExistsError, match=r"job 4711, restart 0, process 100 on n1, which has"):
        second.acquire()
    assert time.now == 10
    first.check_ownership()


def test_a_number_that_stands_still_for_30_s_is_nobodys(tmp_path):
    first, _ = made(tmp_path, OTHER)
    first.acquire()
    second, time = made(tmp_path, MINE)
    second.acquire()
    assert time.now == 30
    second.check_ownership()
    with pytest.raises(FileExistsError, match=r"no longer holds .* process 200 on n2, because"):
        first.check_ownership()
    first.rewrite()  # not a file of another token
    second.check_ownership()
    assert claim.parse_holder(claim.read_claim(second.path)) == MINE


def test_what_is_released_is_free_at_once_and_tells_of_the_job_before(tmp_path):
    first, _ = made(tmp_path, OTHER)
    first.acquire()
    first.update_progress(saved_step=7, save_seconds=12.0)
    first.release()
    second, time = made(tmp_path, MINE)
    second.acquire()
    assert time.now == 0
    assert second.previous_content["save_seconds"] == 12.0
    assert [path.name for path in tmp_path.iterdir()] == [claim.CLAIM_FILE_NAME]


def test_a_pipe_by_the_name_of_a_claim_keeps_nobody(tmp_path):
    os.mkfifo(tmp_path / claim.CLAIM_FILE_NAME)
    assert claim.read_claim(tmp_path / claim.CLAIM_FILE_NAME) == {"text": "", "held": True}
    writer = os.open(tmp_path / claim.CLAIM_FILE_NAME, os.O_RDWR)  # from whom nothing comes
    assert claim.read_claim(tmp_path / claim.CLAIM_FILE_NAME) == {"text": "", "held": True}
    os.close(writer)


def test_an_unreadable_file_is_watched_too(tmp_path):
    (tmp_path / claim.CLAIM_FILE_NAME).write_text("half a te")
    second, time = made(tmp_path, MINE)
    second.acquire()
    assert time.now == 30


DAMAGED = {
    "restart": ["x", None, 1.0, True, [], {}],
    "pid": ["7", None, 7.0],
    "born": [None, "x"],
    "number": [None, "1"],
    "held": [0, 1, "false", None],
    **{name: [None, 4711, ["n1"], {}] for name in ("host", "machine", "job", "token")},
    "saved": [7, None],
    "saved_step": ["5", 5.0, [5]],
    "save_seconds": ["1", None, -1.0, float("nan"), float("inf"), 1e300, 10**400, True],
}


@pytest.mark.parametrize(
    "text",
    [
        *(
            json.dumps(told(OTHER) | {name: value})
            for name, values in DAMAGED.items()
            for value in values
        ),
        *("[" * 8000, '{"a":' * 3000, "null", "7", "[]", '"text"', "{}", "", "\0" * 4096),
        json.dumps(told(OTHER))[:-9],
        json.dumps(told(OTHER)).replace("100", "1" * 5000),  # more digits than Python converts
        json.dumps(told(OTHER)) + " " * 40_000 + "x",
        b"\xff\xfe\xfa" * 99,
        json.dumps(told(OTHER)).encode().replace(b"n1", b"n\xe9"),
    ],
)
def test_a_damaged_file_is_nobodys_after_30_s(tmp_path, text):
    path = tmp_path / claim.CLAIM_FILE_NAME
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert claim.read_claim(path).keys() == {"text", "held"}
    assert claim.read_saved_step(tmp_path) == -1
    here, clock = made(tmp_path, MINE._replace(job="4711", restart=1))
    here.acquire()
    here.check_ownership()
    assert (clock.now, here.progress) == (30, {})


def test_numbers_that_no_process_has_are_a_process_that_has_ended(tmp_path):
    told_pid = told(OTHER._replace(pid=10**30, machine=MINE.machine, restart=10**30))
    (tmp_path / claim.CLAIM_FILE_NAME).write_text(json.dumps(told_pid | {"saved_step": 10**4000}))
    here, clock = made(tmp_path, MINE)
    here.acquire()
    here.rewrite()
    here.check_ownership()
    assert clock.now == 0


def test_a_link_that_leads_nowhere_is_replaced(tmp_path):
    (tmp_path / claim.CLAIM_FILE_NAME).symlink_to("/nonexistent/old/job.json")
    here, clock = made(tmp_path, MINE)
    here.acquire()
    here.check_ownership()
    assert clock.now == 30
    assert not here.path.is_symlink()


@pytest.mark.parametrize("kind", ["directory", "loop"])
def test_what_cannot_be_a_file_is_named(tmp_path, kind):
    path = tmp_path / claim.CLAIM_FILE_NAME
    path.mkdir() if kind == "directory" else path.symlink_to(claim.CLAIM_FILE_NAME)
    with pytest.raises(
        OSError, match=r"job\.json cannot be read \(.*\); remove it.*was not written"
    ):
        manager_in(tmp_path).save()
    assert claim.read_saved_step(tmp_path) == -1


def test_of_two_that_start_at_once_the_quicker_has_it(tmp_path, monkeypatch):
    real, answers = claim.read_claim, [None]
    first, _ = made(tmp_path, OTHER)
    second, clock = made(tmp_path, MINE)
    first.acquire()
    monkeypatch.setattr(claim, "read_claim", lambda path: answers.pop() if answers else real(path))
    with pytest.raises(FileExistsError, match="Another job saves here: job 4711"):
        second.acquire()
    first.check_ownership()
    assert clock.now == 0
    assert [path.name for path in tmp_path.iterdir()] == [claim.CLAIM_FILE_NAME]


def test_of_two_that_take_over_at_once_the_last_has_it(tmp_path):
    made(tmp_path, OTHER)[0].acquire()
    second, third = made(tmp_path, MINE)[0], made(tmp_path, MINE._replace(token="cc", pid=300))[0]
    second._wait_until_free = lambda content: third.acquire()  # both have seen it stand still
    second.acquire()
    second.check_ownership()
    third.rewrite()
    second.check_ownership()
    with pytest.raises(FileExistsError, match="it now belongs to job 4712"):
        third.check_ownership()


def test_a_file_of_another_program_is_not_rewritten(tmp_path):
    first, _ = made(tmp_path, OTHER)
    first.acquire()
    first.path.write_text("not of this job")
    first.rewrite()
    first.release()
    assert first.path.read_text() == "not of this job"
    first.path.unlink()
    first.rewrite()
    assert not list(tmp_path.iterdir())
    os.mkfifo(first.path)
    first.rewrite()  # without waiting for a writer


def test_a_release_amid_a_rewriting_stays(tmp_path, monkeypatch):
    first, written = made(tmp_path, OTHER)[0], os.pwrite
    first.acquire()

    def collected(*args):
        first.release()  # as garbage collection may
        return written(*args)

    monkeypatch.setattr(os, "pwrite", collected)
    first.rewrite()
    assert not claim.read_claim(first.path)["held"]


@pytest.mark.parametrize("character", ["a", chr(0x4E2D), "\n", chr(0x1F600), "\udcff"])
def test_a_long_path_saves_on_and_on(tmp_path, character):
    name = os.fsencode(character) * (240 // len(os.fsencode(character)))
    room = 4000 - len(os.fsencode(tmp_path))
    directory = Path(tmp_path, *[os.fsdecode(name)] * (room // 241))
    directory.mkdir(parents=True)
    manager = manager_in(directory)
    for _ in range(3):
        manager.save()
    text = (directory / claim.CLAIM_FILE_NAME).read_bytes()
    assert len(text) == claim._FILE_NBYTES
    assert json.loads(text)["saved"].endswith("/ckpt-3.npz")


def test_long_names_of_hosts_and_jobs_fit(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", chr(0x1F600) * 9000)
    here, _ = made(tmp_path, None)
    here.acquire()
    here.update_progress(left_because="x" * 9000, saved="y" * 9000)
    here.rewrite()
    here.check_ownership()
    assert len(here.path.read_bytes()) == claim._FILE_NBYTES


def test_a_disk_that_fills_amid_the_file_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    written = os.pwrite

    def full(descriptor, data, at):
        if at >= 100:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(descriptor, data[: 100 - at], at)

    monkeypatch.setattr(os, "pwrite", full)
    here, _ = made(tmp_path / "runs", MINE)
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match="No space left"):
        here.acquire()
    assert not list((tmp_path / "runs").iterdir())
    assert len(list(Path("/proc/self/fd").iterdir())) <= open_before


def test_a_rewriting_that_the_disk_took_half_of_is_made_again(tmp_path, monkeypatch):
    first, written, full = made(tmp_path, OTHER)[0], os.pwrite, [True]

    def pwrite(descriptor, data, at):
        if at and full:
            raise OSError(full.pop() and errno.ENOSPC, "No space left on device")
        return written(descriptor, b"half a text" if full else data, at)

    first.acquire()
    monkeypatch.setattr(os, "pwrite", pwrite)
    first.rewrite()
    assert not full
    with pytest.raises(FileExistsError):
        first.check_ownership()
    first.rewrite()
    first.check_ownership()


def test_of_two_that_take_over_one_has_it(tmp_path):
    made(tmp_path, OTHER)[0].acquire()
    third, _ = made(tmp_path, MINE._replace(token="cc", pid=300, machine="boot-3/7"))
    second, _ = made(tmp_path, MINE, lambda now: third.acquire() if now == 29.5 else None)
    with pytest.raises(FileExistsError):
        second.acquire()
        second.check_ownership()
    third.check_ownership()


def test_a_claim_that_was_removed_is_lost(tmp_path):
    first, _ = made(tmp_path, OTHER)
    first.acquire()
    first.path.unlink()
    with pytest.raises(FileExistsError, match="whole directory, was removed") as caught:
        first.check_ownership()
    assert "did not rewrite" not in str(caught.value)  # no pause is to blame


def test_a_claim_that_was_overwritten_is_nobodys(tmp_path):
    first, _ = made(tmp_path, OTHER)
    first.acquire()
    first.path.write_text("")
    with pytest.raises(FileExistsError, match=r"has overwritten the file.*; remove it, start this"):
        first.check_ownership()


def test_no_thread_for_it_is_told_and_keeps_nobody_out(tmp_path, monkeypatch):
    keep, lacking = claim.Claim.start_heartbeat, threading.Event()

    def kept(self):
        if lacking.is_set():
            raise RuntimeError("can't start new thread")
        keep(self)

    def program(comm):
        manager = manager_in(tmp_path)
        lacking.set()
        with pytest.raises(OSError, match=r"No thread can be started.*was not written"):
            manager.save()
        comm.barrier()
        lacking.clear()
        comm.barrier()
        return Path(manager.save()).name

    monkeypatch.setattr(claim.Claim, "start_heartbeat", kept)
    assert run_ranks(program, 2) == ["ckpt-1.npz"] * 2


def test_it_is_read_as_json_by_people_and_the_umask_decides_who(tmp_path):
    before = os.umask(0o027)
    try:
        first, _ = made(tmp_path, OTHER)
        first.acquire()
    finally:
        os.umask(before)
    first.update_progress(step=1200, steps_per_second=3.5)
    first.rewrite()
    found = json.loads(first.path.read_text())
    assert (found["step"], found["number"], found["host"]) == (1200, 2, "n1")
    assert first.path.stat().st_mode & 0o777 == 0o640


def manager_in(directory):
    with ms.MirroredStrategy().scope():
        v = ms.Variable(0)
    return ms.CheckpointManager(ms.Checkpoint(v=v), directory, max_to_keep=2)


def test_managers_of_one_program_share_a_claim_and_the_last_releases_it(tmp_path):
    one, two = manager_in(tmp_path), manager_in(tmp_path)
    assert not list(tmp_path.iterdir())  # who only reads claims nothing
    one.save()
    two.save()
    assert one._claim is two._claim
    del one
    assert claim.read_claim(tmp_path / claim.CLAIM_FILE_NAME)["held"]
    del two
    assert not claim.read_claim(tmp_path / claim.CLAIM_FILE_NAME)["held"]


def test_no_rank_saves_where_another_job_does(tmp_path, monkeypatch):
    first, _ = made(tmp_path, OTHER)
    first.acquire()
    monkeypatch.setattr(claim, "_POLL_SECONDS", 0.001)
    real = claim.read_claim

    def read(path):
        first.rewrite()
        return real(path)

    monkeypatch.setattr(claim, "read_claim", read)

    def program(comm):
        with pytest.raises(FileExistsError, match="Another job saves here: job 4711"):
            manager_in(tmp_path).save()

    run_ranks(program, 2)
    assert [path.name for path in tmp_path.iterdir()] == [claim.CLAIM_FILE_NAME]


def test_no_rank_commits_after_a_takeover(tmp_path):
    def program(comm):
        manager = manager_in(tmp_path)
        manager.save()
        if comm.rank == 0:
            manager._claim.path.unlink()
            made(tmp_path, OTHER)[0].acquire()
        with pytest.raises(FileExistsError, match=r"no longer holds job.json: it now belongs to"):
            manager.save()

    run_ranks(program, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt-1.npz", claim.CLAIM_FILE_NAME]


JOB = """
import sys, time
import mpistrat as ms
from mpistrat.checkpoint import claim

claim.HEARTBEAT_SECONDS, claim.STALE_SECONDS, claim._POLL_SECONDS = 0.05, 1.0, 0.05
with ms.OneDeviceStrategy("cpu").scope():
    v = ms.Variable(int(sys.argv[2]))
manager = ms.CheckpointManager(ms.Checkpoint(v=v), sys.argv[1], max_to_keep=None)
manager.save()
print("saved", flush=True)
for line in sys.stdin:
    manager.save()
    print("saved", flush=True)
"""


def job(directory, value):
    path = os.pathsep.join([str(Path(ms.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-c", JOB, str(directory), str(value)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


def ended(job):
    with job:  # closes its pipes
        job.kill()


def test_a_job_that_was_stopped_taken_over_and_continued_does_not_commit(tmp_path):
    first = job(tmp_path, 1)
    assert first.stdout.readline() == "saved\n"
    first.send_signal(signal.SIGSTOP)
    try:
        begin = time.monotonic()
        second = job(tmp_path, 2)
        assert second.stdout.readline() == "saved\n", second.communicate()
        assert time.monotonic() - begin > 1.0
        first.send_signal(signal.SIGCONT)
        _, said = first.communicate("save\n")
        assert first.returncode == 1
        assert "This job no longer holds job.json" in said
        second.communicate("save\n")
        assert second.returncode == 0
    finally:
        for one in (first, second):
            ended(one)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["ckpt-1.npz", "ckpt-2.npz", "ckpt-3.npz", "job.json"]
    assert not claim.read_claim(tmp_path / claim.CLAIM_FILE_NAME)["held"]


def test_a_job_that_was_killed_leaves_the_directory_to_the_next_one_at_once(tmp_path):
    first = job(tmp_path, 1)
    assert first.stdout.readline() == "saved\n"
    ended(first)
    second, clock = made(tmp_path, None)
    second.acquire()
    assert clock.now == 0

"""No process of a rank is left behind, whatever it forked; none of another one is touched."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slackwater.common.native import cgroup
from slackwater.common.native.process_marks import mark_of, marks
from slackwater.services.worker.containment import ABANDONED_S, MARK, Containment
from slackwater.services.worker.processes import Intent, RankFiles

FORKS = """
sleep 300 &
setsid sleep 300 &
(setsid sh -c "sleep 300 & sleep 300" &)
(setsid sh -c "exec setsid sleep 300" &)
"""
PARENT = cgroup.own()


@pytest.fixture(params=["cgroup", "mark"])
def containment(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Containment]:
    parent = PARENT if request.param == "cgroup" else None
    if request.param == "cgroup" and parent is None:
        pytest.skip("no cgroup of version 2 can be made here")
    made = Containment(tmp_path, parent)
    yield made
    for rank in (0, 1):
        assert made.end("j", rank, 0)


def launched(
    containment: Containment, folder: Path, script: str, rank: int = 0
) -> subprocess.Popen[bytes]:
    files = RankFiles(folder, "j", rank)
    program = ("/bin/sh", "-c", script)
    environment = containment.environment("j", rank, 0)
    intent = Intent(job="j", rank=rank, workers=1, program=program)
    return files.launch(intent, environment, log_bytes_max=2**23)


def ours(containment: Containment, rank: int = 0) -> list[int]:
    mark = containment.environment("j", rank, 0)[MARK]
    return [pid for pid, found in marks(MARK).items() if found == mark]


def until(count: int, containment: Containment, rank: int = 0) -> None:
    for _ in range(1000):
        if len(ours(containment, rank)) >= count:
            return
        time.sleep(0.01)
    raise AssertionError(ours(containment, rank))


def test_children_that_left_their_session_end_with_the_rank(
    containment: Containment, tmp_path: Path
) -> None:
    leader = launched(containment, tmp_path, FORKS + "exit 3")
    assert leader.wait(20) == 3
    until(6, containment)
    assert containment.end("j", 0, 0)
    assert ours(containment) == []
    assert not containment.kill("j", 0, 0), "nothing is left to kill"


def test_a_rank_that_is_killed_takes_all_of_it_along(
    containment: Containment, tmp_path: Path
) -> None:
    leader = launched(containment, tmp_path, FORKS + "wait")
    until(8, containment)
    containment.kill("j", 0, 0)
    assert leader.wait(20) == -9
    assert containment.end("j", 0, 0)
    assert ours(containment) == []


def test_another_rank_is_left_alone(containment: Containment, tmp_path: Path) -> None:
    launched(containment, tmp_path, FORKS + "exit 0", rank=0).wait(20)
    other = launched(containment, tmp_path, "exec sleep 300", rank=1)
    until(1, containment, rank=1)
    assert containment.end("j", 0, 0)
    assert other.poll() is None
    assert containment.end("j", 1, 0)
    assert other.wait(20) == -9


def test_a_service_that_comes_back_ends_what_ended_ranks_left_behind(
    containment: Containment, tmp_path: Path
) -> None:
    launched(containment, tmp_path, FORKS + "exit 0", rank=0).wait(20)
    lives = launched(containment, tmp_path, "exec sleep 300", rank=1)
    until(6, containment)
    until(1, containment, rank=1)
    again = Containment(tmp_path, containment._parent)
    again.end_strangers([("j", 1, 0)], 0.0)
    assert again.end("j", 0, 0)
    assert ours(containment) == []
    assert lives.poll() is None
    assert containment.end("j", 1, 0)
    assert lives.wait(20) == -9


@pytest.mark.skipif(PARENT is None, reason="no cgroup of version 2 can be made here")
def test_a_cgroup_keeps_hold_of_a_child_that_clears_its_environment(tmp_path: Path) -> None:
    containment = Containment(tmp_path, PARENT)
    escapes = f"env -i setsid sh -c 'echo $$ > {tmp_path}/pid; exec sleep 300' & wait"
    leader = launched(containment, tmp_path, escapes)
    for _ in range(1000):
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip():
            break
        time.sleep(0.01)
    pid = int((tmp_path / "pid").read_text())
    assert mark_of(pid, MARK) is None
    assert containment.end("j", 0, 0)
    leader.wait(20)
    assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text()


@pytest.mark.skipif(PARENT is None, reason="no cgroup of version 2 can be made here")
def test_cgroups_that_another_service_left_behind_are_removed_once_they_are_old(
    tmp_path: Path,
) -> None:
    assert PARENT is not None
    left = PARENT / f"slackwater-left-{os.getpid()}"
    left.mkdir()
    made_s = left.stat().st_mtime
    try:
        Containment(tmp_path, PARENT).end_strangers([], made_s + ABANDONED_S - 1.0)
        assert left.exists()
        Containment(tmp_path, PARENT).end_strangers([], made_s + ABANDONED_S + 1.0)
        assert not left.exists()
    finally:
        cgroup.removed(left)


def test_a_program_does_not_see_its_cgroup(containment: Containment, tmp_path: Path) -> None:
    leader = launched(containment, tmp_path, f"env > {tmp_path}/seen")
    assert leader.wait(20) == 0
    assert containment.end("j", 0, 0)
    seen = (tmp_path / "seen").read_text()
    assert f"{MARK}=" in seen
    assert "SLACKWATER_CGROUP" not in seen

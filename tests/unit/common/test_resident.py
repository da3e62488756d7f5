"""A process that keeps its memory, and says so. One for each test: it cannot be undone."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, os, resource, sys
from pathlib import Path
from slackwater.common.native import memlock
if sys.argv[1] == "anybody":
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (2**16, 2**16))
    if os.getuid() == 0:
        os.setresuid(65534, 65534, 65534)
print(memlock.lock_memory(as_touched=sys.argv[1] == "touched"))
print(memlock.become_io_flusher())
print(memlock.be_killed_last())
data = bytearray(1 << 20)
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(int(status["VmLck"].split()[0]) >= 1024, ctypes.CDLL(None).prctl(58, 0, 0, 0, 0))
"""


def run(who: str) -> list[str]:
    done = subprocess.run(
        (sys.executable, "-c", PROGRAM, who), capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.splitlines()


@pytest.mark.skipif(os.getuid() != 0, reason="only root may lock memory without a limit")
@pytest.mark.parametrize("how", ["now", "touched"])
def test_root_locks_what_it_has_and_will_have(how: str) -> None:
    """In some containers root may not be exempted from writeback: then that is said, and true."""
    locked, flusher, killed, state = run(how)
    assert (locked, state.split()[0]) == ("", "True")
    assert bool(flusher) == (state.split()[1] != "1")
    assert not flusher or "CAP_SYS_RESOURCE" in flusher
    assert not killed or "CAP_SYS_RESOURCE" in killed


def test_others_are_told_what_is_missing_and_nothing_is_half_locked() -> None:
    locked, flusher, killed, state = run("anybody")
    assert "LimitMEMLOCK=infinity" in locked
    assert "CAP_SYS_RESOURCE" in flusher
    assert "CAP_SYS_RESOURCE" in killed
    assert state == "False -1"

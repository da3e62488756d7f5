"""Processes that a service started and left behind when it was killed.

The supervisor makes itself the reaper of its descendants (PR_SET_CHILD_SUBREAPER), so that the
children of a killed service become its own instead of vanishing to process 1. Each process below
it carries a marker in its environment, by which the last sweep finds what is left, whatever
session or parent it has.
"""

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Final

from slackwater.common.base import limits
from slackwater.common.native.process_marks import mark_of, marks

MARKER: Final = "SLACKWATER_SUPERVISOR"
_PR_SET_CHILD_SUBREAPER: Final = 36
_PR_GET_CHILD_SUBREAPER: Final = 37
_libc = ctypes.CDLL(None, use_errno=True)


class Reaper:
    """Between `open` and `close`, orphans below this process come to it."""

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._seen: set[int] = set()
        self._before: int | None = None

    def open(self) -> None:
        state = ctypes.c_int(0)
        _libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(state), 0, 0, 0)
        self._before = state.value
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def close(self) -> None:
        if self._before is not None:
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, self._before, 0, 0, 0)
            self._before = None

    def orphans(self, units: set[int]) -> list[int]:
        """Our children that carry the marker and are not units: they lost their parent."""
        found = [pid for pid in _children() if pid not in units and self._marked(pid)]
        self._seen.update(found)
        return found

    def reap(self, sessions: set[int]) -> None:
        """Take the exit status of orphans that have ended, so that no zombie stays. A zombie has
        no environment: it is known from before, or by the session of the unit it came from."""
        for pid in _children():
            state, session = _state(pid)
            if state == "Z" and (pid in self._seen or (session in sessions and pid != session)):
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
                self._seen.discard(pid)

    def sweep(self, sessions: set[int]) -> list[int]:
        """End every process that carries the marker, and wait for that; who was there."""
        ended: list[int] = []
        give_up_s = time.monotonic() + limits.ABORT_S * 2
        while left := [pid for pid, mark in marks(MARKER).items() if mark == self._marker]:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            ended += [pid for pid in left if pid not in ended]
            self._seen.update(left)
            self.reap(sessions)
            if time.monotonic() > give_up_s:
                break
            time.sleep(0.005)
        self.reap(sessions)
        return ended

    def _marked(self, pid: int) -> bool:
        return mark_of(pid, MARKER) == self._marker


def alive(pid: int) -> bool:
    return _state(pid)[0] not in ("", "Z")


def _children() -> list[int]:
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found += [int(pid) for pid in (task / "children").read_text().split()]
    return found


def _state(pid: int) -> tuple[str, int]:
    """(R, S, Z, ...; session id)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0
    return fields[0], int(fields[3])

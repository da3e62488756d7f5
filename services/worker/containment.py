"""Keep hold of every process of a rank, whatever children and sessions it makes.

Where the service may make cgroups (version 2: as root, or in a unit with `Delegate=yes`), each
process of a rank begins in a cgroup of its own, which the kernel kills as a whole. What a rank
started also bears a mark in its environment, by which it is found elsewhere; there a program that
clears its environment and leaves its session escapes.

Both are named by the service's state folder, the job, the rank and the process number, so that a
service that was killed knows its own again.
"""

import contextlib
import hashlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from slackwater.common.native import cgroup
from slackwater.common.native.process_marks import mark_of, marks

MARK: Final = "SLACKWATER_PROCESS"
CGROUP: Final = "SLACKWATER_CGROUP"
"""Names the cgroup to the shell that enters it; no program sees it."""
KILL_S: Final = 5.0
"""Processes that are killed are gone within milliseconds, unless the kernel holds them (a dead
disk)."""
ABANDONED_S: Final = 3600.0
"""Age of another service's empty cgroup that is taken for left behind."""
_POLL_S: Final = 0.002
_PREFIX: Final = "slackwater-"


class Containment:
    """The processes of all ranks below one state folder. `parent`: the cgroup in which theirs are
    made (cgroup.own); None: there are none."""

    def __init__(self, state_dir: Path, parent: Path | None) -> None:
        self._name = hashlib.sha256(str(state_dir.absolute()).encode()).hexdigest()[:12]
        self._parent = parent

    def environment(self, job: str, rank: int, number: int) -> dict[str, str]:
        """Make the cgroup of a rank's process, and return what its launch needs to know."""
        mark = self._mark(job, rank, number)
        if self._parent is None:
            return {MARK: mark}
        folder = self._parent / (_PREFIX + mark)
        with contextlib.suppress(OSError):  # There are too many: the mark must do.
            folder.mkdir(exist_ok=True)
        return {MARK: mark, CGROUP: str(folder)}

    def drop(self, job: str, rank: int, number: int) -> None:
        """Remove the cgroup of a process that was not started."""
        if self._parent is not None:
            cgroup.removed(self._parent / (_PREFIX + self._mark(job, rank, number)))

    def kill(self, job: str, rank: int, number: int) -> bool:
        """Kill all that the rank has now. False: it had nothing any more."""
        mark = self._mark(job, rank, number)
        lives = False
        if self._parent is not None:
            folder = self._parent / (_PREFIX + mark)
            cgroup.kill(folder)
            lives = not cgroup.removed(folder)
        left = [pid for pid, found in marks(MARK).items() if found == mark]
        _kill(left)
        return lives or bool(left)

    def end(self, job: str, rank: int, number: int) -> bool:
        """Kill all that is left of the rank, and wait for that. False: after KILL_S something still
        is."""
        until_s = time.monotonic() + KILL_S
        while self.kill(job, rank, number):
            if time.monotonic() > until_s:
                return False
            time.sleep(_POLL_S)
        return True

    def holds(self, pid: int, job: str, rank: int, number: int) -> bool:
        """Say whether the process is one of the rank's."""
        mark = self._mark(job, rank, number)
        folder = _PREFIX + mark
        if self._parent is not None and (self._parent / folder).is_dir():
            return folder in cgroup.names(pid)
        return mark_of(pid, MARK) == mark

    def processes(self) -> frozenset[int]:
        """List the processes of all ranks."""
        found = marks(MARK).items()
        return frozenset(pid for pid, mark in found if mark.startswith(self._name))

    def processes_of(self, job: str, rank: int, number: int) -> list[int]:
        """List the processes of one rank."""
        mark = self._mark(job, rank, number)
        return [pid for pid, found in marks(MARK).items() if found == mark]

    def end_strangers(self, alive: Iterable[tuple[str, int, int]], now_s: float) -> None:
        """Kill what is left of all ranks but these (job, rank, process number). `now_s`: by the
        wall clock."""
        kept = {self._mark(*each) for each in alive}
        ours = {pid: mark for pid, mark in marks(MARK).items() if mark.startswith(self._name)}
        _kill(pid for pid, mark in ours.items() if mark not in kept)
        for folder in self._parent.glob(f"{_PREFIX}*") if self._parent is not None else ():
            mark = folder.name.removeprefix(_PREFIX)
            if mark.startswith(self._name):
                if mark not in kept:
                    cgroup.kill(folder)
                    cgroup.removed(folder)
            elif _abandoned(folder, now_s):
                cgroup.removed(folder)

    def _mark(self, job: str, rank: int, number: int) -> str:
        return f"{self._name}-{job}-{rank}-{number}"


def _abandoned(folder: Path, now_s: float) -> bool:
    try:
        return now_s - folder.stat().st_mtime > ABANDONED_S
    except FileNotFoundError:
        return False


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)

"""The memory that this process may have, whom the kernel killed for want of it, and cgroups to hold
processes in.

A cgroup with a limit below the machine's memory, ours or one around it, is the machine as far as we
are concerned. Its count of processes that were killed for memory tells such a kill from a kill by
somebody; where the cgroup does not count, the machine's count stands in.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

UNLIMITED: Final = 2**60
"""Larger values mean no limit: version 1 writes 2**63, rounded to pages."""
PROC: Final = Path("/proc")
CGROUPS: Final = Path("/sys/fs/cgroup")
LOOK_S: Final = 1.0
FOR_MEMORY: Final = "killed by the kernel for memory"
_KIB: Final = 1024


class Group(NamedTuple):
    """Where a cgroup's figures are."""

    folder: Path
    limit_file: str
    usage_file: str
    cache_field: str
    """Field of memory.stat that holds the page cache that could go, in bytes."""
    kills_file: str
    """Has a line `oom_kill N`."""

    def limit_bytes(self) -> int:
        """Raises OSError, ValueError: the root group has no such file."""
        text = (self.folder / self.limit_file).read_text().strip()
        return UNLIMITED if text == "max" else int(text)


_VERSION_2: Final = ("memory.max", "memory.current", "inactive_file", "memory.events")
_VERSION_1: Final = (
    "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control",
)  # fmt: skip


def groups(proc: Path = PROC, cgroups: Path = CGROUPS) -> list[Group]:
    """Our cgroup and those around it: version 2 (also mounted as `unified`), else version 1."""
    try:
        entries = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    for entry in entries:
        _, controllers, path = entry.split(":", 2)
        inner = Path(path.lstrip("/"))
        if controllers == "":
            names, roots = _VERSION_2, [cgroups, cgroups / "unified"]
        elif "memory" in controllers.split(","):
            names, roots = _VERSION_1, [cgroups / "memory"]
        else:
            continue
        for root in roots:
            around = [root / folder for folder in (inner, *inner.parents)]
            found = [Group(one, *names) for one in around if (one / names[0]).exists()]
            if found:
                return found
    return []


def numbers(path: Path) -> Iterator[tuple[str, int]]:
    """`name number ...` of each line. Raises OSError."""
    for line in path.read_text().splitlines():
        words = line.split()
        if len(words) >= 2 and words[1].isdigit():
            yield words[0], int(words[1])


def names(pid: int, proc: Path = PROC) -> tuple[str, ...]:
    """Name the cgroups of version 2 that a process is in, from the root on; none: it is gone."""
    try:
        entries = (proc / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return ()
    paths = (entry.partition("::")[2] for entry in entries if entry.startswith("0::"))
    return tuple(next(paths, "").strip("/").split("/"))


def own(proc: Path = PROC) -> Path | None:
    """Return our cgroup of version 2, if we may make others in it, which the kernel can kill as a
    whole (Linux 5.14); None: we may not."""
    try:
        entries = (proc / "self" / "cgroup").read_text().splitlines()
        mounts = [line.split() for line in (proc / "mounts").read_text().splitlines()]
    except OSError:
        return None
    inner = next((entry[3:] for entry in entries if entry.startswith("0::")), None)
    root = next((words[1] for words in mounts if words[2] == "cgroup2"), None)
    if inner is None or root is None:
        return None
    folder = Path(root) / inner.lstrip("/")
    probe = folder / f"slackwater-probe-{os.getpid()}"
    try:
        probe.mkdir()
    except OSError:
        return None
    can_kill = (probe / "cgroup.kill").exists()
    probe.rmdir()
    return folder if can_kill else None


def kill(folder: Path) -> None:
    """Kill every process of the cgroup and of those in it, if it is there."""
    with contextlib.suppress(OSError):
        (folder / "cgroup.kill").write_text("1")


def removed(folder: Path) -> bool:
    """Remove an empty cgroup with those in it. False: processes are in it."""
    try:
        for each in sorted(folder.glob("**/"), reverse=True):
            each.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def memory_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return the bytes that this process may have: the machine's, or the least limit around it."""
    found = [dict(numbers(proc / "meminfo"))["MemTotal:"] * _KIB]
    for group in groups(proc, cgroups):
        try:
            found.append(group.limit_bytes())
        except (OSError, ValueError):
            continue
    return min(found)


class MemoryKills:
    """Processes that the kernel killed for memory, of our cgroup and those in it. Whoever starts
    processes looks now and then; that the count rose about when one was killed tells why."""

    def __init__(self, proc: Path = PROC, cgroups: Path = CGROUPS) -> None:
        files = [group.folder / group.kills_file for group in groups(proc, cgroups)[:1]]
        self._files = [*files, proc / "vmstat"]
        self._older = self._newer = self.count()
        self._looked_s = 0.0

    def count(self) -> int:
        """Since the machine's start; 0 where nobody counts."""
        for path in self._files:
            try:
                found = dict(numbers(path))
            except OSError:
                continue
            if "oom_kill" in found:
                return found["oom_kill"]
        return 0

    def look(self, now_s: float) -> None:
        """Cheap to call often: a look lasts LOOK_S."""
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self._older, self._newer = self._newer, self.count()

    def rose(self) -> bool:
        """Since the last look but one: the last may have come after a kill that is told now."""
        return self.count() > self._older

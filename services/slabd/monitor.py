"""What the kernel says about memory: how much there is, how much is in use, whether anything waits.

MemAvailable counts the page cache as free, as an application's next allocation would. A cgroup with
a limit below the machine's memory, ours or one around it, is the machine as far as we are
concerned: of several, the one with the least left. PSI's `some avg10` is the share of the last ten
seconds in which at least one task waited for memory, of the machine or of such a cgroup, whichever
is worse; a kernel without it (or with it switched off) shows no pressure.
"""

from pathlib import Path
from typing import Final, NamedTuple, Protocol

from slackwater.services.slabd.events import MemorySampled

_KIB: Final = 1024
_UNLIMITED: Final = 2**60
"""Version 1 says 2**63 rounded to pages where there is no limit."""


class Group(NamedTuple):
    """Where a cgroup's figures are."""

    folder: Path
    limit_file: str
    usage_file: str
    cache_field: str
    """Of memory.stat: the page cache that could go."""


class Monitor(Protocol):
    def sample(self, own_bytes: int) -> MemorySampled:
        """Now. `own_bytes`: resident in our slabs."""
        ...


class KernelMonitor:
    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc = proc
        self._groups = _groups(proc, cgroups)

    def sample(self, own_bytes: int) -> MemorySampled:
        """Raises OSError, ValueError where /proc/meminfo cannot be read: then nothing can be
        lent."""
        info = dict(_lines(self._proc / "meminfo"))
        total = info["MemTotal:"] * _KIB
        used = total - info["MemAvailable:"] * _KIB
        pressure = _pressure(self._proc / "pressure" / "memory")
        for group in self._groups:
            limit, usage = _limited(group)
            if limit < info["MemTotal:"] * _KIB:
                pressure = max(pressure, _pressure(group.folder / "memory.pressure"))
                if limit - usage < total - used:
                    total, used = limit, usage
        return MemorySampled(total, max(0, used - own_bytes), pressure)


def _limited(group: Group) -> tuple[int, int]:
    """(limit, in use) in bytes; the page cache that could go does not count."""
    try:
        text = (group.folder / group.limit_file).read_text().strip()
        limit = _UNLIMITED if text == "max" else int(text)
        usage = int((group.folder / group.usage_file).read_text())
        cache = dict(_lines(group.folder / "memory.stat")).get(group.cache_field, 0)
    except (OSError, ValueError):
        return _UNLIMITED, 0  # The root group has no such files.
    return limit, max(0, usage - cache)


def _pressure(path: Path) -> float:
    """Share of ten seconds; 0 where the kernel does not say."""
    try:
        some = path.read_text().split("\n", 1)[0]
        return float(some.split("avg10=", 1)[1].split(" ", 1)[0]) / 100.0
    except (OSError, IndexError, ValueError):
        return 0.0


def _lines(path: Path) -> list[tuple[str, int]]:
    """`name number ...` of each line."""
    found = []
    for line in path.read_text().splitlines():
        words = line.split()
        if len(words) >= 2 and words[1].isdigit():
            found.append((words[0], int(words[1])))
    return found


def _groups(proc: Path, cgroups: Path) -> list[Group]:
    """Our cgroup and those around it: version 2 (also mounted as `unified`), else version 1."""
    try:
        entries = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    for entry in entries:
        _, controllers, path = entry.split(":", 2)
        inner = Path(path.lstrip("/"))
        if controllers == "":
            names = ("memory.max", "memory.current", "inactive_file")
            roots = [cgroups, cgroups / "unified"]
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            roots = [cgroups / "memory"]
        else:
            continue
        for root in roots:
            around = [root / folder for folder in (inner, *inner.parents)]
            found = [Group(one, *names) for one in around if (one / names[0]).exists()]
            if found:
                return found
    return []

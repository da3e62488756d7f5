"""Memory as the kernel reports it: how much there is, how much is in use, whether anything waits.

MemAvailable counts the page cache as free, as an application's next allocation would. A cgroup with
a limit below the machine's memory, ours or one around it, is the machine as far as we are
concerned: of several, the one with the least left. PSI's `some avg10` is the share of the last ten
seconds in which at least one task waited for memory, of the machine or of such a cgroup, whichever
is worse; a kernel without it (or with it switched off) shows no pressure.
"""

from pathlib import Path
from typing import Final, Protocol

from slackwater.common.native.cgroup import CGROUPS, PROC, UNLIMITED, Group, groups, numbers
from slackwater.services.slabd.events import MemorySampled

_KIB: Final = 1024


class Monitor(Protocol):
    def sample(self, own_bytes: int) -> MemorySampled:
        """Now. `own_bytes`: resident in our slabs."""
        ...


class KernelMonitor:
    def __init__(self, proc: Path = PROC, cgroups: Path = CGROUPS) -> None:
        self._proc = proc
        self._groups = groups(proc, cgroups)

    def sample(self, own_bytes: int) -> MemorySampled:
        """Raises OSError, ValueError where /proc/meminfo cannot be read: then nothing can be
        lent."""
        info = dict(numbers(self._proc / "meminfo"))
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
        limit = group.limit_bytes()
        usage = int((group.folder / group.usage_file).read_text())
        cache = dict(numbers(group.folder / "memory.stat")).get(group.cache_field, 0)
    except (OSError, ValueError):
        return UNLIMITED, 0  # The root group has no such files.
    return limit, max(0, usage - cache)


def _pressure(path: Path) -> float:
    """Return the pressure, as a share of ten seconds; 0 where the kernel reports none."""
    try:
        some = path.read_text().split("\n", 1)[0]
        return float(some.split("avg10=", 1)[1].split(" ", 1)[0]) / 100.0
    except (OSError, IndexError, ValueError):
        return 0.0

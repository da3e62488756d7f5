"""What the kernel says about memory: how much there is, how much is in use, whether anything waits.

MemAvailable counts the page cache as free, as an application's next allocation would. A cgroup with
a limit below the machine's memory is the machine as far as we are concerned. PSI's `some avg10` is
the share of the last ten seconds in which at least one task waited for memory; a kernel without it
(or with it switched off) shows no pressure.
"""

from pathlib import Path
from typing import Final, Protocol

from slackwater.services.slabd.events import MemorySampled

_KIB: Final = 1024
_UNLIMITED: Final = 2**60
"""Version 1 says 2**63 rounded to pages where there is no limit."""


class Monitor(Protocol):
    def sample(self, own_bytes: int) -> MemorySampled:
        """Now. `own_bytes`: resident in our slabs."""
        ...


class KernelMonitor:
    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc = proc
        self._group = _group(proc, cgroups)

    def sample(self, own_bytes: int) -> MemorySampled:
        """Raises OSError, ValueError where /proc/meminfo cannot be read: then nothing can be
        lent."""
        info = dict(_lines(self._proc / "meminfo"))
        total = info["MemTotal:"] * _KIB
        used = total - info["MemAvailable:"] * _KIB
        limit, usage = self._limited()
        if limit < total:
            total, used = limit, usage
        return MemorySampled(total, max(0, used - own_bytes), self._pressure())

    def _limited(self) -> tuple[int, int]:
        """(limit, in use) of our cgroup; the page cache that could go does not count."""
        if self._group is None:
            return _UNLIMITED, 0
        folder, limit_file, usage_file, cache_field = self._group
        try:
            text = (folder / limit_file).read_text().strip()
            limit = _UNLIMITED if text == "max" else int(text)
            usage = int((folder / usage_file).read_text())
            cache = dict(_lines(folder / "memory.stat")).get(cache_field, 0)
        except (OSError, ValueError):
            return _UNLIMITED, 0  # The root group has no such files.
        return limit, max(0, usage - cache)

    def _pressure(self) -> float:
        try:
            some = (self._proc / "pressure" / "memory").read_text().split("\n", 1)[0]
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


def _group(proc: Path, cgroups: Path) -> tuple[Path, str, str, str] | None:
    """Where our cgroup's figures are: version 2 (also mounted as `unified`), else version 1."""
    try:
        entries = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return None
    for entry in entries:
        _, controllers, path = entry.split(":", 2)
        inner = path.lstrip("/")
        if controllers == "":
            for root in (cgroups, cgroups / "unified"):
                if (root / inner / "memory.max").exists():
                    return root / inner, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            folder = cgroups / "memory" / inner
            if (folder / "memory.limit_in_bytes").exists():
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
                return folder, *names
    return None

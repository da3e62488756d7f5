"""Other work of the machine while a replay runs."""

from pathlib import Path
from typing import Final

_PRESSURE: Final = Path("/proc/pressure/cpu")


def cpu_stalled_s(path: Path = _PRESSURE) -> float | None:
    """Seconds since the start in which some process waited for a CPU; None: the kernel does not
    say."""
    try:
        first = path.read_text().splitlines()[0]
    except (OSError, IndexError):
        return None
    for word in first.split():
        name, _, value = word.partition("=")
        if name == "total" and value.isdigit():
            return int(value) / 1e6
    return None

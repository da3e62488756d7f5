"""How often a process ended of late: what decides whether it is started again."""

import signal
from collections import deque
from typing import Final

from slackwater.common.base import limits
from slackwater.common.native.cgroup import FOR_MEMORY


class RecentEnds:
    """Ends of one process within RESTART_WINDOW_S; older ones are forgotten."""

    def __init__(self) -> None:
        self._at_s: deque[float] = deque()

    def __len__(self) -> int:
        """Count the ends within the window before the last one."""
        return len(self._at_s)

    def add(self, now_s: float) -> int:
        """Note an end; how many there were within the window, this one included."""
        self._at_s.append(now_s)
        while self._at_s[0] < now_s - limits.RESTART_WINDOW_S:
            self._at_s.popleft()
        return len(self._at_s)


_FROM_OUTSIDE: Final = (-signal.SIGKILL, -signal.SIGTERM)


def quick_ends(before: int, code: int, settled: bool) -> int:
    """Count the ends in quick succession, this one included, that make the next start wait.
    `settled`: it had been ready for a while. One that was killed would not end so by itself."""
    return 0 if settled or code in _FROM_OUTSIDE else before + 1


def described(code: int, for_memory: bool = False) -> str:
    """An exit code as a person reads it; negative: by a signal."""
    how = f"signal {-code}" if code < 0 else f"code {code}"
    return f"{how} ({FOR_MEMORY})" if for_memory else how


def too_often(ends: int, how: str) -> str:
    """Why a process that ended so often is not started again."""
    within = f"ended {ends} times within {limits.RESTART_WINDOW_S:.0f} s"
    return f"{within}, the last time with {how}"

"""Look where a rank's program stands: whether it computes, and the stacks of its Python.

The program needs nothing for it, and nobody any privilege: each Python that a rank starts has a
signal at which faulthandler writes all threads' stacks into a file (common/native/rank_start).
It is a real-time signal that nobody else uses, and is only sent to processes that handle it. A
program that is not Python, or ignores PYTHONPATH, shows whether it computes, and no stack.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from slackwater.common.native import rank_start
from slackwater.schemas.hangs import STACK_CHARS_MAX, RankLook

SIGNUM: Final = signal.SIGRTMAX - 3
FOLDER: Final = Path(rank_start.__path__[0]).absolute()
CPU_S: Final = 0.5
"""Seconds over which CPU time is measured."""
WRITTEN_S: Final = 1.0
"""Seconds that a program has to write its stacks."""
_POLL_S: Final = 0.01
_TICKS: Final = os.sysconf("SC_CLK_TCK")


def environment(path: Path, given: Mapping[str, str]) -> dict[str, str]:
    """Make the variables by which a rank's Python writes stacks to `path` when asked. `given`: what
    it finds in its environment otherwise."""
    return {"SLACKWATER_STACKS": f"{path.absolute()}:{SIGNUM}", **python_path(given)}


def python_path(given: Mapping[str, str]) -> dict[str, str]:
    """Let an interpreter with the environment `given` read common/native/rank_start first."""
    others = given["PYTHONPATH"].split(os.pathsep) if given.get("PYTHONPATH") else ()
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys((str(FOLDER), *others)))}


@dataclass(frozen=True, slots=True)
class _Process:
    pid: int
    state: str
    ticks: int
    start_ticks: int


def look(pids: Iterable[int], path: Path) -> RankLook:
    """Look at a rank's processes. Takes between half a second and one and a half."""
    before = _processes(pids)
    time.sleep(CPU_S)
    now = _processes(each.pid for each in before)
    ticks = sum(each.ticks for each in now) - sum(each.ticks for each in before)
    cores = max(0.0, ticks / _TICKS / CPU_S)
    cpu_s = sum(each.ticks for each in now) / _TICKS
    if not now:
        return RankLook(why="no process of it is left")
    pythons = [each for each in now if _handles(each.pid)]
    program = min(pythons or now, key=lambda each: (each.start_ticks, each.pid))
    if any(each.state in "Tt" for each in now):
        why = "its process was stopped by a signal"
        return RankLook(state="T", cores=cores, cpu_s=cpu_s, why=why)
    if not pythons:
        why = "its program writes no stack: it is not Python, or was started without PYTHONPATH"
        return RankLook(state=program.state, cores=cores, cpu_s=cpu_s, why=why)
    stack = _stack(program.pid, path)
    why = "" if stack else f"its process did not write its stack within {WRITTEN_S:g} s"
    return RankLook(state=program.state, cores=cores, cpu_s=cpu_s, stack=stack, why=why)


def _processes(pids: Iterable[int]) -> list[_Process]:
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):  # It has ended.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                ticks = int(fields[11]) + int(fields[12])
                found.append(_Process(pid, fields[0], ticks, int(fields[19])))
    return found


def _handles(pid: int) -> bool:
    """Tell whether the process handles the signal: any other one would be ended by it."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (SIGNUM - 1) & 1)
    return False


def _stack(pid: int, path: Path) -> str:
    """Have it written; empty: it was not."""
    with contextlib.suppress(OSError):
        os.truncate(path, 0)  # It is appended to.
        os.kill(pid, SIGNUM)
        until_s, size = time.monotonic() + WRITTEN_S, 0
        while time.monotonic() < until_s:
            time.sleep(_POLL_S)
            if size and path.stat().st_size == size:
                break
            size = path.stat().st_size
        return last_text(path)
    return ""


def last_text(path: Path) -> str:
    """Return the end of a file that a rank may have made as large as it likes. Raises OSError."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - STACK_CHARS_MAX))
        return file.read(STACK_CHARS_MAX).decode(errors="replace")[-STACK_CHARS_MAX:]

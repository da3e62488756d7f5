"""Runs between the supervisor's fork and a service's exec, as a program of its own.

    python -I -S launch.py PARENT FD,FD,... OOM_SCORE_ADJ -- COMMAND...

It asks the kernel to end the service with its supervisor, and how gladly to kill it when memory
runs out (0: as it is), moves the stored descriptors (in
ascending order) to where sd_listen_fds(3) has them (3, 4, ...), says so in LISTEN_PID and
LISTEN_FDS, and becomes the service. A program of its own, because nothing may be loaded or
allocated between fork and exec in a process that has threads. Standard library only: it runs
without site-packages.
"""

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_FIRST_FD = 3


def launch(parent: int, fds: list[int], oom_score_adj: int, command: list[str]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:  # It died before the kernel knew.
        sys.exit(1)
    if oom_score_adj:
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write(str(oom_score_adj))
    # In ascending order, each goes to a number that is free by then: fds[i] >= 3 + i.
    for index, fd in enumerate(sorted(fds)):
        if fd != _FIRST_FD + index:
            os.dup2(fd, _FIRST_FD + index, inheritable=True)
            os.close(fd)
    if fds:
        os.environ["LISTEN_PID"] = str(os.getpid())
        os.environ["LISTEN_FDS"] = str(len(fds))
    os.execv(command[0], command)  # noqa: S606 (that is what it is for)


if __name__ == "__main__":
    parent, fds, oom_score_adj, dashes = sys.argv[1:5]
    assert dashes == "--"
    inherited = [int(fd) for fd in fds.split(",") if fd]
    launch(int(parent), inherited, int(oom_score_adj), sys.argv[5:])

"""Start a program under its job's account, below a first process that keeps the service's.

Nothing that a job's user gives counts before the program has its account: with the service's, which
is root, a variable such as PATH or LD_PRELOAD, or a folder that others may not enter, would give
the user root's rights. So the first process has an environment of the service's alone, and the
program's own comes in a file that the account's shell reads.
"""

import contextlib
import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from slackwater.services.worker.containment import CGROUP, MARK

_AS_ACCOUNT: Final = """\
cd -- "$0" || exit 127
. /proc/self/fd/0 && exec "$@" < /dev/null
"""
"""Enters the folder $0, and takes the environment of the program from what it is given to read."""
_SHELLS_OWN: Final = frozenset({
    "BASHOPTS", "BASH_VERSINFO", "BASHPID", "EUID", "GROUPS", "LINENO", "OPTIND", "PPID", "RANDOM",
    "SECONDS", "SHELLOPTS", "SHLVL", "UID",
})  # fmt: skip
"""Variables that a shell keeps to itself: it ends where a script sets one, or has its own value."""


def command(account: int, folder: str) -> tuple[str, ...]:
    """Return the words before a program that run it as this account in the folder."""
    return (
        "setpriv", f"--reuid={account}", f"--regid={account}", "--clear-groups", "--no-new-privs",
        "--inh-caps=-all", "--", "/bin/sh", "-c", _AS_ACCOUNT, str(Path(folder or ".").absolute()),
    )  # fmt: skip


def first_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Make the environment of the first process: its search path, and by what it is contained."""
    ours = {name: environment[name] for name in (MARK, CGROUP) if name in environment}
    return {"PATH": os.environ.get("PATH", os.defpath), **ours}


@contextlib.contextmanager
def exported(environment: Mapping[str, str]) -> Iterator[int]:
    """Open a file that sets the environment when a shell reads it. It is in memory: other accounts
    do not see what is in it. Raises OSError."""
    given = {
        name: shlex.quote(value)
        for name, value in environment.items()
        if name != CGROUP and name.isascii() and name.isidentifier()  # A shell drops others.
    }
    lines = [f"export {name}={given[name]}\n" for name in given if name not in _SHELLS_OWN]
    if rest := [f"{name}={given[name]}" for name in given if name in _SHELLS_OWN]:
        lines.append(f'set -- env {" ".join(rest)} "$@"\n')
    fd = os.memfd_create("slackwater-environment", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write("".join(lines).encode(errors="surrogateescape"))
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)

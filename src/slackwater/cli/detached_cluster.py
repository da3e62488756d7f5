"""`slackwater up --detach`: the same command in a session of its own, waited for until it is ready.

Its output goes to `up.log` beside the services' logs.
"""

import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import typer

from slackwater.cli.machine import announce
from slackwater.common.base import limits
from slackwater.common.base.errors import DeadlineExceeded
from slackwater.common.bus import local_clusters
from slackwater.common.embedded.logs import rotate
from slackwater.console.outcome import FAILED, err
from slackwater.schemas.machine import LocalCluster

LOG: Final = "up.log"
LAST_LINES: Final = 20
_PARENT_ONLY: Final = ("--detach", "-d", "--json")
_LOOK_S: Final = 0.05
_READY_S: Final = 2 * limits.START_S


def start(name: str, log_dir: Path, json: bool) -> None:
    """Return when the cluster is ready. Raises typer.Exit with its exit code when it ended instead,
    its last lines on stderr."""
    log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = log_dir / LOG
    rotate(path)
    words = [word for word in sys.argv[1:] if word not in _PARENT_ONLY]
    with path.open("ab") as log:
        before = log.tell()
        child = subprocess.Popen(
            [sys.executable, "-m", "slackwater.cli.main", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        entry = _ready(name, child)
    except BaseException:
        child.terminate()
        child.wait()
        raise
    if entry is None:
        _show_end(path, before)
        raise typer.Exit(child.returncode or FAILED)
    announce(entry, json)


def _ready(name: str, child: "subprocess.Popen[bytes]") -> LocalCluster | None:
    """Wait until it is ready; None: it ended. Raises DeadlineExceeded."""
    give_up_s = time.monotonic() + _READY_S
    while child.poll() is None:
        entry = local_clusters.living(name)
        if entry is not None and entry.pid == child.pid and entry.url:
            return entry
        if time.monotonic() > give_up_s:
            raise DeadlineExceeded(f"cluster {name} was not ready within {_READY_S:.0f} s")
        time.sleep(_LOOK_S)
    return None


def _show_end(path: Path, before: int) -> None:
    with path.open("rb") as log:
        log.seek(before)
        said = log.read().decode(errors="replace").splitlines()
    for line in said[-LAST_LINES:]:
        err.print(line, markup=False)
    err.print(f"the whole log: {path}", markup=False)

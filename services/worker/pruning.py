"""Remove the files of jobs that ended long ago; what cannot be removed is passed over."""

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import structlog

_log = structlog.get_logger()
_UNUSED_S = 3600.0
"""Age of a job's folder without a rank that is taken for left behind."""


@dataclass(frozen=True, slots=True)
class Retention:
    """Bounds what is kept of jobs that ended: how many, for how long, and how many bytes
    together."""

    jobs: int
    seconds: float
    nbytes: int


class Pruner:
    """Keeps the jobs' folders below one state folder within `keep`."""

    def __init__(self, state_dir: Path, keep: Retention) -> None:
        self._jobs, self._keep = state_dir / "jobs", keep
        self._stuck: frozenset[str] = frozenset()
        """Jobs whose folders could not be read or removed the last time, which is logged."""

    def prune(self, now_s: float) -> frozenset[str]:
        """Remove the files of ended jobs beyond what is to be kept, the oldest first. Return the
        jobs whose files were removed. `now_s`: by the wall clock."""
        folders, stuck = [], {}
        for folder in self._jobs.glob("*/"):
            try:
                ended_s = _ended_s(folder, now_s)
            except OSError as error:
                stuck[folder.name] = error
                continue
            if ended_s is not None:
                folders.append((ended_s, folder))
        removed, nbytes, keep = set(), 0, self._keep
        for number, (ended_s, folder) in enumerate(sorted(folders, reverse=True), 1):
            nbytes += _nbytes(folder)
            old = now_s - ended_s > keep.seconds or not any(folder.glob("*.intent.json"))
            if not old and number <= keep.jobs and nbytes <= keep.nbytes:
                continue
            try:
                _remove(folder)
            except OSError as error:
                stuck[folder.name] = error
            else:
                removed.add(folder.name)
        for job in sorted(stuck.keys() - self._stuck):
            remedy = "it stays; remove it as the account that owns it"
            _log.warning("job-files.stuck", job=job, reason=f"{stuck[job]}; {remedy}")
        self._stuck = frozenset(stuck)
        return frozenset(removed)


def _ended_s(folder: Path, now_s: float) -> float | None:
    """Return when the job's last rank was reported; None: it runs, or is to be. Raises OSError."""
    names, changed_s = os.listdir(folder), folder.stat().st_mtime
    intents = sum(name.endswith(".intent.json") for name in names)
    unused = not intents and now_s - changed_s > _UNUSED_S  # A gang was prepared and given up.
    ended = 0 < intents == sum(name.endswith(".reported") for name in names)
    return changed_s if unused or ended else None


def _nbytes(folder: Path) -> int:
    """Sum up the bytes below the folder, as far as it may be read."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.lstat().st_size
    return total


def _remove(folder: Path) -> None:
    """Remove it. What its program made goes first, so that the rest still says that it ended where
    that fails. Raises OSError."""
    for path in [*folder.iterdir(), folder]:
        if path.is_symlink() or not path.is_dir():
            continue
        try:
            shutil.rmtree(path)
        except PermissionError:
            if os.geteuid() == 0:  # No mode keeps root out.
                raise
            _open(path)
            shutil.rmtree(path)


def _open(folder: Path) -> None:
    """Open folders that a program closed to its own account, which is this service's."""
    with contextlib.suppress(PermissionError):  # It is another account's.
        folder.chmod(0o700)
        for at, names, _ in os.walk(folder):
            for path in (Path(at, name) for name in names):
                if not path.is_symlink():  # A link's target is not the job's.
                    path.chmod(0o700)

"""Temporary folders of supervisors: locked while somebody lives there, removed once nobody does.

They hold the cluster's token. A supervisor removes its own at the end; that of one which was killed
is found by the next one, and by the commands that list or end clusters.
"""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from slackwater.common.base.file_lock import FileLock

PREFIX: Final = "slackwater-"
LOCK: Final = "lock"


def own_folder() -> FileLock:
    """Make a temporary folder that only this account can read; return the lock on the file in
    it."""
    while True:
        holding = FileLock(Path(tempfile.mkdtemp(prefix=PREFIX)) / LOCK)
        if not holding.take() and holding.path.exists():
            return holding
        holding.release()  # Another process removed it just before the lock.


def sweep() -> list[Path]:
    """Remove this account's folders whose supervisor and bus server are gone; return those
    removed."""
    folders = Path(tempfile.gettempdir()).glob(f"{PREFIX}*")
    return [folder for folder in folders if _ours(folder / LOCK) and _remove(folder)]


def _ours(lock: Path) -> bool:
    try:
        return lock.is_file() and lock.parent.lstat().st_uid == os.getuid()
    except OSError:
        return False  # Another account's, or gone by now.


def _remove(folder: Path) -> bool:
    holding = FileLock(folder / LOCK)
    try:
        if holding.take():
            return False
        shutil.rmtree(folder, ignore_errors=True)
        return True
    except FileNotFoundError:
        return False
    finally:
        holding.release()

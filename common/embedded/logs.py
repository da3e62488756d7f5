"""The logs of supervised services, kept within bounds while they are written.

A service has its log as its standard error, and keeps that file: it is copied and emptied, not
renamed. What is written between the two is lost, at most a few lines in many megabytes.
"""

import os
import shutil
from pathlib import Path

from slackwater.common.base import limits


def rotate(path: Path, bytes_max: int = limits.UNIT_LOG_BYTES_MAX) -> bool:
    """Move what a log holds to NAME.log.1, in the place of what was there, once it is longer than
    `bytes_max`. Whoever appends to the log goes on."""
    try:
        if path.stat().st_size <= bytes_max:
            return False
    except FileNotFoundError:
        return False
    shutil.copyfile(path, path.with_name(f"{path.name}.1"))
    os.truncate(path, 0)
    return True

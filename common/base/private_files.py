"""Files that hold a secret: readable by their owner alone, from their first byte on."""

import os
import secrets
from pathlib import Path
from typing import Final

from slackwater.common.base.errors import ConfigRejected

TOKEN_BYTES: Final = 32
"""Random bytes in a token."""


def write_private(path: Path, text: str) -> None:
    """Replace the file in one step; nobody else could open it at any time.

    Raises ConfigRejected where something is at `path` that is not a file: root would replace a
    device node, such as /dev/null, for the whole machine.
    """
    if path.exists() and not path.is_file():
        raise ConfigRejected(f"{path} exists but is not a file: give another path")
    draft = path.with_name(f"{path.name}.new")
    draft.unlink(missing_ok=True)  # Left by a write that was cut short, with who knows which mode.
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(text)
    draft.replace(path)


def private_folder(path: Path) -> Path:
    """Make the folder, or close an existing one, so that only its owner can look into it."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_mode & 0o077:
        path.chmod(0o700)
    return path


def own_folder(path: Path, holds: str) -> Path:
    """Make or close a folder that a user names, for files of ours: `holds` is the name of one.

    Raises ConfigRejected where other files are there and others may look into it: closed, it would
    be shut to them. Root would close /etc, or /, to the whole machine.
    """
    if path.exists() and not path.is_dir():
        raise ConfigRejected(f"{path} is not a folder: give another path")
    is_open = path.exists() and path.stat().st_mode & 0o077
    if is_open and not (path / holds).exists() and any(path.iterdir()):
        raise ConfigRejected(
            f"{path} holds other files, and others may look into it, which they may not then: give "
            "a folder for this alone"
        )
    return private_folder(path)


def kept_token(path: Path) -> str:
    """The token in the file; a new one is made where there is none. Raises ConfigRejected."""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        token = secrets.token_hex(TOKEN_BYTES)
        write_private(path, token + "\n")
        return token
    except UnicodeDecodeError as error:
        raise ConfigRejected(f"{path}: not a token ({error}); remove it") from error
    if len(token) < TOKEN_BYTES or not token.isalnum():
        raise ConfigRejected(
            f"{path}: a token has {TOKEN_BYTES} or more letters and digits, this one {len(token)} "
            "characters; remove it"
        )
    path.chmod(0o600)
    return token

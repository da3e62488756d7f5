"""Packs of code: the files of a folder that belong to a program."""

import os
import subprocess
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Final

from slackwater.common.base.errors import Rejected
from slackwater.common.store.packs import Kind, Pack, look, too_many

IGNORE_FILE: Final = ".slackwaterignore"
CODE: Final = Kind(
    "pack of code", 256 * 1024**2, 20_000, f"name what is not code in {IGNORE_FILE}"
)  # fmt: skip
"""Code, not data sets."""
ALWAYS_IGNORED: Final = (
    ".git", ".hg", ".svn", "__pycache__", "*.pyc", ".venv", "node_modules", "checkpoints",
    ".mypy_cache", ".pytest_cache", ".ruff_cache",
)  # fmt: skip


def pack(folder: Path) -> Pack:
    """Pack the files that belong to the code: in a git checkout those that git would not ignore,
    elsewhere all; never ALWAYS_IGNORED, nor what the patterns in IGNORE_FILE name. Raises Rejected
    where they are too many or too large, OSError."""
    if not folder.is_dir():
        raise Rejected(f"{folder} is not a folder")
    return look(folder, _chosen(folder), CODE)


def _chosen(folder: Path) -> list[str]:
    ignore = folder / IGNORE_FILE
    lines = ignore.read_text().splitlines() if ignore.is_file() else []
    patterns = [line.strip().rstrip("/") for line in lines if line.strip() and line[0] != "#"]
    patterns += ALWAYS_IGNORED
    names = _of_git(folder) if _is_checkout(folder) else _all(folder, patterns)
    return [name for name in names if not _ignored(name, patterns)]


def _is_checkout(folder: Path) -> bool:
    return any((each / ".git").exists() for each in (folder.resolve(), *folder.resolve().parents))


def _of_git(folder: Path) -> list[str]:
    """Return what git tracks or would add, as far as it is there."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise Rejected(
            f"{folder} is in a git checkout, and `git ls-files` does not list it: {error}"
        ) from error
    names = (os.fsdecode(name) for name in done.stdout.split(b"\0") if name)
    return [name for name in dict.fromkeys(names) if _is_file(folder / name)]


def _all(folder: Path, patterns: Iterable[str]) -> list[str]:
    patterns, found = tuple(patterns), []
    for place, folders, files in os.walk(folder):
        below = os.path.relpath(place, folder)
        names = [os.path.normpath(os.path.join(below, name)) for name in (*folders, *files)]
        folders[:] = [each for each in folders if not _ignored(each, patterns)]
        found += [name for name in names if _is_file(folder / name)]
        if len(found) > 10 * CODE.files_max:
            raise Rejected(too_many(folder, len(found), CODE))
    return found


def _is_file(path: Path) -> bool:
    """Say whether it is packed: a regular file, or a link to anything."""
    return path.is_symlink() or path.is_file()


def _ignored(name: str, patterns: Iterable[str]) -> bool:
    """Say whether a pattern names the file, or a folder above it: by its name, or by its path."""
    parts = PurePosixPath(name).parts
    paths = ["/".join(parts[: end + 1]) for end in range(len(parts))]
    return any(
        fnmatchcase(part, pattern) or fnmatchcase(path, pattern.lstrip("/"))
        for pattern in patterns
        for part, path in zip(parts, paths, strict=True)
    )

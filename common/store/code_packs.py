"""Packs of code: a folder as one file, the same bytes whoever packs it, named by their digest.

A pack is a tar of regular files, folders and links within it, sorted, without owners, times or any
mode but `executable`, compressed. Its digest is that of the tar, so that another version of the
compression gives the same name. What is unpacked is read by this module's own rules, as it may come
from anybody: files are written before any link is made, into a folder that was not there.
"""

import gzip
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from slackwater.common.base.errors import Rejected

PACK_BYTES_MAX: Final = 256 * 1024**2
"""Bytes of a pack's files: code, not data sets."""
PACK_FILES_MAX: Final = 20_000
IGNORE_FILE: Final = ".slackwaterignore"
ALWAYS_IGNORED: Final = (
    ".git", ".hg", ".svn", "__pycache__", "*.pyc", ".venv", "node_modules", "checkpoints",
    ".mypy_cache", ".pytest_cache", ".ruff_cache",
)  # fmt: skip
_LARGEST_NAMED: Final = 3


class Pack(NamedTuple):
    digest: str
    """SHA-256 of the tar, in hex."""
    payload: bytes
    files: int
    nbytes: int


def pack(folder: Path) -> Pack:
    """Pack the files that belong to the code: in a git checkout those that git would not ignore,
    elsewhere all; never ALWAYS_IGNORED, nor what the patterns in IGNORE_FILE name. Raises Rejected
    where they are too many or too large, OSError."""
    if not folder.is_dir():
        raise Rejected(f"{folder} is not a folder")
    names = _chosen(folder)
    sizes = {name: os.lstat(folder / name).st_size for name in names}
    _check_size(folder, sizes)
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in names:
            _add(tar, folder, name)
    tarred = raw.getvalue()
    payload = gzip.compress(tarred, compresslevel=1, mtime=0)
    return Pack(hashlib.sha256(tarred).hexdigest(), payload, len(names), sum(sizes.values()))


def unpack(payload: bytes, digest: str, target: Path) -> None:
    """Unpack into `target`, which must not be there and then is whole. Raises Rejected where these
    are not the bytes that the digest names, or would write elsewhere; OSError."""
    tarred = _uncompressed(payload)
    found = hashlib.sha256(tarred).hexdigest()
    if found != digest:
        raise Rejected(f"the pack {digest[:12]} is damaged: its bytes have the digest {found[:12]}")
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _extract(tarred, fresh)
        fresh.rename(target)
    except BaseException:
        shutil.rmtree(fresh)
        raise


def _chosen(folder: Path) -> list[str]:
    ignore = folder / IGNORE_FILE
    lines = ignore.read_text().splitlines() if ignore.is_file() else []
    patterns = [line.strip().rstrip("/") for line in lines if line.strip() and line[0] != "#"]
    patterns += ALWAYS_IGNORED
    names = _of_git(folder) if _is_checkout(folder) else _all(folder, patterns)
    return sorted(name for name in names if not _ignored(name, patterns))


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
        if len(found) > 10 * PACK_FILES_MAX:
            raise Rejected(_too_many(folder, len(found)))
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


def _check_size(folder: Path, sizes: dict[str, int]) -> None:
    total = sum(sizes.values())
    if len(sizes) > PACK_FILES_MAX:
        raise Rejected(_too_many(folder, len(sizes)))
    if total > PACK_BYTES_MAX:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:_LARGEST_NAMED]
        said = ", ".join(f"{name} ({_mebibytes(sizes[name])})" for name in largest)
        raise Rejected(
            f"{folder} has {_mebibytes(total)}, at most {_mebibytes(PACK_BYTES_MAX)} are sent to "
            f"nodes; the largest are {said}: name what is not code in {IGNORE_FILE}"
        )
    if not sizes:
        raise Rejected(f"{folder} has no file that is not ignored")


def _too_many(folder: Path, number: int) -> str:
    return (
        f"{folder} has {number:,} files, at most {PACK_FILES_MAX:,} are sent to nodes: name what "
        f"is not code in {IGNORE_FILE}"
    )


def _add(tar: tarfile.TarFile, folder: Path, name: str) -> None:
    path, entry = folder / name, tarfile.TarInfo(name)
    if path.is_symlink():
        entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(path)
        if not _within(name, entry.linkname):
            raise Rejected(
                f"{path} is a link to {entry.linkname}, outside of {folder}: nodes would not have "
                f"it; name it in {IGNORE_FILE}"
            )
        tar.addfile(entry)
        return
    content = path.read_bytes()
    entry.size, entry.mode = len(content), 0o755 if os.access(path, os.X_OK) else 0o644
    tar.addfile(entry, io.BytesIO(content))


def _uncompressed(payload: bytes) -> bytes:
    """Return the tar. No more is uncompressed than a pack may have."""
    most = PACK_BYTES_MAX + 4096 * (PACK_FILES_MAX + 1)
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(payload)) as file:
            tarred = file.read(most + 1)
    except (OSError, EOFError, ValueError) as error:
        raise Rejected(f"not a pack of code: {error}") from error
    except Exception as error:  # zlib.error, which has no base but this.
        raise Rejected(f"not a pack of code: {error}") from error
    if len(tarred) > most:
        raise Rejected(f"a pack of code with more than {_mebibytes(PACK_BYTES_MAX)}")
    return tarred


def _extract(tarred: bytes, fresh: Path) -> None:
    links: list[tuple[str, str]] = []
    written = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(tarred), mode="r:") as tar:
            for entry in tar:
                written += 1
                if written > PACK_FILES_MAX:
                    raise Rejected(f"a pack of code with more than {PACK_FILES_MAX:,} files")
                _check_name(entry.name)
                if entry.issym():
                    links.append((entry.name, entry.linkname))
                    continue
                if not entry.isreg() or entry.issparse():  # Sparse: larger than what was sent.
                    raise Rejected(f"a pack of code has {entry.name!r}, which is not a plain file")
                content = tar.extractfile(entry)
                assert content is not None, "a regular file has content"
                path = fresh / entry.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.read())
                path.chmod(0o755 if entry.mode & 0o100 else 0o644)
    except (tarfile.TarError, ValueError, OSError) as error:
        raise Rejected(f"not a pack of code: {error}") from error
    _make_links(fresh, dict(links))


def _make_links(fresh: Path, links: dict[str, str]) -> None:
    """Make the links, after all files, and see that none leads outside: several together may lead
    where none of them does."""
    for name, to in links.items():
        below = any(str(parent) in links for parent in PurePosixPath(name).parents)
        if below or not _within(name, to):
            raise Rejected(f"a pack of code has a link {name!r} to {to!r}, outside of it")
        path = fresh / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(to)
        except OSError as error:
            raise Rejected(f"a pack of code has a link {name!r}, impossible: {error}") from error
    for name, to in links.items():
        try:
            inside = (fresh / name).resolve().is_relative_to(fresh.resolve())
        except (OSError, RuntimeError):  # It leads to itself.
            inside = False
        if not inside:
            raise Rejected(f"a pack of code has a link {name!r} to {to!r}, outside of it")


def _check_name(name: str) -> None:
    parts = name.split("/")
    if not name or name[0] == "/" or "\0" in name or any(p in ("", ".", "..") for p in parts):
        raise Rejected(f"a pack of code has the name {name!r}, outside of it")


def _within(name: str, to: str) -> bool:
    """Say whether a link `name` to `to` stays inside, by the words alone."""
    if os.path.isabs(to) or "\0" in to or not to:
        return False
    target = os.path.normpath(os.path.join(os.path.dirname(name), to))
    return target != ".." and not target.startswith("../")


def _mebibytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"

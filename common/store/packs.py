"""Packs: files of a folder as one file, the same bytes whoever packs them, named by their digest.

A pack is a tar of regular files and links, sorted, without owners, times or any mode but
`executable`, compressed. Its digest is that of the tar, so that another version of the compression
gives the same name. What is unpacked is read by this module's own rules, as it may come from
anybody: files are written before any link is made, into a folder that was not there. Neither way is
a pack ever in memory as a whole.
"""

import gzip
import hashlib
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import IO, Final, NamedTuple, cast

from slackwater.common.base.errors import Rejected

_LARGEST_NAMED: Final = 3
_HEADER_BYTES_MAX: Final = 1024**2
"""Bytes before and after the content of a file: its name, and padding."""


class Kind(NamedTuple):
    what: str
    bytes_max: int
    """Bytes of its files."""
    files_max: int
    remedy: str
    """Says how it gets smaller."""
    leads_out: Callable[[str, str], bool] = lambda name, to: False
    """Whether the link `name` to `to` may lead out of it."""


class Pack(NamedTuple):
    """A folder that was looked at, and is packed by `write`."""

    digest: str
    """SHA-256 of the tar, in hex."""
    folder: Path
    names: tuple[str, ...]
    nbytes: int
    """Bytes of its files."""
    kind: Kind

    def write(self, target: IO[bytes]) -> None:
        """Raises Rejected where a file is another one than before, OSError."""
        with gzip.GzipFile("", "wb", 1, target, mtime=0) as compressed:
            digested = _Digested(cast(IO[bytes], compressed))
            if _write(self.folder, self.names, self.kind, digested) != self.digest:
                raise Rejected(f"files in {self.folder} change meanwhile: submit it again")


def look(folder: Path, names: list[str], kind: Kind) -> Pack:
    """Make the pack of these files, which are read once. Raises Rejected where they are too many or
    too large, or a link leads elsewhere, and OSError."""
    sizes = {name: os.lstat(folder / name).st_size for name in names}
    _check_size(folder, sizes, kind)
    chosen = tuple(sorted(names))
    digest = _write(folder, chosen, kind, _Digested(None))
    return Pack(digest, folder, chosen, sum(sizes.values()), kind)


def unpack(
    source: IO[bytes],
    digest: str,
    target: Path,
    kind: Kind,
    finish: Callable[[Path], None] = lambda fresh: None,
) -> None:
    """Unpack into `target`, which must not be there and then is whole; `finish` is given the folder
    before. Raises Rejected where these are not the bytes that the digest names, or would write
    elsewhere; OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        found = _extract(source, fresh, kind)
        if found != digest:
            raise Rejected(
                f"the {kind.what} {digest[:12]} is damaged: its bytes have the digest {found[:12]}"
            )
        finish(fresh)
        fresh.rename(target)
    except BaseException:
        remove(fresh)
        raise


def remove(folder: Path) -> None:
    """Remove a folder whose folders may be read-only. Raises OSError."""
    for place, _, _ in os.walk(folder):
        os.chmod(place, 0o700)
    shutil.rmtree(folder)


def too_many(folder: Path, number: int, kind: Kind) -> str:
    return (
        f"{folder} has {number:,} files, at most {kind.files_max:,} are sent to nodes: "
        f"{kind.remedy}"
    )


def mebibytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


# Packing ------------------------------------------------------------------------------------------


def _check_size(folder: Path, sizes: dict[str, int], kind: Kind) -> None:
    total = sum(sizes.values())
    if len(sizes) > kind.files_max:
        raise Rejected(too_many(folder, len(sizes), kind))
    if total > kind.bytes_max:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:_LARGEST_NAMED]
        said = ", ".join(f"{name} ({mebibytes(sizes[name])})" for name in largest)
        raise Rejected(
            f"{folder} has {mebibytes(total)}, at most {mebibytes(kind.bytes_max)} are sent to "
            f"nodes; the largest are {said}: {kind.remedy}"
        )
    if not sizes:
        raise Rejected(f"{folder} has no file that is not ignored")


class _Digested:
    """Takes the tar's bytes, and digests them; `target`: what gets them, too."""

    def __init__(self, target: IO[bytes] | None) -> None:
        self._target = target
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        if self._target is not None:
            self._target.write(data)
        return len(data)


def _write(folder: Path, names: tuple[str, ...], kind: Kind, digested: _Digested) -> str:
    """Write the tar, and return its digest."""
    target = cast(IO[bytes], digested)
    with tarfile.open(fileobj=target, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for name in names:
            _add(tar, folder, name, kind)
    return digested.digest.hexdigest()


def _add(tar: tarfile.TarFile, folder: Path, name: str, kind: Kind) -> None:
    path, entry = folder / name, tarfile.TarInfo(name)
    if path.is_symlink():
        entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(path)
        if not _within(name, entry.linkname):
            entry.linkname = os.path.realpath(path)
            if not kind.leads_out(name, entry.linkname):
                raise Rejected(
                    f"{path} is a link to {os.readlink(path)}, outside of {folder}: nodes would "
                    f"not have it; {kind.remedy}"
                )
        tar.addfile(entry)
        return
    with path.open("rb") as content:
        entry.size = os.fstat(content.fileno()).st_size
        entry.mode = 0o755 if os.access(path, os.X_OK) else 0o644
        tar.addfile(entry, content)


# Unpacking ----------------------------------------------------------------------------------------


class _Source:
    """Uncompresses a pack and digests it, no more of it than up to `most` bytes."""

    def __init__(self, file: IO[bytes], kind: Kind) -> None:
        self._file, self._kind, self._read_bytes = file, kind, 0
        self._digest = hashlib.sha256()
        self.most = 0

    def allow(self, nbytes: int) -> None:
        self.most = self._read_bytes + nbytes + _HEADER_BYTES_MAX

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self._digest.update(data)
        self._read_bytes += len(data)
        if self._read_bytes > self.most:
            raise Rejected(f"a {self._kind.what} with more than it says")
        return data

    def whole(self) -> str:
        """Read the padding at the end, and return the digest of all that was read."""
        self.allow(0)
        while self.read(2**16):
            pass
        return self._digest.hexdigest()


def _extract(packed: IO[bytes], fresh: Path, kind: Kind) -> str:
    """Write the files and links, and return the digest of what was read."""
    links: dict[str, str] = {}
    written = nbytes = 0
    try:
        with gzip.GzipFile(fileobj=packed) as file:
            source = _Source(cast(IO[bytes], file), kind)
            source.allow(0)
            with tarfile.open(fileobj=cast(IO[bytes], source), mode="r|") as tar:
                while (entry := tar.next()) is not None:
                    written, nbytes = written + 1, nbytes + entry.size
                    _check_entry(entry, written, nbytes, kind)
                    if entry.issym():
                        links[entry.name] = entry.linkname
                        continue
                    source.allow(entry.size)
                    _write_file(tar, entry, fresh / entry.name)
                    source.allow(0)
            digest = source.whole()
    except (tarfile.TarError, zlib.error, EOFError, ValueError) as error:
        raise Rejected(f"not a {kind.what}: {error}") from error
    except OSError as error:
        raise Rejected(f"a {kind.what} that cannot be unpacked: {error}") from error
    _make_links(fresh, links, kind)
    return digest


def _check_entry(entry: tarfile.TarInfo, number: int, nbytes: int, kind: Kind) -> None:
    """Raises Rejected."""
    if number > kind.files_max:
        raise Rejected(f"a {kind.what} with more than {kind.files_max:,} files")
    if nbytes > kind.bytes_max:
        raise Rejected(f"a {kind.what} with more than {mebibytes(kind.bytes_max)}")
    parts = entry.name.split("/")
    if "\0" in entry.name or any(part in ("", ".", "..") for part in parts):
        raise Rejected(f"a {kind.what} has the name {entry.name!r}, outside of it")
    if entry.issym():
        return
    if not entry.isreg() or entry.issparse():  # Sparse: larger than what was sent.
        raise Rejected(f"a {kind.what} has {entry.name!r}, which is not a plain file")


def _write_file(tar: tarfile.TarFile, entry: tarfile.TarInfo, path: Path) -> None:
    content = tar.extractfile(entry)
    assert content is not None, "a regular file has content"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        shutil.copyfileobj(content, file)
    path.chmod(0o755 if entry.mode & 0o100 else 0o644)


def _make_links(fresh: Path, links: dict[str, str], kind: Kind) -> None:
    """Make the links, after all files, and see that none leads outside but those that may: several
    together may lead where none of them does."""
    for name, to in links.items():
        below = any(str(parent) in links for parent in PurePosixPath(name).parents)
        if below or not (_within(name, to) or kind.leads_out(name, to)):
            raise Rejected(f"a {kind.what} has a link {name!r} to {to!r}, outside of it")
        path = fresh / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(to)
        except (OSError, ValueError) as error:
            raise Rejected(f"a {kind.what} has a link {name!r}, impossible: {error}") from error
    for name, to in links.items():
        try:
            end = (fresh / name).resolve()
            inside = end.is_relative_to(fresh.resolve()) or kind.leads_out(name, str(end))
        except (OSError, RuntimeError):  # It leads to itself.
            inside = False
        if not inside:
            raise Rejected(f"a {kind.what} has a link {name!r} to {to!r}, outside of it")


def _within(name: str, to: str) -> bool:
    """Say whether a link `name` to `to` stays inside, by the words alone."""
    if os.path.isabs(to) or "\0" in to or not to:
        return False
    target = os.path.normpath(os.path.join(os.path.dirname(name), to))
    return target != ".." and not target.startswith("../")

"""A job's checkpoints on disk: a set of parts for each saved iteration, whole or not there.

A part is one file, a rank's or a bucket's, and a manifest beside it that says its length and
checksum:

    iteration-000000000120.0of2.pt      kind "torch": what torch.load reads
    iteration-000000000120.0of2.json    a `Part`, written last
    iteration-000000000120.1of2.pt
    iteration-000000000120.1of2.json

Aggregators' sets have names of their own, so that both may lie in one folder; numpy.load reads them
(common/domains/slots/saved_bucket.py). After a set come updates: what changed most of a part since.
Each counts by itself.

    buckets-000000000120.1of2.npz       and its manifest
    update-000000000140.1of2.npz        and its manifest

A file is written under another name, synced, then renamed; its manifest after it, in the same way.
So whoever is killed, at any instant, leaves each part whole or without a manifest, and a set counts
once the manifests of all its parts are there. No two processes ever write the same file, and none
has to wait for another. The checksum finds what a disk did to the bytes afterwards.
"""

import os
import re
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from slackwater.common.base.errors import Rejected

FORMAT: Final = "slackwater-checkpoint/1"
KEPT: Final = 2
"""Whole sets that stay: the newest may be found damaged."""
TORCH: Final = "torch"
BUCKETS: Final = "buckets"
UPDATE: Final = "update"
WORDS: Final = {TORCH: "iteration", BUCKETS: "buckets", UPDATE: "update"}
"""Kind of a part -> how its file's name begins."""
SUFFIXES: Final = {TORCH: "pt", BUCKETS: "npz", UPDATE: "npz"}
"""And how it ends."""
_NAME: Final = re.compile(
    r"(?P<word>[a-z]+)-(?P<iteration>\d{12})\.(?P<part>\d+)of(?P<parts>\d+)\."
    r"(pt|npz|json)(?P<new>\.new)?"
)
_PIECE_BYTES: Final = 8 * 1024**2


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest of one file."""

    format: str
    iteration: int
    part: int
    parts: int
    kind: str
    nbytes: int
    crc32: int

    @property
    def file(self) -> str:
        return file_name(self.iteration, self.part, self.parts, self.kind)


def file_name(iteration: int, part: int, parts: int, kind: str) -> str:
    return f"{WORDS[kind]}-{iteration:012d}.{part}of{parts}.{SUFFIXES[kind]}"


class CheckpointFolder:
    """The sets of one kind in a folder, which all who write or read them see."""

    def __init__(self, path: Path, kind: str = TORCH) -> None:
        """Make the folder where it is missing. Raises Rejected."""
        self.path, self._kind = path, kind
        self._words = {WORDS[kind], *([WORDS[UPDATE]] if kind == BUCKETS else ())}
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Rejected(
                f"checkpoints cannot be kept in {path}: {error.strerror}; name another folder by "
                "folder=, or by `slackwater submit --checkpoint FOLDER`"
            ) from error

    def sets(self) -> list[tuple[Part, ...]]:
        """List the sets of which every part has a manifest, the newest first, parts in order."""
        found: dict[tuple[int, int], list[Part]] = {}
        for path in self.path.glob(f"{WORDS[self._kind]}-*.json"):
            if (part := _manifest(path)) is not None:
                found.setdefault((part.iteration, part.parts), []).append(part)
        whole = [
            tuple(sorted(parts, key=lambda each: each.part))
            for (_, number), parts in found.items()
            if len(parts) == number
        ]
        return sorted(whole, key=lambda each: -each[0].iteration)

    def updates(self, after: int) -> list[Part]:
        """List the updates of later iterations, the oldest first."""
        found = (_manifest(path) for path in self.path.glob(f"{WORDS[UPDATE]}-*.json"))
        later = [part for part in found if part is not None and part.iteration > after]
        return sorted(later, key=lambda each: (each.iteration, each.part))

    def unfinished(self, after: int) -> list[int]:
        """List the iterations after this one of which some part is missing."""
        whole = {parts[0].iteration for parts in self.sets()}
        begun = {int(name["iteration"]) for name in self._names() if name["word"] != UPDATE}
        return sorted({iteration for iteration in begun if iteration > after} - whole)

    def _names(self) -> list[re.Match[str]]:
        """List the files' names that are of this kind."""
        found = (_NAME.fullmatch(path.name) for path in self.path.iterdir())
        return [name for name in found if name and name["word"] in self._words]

    def damage(self, part: Part) -> str:
        """Say what is wrong with the part's file; empty: it is as it was written."""
        try:
            nbytes, crc32 = _checksum(self.path / part.file)
        except OSError as error:
            return f"{part.file}: {error.strerror}"
        if nbytes != part.nbytes:
            return f"{part.file} has {nbytes} bytes, {part.nbytes} were written"
        return (
            "" if crc32 == part.crc32 else f"{part.file} does not have the bytes that were written"
        )

    def write(
        self, iteration: int, part: int, parts: int, kind: str, fill: Callable[[Path], None]
    ) -> None:
        """Publish what `fill` writes to the path that it gets; durable on return. Raises OSError,
        and as `fill` does."""
        target = self.path / file_name(iteration, part, parts, kind)
        manifest = target.with_suffix(".json")
        fresh = _fresh(target)
        fill(fresh)
        nbytes, crc32 = _checksum(fresh)
        make_durable(fresh)
        said = Part(
            format=FORMAT, iteration=iteration, part=part, parts=parts, kind=kind,
            nbytes=nbytes, crc32=crc32,
        )  # fmt: skip
        manifest.unlink(missing_ok=True)
        fresh.replace(target)
        _fresh(manifest).write_bytes(msgspec.json.encode(said) + b"\n")
        make_durable(_fresh(manifest))
        _fresh(manifest).replace(manifest)
        make_durable(self.path)

    def prune(self) -> None:
        """Remove what is older than the sets that are kept. Only rank 0 calls it."""
        whole = self.sets()
        oldest = whole[KEPT - 1][0].iteration if len(whole) >= KEPT else 0
        self._remove(lambda name: int(name["iteration"]) < oldest)

    def clear(self, part: int, after: int) -> None:
        """Remove what former processes of this rank had not written to its end, and what they wrote
        after the iteration that it goes on from: sets that lacked another part, or were damaged,
        and with whose parts those that are written now would be taken for whole."""
        self._remove(
            lambda name: (
                int(name["part"]) == part and (bool(name["new"]) or int(name["iteration"]) > after)
            )
        )

    def _remove(self, which: Callable[[re.Match[str]], bool]) -> None:
        """Remove files by their names, manifests first."""
        for name in sorted(self._names(), key=lambda name: ".json" not in name.string):
            if which(name):
                (self.path / name.string).unlink(missing_ok=True)


def check_absolute(folder: Path) -> None:
    """Raise Rejected for a path that means another folder to each process, or none."""
    if not folder.is_absolute() or "\0" in str(folder):
        raise Rejected(f"{str(folder)!r} is not an absolute path of a folder")


def newest_of_buckets(folder: Path) -> tuple[Part, ...]:
    """Return the parts of the newest set that aggregators wrote. Raises Rejected where there is
    none."""
    check_absolute(folder)
    if not folder.is_dir():
        raise Rejected(f"folder {folder} is missing, or not seen from here")
    if sets := CheckpointFolder(folder, BUCKETS).sets():
        return sets[0]
    if CheckpointFolder(folder).sets():
        raise Rejected(
            f"{folder} has what a program saved (slackwater.torch.checkpoint): submit with "
            f"--checkpoint {folder}, and the program itself goes on from it"
        )
    raise Rejected(f"{folder} has no whole checkpoint; `slackwater checkpoint JOB` makes one")


def _manifest(path: Path) -> Part | None:
    """Read a manifest; None: it was removed just now, or is none of this format."""
    name = _NAME.fullmatch(path.name)
    try:
        part = msgspec.json.decode(path.read_bytes(), type=Part)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        sys.stderr.write(f"slackwater: {path} is skipped: it is damaged ({error})\n")
        return None
    said = (WORDS.get(part.kind), part.iteration, part.part, part.parts)
    named = name and (name["word"], int(name["iteration"]), int(name["part"]), int(name["parts"]))
    if part.format != FORMAT or said != named:
        sys.stderr.write(f"slackwater: {path} is skipped: it does not say what its name says\n")
        return None
    return part


def _fresh(path: Path) -> Path:
    return path.with_name(f"{path.name}.new")


def _checksum(path: Path) -> tuple[int, int]:
    """Return the file's length and CRC-32."""
    piece = memoryview(bytearray(_PIECE_BYTES))
    nbytes, crc32 = 0, 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            crc32 = zlib.crc32(piece[:count], crc32)
            nbytes += count
    return nbytes, crc32


def make_durable(path: Path) -> None:
    """Have the disk keep a file, or a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

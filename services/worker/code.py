"""The code of jobs whose nodes lack it: packs that are fetched by their digest, and unpacked.

Packs are kept as they came, the ones used longest ago go first. Each job gets a copy of its own,
unpacked from the pack, which its program may write to: links to shared files would let one job
change another's. The copy stays from attempt to attempt, and goes with the job's files.
"""

import asyncio
import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import IO, Final
from weakref import WeakValueDictionary

import structlog

from slackwater.common.base.errors import Rejected, SlackwaterError
from slackwater.common.base.private_files import private_folder
from slackwater.common.store.code_packs import CODE
from slackwater.common.store.objects import Objects
from slackwater.common.store.packs import unpack

log = structlog.get_logger()
PACKS_BYTES_MAX: Final = 2 * 1024**3
"""Bytes of packs that a node keeps."""
_BESIDE_MAX: Final = 500
_BESIDE_BYTES_MAX: Final = 16 * 1024**2
"""Python files beside a script, and their bytes, by which its code is compared."""


class CodeMissing(SlackwaterError):
    """A job's code, or its virtual environment, could not be fetched or unpacked."""


class CodeStore:
    """The packs and the jobs' copies below one state folder."""

    def __init__(self, state_dir: Path, objects: Objects | None) -> None:
        below = state_dir.absolute()
        self._packs, self._jobs = below / "packs", below / "jobs"
        self._objects = objects
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def folder(self, job: str, code: str, folder: str) -> str:
        """Return the folder that the job's program runs in: of its copy, if it has `code`."""
        return str(self._copy(job, code) / folder) if code else folder

    async def provide(self, job: str, code: str) -> None:
        """Have the job's copy there, whole. Asked by several at once, it is fetched once. Raises
        CodeMissing."""
        if not code:
            return
        target = self._copy(job, code)
        lock = self._locks.setdefault(code, asyncio.Lock())
        try:
            async with lock:
                if target.exists():
                    return
                target.parent.mkdir(mode=0o700, exist_ok=True)
                if not await asyncio.to_thread(self._unpacked, code, target):
                    await self._fetch(code, target)
        except (SlackwaterError, OSError) as error:
            raise CodeMissing(f"its code cannot be had: {error}") from error

    def _copy(self, job: str, code: str) -> Path:
        return self._jobs / job / f"code-{code[:16]}"

    def _pack(self, code: str) -> Path:
        return self._packs / f"{code}.tar.gz"

    def _unpacked(self, code: str, target: Path) -> bool:
        """Unpack the pack that this node keeps. False: there is none, or it is damaged and goes."""
        kept = self._pack(code)
        try:
            os.utime(kept)
            with kept.open("rb") as file:
                unpack(file, code, target, CODE)
        except FileNotFoundError:
            return False
        except Rejected as error:
            log.warning("pack.damaged", code=code[:12], reason=str(error))
            kept.unlink(missing_ok=True)
            return False
        return True

    async def _fetch(self, code: str, target: Path) -> None:
        """Fetch and unpack the pack, and keep it once its bytes are known to be right."""
        private_folder(self._packs)
        kept = self._pack(code)
        fresh = kept.with_suffix(".new")
        try:
            with fresh.open("w+b") as file:
                await fetch(self._objects, code, file, f"the code {code[:12]}", "--workdir")
                file.seek(0)
                await asyncio.to_thread(unpack, file, code, target, CODE)
            fresh.replace(kept)
        finally:
            fresh.unlink(missing_ok=True)
        await asyncio.to_thread(self._let_go, kept)

    def _let_go(self, kept: Path) -> None:
        """Let the oldest packs go. Others may do the same at once."""
        found = []
        for path in self._packs.glob("*.tar.gz"):
            with suppress(FileNotFoundError):
                found.append((path.stat(), path))
        nbytes = 0
        for stat, path in sorted(found, key=lambda each: -each[0].st_mtime):
            nbytes += stat.st_size
            if nbytes > PACKS_BYTES_MAX and path != kept:
                path.unlink(missing_ok=True)


async def fetch(
    objects: Objects | None, name: str, target: IO[bytes], what: str, option: str
) -> None:
    """Write a stored pack to the open file. Raises SlackwaterError, OSError."""
    if objects is None:
        raise Rejected(f"this node has no object store to fetch {what} from")
    if not await objects.get(name, target):
        raise Rejected(f"{what} is not stored any more; submit the job again with {option}")


def script_digest(program: tuple[str, ...], folder: str) -> str:
    """Return the digest of a Python program's script and of the Python files beside it, so that
    ranks on different code are found; empty: it runs no script."""
    script = next((word for word in program[1:] if not word.startswith("-")), "")
    if not script.endswith(".py") or program[1] != script:
        return ""
    path = Path(folder or ".") / script
    found = hashlib.sha256()
    left = _BESIDE_BYTES_MAX
    for each in sorted(path.parent.glob("*.py"))[:_BESIDE_MAX]:
        with suppress(OSError):  # A link to nowhere, as an editor's lock, or a file just removed.
            left -= each.stat().st_size
            if each.is_file() and left >= 0:
                found.update(each.name.encode() + b"\0" + each.read_bytes() + b"\0")
    return found.hexdigest()

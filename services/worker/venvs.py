"""The virtual environments of jobs whose nodes lack them: fetched by their digest, unpacked once.

All jobs of the node share the unpacked copy, which nobody may write to. Copies that no rank uses
are kept for the next job, and the ones used longest ago go first; one that a rank uses never goes.
"""

import asyncio
import os
import tempfile
from collections.abc import Hashable
from pathlib import Path
from typing import Final
from weakref import WeakValueDictionary

import structlog

from slackwater.common.base.errors import SlackwaterError
from slackwater.common.store.objects import Objects
from slackwater.common.store.packs import remove, unpack
from slackwater.common.store.venv_packs import VENV, Venv, settle
from slackwater.schemas.jobs import VENV_OBJECT
from slackwater.services.worker.code import CodeMissing, fetch

log = structlog.get_logger()
_PASS: Final = 0o711
"""Mode of the folder: jobs with accounts of their own pass through it."""
_NAME_CHARS: Final = 32
"""Letters of a digest that name a copy: paths in it stay short."""


class VenvStore:
    """The environments below one state folder. `nbytes`: how many bytes of them are kept."""

    def __init__(self, state_dir: Path, objects: Objects | None, nbytes: int) -> None:
        self._folder = state_dir.absolute() / "venvs"
        self._objects, self._nbytes = objects, nbytes
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._users: dict[Hashable, str] = {}
        self._goes = asyncio.Lock()
        """One look at all of them at a time."""

    def folder(self, venv: str) -> str:
        """Return where the environment is, once it is provided; empty: there is none."""
        return str(self._folder / venv[:_NAME_CHARS]) if venv else ""

    def hold(self, user: Hashable, venv: str) -> None:
        """Let the environment stay until its user is done."""
        if venv:
            self._users[user] = self.folder(venv)

    def release(self, user: Hashable) -> None:
        self._users.pop(user, None)

    def clean(self) -> None:
        """Remove what a former life of the service did not make whole, as far as nothing of that
        life writes to it still: the next one removes the rest."""
        for path in self._folder.glob(".*"):
            try:
                remove(path) if path.is_dir() else path.unlink()
            except OSError as error:
                log.warning("venv.left", path=str(path), reason=str(error))

    async def provide(self, venv: str) -> None:
        """Have the environment there, whole. Asked by several at once, it is fetched once. Raises
        CodeMissing."""
        if not venv:
            return
        target = Path(self.folder(venv))
        lock = self._locks.setdefault(venv, asyncio.Lock())
        try:
            async with lock:
                if not await asyncio.to_thread(self._there, target):
                    await self._make(venv, target)
                    async with self._goes:
                        await self._let_go(target)
        except (SlackwaterError, OSError) as error:
            raise CodeMissing(f"its virtual environment cannot be had: {error}") from error

    def _there(self, target: Path) -> bool:
        """Tell whether the environment is there, and can be used. Raises Rejected, OSError."""
        try:
            os.utime(target)
            Venv(target).check()
        except FileNotFoundError:
            return False
        return True

    async def _make(self, venv: str, target: Path) -> None:
        self._folder.mkdir(exist_ok=True)
        self._folder.chmod(_PASS)
        packed = target.with_name(f".{target.name}.pack")
        what = f"the virtual environment {venv[:12]}"
        try:
            with packed.open("w+b") as file:
                await fetch(self._objects, VENV_OBJECT + venv, file, what, "--venv")
                file.seek(0)
                finish = lambda fresh: settle(fresh, target)  # noqa: E731
                await asyncio.to_thread(unpack, file, venv, target, VENV, finish)
        finally:
            packed.unlink(missing_ok=True)
        log.info("venv.unpacked", venv=venv[:12])

    async def _let_go(self, kept: Path) -> None:
        """Remove environments beyond what is kept. They leave their names in one step of the loop
        with the look at their users, so that nobody begins to use one that goes."""
        sizes = await asyncio.to_thread(self._sizes)
        nbytes, going = 0, []
        for path, size in sizes:
            nbytes += size
            if nbytes > self._nbytes and path != kept and str(path) not in self._users.values():
                gone = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=self._folder))
                path.rename(gone)
                going.append(gone)
                nbytes -= size
        for gone in going:
            await asyncio.to_thread(remove, gone)
            log.info("venv.removed", venv=gone.name)

    def _sizes(self) -> list[tuple[Path, int]]:
        """List the environments with their bytes, the one used last first."""
        found = [path for path in self._folder.iterdir() if not path.name.startswith(".")]
        found.sort(key=lambda path: -path.stat().st_mtime)
        return [(path, sum(each.lstat().st_size for each in path.rglob("*"))) for path in found]

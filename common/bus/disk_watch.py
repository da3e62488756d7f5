"""Watches the disk of a bus server: says how much room it has, and what the server cannot write.

JetStream does not answer a write that its disk refused, and goes on refusing when there is room
again, for as long as the server lives; a server of a cluster ends its JetStream for good and goes
on without. So the watch asks the server's own health page, tells what that says on the bus (plain
messages need no disk), and has the server started anew once the disk takes writes again.
"""

import asyncio
import contextlib
import json
import os
import shutil
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Final

import structlog

from slackwater.common.base import codec, limits
from slackwater.common.base.clock import Clock
from slackwater.common.base.errors import Retryable
from slackwater.common.bus.base import Bus
from slackwater.schemas import subjects
from slackwater.schemas.service import BusState

_PROBE: Final = ".written"
_RESERVE: Final = ".reserve"
_RESERVE_BYTES_MAX: Final = 16 * 1024**2
_PAGE_S: Final = 2.0
_PAGE_BYTES: Final = 64 * 1024
_REASON_CHARS: Final = 400
_log = structlog.get_logger()


def reason_in(said: str) -> str:
    """Return what a server's health page says of writes that fail; empty: it speaks of something
    else, such as a copy that is behind."""
    if said.startswith("JetStream not enabled"):
        return "its disk refused a write, and it keeps no records since"
    if "insufficient storage resources" in said:
        return "it started when its disk had no room, and keeps no records since"
    return said[:_REASON_CHARS] if "write error" in said else ""


def looked(ill: int, mended: bool) -> tuple[int, bool]:
    """Return the looks in a row, this one included, at which the server could not write although
    its disk can be written, and whether to start it anew now."""
    ill = ill + 1 if mended else 0
    return (0, True) if ill >= limits.BUS_MENDED_LOOKS else (ill, False)


class DiskWatch:
    """`restart` ends the server, which its supervisor starts anew. `page`: its monitoring URL."""

    def __init__(
        self,
        server: str,
        store_dir: Path,
        page: str,
        bus: Bus,
        clock: Clock,
        restart: Callable[[], None],
    ) -> None:
        self._server, self._store_dir, self._page = server, store_dir, page
        self._bus, self._clock, self._restart = bus, clock, restart
        self._ill = 0

    async def run(self) -> None:
        """Until cancelled."""
        due_s = self._clock.now_s()
        while True:
            await self._look()
            due_s = max(due_s + limits.HEARTBEAT_S, self._clock.now_s())
            await self._clock.sleep_until(due_s)

    async def _look(self) -> None:
        state = await asyncio.to_thread(self._state)
        subject = subjects.telemetry("bus", self._server, "state")
        with contextlib.suppress(Retryable):
            await self._bus.publish(subject, codec.encode(state))
        mended = bool(state.reason) and await asyncio.to_thread(self._writable)
        await asyncio.to_thread(self._keep_reserve, state, bool(state.reason) and not mended)
        self._ill, restart = looked(self._ill, mended)
        if restart:
            _log.warning("bus.restart", server=self._server, reason=state.reason)
            self._restart()

    def _state(self) -> BusState:
        """Look at the disk and at the server's health."""
        disk = shutil.disk_usage(self._store_dir)
        return BusState(
            server=self._server,
            free_bytes=disk.free,
            total_bytes=disk.total,
            reason=self._error() or self._read_only(),
            at_s=self._clock.now_s(),
        )

    def _error(self) -> str:
        """Return what the server says it cannot write; empty: nothing, or it does not answer."""
        connection = HTTPConnection(self._page.removeprefix("http://"), timeout=_PAGE_S)
        try:
            connection.request("GET", "/healthz")
            said = str(json.loads(connection.getresponse().read(_PAGE_BYTES)).get("error", ""))
        except (OSError, HTTPException, ValueError):
            return ""
        finally:
            connection.close()
        return reason_in(said)

    def _keep_reserve(self, state: BusState, needed: bool) -> None:
        """Hold some of the disk, and give it up where nothing else is left: leases and epochs can
        be written then, while new jobs are refused."""
        path = self._store_dir / _RESERVE
        wanted = min(state.total_bytes // 50, _RESERVE_BYTES_MAX)
        with contextlib.suppress(OSError):  # The disk lacks the room: nothing is held.
            if needed:
                path.unlink(missing_ok=True)
            elif not path.exists() and state.free_bytes > state.reserve_bytes + wanted:
                with path.open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, wanted)

    def _read_only(self) -> str:
        flags = os.statvfs(self._store_dir).f_flag
        return "its disk is read-only" if flags & os.ST_RDONLY else ""

    def _writable(self) -> bool:
        """Write a page to the disk, and wait until it is there."""
        path = self._store_dir / _PROBE
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                os.write(descriptor, bytes(4096))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
                path.unlink()
        except OSError:
            return False
        return True

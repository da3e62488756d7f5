"""Have ranks without an Agent watched, and tell the master what they send.

A process of its own does the watching (traffic_program.py), as long as there is a rank to watch:
the lowest of each job that runs here, once it has lasted for LOOK_S and no Agent of it has
registered tensors. Where nothing may be watched, the log says why.
"""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import msgspec
import structlog

from slackwater.common.base import codec
from slackwater.common.base.errors import Retryable
from slackwater.common.bus.base import Bus
from slackwater.common.native.sockets import ports
from slackwater.common.shell.definition import Port
from slackwater.schemas import subjects
from slackwater.schemas.base import RUN_ATTEMPTS, JobId, NodeId
from slackwater.schemas.traffic import TrafficObserved
from slackwater.services.worker.config import WorkerConfig
from slackwater.services.worker.containment import Containment
from slackwater.services.worker.environment import inherited
from slackwater.services.worker.processes import Intent, RankFiles
from slackwater.services.worker.relay import Relay
from slackwater.services.worker.traffic_talk import Able, Finding, Orders, Target

_log = structlog.get_logger()
PROGRAM: Final = "slackwater.services.worker.traffic_program"
LOOK_S: Final = 5.0
"""Seconds between two looks at which ranks there are."""
IDLE_S: Final = 60.0
"""Seconds without a rank after which the process is ended."""
LINE_BYTES_MAX: Final = 1 << 20
AGAIN_S: Final = 600.0
"""Seconds until the next try, where nothing may be watched, or the process failed."""


class Followed(Protocol):
    """A rank's process that runs."""

    @property
    def files(self) -> RankFiles: ...


class TrafficWatch:
    """`watched`: the ranks that run, by job and rank."""

    def __init__(
        self,
        config: WorkerConfig,
        bus: Bus,
        containment: Containment,
        relay: Relay,
        watched: Mapping[tuple[str, int], Followed],
    ) -> None:
        self._config, self._bus = config, bus
        self._containment, self._relay, self._watched = containment, relay, watched
        self._known: dict[str, RankFiles] = {}
        """Ranks of the last look, by the key that the process knows them by."""
        self._able = False

    async def keep(self, port: Port) -> None:
        """Watch, as long as the service lasts."""
        while self._config.traffic != "off":
            await asyncio.sleep(LOOK_S)
            if await self._targets():
                reason = await self._life()
                if reason:
                    _log.warning("traffic.ended", reason=reason, again_s=AGAIN_S)
                    await asyncio.sleep(AGAIN_S)

    async def _life(self) -> str:
        """Run the process until it is not needed; empty. Else return why it ended."""
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", PROGRAM,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd="/",
                env=inherited(os.environ, self._config.environment), limit=LINE_BYTES_MAX,
            )  # fmt: skip
        except OSError as error:
            return str(error)
        assert process.stdin is not None
        assert process.stdout is not None
        self._able = False
        reading = asyncio.create_task(self._read(process.stdout))
        try:
            needed_s, told = time.monotonic(), b""
            while not reading.done():
                targets = await self._targets()
                needed_s = time.monotonic() if targets else needed_s
                if time.monotonic() - needed_s > IDLE_S:
                    return ""
                orders = msgspec.json.encode(Orders(tuple(targets))) + b"\n"
                if orders != told:
                    process.stdin.write(orders)
                    # Reading says that it ended; what is late is told again, or replaced.
                    with contextlib.suppress(ConnectionError, TimeoutError):
                        await asyncio.wait_for(process.stdin.drain(), LOOK_S)
                    told = orders
                await asyncio.wait({reading}, timeout=LOOK_S)
            return reading.result()
        except (msgspec.DecodeError, ValueError) as error:
            return f"its process said what is not understood: {error}"
        finally:
            reading.cancel()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _read(self, stdout: asyncio.StreamReader) -> str:
        """Pass on what the process finds, until it ends; return why."""
        while line := await stdout.readline():
            if not self._able:
                able = msgspec.json.decode(line, type=Able)
                for reason in filter(None, (able.packets, able.calls)):
                    _log.info("traffic.limited", reason=reason)
                if able.packets and able.calls:
                    return f"{able.packets}; {able.calls}"
                self._able = True
                continue
            await self._tell(msgspec.json.decode(line, type=Finding))
        return "its process ended; its last lines are above"

    async def _tell(self, found: Finding) -> None:
        files = self._known.get(found.key)
        if files is None:
            return
        message = TrafficObserved(
            job=JobId(files.job),
            attempt=files.attempt // RUN_ATTEMPTS,
            node=NodeId(self._config.node or self._config.id),
            traffic=msgspec.structs.replace(found.traffic, rank=files.rank),
            cpu_percent=found.cpu_percent,
            sender=f"worker.{self._config.id}",
        )
        try:
            subject = subjects.telemetry("job", files.job, "traffic")
            await self._bus.publish(subject, codec.encode(message))
        except Retryable as error:  # The next window says it again.
            _log.info("traffic.untold", job=files.job, reason=str(error))

    async def _targets(self) -> list[Target]:
        """List the ranks to watch: those that were there a look before, too."""
        files = [each.files for each in self._watched.values()]
        own = {f"{each.job}.{each.rank}.{each.attempt}": each for each in lowest(files)}
        before, self._known = self._known, own
        lasting = {key: each for key, each in own.items() if key in before}
        if not lasting:
            return []
        return await asyncio.to_thread(self._described, lasting)

    def _described(self, files: Mapping[str, RankFiles]) -> list[Target]:
        found = []
        for key, each in files.items():
            rank = each.job, each.rank, each.attempt
            intent = _intent(each)
            if intent is None or intent.workers < 2 or rank in self._relay.registered:
                continue
            if self._config.traffic == "auto" and not intent.gpu_ids:
                continue
            pids = frozenset(self._containment.processes_of(*rank))
            if own := ports(pids):
                found.append(Target(key, pids, frozenset(own), intent.workers))
        return found


def lowest(files: Sequence[RankFiles]) -> list[RankFiles]:
    """Choose the lowest rank of each job."""
    found: dict[str, RankFiles] = {}
    for each in sorted(files, key=lambda one: one.rank):
        found.setdefault(each.job, each)
    return list(found.values())


def _intent(files: RankFiles) -> Intent | None:
    try:
        return msgspec.json.decode(files.path("intent.json").read_bytes(), type=Intent)
    except FileNotFoundError:  # Its files were removed just now.
        return None

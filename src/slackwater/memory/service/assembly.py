"""The parts of one device, put together, from its start to its end.

A program that uses a device within itself (arrays, what is spilled) and the process that exports
one to clients both assemble it here; they differ in the front that serves it (NBD), if any. The
device serves whatever the bus does: its control service is started anew while the device lives.
"""

import asyncio
import contextlib
import random
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, Protocol

import structlog

from slackwater.common.base import codec, limits
from slackwater.common.base.background import Background
from slackwater.common.base.clock import Clock
from slackwater.common.base.effects import Publish
from slackwater.common.base.errors import Fatal, SlackwaterError
from slackwater.common.bus.access import Credentials
from slackwater.common.native.link import ANYWHERE, link_of
from slackwater.common.shell import run_service
from slackwater.common.shell.definition import Port
from slackwater.common.shell.world import World, live_world
from slackwater.common.transport.negotiate import live_fabrics
from slackwater.common.transport.pacing import leftover_of
from slackwater.common.transport.tls import TlsEnds
from slackwater.memory.control.core import DeviceCore
from slackwater.memory.control.lenders import Lenders
from slackwater.memory.control.spans import DeviceSettings
from slackwater.memory.pages import kernels as k
from slackwater.memory.pages.backup import Backup
from slackwater.memory.pages.device import Device
from slackwater.memory.pages.stall import Stall
from slackwater.memory.pages.table import make_table
from slackwater.memory.prefetch.readahead import ReadAhead
from slackwater.memory.resilience.resilience import resilience
from slackwater.memory.service import control_service
from slackwater.memory.service.options import DeviceOptions, check_options, node_of
from slackwater.memory.service.shutdown import Patience
from slackwater.memory.service.status import DeviceStatus
from slackwater.memory.store import PAGE_BYTES, Resilience
from slackwater.schemas import subjects
from slackwater.schemas.base import NodeId
from slackwater.schemas.memory import DeviceHello, DeviceId

_RECONNECT_WAIT_S: Final = 2.0
_WATCH_S: Final = 1.0
_log = structlog.get_logger()


class Front(Protocol):
    """Serves a device to clients."""

    @property
    def open_requests(self) -> int: ...

    def start(self) -> None: ...

    async def close(self) -> None:
        """Take no new client, finish what was begun."""
        ...


class DeviceAssembly:
    """Call `start` and `close` on one loop."""

    def __init__(
        self, options: DeviceOptions, slab_bytes: int, clock: Clock, tls: TlsEnds | None = None
    ) -> None:
        """`tls`: by which certificates lenders are reached over tls. Raises ConfigRejected."""
        check_options(options, slab_bytes)
        self._node = node_of(options)
        self.background = Background()
        strategy = resilience(options.resilience, self.background)
        span_pages = strategy.span_pages(slab_bytes)
        pages = options.size_bytes // PAGE_BYTES
        self.options = options
        self._clock = clock
        places = limits.AHEAD_PAGES if options.prefetch and options.socket is not None else 0
        table = make_table(pages, span_pages, backed=strategy.backup, places=places)
        backup = Backup(
            options.backup,
            table,
            self.background,
            direct=options.direct,
            delay_s=options.delay_s,
            reserve=options.swap,
        )
        self.device = Device(table, backup, strategy, self.background)
        self.stall = Stall(table)
        self.ahead = ReadAhead(self.device, options.prefetch)
        settings = self._settings(len(table.state), strategy)
        self.core = DeviceCore(settings, slab_bytes, random.Random())
        self._post: Callable[[Any], None] = lambda event: None
        self.lenders = Lenders(
            self.core,
            self.device,
            live_fabrics(options.transport, tls=tls),
            clock,
            self._hello(),
            publish=self._say,
            changed=lambda: self._post(control_service.MapChanged()),
            transport=options.transport,
            leftover=leftover_of(
                link_of(options.network_interface, options.network_bytes_s, [ANYWHERE])
            ),
        )
        self.status = DeviceStatus(
            options=options,
            node=self._node,
            slab_bytes=slab_bytes,
            part_spans=limits.SLAB_MAP_MEMBERS // strategy.width,
            core=self.core,
            device=self.device,
            lenders=self.lenders,
            ahead=self.ahead,
            stall=self.stall,
            background=self.background,
        )
        self.front: Front | None = None
        self._measuring: list[asyncio.Task[None]] = []

    def _settings(self, spans: int, strategy: Resilience) -> DeviceSettings:
        options = self.options
        return DeviceSettings(
            id=DeviceId(options.id),
            node=self._node,
            spans=spans,
            width=strategy.width,
            needed=strategy.needed,
            hot=options.hot,
            cold=options.cold,
            hold_s=options.hold_s,
            secret=secrets.token_hex(16),
        )

    def _hello(self) -> bytes:
        """Return the greeting that lenders get when a channel of the device begins."""
        message = DeviceHello(
            device=self.core.settings.id,
            node=NodeId(self._node),
            incarnation=int(self._clock.now_s() * 1000),
            token=self.options.token,
        )
        return codec.encode(message)

    # A life ---------------------------------------------------------------------------------------

    async def start(self, front: Front | None = None) -> None:
        """Begin; `front` serves the device to clients from now until `close`."""
        self.front = front
        self.device.backup.start()
        self.device.backup.on_failure = self._backup_failed
        if front is not None:
            self.ahead.start()
            front.start()
        self._measuring = [
            self.background.spawn(self.lenders.run()),
            self.background.spawn(self._watch()),
        ]

    async def close(self) -> None:
        """In order, for as long as something moves. Raises Fatal, with everything closed that
        could be, when requests or pages had to be given up."""
        self.status.stopping = True
        self._announce()
        ending = Patience(self._progress)
        if self.front is not None:
            await ending.wait(self.front.close(), "requests of clients")
        await ending.wait(self.ahead.close(), "prefetched pages")
        for task in self._measuring:
            task.cancel()
        await asyncio.gather(*self._measuring, return_exceptions=True)
        await ending.wait(self.lenders.rest(), "pages on their way to new slabs")
        await ending.wait(self.device.backup.close(), "the backup file")
        await ending.wait(self.lenders.close(), "lenders")
        if ending.given_up:
            self.background.cancel()
            unwritten = self.device.backup_waiting_pages
            why = (
                f"device {self.options.id} was ended while it waited for "
                f"{' and '.join(ending.given_up)}; {unwritten} pages are not in the backup file"
            )
            # Logged as well: where a thread hangs, the process is ended before the command says it.
            _log.error("device.given-up", reason=why, unwritten_pages=unwritten)
            raise Fatal(why)

    def _progress(self) -> tuple[int, ...]:
        words = self.device.table.words
        requests = self.front.open_requests if self.front is not None else 0
        moving = (k.TAIL, k.TAKEN, k.DISK_OPERATIONS)
        return requests, *(int(words[word]) for word in moving)

    async def _watch(self) -> None:
        """Tell when the ring stands still, and when it moves again."""
        loop = asyncio.get_running_loop()
        while True:
            before = self.stall.reason
            reason = self.stall.look(loop.time())
            if reason and not before:
                _log.error("device.stuck", reason=reason)
            elif before and not reason:
                _log.info("device.moves-again")
            await asyncio.sleep(_WATCH_S)

    def _backup_failed(self, reason: str) -> None:
        if reason:
            _log.error("backup.refuses", path=str(self.options.backup), reason=reason)
        else:
            _log.info("backup.works-again", path=str(self.options.backup))

    # On the bus -----------------------------------------------------------------------------------

    async def publish(
        self, url: str, stop: asyncio.Event, credentials: Credentials | None = None
    ) -> None:
        """Publish the device on the bus until `stop` is set; reconnect after failures."""
        name = f"device-{self.options.id}"
        while not stop.is_set():
            try:
                async with live_world(url, name, credentials=credentials) as world:
                    await self._publish_once(world, stop)
                return
            except SlackwaterError as error:
                _log.warning("device.off-the-bus", reason=str(error))
            finally:
                self._post = lambda event: None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RECONNECT_WAIT_S):
                    await stop.wait()

    async def _publish_once(self, world: World, stop: asyncio.Event) -> None:
        # A device within a process (an array's) is never found again: nothing is kept of it.
        keeps = self.options.socket is not None
        core = control_service.ControlServiceCore(self.options.id, keeps)
        service = control_service.ControlService(core, self.status.records, self.status.map)
        beat, seen = self.status.heartbeat, self.lenders.seen
        made = control_service.definition(self.options.id, service, beat, seen)

        async def begin(port: Port) -> None:
            self._post = port.post

        await run_service(replace(made, on_start=begin), world, stop)

    def _say(self, effect: Publish) -> None:
        self._post(control_service.FactSaid(effect))

    def _announce(self) -> None:
        """Show the state at once: a device that ends may have no time for another heartbeat."""
        subject = subjects.telemetry(control_service.SERVICE, self.options.id, "heartbeat")
        self._say(Publish(subject, self.status.heartbeat(self._clock.now_s())))

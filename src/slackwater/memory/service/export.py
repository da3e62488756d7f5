"""The process behind `slackwater memory export`: one device, its NBD server, its control service.

The device serves whatever the bus does: its control service is started anew while the device lives.
A signal ends it in order: no new client, what was begun is finished, everything reaches the backup
file, the slabs go back.
"""

import asyncio
import contextlib
import math
import os
import random
import re
import secrets
import signal
import socket
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import structlog

from slackwater.common.base import codec, limits
from slackwater.common.base.background import Background
from slackwater.common.base.clock import Clock, LiveClock
from slackwater.common.base.effects import Publish
from slackwater.common.base.errors import (
    ConfigRejected,
    Fatal,
    SlackwaterError,
    Unavailable,
)
from slackwater.common.bus.access import Credentials
from slackwater.common.native import descriptors, memlock
from slackwater.common.native.compiled import on_compiling
from slackwater.common.shell import run_service
from slackwater.common.shell.config import DEFAULT_METRICS_ADDRESS
from slackwater.common.shell.definition import Port
from slackwater.common.shell.metrics import Exposition
from slackwater.common.shell.notify import SdNotify
from slackwater.common.shell.world import World, live_world
from slackwater.common.transport.negotiate import live_fabrics
from slackwater.memory.control.core import DeviceCore
from slackwater.memory.control.lenders import Lenders
from slackwater.memory.control.spans import HOT, DeviceSettings
from slackwater.memory.nbd.server import NbdServer
from slackwater.memory.pages import kernels as k
from slackwater.memory.pages.backup import Backup
from slackwater.memory.pages.device import Device
from slackwater.memory.pages.latency import infos
from slackwater.memory.pages.stall import Stall
from slackwater.memory.pages.table import counters, make_table
from slackwater.memory.prefetch.prefetch import WINDOW_MAX
from slackwater.memory.prefetch.readahead import ReadAhead
from slackwater.memory.resilience.resilience import resilience
from slackwater.memory.service import control_service
from slackwater.memory.service.discovery import find_slab_bytes, refuse_namesake
from slackwater.memory.service.metrics import expose
from slackwater.memory.service.shutdown import Patience, end_by_force, prepare
from slackwater.memory.service.warm import warm
from slackwater.memory.store import PAGE_BYTES
from slackwater.schemas import subjects
from slackwater.schemas.base import ID_PATTERN, NodeId
from slackwater.schemas.memory import (
    DeviceHeartbeat,
    DeviceHello,
    DeviceId,
    DeviceMap,
    DeviceRecord,
    DeviceState,
    SpanInfo,
    SpanRecord,
)

_RECONNECT_WAIT_S: Final = 2.0
_WATCH_S: Final = 1.0
_REASON_MAX: Final = 400
_FORCE_S: Final = 5.0
"""Threads that hang have so long after the device was given up."""
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """`slab_bytes` 0: what the lenders of the cluster have."""

    id: str
    size_bytes: int
    socket: Path | None
    """None: no NBD server, the device is used within this process."""
    backup: Path
    node: str = ""
    slab_bytes: int = 0
    resilience: str = "disk"
    hot: float = HOT
    cold: float = 0.0
    hold_s: float = 10.0
    direct: bool = False
    delay_s: float = 0.0
    swap: bool = False
    """Prepare for serving this machine's own swap: memory locked, writeback not throttled, room in
    the backup file taken now."""
    transport: str | None = None
    token: str = ""
    prefetch: int = WINDOW_MAX
    """Requests of a client that are fetched ahead at once, at most; 0: none. It is for pages behind
    a channel: where slabs are mapped (shm) it has nothing to do."""
    metrics_port: int = 0
    """Prometheus on this port; 0: none, -1: any free one."""
    metrics_address: str = DEFAULT_METRICS_ADDRESS


class Exporter:
    """The parts of one device, put together. `start` and `close` on one loop."""

    def __init__(self, options: ExportOptions, slab_bytes: int, clock: Clock) -> None:
        """Raises ConfigRejected."""
        _check(options, slab_bytes)
        self._node = _node(options)
        self.background = Background()
        strategy = resilience(options.resilience, self.background)
        span_pages = strategy.span_pages(slab_bytes)
        pages = options.size_bytes // PAGE_BYTES
        self.options = options
        self._slab_bytes = slab_bytes
        self._part_spans = limits.SLAB_MAP_MEMBERS // strategy.width
        self._clock = clock
        places = limits.AHEAD_PAGES if options.prefetch and options.socket is not None else 0
        table = make_table(pages, span_pages, backed=strategy.backup, places=places)
        backup = Backup(
            options.backup,
            table,
            direct=options.direct,
            delay_s=options.delay_s,
            reserve=options.swap,
            background=self.background,
        )
        self.device = Device(table, backup, strategy, self.background)
        self.stall = Stall(table)
        self.ahead = ReadAhead(self.device, options.prefetch)
        settings = DeviceSettings(
            id=DeviceId(options.id),
            node=self._node,
            spans=len(table.state),
            width=strategy.width,
            needed=strategy.needed,
            hot=options.hot,
            cold=options.cold,
            hold_s=options.hold_s,
            secret=secrets.token_hex(16),
        )
        self.core = DeviceCore(settings, slab_bytes, random.Random())
        self._post: Callable[[Any], None] = lambda event: None
        self.lenders = Lenders(
            self.core,
            self.device,
            live_fabrics(options.transport),
            clock,
            self._hello(),
            publish=self._say,
            changed=lambda: self._post(control_service.MapChanged()),
            transport=options.transport,
        )
        self._server: NbdServer | None = None
        self._stopping = False
        self._measuring: list[asyncio.Task[None]] = []

    def _hello(self) -> bytes:
        """What lenders are told of the device when a channel begins."""
        message = DeviceHello(
            device=self.core.settings.id,
            node=NodeId(self._node),
            incarnation=int(self._clock.now_s() * 1000),
            token=self.options.token,
        )
        return codec.encode(message)

    # A life ---------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Raises ConfigRejected when the socket cannot be had."""
        if self.options.socket is not None:
            self._server = NbdServer(self.options.socket, self.device, self.ahead, self.options.id)
        self.device.backup.start()
        self.device.backup.on_failure = self._backup_failed
        if self._server is not None:
            self.ahead.start()
            self._server.start()
        self._measuring = [
            self.background.spawn(self.lenders.run()),
            self.background.spawn(self._watch()),
        ]

    async def close(self) -> None:
        """In order, for as long as something moves. Raises Fatal, with everything closed that
        could be, when requests or pages had to be given up."""
        self._stopping = True
        self._announce()
        ending = Patience(self._progress)
        if self._server is not None:
            await ending.wait(self._server.close(), "requests of clients")
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
        requests = self._server.open_requests if self._server is not None else 0
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

    async def show(
        self, url: str, stop: asyncio.Event, credentials: Credentials | None = None
    ) -> None:
        """Publish the device on the bus until `stop` is set; reconnect after failures."""
        name = f"device-{self.options.id}"
        while not stop.is_set():
            try:
                async with live_world(url, name, credentials=credentials) as world:
                    await self._show_once(world, stop)
                return
            except SlackwaterError as error:
                _log.warning("device.off-the-bus", reason=str(error))
            finally:
                self._post = lambda event: None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RECONNECT_WAIT_S):
                    await stop.wait()

    async def _show_once(self, world: World, stop: asyncio.Event) -> None:
        # A device within a process (an array's) is never found again: nothing is kept of it.
        keeps = self.options.socket is not None
        core = control_service.ControlServiceCore(self.options.id, self.records, self.map, keeps)
        made = control_service.definition(self.options.id, core, self.heartbeat, self.lenders.seen)

        async def begin(port: Port) -> None:
            self._post = port.post

        await run_service(replace(made, on_start=begin), world, stop)

    def _say(self, effect: Publish) -> None:
        self._post(control_service.FactSaid(effect))

    def _announce(self) -> None:
        """Show the state at once: a device that ends may have no time for another heartbeat."""
        subject = subjects.telemetry(control_service.SERVICE, self.options.id, "heartbeat")
        self._say(Publish(subject, self.heartbeat(self._clock.now_s())))

    # What others see ------------------------------------------------------------------------------

    def records(self) -> dict[int, DeviceRecord]:
        """The slab map's parts by number; those without a slab are left out, but for the first."""
        parts: dict[int, list[SpanRecord]] = {0: []}
        for span in self.core.spans.span_records():
            parts.setdefault(span.span // self._part_spans, []).append(span)
        return {
            part: DeviceRecord(
                device=self.core.settings.id,
                node=NodeId(self._node),
                size_bytes=self.options.size_bytes,
                slab_bytes=self._slab_bytes,
                resilience=self.options.resilience,
                spans=tuple(spans),
            )
            for part, spans in parts.items()
        }

    def map(self, first: int = 0) -> DeviceMap:
        found = sorted({*self.core.spans.in_use(), *self._active()})
        left = found[bisect_left(found, first) :]
        spans = left[: self._part_spans]
        return DeviceMap(
            device=self.core.settings.id,
            size_bytes=self.options.size_bytes,
            span_bytes=self.device.resilience.span_pages(self._slab_bytes) * PAGE_BYTES,
            spans=tuple(
                SpanInfo(
                    span=span,
                    state=self.core.spans.state(span),
                    members=self.core.spans.records(span),
                    activity=round(float(self.core.activity[span]), 3),
                    remote_pages=self.device.present_pages(span),
                )
                for span in spans
            ),
            following=left[len(spans)] if len(left) > len(spans) else 0,
        )

    def _active(self) -> list[int]:
        """Spans without a slab that somebody uses."""
        active: list[int] = (self.core.activity > 0.5).nonzero()[0].tolist()
        return active

    def heartbeat(self, now_s: float) -> DeviceHeartbeat:
        seen = counters(self.device.table)
        state, reason = self._condition()
        lenders = {member.lender for member in self.core.spans.all() if member.counts}
        over_channels = self.device.remote_read_pages - self.device.remote_ahead_pages
        over_channels += seen["read_lane_pages"]
        hits = seen["prefetch_hit_pages"]
        near = seen["read_mapped_pages"] + seen["read_held_pages"] + hits
        return DeviceHeartbeat(
            service=control_service.SERVICE,
            id=self.options.id,
            incarnation=0,
            at_s=now_s,
            node=NodeId(self._node),
            resilience=self.options.resilience,
            size_bytes=self.options.size_bytes,
            spans=self.core.settings.spans,
            mapped_spans=self.device.mapped_spans,
            lenders=len(lenders),
            read_pages=seen["read_pages"],
            read_remote_pages=seen["read_mapped_pages"] + hits + over_channels,
            read_waited_pages=max(0, seen["read_pages"] - near),
            prefetched_pages=seen["prefetched_pages"],
            prefetch_hit_pages=hits,
            prefetch_late_pages=self.ahead.late_pages,
            written_pages=seen["written_pages"],
            written_remote_pages=seen["written_mapped_pages"]
            + seen["written_lane_pages"]
            + self.device.remote_written_pages,
            slabs_evicted=self.core.departed["evict"],
            slabs_lost=self.core.departed["lost"],
            refilled_pages=self.lenders.refiller.refilled_pages,
            regenerated_pages=self.lenders.regenerator.regenerated_pages,
            repaired_fragments=self.device.resilience.erasures,
            lost_pages=self.device.resilience.lost_pages,
            backup_waiting_pages=self.device.backup_waiting_pages,
            activity=round(float(self.core.activity.sum()), 3),
            latency=infos(self.device.latency.recent(now_s)),
            export=str(self.options.socket or ""),
            state=state,
            reason=reason[:_REASON_MAX],
        )

    def expose(self) -> Exposition:
        """Serve metrics to Prometheus. Raises ConfigRejected."""
        at, times = (self.options.metrics_address, self.options.metrics_port), self.device.latency
        return expose(self.options.id, at, lambda: self.heartbeat(self._clock.now_s()), times)

    def _condition(self) -> tuple[DeviceState, str]:
        """The state and its reason: what is worst comes first."""
        if (failure := self.background.failure) is not None:
            return "failed", str(failure)
        if failed := self.device.backup.failed:
            return "degraded", f"backup file: {os.strerror(failed)}"
        if reason := self.stall.reason:
            return "stuck", reason
        return ("stopping", "") if self._stopping else ("serving", "")


def _node(options: ExportOptions) -> str:
    return options.node or socket.gethostname().split(".")[0]


def _check(options: ExportOptions, slab_bytes: int) -> None:
    """What would only fail later, or on the bus, or never be told. Raises ConfigRejected."""
    for name, value in (("id", options.id), ("node", _node(options))):
        if re.fullmatch(ID_PATTERN, value) is None:
            raise ConfigRejected(
                f"{name} {value!r}: give letters, digits, - and _, at most 63 in all, a letter "
                "or digit first"
            )
    path = options.socket
    if path is not None and not path.parent.is_dir():
        raise ConfigRejected(f"socket {path}: there is no folder {path.parent}; name another path")
    if path is not None and path.exists() and not path.is_socket():
        raise ConfigRejected(f"socket {path} exists and is not a socket: name another path")
    if options.size_bytes % PAGE_BYTES or options.size_bytes <= 0:
        raise ConfigRejected(f"size {options.size_bytes}: give a multiple of {PAGE_BYTES}")
    known = limits.SLAB_BYTES_MIN <= slab_bytes <= limits.SLAB_BYTES_MAX
    if slab_bytes % PAGE_BYTES or not known:
        raise ConfigRejected(
            f"slab size {slab_bytes}: give what the lenders have, a multiple of {PAGE_BYTES} from "
            f"{limits.SLAB_BYTES_MIN} to {limits.SLAB_BYTES_MAX}"
        )
    if not (math.isfinite(options.hot) and options.hot >= 0):
        raise ConfigRejected(f"hot {options.hot:g}: give page I/O per second, 0 or more")
    if options.cold and not 0 <= options.cold < options.hot:
        raise ConfigRejected(
            f"cold {options.cold:g}: give less than hot, which is {options.hot:g}, or 0 for never"
        )
    if not 0 <= options.prefetch <= limits.AHEAD_WINDOW_MAX:
        raise ConfigRejected(f"prefetch {options.prefetch}: give 0 to {limits.AHEAD_WINDOW_MAX}")


async def export(
    options: ExportOptions,
    url: str,
    ready: Callable[[Exporter], None] = lambda exporter: None,
    credentials: Credentials | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT. `ready` is called, and systemd told, once clients may
    connect. Raises Fatal when a part of the device fails, or when it cannot end in order."""
    _check(options, options.slab_bytes or limits.SLAB_BYTES_DEFAULT)
    notify = SdNotify.from_environment()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    descriptors.allow_all()  # Channels and lanes: of each lender a few, and one for each client.
    if options.swap:
        prepare_for_swap()  # Threads inherit it: so before there are any.
    try:
        await refuse_namesake(url, options.id, credentials)
    except Unavailable:
        if not options.slab_bytes:
            raise
    slab_bytes = options.slab_bytes or await find_slab_bytes(
        url, f"device-{options.id}", credentials
    )
    if not slab_bytes:
        slab_bytes = limits.SLAB_BYTES_DEFAULT
        _log.warning("no-lender", slab_bytes=slab_bytes, hint="is slabd running? pages go to disk")
    on_compiling(_say_compiling)
    await prepare(warm, stop)
    clock = LiveClock()
    exporter = Exporter(options, slab_bytes, clock)
    shown: asyncio.Task[None] | None = None
    scraped: Exposition | None = None
    try:
        await exporter.start()
        if options.metrics_port:
            scraped = exporter.expose()
        shown = exporter.background.spawn(exporter.show(url, stop, credentials))
        ready(exporter)
        notify.ready()
        await exporter.background.alongside(stop.wait())
    finally:
        notify.stopping()
        if scraped is not None:
            await asyncio.to_thread(scraped.close)
        closing = asyncio.ensure_future(exporter.close())
        await asyncio.sleep(0)  # Its state is published before the control service ends.
        stop.set()
        try:
            await closing
        except Fatal:
            end_by_force(_FORCE_S)
            raise
        if shown is not None:
            await asyncio.gather(shown, return_exceptions=True)
        notify.close()


def _say_compiling() -> None:
    _log.info(
        "compiling", hint="once for an installation, up to a minute; or before: slackwater compile"
    )


def prepare_for_swap() -> None:
    """A server of its own machine's swap must not be swapped out, must not wait for its own
    writeback, and must be killed last. Raises ConfigRejected where that is not allowed."""
    for need in (memlock.lock_memory, memlock.become_io_flusher, memlock.be_killed_last):
        if lacks := need():
            raise ConfigRejected(f"--swap: {lacks}")

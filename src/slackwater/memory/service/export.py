"""The process behind `slackwater memory export`: a device, its NBD server, its metrics.

A signal ends it in order: no new client, what was begun is finished, everything reaches the backup
file, the slabs go back.
"""

import asyncio
import signal
from collections.abc import Callable
from typing import Final

import structlog

from slackwater.common.base import failpoints, limits
from slackwater.common.base.clock import Clock, LiveClock
from slackwater.common.base.errors import ConfigRejected, Fatal, Unavailable
from slackwater.common.bus.access import Credentials, ends_of
from slackwater.common.native import descriptors, memlock
from slackwater.common.native.compiled import on_compiling
from slackwater.common.shell.metrics import Exposition
from slackwater.common.shell.notify import SdNotify
from slackwater.memory.nbd.server import NbdServer
from slackwater.memory.service.assembly import DeviceAssembly
from slackwater.memory.service.discovery import find_slab_bytes, refuse_namesake
from slackwater.memory.service.metrics import expose
from slackwater.memory.service.options import DeviceOptions, check_options
from slackwater.memory.service.shutdown import end_by_force, prepare
from slackwater.memory.service.warm import warm

_FORCE_S: Final = 5.0
"""Threads that hang have so long after the device was given up."""
_log = structlog.get_logger()


async def export(
    options: DeviceOptions,
    url: str,
    ready: Callable[[DeviceAssembly], None] = lambda assembly: None,
    credentials: Credentials | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT. `ready` is called, and systemd told, once clients may
    connect. Raises Fatal when a part of the device fails, or when it cannot end in order."""
    check_options(options, options.slab_bytes or limits.SLAB_BYTES_DEFAULT)
    failpoints.arm_from_environment()
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
    assembly = DeviceAssembly(options, slab_bytes, clock, ends_of(credentials))
    published: asyncio.Task[None] | None = None
    scraped: Exposition | None = None
    try:
        await start_serving(assembly)
        if options.metrics_port:
            scraped = _expose(assembly, clock)
        published = assembly.background.spawn(assembly.publish(url, stop, credentials))
        ready(assembly)
        notify.ready()
        await assembly.background.alongside(stop.wait())
    finally:
        notify.stopping()
        if scraped is not None:
            await asyncio.to_thread(scraped.close)
        closing = asyncio.ensure_future(assembly.close())
        await asyncio.sleep(0)  # Its state is published before the control service ends.
        stop.set()
        try:
            await closing
        except Fatal:
            end_by_force(_FORCE_S)
            raise
        if published is not None:
            await asyncio.gather(published, return_exceptions=True)
        notify.close()


async def start_serving(assembly: DeviceAssembly) -> None:
    """Start the device and serve it on its socket. Raises ConfigRejected when the socket cannot be
    had."""
    options = assembly.options
    assert options.socket is not None
    front = NbdServer(options.socket, assembly.device, assembly.ahead, options.id)
    await assembly.start(front)


def _expose(assembly: DeviceAssembly, clock: Clock) -> Exposition:
    """Serve metrics to Prometheus. Raises ConfigRejected."""
    options, times = assembly.options, assembly.device.latency
    at = options.metrics_address, options.metrics_port
    return expose(options.id, at, lambda: assembly.status.heartbeat(clock.now_s()), times)


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

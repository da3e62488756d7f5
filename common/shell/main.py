"""A service as a process: configuration, logs, signals, exit codes.

    0   ended as it was told
    1   failed: its supervisor starts it anew, and it rebuilds from its buckets
    70  an event from outside broke its core: started anew at once, it refuses that event
    75  the bus or the store did not answer: try again later
    78  the configuration or what was found is at fault: starting it again would not help

An expected error is one line with its remedy, never a traceback.
"""

import argparse
import asyncio
import faulthandler
import gc
import inspect
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
import structlog
import uvloop

from slackwater.common.base import failpoints
from slackwater.common.base import logging as logs
from slackwater.common.base.errors import (
    Breached,
    ConfigRejected,
    Rejected,
    Retryable,
    SlackwaterError,
)
from slackwater.common.bus.access import Credentials, Tls
from slackwater.common.shell import metrics, otel
from slackwater.common.shell.config import DEFAULT_METRICS_ADDRESS, DEFAULT_URL, load_config
from slackwater.common.shell.definition import ServiceDefinition
from slackwater.common.shell.process import Process
from slackwater.common.shell.service import Shell
from slackwater.common.shell.world import World, live_world

EX_FAILED = 1
EX_BREACHED = 70
EX_TEMPFAIL = 75
EX_CONFIG = 78

C = TypeVar("C", bound=msgspec.Struct)
Build = Callable[[C, World], ServiceDefinition | Awaitable[ServiceDefinition]]
"""Makes the definition of the configured instance. Called on the running loop, bus connected. The
configuration has the fields of `config.ServiceConfig` that the service cares for; `url` is one."""


def main(
    service: str, config_type: type[C], build: Build[C], argv: Sequence[str] | None = None
) -> int:
    """Run `service` as this process; the exit code. `argv` is `--config FILE`."""
    parser = argparse.ArgumentParser(prog=f"slackwater run {service}")
    parser.add_argument("--config", required=True, metavar="FILE", help="its TOML configuration")
    arguments = parser.parse_args(argv)
    faulthandler.enable()  # SIGABRT by the watchdog shows where the loop hung.
    try:
        failpoints.arm_from_environment()
        config = load_config(arguments.config, config_type)
    except ConfigRejected as error:
        return _tell(service, error, EX_CONFIG)
    id = _field(config, "id", service)
    logs.configure(_field(config, "log_level", "info"), service=service, id=id, pid=os.getpid())
    gc.freeze()  # Modules live as long as the process: a collection need not look at them.
    try:
        with (
            otel.recording(service, id, os.environ),
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            return runner.run(_live(service, id, config, build))
    except SlackwaterError as error:
        return _tell(f"{service} {id}", error, exit_code(error))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:  # A bug: it is logged, and the supervisor starts it anew.
        structlog.get_logger().exception("failed", reason=repr(error))
        return EX_FAILED


def exit_code(error: SlackwaterError) -> int:
    """Return the exit code that tells the supervisor why the process ended."""
    if isinstance(error, Retryable):
        return EX_TEMPFAIL
    if isinstance(error, Breached):
        return EX_BREACHED
    return EX_CONFIG if isinstance(error, Rejected) else EX_FAILED


async def _live(service: str, id: str, config: C, build: Build[C]) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    process = Process.live()
    url = _field(config, "url", DEFAULT_URL)
    credentials: Credentials = _field(config, "credentials", Credentials())
    credentials = credentials.trusting(_field(config, "tls", Tls()))
    name, replicas = f"{service}-{id}", _field(config, "replicas", 1)
    folder = _field(config, "state_dir", "")
    async with live_world(
        url, name, credentials=credentials, replicas=replicas, state_dir=folder
    ) as world:
        made = build(config, world)
        definition = await made if inspect.isawaitable(made) else made
        shell = Shell(definition, world, stop, process)
        exposition = _expose(service, id, config, shell)
        try:
            return await shell.run()
        finally:
            if exposition is not None:
                exposition.close()
            process.notify.close()


def _field(config: msgspec.Struct, name: str, default: Any) -> Any:
    return getattr(config, name, default)


def _expose(service: str, id: str, config: Any, shell: Shell) -> metrics.Exposition | None:
    port = _field(config, "metrics_port", 0)
    if not port:
        return None
    address = _field(config, "metrics_address", DEFAULT_METRICS_ADDRESS)
    exposition = metrics.expose(service, id, address, port, shell.samples)
    structlog.get_logger().info("metrics", address=address, port=exposition.port)
    return exposition


def _tell(who: str, error: SlackwaterError, code: int) -> int:
    sys.stderr.write(f"slackwater {who}: {' '.join(str(error).split())}\n")
    return code

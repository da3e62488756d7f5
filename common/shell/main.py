"""A service as a process: configuration, logs, signals, exit codes.

    0   ended as it was told
    1   failed: its supervisor starts it anew, and it rebuilds from its buckets
    75  the bus or the store did not answer: try again later
    78  the configuration or what was found is at fault: starting it again would not help

An expected error is one line with its remedy, never a traceback.
"""

import argparse
import asyncio
import faulthandler
import inspect
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import structlog
import uvloop
from slackwater.common.world import World, live_world

from slackwater.common import failpoints, metrics
from slackwater.common import logging as logs
from slackwater.common.config import ServiceConfig, load_config
from slackwater.common.errors import ConfigRejected, Rejected, Retryable, SlackwaterError
from slackwater.common.shell.definition import ServiceDefinition
from slackwater.common.shell.process import Process
from slackwater.common.shell.service import Shell

EX_FAILED = 1
EX_TEMPFAIL = 75
EX_CONFIG = 78

C = TypeVar("C", bound=ServiceConfig)
Build = Callable[[C, World], ServiceDefinition | Awaitable[ServiceDefinition]]
"""Makes the definition of the configured instance. Called on the running loop, bus connected."""


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
    logs.configure(config.log_level, service=service, id=config.id, pid=os.getpid())
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_live(service, config, build))
    except SlackwaterError as error:
        return _tell(f"{service} {config.id}", error, exit_code(error))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        structlog.get_logger().exception("failed", reason=repr(error))
        return EX_FAILED


def exit_code(error: SlackwaterError) -> int:
    """What the supervisor is to know of why the process ended."""
    if isinstance(error, Retryable):
        return EX_TEMPFAIL
    return EX_CONFIG if isinstance(error, Rejected) else EX_FAILED


async def _live(service: str, config: C, build: Build[C]) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    process = Process.live()
    credentials = config.credentials or None
    async with live_world(config.url, f"{service}-{config.id}", credentials=credentials) as world:
        made = build(config, world)
        definition = await made if inspect.isawaitable(made) else made
        shell = Shell(definition, world, stop, process)
        exposition = _expose(service, config, shell) if config.metrics_port else None
        try:
            return await shell.run()
        finally:
            if exposition is not None:
                exposition.close()
            process.notify.close()


def _expose(service: str, config: ServiceConfig, shell: Shell) -> metrics.Exposition:
    collector = metrics.ShellCollector(service, config.id, shell.counters.all, shell.gauges)
    try:
        exposition = metrics.Exposition(collector, config.metrics_port)
    except OSError as error:
        raise ConfigRejected(
            f"metrics_port {config.metrics_port}: {error.strerror}; choose another, or 0 for none"
        ) from error
    structlog.get_logger().info("metrics", port=exposition.port)
    return exposition


def _tell(who: str, error: SlackwaterError, code: int) -> int:
    sys.stderr.write(f"slackwater {who}: {' '.join(str(error).split())}\n")
    return code

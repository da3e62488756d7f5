"""Serve the dashboard: one listening socket, one watch of the cluster, until it is stopped."""

import asyncio
import secrets
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import uvicorn

from slackwater.client import AsyncClient
from slackwater.common.base.errors import ConfigRejected
from slackwater.common.base.private_files import write_private
from slackwater.common.bus.access import Tls
from slackwater.web.app import Dashboard
from slackwater.web.sessions import Sessions
from slackwater.web.watch import Watch

KEY_BYTES: Final = 24
CLOSE_S: Final = 1


class _Server(uvicorn.Server):
    """Leaves signals to the command."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listening(host: str, port: int) -> socket.socket:
    """Listen. Raises ConfigRejected, which names the address and what to do."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigRejected(
            f"cannot listen on {host}:{port} ({why}): choose another --port (0: any free one) or "
            "--host"
        ) from error


def kept_key(file: Path | None) -> str:
    """Return the key in the file, which is made, readable by its owner alone, where there is none;
    without a file a new one. Raises ConfigRejected."""
    if file is None:
        return secrets.token_urlsafe(KEY_BYTES)
    try:
        if file.exists():
            key = file.read_text().strip()
            if len(key) < KEY_BYTES:
                raise ConfigRejected(f"{file}: a key has at least {KEY_BYTES} characters")
            return key
        key = secrets.token_urlsafe(KEY_BYTES)
        write_private(file, key + "\n")
    except OSError as error:
        raise ConfigRejected(f"{file}: {error.strerror}") from error
    return key


async def serve(
    client: AsyncClient,
    listener: socket.socket,
    *,
    key: str,
    actions_at: str,
    tls: Tls,
    name: str,
    every_s: float,
    ready: Callable[[], None],
) -> None:
    """Serve until SIGINT or SIGTERM. `actions_at`: the bus's URL without a user or token of our
    own, if people who sign in there may act, trusting the files of `tls`; empty: nobody may."""
    watch = Watch(client, every_s)
    sessions = Sessions(actions_at, tls) if actions_at else None
    application = Dashboard(watch, sessions, name).application(key)
    config = uvicorn.Config(
        application, log_config=None, access_log=False, lifespan="off", server_header=False,
        timeout_graceful_shutdown=CLOSE_S,
    )  # fmt: skip
    server = _Server(config)
    loop = asyncio.get_running_loop()

    def stop() -> None:
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    watching = asyncio.create_task(watch.run())
    watching.add_done_callback(lambda _: stop())
    ready()
    try:
        await server.serve(sockets=[listener])
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        if sessions is not None:
            await sessions.close_all()

"""`slackwater web`: the cluster in a browser."""

from pathlib import Path
from types import ModuleType
from typing import Annotated, Final

import typer

from slackwater.cli.show import with_client
from slackwater.client import AsyncClient
from slackwater.common.base.errors import ConfigRejected
from slackwater.common.bus.access import Identity, Tls, shown
from slackwater.console.options import Json, Url
from slackwater.console.outcome import err, out, print_json, reported
from slackwater.console.where import credentials, resolve

PORT: Final = 8118
EXTRA: Final = "pip install 'slackwater[web]'"


def web(
    host: Annotated[
        str, typer.Option(help="Listen on this address; 0.0.0.0 lets other machines in.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Listen on this port (0: any free one).")
    ] = PORT,
    actions: Annotated[
        bool,
        typer.Option(
            "--actions",
            help="Let people pause, resume, cancel and rerun jobs, signed in as users of the bus.",
        ),
    ] = False,
    key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Keep the page's key in this file, so that its address stays."
        ),
    ] = None,
    no_key: Annotated[
        bool,
        typer.Option("--no-key", help="Show the page to everybody who reaches the address."),
    ] = False,
    every: Annotated[
        float, typer.Option(min=0.2, max=60.0, help="Read the cluster's lists so often, in s.")
    ] = 1.0,
    url: Url = None,
    json: Json = False,
) -> None:
    """Show the cluster in a browser: pools, jobs, nodes, tenants and what happens.

    The page is read-only, unless --actions lets people act who sign in as users of the bus. Open
    the address that is printed, which has the page's key. Ctrl-C ends it.
    """
    with reported():
        server = _server()
        if no_key and key_file is not None:
            raise ConfigRejected("--no-key and --key-file: choose one")
        key = "" if no_key else server.kept_key(key_file)
        where, identity = resolve(url), credentials()
        tls = identity.tls if isinstance(identity, Identity) else Tls()
        listener = server.listening(host, port)
    with listener:
        address = _address(host, listener.getsockname()[1], key)

        def ready() -> None:
            if json:
                print_json({"url": address, "cluster": shown(where), "actions": actions})
            else:
                out.print(f"the dashboard is at {address}", markup=False, soft_wrap=True)
                err.print("Ctrl-C ends it", markup=False)

        async def serve(client: AsyncClient) -> None:
            await server.serve(
                client, listener, key=key, actions_at=shown(where) if actions else "", tls=tls,
                name=shown(where).partition("//")[2], every_s=every, ready=ready,
            )  # fmt: skip

        with_client(url, serve)


def _server() -> ModuleType:
    """Return the module that serves. Raises ConfigRejected where its libraries are missing."""
    try:
        from slackwater.web import server
    except ImportError as error:
        raise ConfigRejected(f"the dashboard needs {error.name}: {EXTRA}") from error
    return server


def _address(host: str, port: int, key: str) -> str:
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
    return f"http://{name}:{port}/" + (f"?key={key}" if key else "")

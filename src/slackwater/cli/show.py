"""How commands reach a cluster, and what passes on its bus."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import typer

from slackwater.client import AsyncClient
from slackwater.common.base import tracing
from slackwater.common.bus.base import Delivery
from slackwater.common.shell import otel
from slackwater.common.shell.client import Client
from slackwater.console.documents import TIMES
from slackwater.console.durations import clock
from slackwater.console.options import Json, Url
from slackwater.console.outcome import out, print_json, reported
from slackwater.console.program import command_path
from slackwater.console.where import credentials, resolve

T = TypeVar("T")
REFRESH_S = 1.0


def with_client(url: str | None, work: Callable[[AsyncClient], Awaitable[T]]) -> T:
    """Run `work` on a connected client; expected errors become one line and an exit code."""

    async def connected() -> T:
        address = resolve(url)
        connecting = AsyncClient.connect(address, credentials=credentials(), name="slackwater-cli")
        async with connecting as client:
            return await work(client)

    with reported(), _traced():
        return asyncio.run(connected())


@contextmanager
def _traced() -> Iterator[None]:
    """Record the command as a span, and what services do for it as others; a trace that
    TRACEPARENT names has it as a part."""
    header = os.environ.get(tracing.VARIABLE, "")
    with otel.recording("", "", os.environ), tracing.whole(command_path.get(), header):
        yield


def tap(
    subject: Annotated[
        str, typer.Argument(help="The NATS subject or pattern to listen to.")
    ] = "sw.v1.evt.>",
    url: Url = None,
    json: Json = False,
    count: Annotated[int, typer.Option(min=0, help="End after this many messages (0: never).")] = 0,
) -> None:
    """Print messages as they pass, readably."""

    async def listen(client: Client) -> None:
        seen: asyncio.Queue[Delivery] = asyncio.Queue()

        async def keep(delivery: Delivery) -> None:
            await seen.put(delivery)

        await client.bus.subscribe(subject, keep)
        number = 0
        while count == 0 or number < count:
            delivery = await seen.get()
            number += 1
            _print_delivery(delivery, json, client.clock.now_s())

    with_client(url, listen)


def _print_delivery(delivery: Delivery, json: bool, now_s: float) -> None:
    kind: Literal["json", "msgpack"] = "json" if delivery.json else "msgpack"
    try:
        decoder: Any = msgspec.json if kind == "json" else msgspec.msgpack
        body = decoder.decode(delivery.payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        body = f"<{len(delivery.payload)} bytes that are no {kind}: {error}>"
    if json:
        print_json({"subject": delivery.subject, "message": body})
    else:
        text = msgspec.json.encode(_by_clock(body, now_s), enc_hook=repr).decode()
        out.print(f"{clock(now_s, now_s)} [bold]{delivery.subject}[/bold] ", end="")
        out.print(text, markup=False, highlight=True, soft_wrap=True)


def _by_clock(body: Any, now_s: float) -> Any:
    """Show a message with times of the day instead of seconds since 1970."""
    if not isinstance(body, dict):
        return body
    return {
        key: clock(value, now_s) if key in TIMES and isinstance(value, float) else value
        for key, value in body.items()
    }

"""`loadgen memory`: plays a memory workload against a live block device or an array."""

import asyncio
import re
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from slackwater.common.bus.access import shown
from slackwater.console.options import Json, Seed, Url
from slackwater.console.outcome import Usage, out, print_json, reported
from slackwater.console.sizes import size_bytes
from slackwater.console.where import credentials, resolve
from slackwater.schemas.base import ID_PATTERN

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from slackwater.loadgen.memory.play import Counters, PlayOptions, PlayResult

_PAGE = 4096
_BEAT_S = 1.2
"""Longer than a heartbeat."""


def memory(
    workload: Annotated[
        str, typer.Argument(help="The pattern: sequential, strided, random, zipf, etc or sys.")
    ],
    size: Annotated[str, typer.Option(help="Bytes of the address space, for example 1G.")],
    socket: Annotated[
        Path | None, typer.Option(help="The NBD socket of a block device to play on.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="The device's name on the bus, to read its hit rates.")
    ] = "",
    cache: Annotated[
        str, typer.Option(help="Without a socket: local bytes of the array to play on.")
    ] = "",
    seconds: Annotated[
        float, typer.Option(help="Seconds to measure, after everything was written.")
    ] = 10.0,
    depth: Annotated[
        int, typer.Option(min=1, max=1024, help="Requests in flight, on a block device.")
    ] = 16,
    seed: Seed = 0,
    check: Annotated[bool, typer.Option(help="Check every page that is read.")] = False,
    report: Annotated[Path | None, typer.Option(help="Write the report to this folder.")] = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Play a memory workload; tell throughput, latencies and hit rates."""
    from slackwater.loadgen.memory.play import PlayOptions
    from slackwater.loadgen.memory.report import lines, table, write_report

    with reported():
        if (socket is None) == (not cache):
            raise Usage("name either a device's --socket, or the --cache of an array")
        if size_bytes(size, "--size") < _PAGE:
            raise Usage(f"--size {size!r}: give at least a page, {_PAGE} bytes")
        if device and re.fullmatch(ID_PATTERN, device) is None:
            raise Usage(f"--device {device!r}: give a name of `slackwater memory top`")
        given = {
            "workload": workload, "pages": size_bytes(size, "--size") // _PAGE,
            "seconds": seconds, "depth": depth, "seed": seed, "check": check,
        }  # fmt: skip
        try:
            options = msgspec.convert(given, PlayOptions)
        except msgspec.ValidationError as error:
            raise Usage(f"{error}; see loadgen memory --help") from error
        if socket is not None:
            result = asyncio.run(_device(socket, options, device, url))
        else:
            result = _array(options, size_bytes(cache, "--cache"), url)
        if report is not None:
            write_report(report, result)
    if json:
        print_json(result)
        return
    out.print(table(result))
    for line in lines(result):
        out.print(line, highlight=False)


async def _device(
    socket: Path, options: "PlayOptions", device: str, url: str | None
) -> "PlayResult":
    from slackwater.loadgen.memory.play import play_device

    if not device:
        return await play_device(socket, options)
    async with _heard(device, resolve(url)) as counters:
        return await play_device(socket, options, counters)


@asynccontextmanager
async def _heard(device: str, url: str) -> "AsyncIterator[Counters]":
    """Return the counters of the device's last heartbeat."""
    from slackwater.common.base import codec
    from slackwater.common.base.errors import Unavailable
    from slackwater.common.bus.base import Delivery
    from slackwater.common.shell.client import connect
    from slackwater.schemas import subjects
    from slackwater.schemas.memory import DeviceHeartbeat

    beats: list[DeviceHeartbeat] = []

    async def hear(delivery: Delivery) -> None:
        beats[:] = [codec.decode(delivery.payload, DeviceHeartbeat, json=delivery.json)]

    def counters() -> dict[str, int]:
        beat = beats[0]
        return {"read_pages": beat.read_pages, "read_remote_pages": beat.read_remote_pages}

    async with connect(url, "loadgen", credentials()) as client:
        await client.bus.subscribe(subjects.telemetry("device", device, "heartbeat"), hear)
        await asyncio.sleep(_BEAT_S)
        if not beats:
            at = shown(url)
            raise Unavailable(f"device {device} is not heard at {at}; see `slackwater memory top`")
        yield counters


def _array(options: "PlayOptions", cache_bytes: int, url: str | None) -> "PlayResult":
    import numpy as np

    from slackwater.loadgen.memory.play import play_array
    from slackwater.memory import RemoteArray

    shape = (options.pages, _PAGE)
    with RemoteArray(
        shape, np.uint8, cache_bytes=cache_bytes, url=resolve(url), credentials=credentials()
    ) as remote:
        return play_array(remote, options)

"""`slackwater memory`: export a block device from idle memory; see and steer who lends what."""

import asyncio
import os
import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table

from slackwater.cli.options import Json, Url
from slackwater.cli.outcome import Usage, out, print_json, reported
from slackwater.cli.program import group
from slackwater.cli.show import REFRESH_S, with_client
from slackwater.cli.sizes import human, size_bytes
from slackwater.cli.where import credentials, resolve
from slackwater.common import codec, limits
from slackwater.common.bus.base import Delivery
from slackwater.common.client import Client
from slackwater.common.config import DEFAULT_METRICS_ADDRESS
from slackwater.common.errors import DecodeRejected, Unavailable
from slackwater.common.logging import configure
from slackwater.schemas import subjects
from slackwater.schemas.base import ID_PATTERN, Message, Ok
from slackwater.schemas.memory import (
    SLABS_PER_MESSAGE,
    DeviceHeartbeat,
    DeviceMap,
    EvictBegun,
    EvictNow,
    GetMap,
    LatencyCause,
    ListSlabs,
    SetLending,
    SlabdHeartbeat,
    SlabId,
    SlabList,
)

if TYPE_CHECKING:
    from slackwater.memory.export import Exporter

MetricsAddress = Annotated[str, typer.Option(help="Of this machine, where that port is.")]
app = group("Remote memory: block devices in the idle memory of other machines.")
_LISTEN_S = 2.2
"""Longer than two heartbeats: who is there has been heard by then."""
_WHO = "`slackwater memory top`"
_SLAB_PATTERN = r"[0-9a-f]{12}"
M = TypeVar("M", bound=Message)
_WAITED: dict[LatencyCause, str] = {
    "hit": "nothing (read)",
    "late": "prefetching",
    "lender": "lender",
    "disk": "disk",
    "write": "write to count",
}
_TOLD_S = 10.0
"""So long it is said that there were two lenders of one id."""
_FORGOTTEN_S = 60.0
"""Who has not been heard for so long is not shown any more."""


@dataclass(slots=True)
class Seen:
    """The newest heartbeats, by id."""

    lenders: dict[str, SlabdHeartbeat] = field(default_factory=dict)
    devices: dict[str, DeviceHeartbeat] = field(default_factory=dict)
    heard_s: dict[str, float] = field(default_factory=dict)
    """By service and id."""
    older: dict[str, tuple[str, float]] = field(default_factory=dict)
    """Of lenders that share an id with an older one: its node, and when that was seen."""

    def hear(self, beat: SlabdHeartbeat | DeviceHeartbeat, now_s: float) -> None:
        if isinstance(beat, SlabdHeartbeat):
            known = self.lenders.get(beat.id, beat)
            if known.incarnation != beat.incarnation and not self.silence(known, now_s):
                older = min(known, beat, key=lambda one: one.incarnation)
                self.older[beat.id] = (older.node, now_s)
                if older is beat:
                    return
            self.lenders[beat.id] = beat
        else:
            self.devices[beat.id] = beat
        self.heard_s[f"{beat.service}.{beat.id}"] = now_s

    def silence(self, beat: SlabdHeartbeat | DeviceHeartbeat, now_s: float) -> str:
        """What is to be said of it; "": it was heard lately."""
        silent_s = now_s - self.heard_s[f"{beat.service}.{beat.id}"]
        return f"not heard for {silent_s:.0f} s" if silent_s > limits.LOST_AFTER_S else ""

    def namesake(self, id: str, now_s: float) -> str:
        """What is to be said of a lender's id."""
        node, seen_s = self.older.get(id, ("", -limits.LOST_AFTER_S))
        return f"two of this id: the older, on {node}, ends" if now_s - seen_s <= _TOLD_S else ""

    def forget(self, now_s: float) -> None:
        for beats in (self.lenders, self.devices):
            for id, beat in tuple(beats.items()):
                if now_s - self.heard_s[f"{beat.service}.{id}"] > _FORGOTTEN_S:
                    del beats[id]


@app.command()
def export(
    size: Annotated[str, typer.Option(help="Bytes of the device, for example 64G.")],
    socket: Annotated[Path, typer.Option(help="Unix socket that NBD clients connect to.")],
    backup: Annotated[
        Path | None, typer.Option(help="The file behind it [default: SOCKET.backup].")
    ] = None,
    id: Annotated[str, typer.Option(help="The device's name on the bus.")] = "d1",
    node: Annotated[str, typer.Option(help="This machine, never borrowed from.")] = "",
    slab_size: Annotated[str, typer.Option(help="Bytes of a slab; by default the lenders'.")] = "0",
    resilience: Annotated[
        str, typer.Option(help="How pages outlive a lender: disk, 8+2 (k + r coding) or 2-copies.")
    ] = "disk",
    hot: Annotated[float, typer.Option(help="Page I/O per second that maps a slab.")] = 20.0,
    cold: Annotated[float, typer.Option(help="Page I/O per second that unmaps a slab.")] = 0.0,
    direct: Annotated[bool, typer.Option(help="Keep the backup out of the page cache.")] = False,
    swap: Annotated[bool, typer.Option(help="Serve this machine's own swap.")] = False,
    transport: Annotated[str | None, typer.Option(help="Use shm, tcp or verbs alone.")] = None,
    prefetch: Annotated[
        int, typer.Option(help="Requests of a scan fetched ahead over tcp or verbs; 0: none.")
    ] = 8,
    metrics_port: Annotated[
        int, typer.Option(min=-1, max=65_535, help="Prometheus there; 0: none, -1: any free one.")
    ] = 0,
    metrics_address: Annotated[
        str, typer.Option(help="Address of this machine for that port.")
    ] = DEFAULT_METRICS_ADDRESS,
    url: Url = None,
    json: Json = False,
) -> None:
    """Serve a block device until Ctrl-C."""
    with reported():  # Kernels are defined, for which there must be a cache.
        from slackwater.memory.export import ExportOptions
        from slackwater.memory.export import export as serve

    options = ExportOptions(
        id=id,
        size_bytes=size_bytes(size, "--size"),
        socket=socket.absolute(),
        backup=(backup or socket.with_name(f"{socket.name}.backup")).absolute(),
        node=node,
        slab_bytes=size_bytes(slab_size, "--slab-size"),
        resilience=resilience,
        hot=hot,
        cold=cold,
        direct=direct or swap,
        swap=swap,
        transport=transport,
        prefetch=prefetch,
        metrics_port=metrics_port,
        metrics_address=metrics_address,
        token=os.environ.get("SLACKWATER_CLUSTER_TOKEN", ""),
    )

    with reported():
        import uvloop

        configure(id=id, service="device")  # Standard output is the answer's.
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            ready = partial(_say_ready, json=json)
            runner.run(serve(options, resolve(url), ready, credentials()))


def _say_ready(exporter: "Exporter", json: bool) -> None:
    options = exporter.options
    uri = f"nbd+unix:///?socket={options.socket}"
    if json:
        print_json({"uri": uri, "backup": str(options.backup), "size_bytes": options.size_bytes})
    else:
        out.print(f"device {options.id}: {human(options.size_bytes)} at {uri}", soft_wrap=True)
        out.print(f"backup file {options.backup}", soft_wrap=True)


# Seeing -------------------------------------------------------------------------------------------


async def _listen(client: Client, seen: Seen, seconds: float) -> None:
    """Collect the heartbeats of lenders and devices."""

    async def lender(delivery: Delivery) -> None:
        beat = codec.decode(delivery.payload, SlabdHeartbeat, json=delivery.json)
        seen.hear(beat, client.clock.now_s())

    async def device(delivery: Delivery) -> None:
        beat = codec.decode(delivery.payload, DeviceHeartbeat, json=delivery.json)
        seen.hear(beat, client.clock.now_s())

    for service, hear in (("slabd", lender), ("device", device)):
        pattern = subjects.telemetries(service=service, what="heartbeat")
        await client.bus.subscribe(pattern, _readable(hear))
    await asyncio.sleep(seconds)


def _readable(hear: Any) -> Any:
    async def listen(delivery: Delivery) -> None:
        try:
            await hear(delivery)
        except DecodeRejected:
            return  # A newer version's: its line is missing, the others are not.

    return listen


def _tables(seen: Seen, now_s: float) -> RenderableType:
    seen.forget(now_s)
    lenders = Table(title="lenders")
    for column in ("lender", "node", "memory", "in use", "headroom", "free", "lent", "devices", ""):
        lenders.add_column(column)
    for id, beat in sorted(seen.lenders.items()):
        slab = beat.slab_bytes
        lenders.add_row(
            id, beat.node, human(beat.total_bytes), human(beat.used_bytes),
            human(beat.headroom_bytes), f"{beat.free_slabs} x {human(slab)}",
            f"{beat.lent_slabs} x {human(slab)}", str(beat.devices),
            seen.silence(beat, now_s)
            or seen.namesake(id, now_s)
            or ("" if beat.lending else "drained"),
        )  # fmt: skip
    devices = Table(title="devices")
    for column in (
        "device", "size", "spans", "lenders", "I/O per s", "remote hits", "prefetched", "to disk",
        "",
    ):  # fmt: skip
        devices.add_column(column)
    for id, mine in sorted(seen.devices.items()):
        hits = mine.read_remote_pages / mine.read_pages if mine.read_pages else 0.0
        devices.add_row(
            id, human(mine.size_bytes), f"{mine.mapped_spans} of {mine.spans}", str(mine.lenders),
            f"{mine.activity:,.0f}", f"{hits:.1%} of {mine.read_pages:,}", _prefetched(mine),
            f"{mine.backup_waiting_pages:,}",
            seen.silence(mine, now_s) or mine.reason or mine.state,
        )  # fmt: skip
    return Group(lenders, devices, _latency_table(list(seen.devices.values())))


def _latency_table(beats: list[DeviceHeartbeat]) -> Table:
    """Of the last seconds, by what requests waited for; below 80 columns, and plain."""
    table = Table(title="latency", title_justify="left", box=None, pad_edge=False)
    table.add_column("device", no_wrap=True, max_width=30)
    table.add_column("waited for")
    for column in ("requests", "p50", "p99"):
        table.add_column(column, justify="right", no_wrap=True)
    for beat in sorted(beats, key=lambda beat: beat.id):
        for info in beat.latency:
            times = (_duration(info.p50_us), _duration(info.p99_us))
            table.add_row(beat.id, _WAITED[info.cause], f"{info.requests:,}", *times)
    return table


def _duration(us: float) -> str:
    """Of three digits."""
    if us < 1e3:
        return f"{us:.3g} us"
    return f"{us / 1e3:.3g} ms" if us < 1e6 else f"{us / 1e6:.3g} s"


def _prefetched(beat: DeviceHeartbeat) -> str:
    """Leap's coverage (of the pages that were neither mapped nor held, those that it had brought or
    was bringing) and accuracy (of what it brought, what was read)."""
    if not beat.prefetched_pages:
        return "-"
    hits = beat.prefetch_hit_pages
    coverage = hits / max(1, hits + beat.read_waited_pages)
    return f"{coverage:.1%}, {hits / beat.prefetched_pages:.1%} used"


@app.command()
def top(
    url: Url = None,
    json: Json = False,
    once: Annotated[bool, typer.Option(help="Print once and end.")] = False,
) -> None:
    """Lenders and devices, refreshed every second."""

    async def snapshot(client: Client) -> tuple[Seen, float]:
        seen = Seen()
        await _listen(client, seen, _LISTEN_S)
        return seen, client.clock.now_s()

    async def refresh(client: Client) -> None:
        seen = Seen()
        await _listen(client, seen, 0.0)
        with Live(console=out, screen=out.is_terminal) as live:
            while True:
                live.update(_tables(seen, client.clock.now_s()))
                await asyncio.sleep(REFRESH_S)

    if json:
        seen, _ = with_client(url, snapshot)
        print_json({"lenders": list(seen.lenders.values()), "devices": list(seen.devices.values())})
    elif once or not out.is_terminal:
        out.print(_tables(*with_client(url, snapshot)))
    else:
        with_client(url, refresh)


async def _ask(
    client: Client,
    what: Literal["lender", "device"],
    name: str,
    verb: str,
    message: Message,
    answer: type[M],
) -> M:
    """Raises Usage for a name that cannot be one, Unavailable for one that nobody has."""
    if re.fullmatch(ID_PATTERN, name) is None:
        raise Usage(f"{what} {name!r}: a name has letters, digits, - and _; see {_WHO}")
    service = "slabd" if what == "lender" else what
    try:
        return await client.ask(subjects.command(service, name, verb), message, answer)
    except Unavailable as error:
        raise Unavailable(
            f"{what} {name!r} does not answer: see {_WHO} for those that are there"
        ) from error


async def _lender_names(client: Client) -> list[str]:
    seen = Seen()
    await _listen(client, seen, _LISTEN_S)
    if not seen.lenders:
        raise Unavailable("no lender is heard: start one with `slackwater up --lenders 2`")
    return sorted(seen.lenders)


@app.command("map")
def show_map(
    device: Annotated[str | None, typer.Argument(help="A device; else all lenders' slabs.")] = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Which slab of whom backs which part of a device; or what lenders have lent to whom."""

    async def of_device(client: Client) -> DeviceMap:
        assert device is not None
        found = await _ask(client, "device", device, "map", GetMap(), DeviceMap)
        spans = found.spans
        while found.following:
            message = GetMap(first=found.following)
            found = await _ask(client, "device", device, "map", message, DeviceMap)
            spans += found.spans
        return msgspec.structs.replace(found, spans=spans)

    async def of_lenders(client: Client) -> list[SlabList]:
        return [
            await _ask(client, "lender", name, "slabs", ListSlabs(), SlabList)
            for name in await _lender_names(client)
        ]

    if device is not None:
        found = with_client(url, of_device)
        print_json(found) if json else out.print(_device_table(found))
        return
    lists = with_client(url, of_lenders)
    print_json(lists) if json else out.print(_slab_table(lists))


def _device_table(found: DeviceMap) -> Table:
    table = Table(title=f"{found.device}: {human(found.size_bytes)} in spans of "
                  f"{human(found.span_bytes)}")  # fmt: skip
    for column in ("span", "state", "lender", "slab", "I/O per s", "remote pages"):
        table.add_column(column)
    for span in found.spans:
        members = [member for member in span.members if member is not None]
        table.add_row(
            str(span.span), span.state, " ".join(m.lender for m in members) or "-",
            " ".join(f"{m.slab}/{m.generation}" for m in members) or "-",
            f"{span.activity:,.1f}", f"{span.remote_pages:,}",
        )  # fmt: skip
    return table


def _slab_table(lists: list[SlabList]) -> Table:
    table = Table()
    for column in ("lender", "slab", "state", "generation", "device", "span"):
        table.add_column(column)
    for one in lists:
        for slab in one.slabs:
            owned = bool(slab.device)
            table.add_row(
                one.lender, slab.slab, slab.state, str(slab.generation), slab.device or "-",
                str(slab.span) if owned else "-",
            )  # fmt: skip
    return table


# Steering -----------------------------------------------------------------------------------------


@app.command()
def evict(
    lender: Annotated[str, typer.Argument(help="One that `slackwater memory top` lists.")],
    slab: Annotated[
        list[str] | None,
        typer.Argument(help="Slabs to evict, by their names in `slackwater memory map`."),
    ] = None,
    count: Annotated[
        int, typer.Option(min=0, max=4096, help="Evict so many instead, the least active ones.")
    ] = 0,
    url: Url = None,
    json: Json = False,
) -> None:
    """Make a lender take slabs back; their pages stay in the devices' backups."""
    with reported():
        if not slab and not count:
            raise Usage("nothing to evict: name slabs, or give --count")
        wrong = [one for one in slab or () if re.fullmatch(_SLAB_PATTERN, one) is None]
        if wrong:
            raise Usage(
                f"slab {wrong[0]!r}: a slab's name is 12 hexadecimal digits; `slackwater memory "
                "map` shows them"
            )
        if len(slab or ()) > SLABS_PER_MESSAGE:
            raise Usage(f"{len(slab or ())} slabs: name at most {SLABS_PER_MESSAGE} at a time")
    message = EvictNow(count=count, slabs=tuple(SlabId(one) for one in slab or ()))
    begun = with_client(
        url, lambda client: _ask(client, "lender", lender, "evict", message, EvictBegun)
    )
    asked = len(set(slab or ())) + count
    if json:
        told = {"lender": lender, "slabs": slab or [], "count": count, "begun": begun.slabs}
        print_json(told)
        return
    few = f" (of {asked} asked for: it lends no more)" if begun.slabs < asked else ""
    what = ", ".join(slab) if slab and not count else f"{begun.slabs} slabs"
    out.print(f"{lender} evicts {what}{few}")


@app.command()
def drain(
    lender: Annotated[str, typer.Argument(help="One that `slackwater memory top` lists.")],
    back: Annotated[bool, typer.Option("--back", help="Let it lend again.")] = False,
    url: Url = None,
    json: Json = False,
) -> None:
    """Empty a lender before maintenance: it evicts everything and lends nothing new."""
    message = SetLending(lending=back)
    with_client(url, lambda client: _ask(client, "lender", lender, "lending", message, Ok))
    if json:
        print_json({"lender": lender, "lending": back})
        return
    out.print(f"{lender} lends again" if back else f"{lender} gives everything back")

"""`slackwater memory`: export a block device from idle memory; see and steer who lends what."""

import asyncio
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
import typer
from rich.live import Live
from rich.text import Text

from slackwater.cli.memory_export import export
from slackwater.cli.show import REFRESH_S, with_client
from slackwater.common.base import codec, limits
from slackwater.common.base.errors import DecodeRejected, Unavailable
from slackwater.common.bus.base import Delivery
from slackwater.common.shell.client import Client
from slackwater.console import tables
from slackwater.console.options import Json, Url
from slackwater.console.outcome import Usage, out, print_json, reported
from slackwater.console.program import group
from slackwater.console.sizes import human
from slackwater.console.tables import Row
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

app = group("Manage remote memory: block devices in the idle memory of other machines.")
_LISTEN_S = 2.2
"""Longer than two heartbeats: who is there has been heard by then."""
_WHO = "`slackwater memory top`"
_SLAB_PATTERN = r"[0-9a-f]{12}"
M = TypeVar("M", bound=Message)
B = TypeVar("B", SlabdHeartbeat, DeviceHeartbeat)
_WAITED: dict[LatencyCause, str] = {
    "hit": "nothing (read)",
    "late": "prefetching",
    "lender": "lender",
    "disk": "disk",
    "write": "write to count",
}
_TOLD_S = 10.0
"""Seconds for which a table says that two lenders had one id."""
_FORGOTTEN_S = 60.0
"""Seconds of silence after which a service is not shown any more."""


@dataclass(slots=True)
class Seen:
    """The newest heartbeats, by id."""

    lenders: dict[str, SlabdHeartbeat] = field(default_factory=dict)
    devices: dict[str, DeviceHeartbeat] = field(default_factory=dict)
    heard_s: dict[str, float] = field(default_factory=dict)
    """Time of the last heartbeat, by service and id."""
    older: dict[str, tuple[str, float]] = field(default_factory=dict)
    """Lenders that share an id with an older one: the older one's node, and when that was seen."""

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
        """Describe the service's silence; "": it was heard lately."""
        silent_s = now_s - self.heard_s[f"{beat.service}.{beat.id}"]
        return f"not heard for {silent_s:.0f} s" if silent_s > limits.LOST_AFTER_S else ""

    def namesake(self, id: str, now_s: float) -> str:
        """Say that an older lender of the same id ends; empty: the id is not shared."""
        node, seen_s = self.older.get(id, ("", -limits.LOST_AFTER_S))
        return f"two of this id: the older, on {node}, ends" if now_s - seen_s <= _TOLD_S else ""

    def forget(self, now_s: float) -> None:
        for beats in (self.lenders, self.devices):
            for id, beat in tuple(beats.items()):
                if now_s - self.heard_s[f"{beat.service}.{id}"] > _FORGOTTEN_S:
                    del beats[id]


app.command()(export)


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


LENDER_HEADS: Final = (
    "LENDER", "NODE", "MEMORY", "IN USE", "HEADROOM", "FREE", "LENT", "DEVICES",
)  # fmt: skip
DEVICE_HEADS: Final = (
    "DEVICE", "SIZE", "SPANS", "LENDERS", "I/O PER S", "REMOTE HITS", "PREFETCHED", "TO DISK",
)  # fmt: skip
LATENCY_HEADS: Final = ("DEVICE", "WAITED FOR", "REQUESTS", "P50", "P99")


def _overview(seen: Seen, now_s: float, width: int | None) -> list[str]:
    """Lay out lenders, devices and latencies, in lines of at most `width`; None: as wide as they
    are."""
    seen.forget(now_s)
    lenders = [_lender(seen, beat, now_s) for beat in _by_id(seen.lenders.values())]
    devices = [_device(seen, beat, now_s) for beat in _by_id(seen.devices.values())]
    latencies = _latencies(_by_id(seen.devices.values()))
    return [
        *tables.lines(LENDER_HEADS, lenders, width, note="STATE"),
        *([] if lenders else ["No lender is heard; `slackwater up --lenders N` starts some."]),
        "",
        *(
            tables.lines(DEVICE_HEADS, devices, width, note="STATE")
            if devices
            else ["No device is served; `slackwater memory export` serves one."]
        ),
        *(["", *tables.lines(LATENCY_HEADS, latencies, width)] if latencies else []),
    ]


def _by_id(beats: Iterable[B]) -> list[B]:
    return sorted(beats, key=lambda beat: tables.natural(beat.id))


def _lender(seen: Seen, beat: SlabdHeartbeat, now_s: float) -> Row:
    slab = human(beat.slab_bytes)
    silent = seen.silence(beat, now_s) or seen.namesake(beat.id, now_s)
    return Row(
        (
            beat.id, beat.node, human(beat.total_bytes), human(beat.used_bytes),
            human(beat.headroom_bytes), f"{beat.free_slabs} x {slab}",
            f"{beat.lent_slabs} x {slab}", str(beat.devices),
        ),
        silent or ("lending" if beat.lending else "drained"),
    )  # fmt: skip


def _device(seen: Seen, beat: DeviceHeartbeat, now_s: float) -> Row:
    hits = beat.read_remote_pages / beat.read_pages if beat.read_pages else 0.0
    return Row(
        (
            beat.id, human(beat.size_bytes), f"{beat.mapped_spans} of {beat.spans}",
            str(beat.lenders), f"{beat.activity:,.0f}", f"{hits:.1%} of {beat.read_pages:,}",
            _prefetched(beat), f"{beat.backup_waiting_pages:,}",
        ),
        seen.silence(beat, now_s) or beat.reason or beat.state,
    )  # fmt: skip


def _latencies(beats: Iterable[DeviceHeartbeat]) -> list[Row]:
    """Tabulate latencies of the last seconds, by what requests waited for."""
    return [
        Row(
            (
                beat.id, _WAITED[info.cause], f"{info.requests:,}", _duration(info.p50_us),
                _duration(info.p99_us),
            )
        )
        for beat in beats
        for info in beat.latency
    ]  # fmt: skip


def _duration(us: float) -> str:
    """Write a duration with three digits."""
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
    """Show lenders and devices, refreshed every second."""

    async def snapshot(client: Client) -> tuple[Seen, float]:
        seen = Seen()
        await _listen(client, seen, _LISTEN_S)
        return seen, client.clock.now_s()

    async def refresh(client: Client) -> None:
        seen = Seen()
        await _listen(client, seen, 0.0)
        with Live(console=out, screen=out.is_terminal) as live:
            while True:
                shown = _overview(seen, client.clock.now_s(), out.width)
                live.update(Text("\n".join(shown)))
                await asyncio.sleep(REFRESH_S)

    if json:
        seen, _ = with_client(url, snapshot)
        print_json({"lenders": list(seen.lenders.values()), "devices": list(seen.devices.values())})
    elif once or not out.is_terminal:
        tables.show(_overview(*with_client(url, snapshot), _width()))
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
    """Ask a lender or a device. Raises Usage for a name that cannot be one, Unavailable for one
    that nobody has."""
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
    """Show the slabs that back a device, or all slabs that lenders have lent."""

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
        print_json(found) if json else tables.show(_spans(found))
        return
    lists = with_client(url, of_lenders)
    print_json(lists) if json else tables.show(_slabs(lists))


def _width() -> int | None:
    return out.width if out.is_terminal else None


def _spans(found: DeviceMap) -> list[str]:
    size, span_size = human(found.size_bytes), human(found.span_bytes)
    rows = []
    for span in found.spans:
        members = [member for member in span.members if member is not None]
        rows.append(
            Row(
                (
                    str(span.span), span.state, f"{span.activity:,.1f}",
                    f"{span.remote_pages:,}", " ".join(m.lender for m in members),
                    " ".join(f"{m.slab}/{m.generation}" for m in members),
                )
            )
        )  # fmt: skip
    heads = ("SPAN", "STATE", "I/O PER S", "REMOTE PAGES", "LENDER", "SLAB")
    title = f"{found.device}: {size} in spans of {span_size}"
    return [title, *tables.lines(heads, rows, _width())]


def _slabs(lists: list[SlabList]) -> list[str]:
    rows = [
        Row(
            (
                one.lender, slab.slab, slab.state, str(slab.generation), slab.device or "",
                str(slab.span) if slab.device else "",
            )
        )
        for one in lists
        for slab in one.slabs
    ]  # fmt: skip
    return tables.lines(("LENDER", "SLAB", "STATE", "GENERATION", "DEVICE", "SPAN"), rows, _width())


# Steering -----------------------------------------------------------------------------------------


@app.command()
def evict(
    lender: Annotated[str, typer.Argument(help="A lender that `slackwater memory top` lists.")],
    slab: Annotated[
        list[str] | None,
        typer.Argument(help="Slabs to evict, by their names in `slackwater memory map`."),
    ] = None,
    count: Annotated[
        int,
        typer.Option(min=0, max=4096, help="Evict this many of the least active slabs instead."),
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
    lender: Annotated[str, typer.Argument(help="A lender that `slackwater memory top` lists.")],
    back: Annotated[bool, typer.Option("--back", help="Let the lender lend again.")] = False,
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

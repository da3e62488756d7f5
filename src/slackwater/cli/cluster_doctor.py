"""`slackwater doctor --whole`: what is wrong with a cluster as a whole, and what to do about it.

What the bus says is gathered first (`gather`); what it means is decided without it (`judge`).
"""

import asyncio
import json
import socket
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

import msgspec

from slackwater.cli.doctor import Check
from slackwater.common.base import codec, limits
from slackwater.common.base.clock import Clock
from slackwater.common.base.errors import DecodeRejected, SlackwaterError
from slackwater.common.base.words import number_of
from slackwater.common.bus.access import Credentials, Identity, servers_of
from slackwater.common.bus.base import Delivery
from slackwater.common.bus.nats import NatsBus
from slackwater.common.shell.client import Client
from slackwater.common.store import snapshots
from slackwater.common.store.jetstream import StreamInfo, ask, mapped
from slackwater.schemas import subjects
from slackwater.schemas.cluster import AggregatorInfo, NodeInfo
from slackwater.schemas.service import BusState, GetHealth, Health

LISTEN_S: Final = 2.5
"""So long heartbeats are waited for: they come once a second."""
SKEW_POOR_S: Final = 1.0
SKEW_BAD_S: Final = 30.0
KEPT_FOR_PEOPLE: Final = {
    "KV_damaged": ("record", "could not be read: set aside"),
    "KV_breaches": ("instance", "with messages that broke it"),
}
EXPIRY_POOR_S: Final = 30 * 86_400.0


@dataclass(slots=True)
class Seen:
    """All that was gathered about a cluster."""

    now_s: float
    services: dict[str, str] = field(default_factory=dict)
    """Service and id -> version."""
    health: dict[str, Health] = field(default_factory=dict)
    skew_s: dict[str, float] = field(default_factory=dict)
    """Service and id -> how far its clock is ahead of this one; late messages seem behind."""
    disks: dict[str, BusState] = field(default_factory=dict)
    streams: dict[str, StreamInfo] = field(default_factory=dict)
    expiries_s: dict[str, float | str] = field(default_factory=dict)
    """Bus server -> when its certificate ends, or why that is unknown."""
    nodes: tuple[NodeInfo, ...] = ()
    aggregators: tuple[AggregatorInfo, ...] = ()
    unanswered: dict[str, str] = field(default_factory=dict)
    """Master, or a stream, that did not answer a question, and why."""


class _Beat(msgspec.Struct):
    """The fields that heartbeats of all services have."""

    service: str
    id: str
    at_s: float


# Gathering ----------------------------------------------------------------------------------------


async def gather(client: Client, bus: NatsBus, url: str, identity: Credentials) -> Seen:
    seen = Seen(client.clock.now_s())
    await _listen(bus, client.clock, seen)
    await asyncio.gather(*(_ask_health(client, service, seen) for service in seen.services))
    try:
        seen.nodes, seen.aggregators = await client.nodes(), await client.aggregators()
    except SlackwaterError as error:
        seen.unanswered["master"] = str(error)
    await _look_at_streams(bus, seen)
    for server in servers_of(url):
        if server.startswith("tls://"):
            seen.expiries_s[server] = await asyncio.to_thread(expiry_s, server, identity)
    return seen


async def _ask_health(client: Client, service: str, seen: Seen) -> None:
    name, id = service.split(" ", 1)
    with suppress(SlackwaterError):  # `judge` says that it does not answer.
        subject = subjects.command(name, id, "health")
        seen.health[service] = await client.ask(subject, GetHealth(), Health)


async def _look_at_streams(bus: NatsBus, seen: Seen) -> None:
    try:
        names = await snapshots.streams(bus)
    except SlackwaterError as error:
        seen.unanswered["store"] = str(error)
        return
    for stream in names:
        kept = {"subjects_filter": ">"} if stream in KEPT_FOR_PEOPLE else None
        try:
            info = await ask(bus, f"STREAM.INFO.{stream}", kept, StreamInfo)
            if info.error is not None:
                raise mapped(stream, info.error)
        except SlackwaterError as error:
            seen.unanswered[f"stream {stream}"] = str(error)
            continue
        seen.streams[stream] = info


async def _listen(bus: NatsBus, clock: Clock, seen: Seen) -> None:
    """Hear for a while which services there are, and what they and bus servers say."""

    async def take_disk(delivery: Delivery) -> None:
        with suppress(DecodeRejected):
            state = codec.decode(delivery.payload, BusState)
            seen.disks[state.server] = state

    async def take_beat(delivery: Delivery) -> None:
        with suppress(msgspec.DecodeError):
            beat = msgspec.msgpack.decode(delivery.payload, type=_Beat)
            seen.skew_s[f"{beat.service} {beat.id}"] = beat.at_s - clock.now_s()

    answers: list[bytes] = []
    inbox = await bus.open_inbox(lambda message: answers.append(message.data))
    heard = [
        await bus.subscribe(subjects.telemetries("bus", what="state"), take_disk),
        await bus.subscribe(subjects.telemetries(what="heartbeat"), take_beat),
    ]
    await bus.publish("$SRV.PING", b"", reply_to=f"{inbox.subject}.0")
    await asyncio.sleep(LISTEN_S)
    for subscription in heard:
        await subscription.unsubscribe()
    await inbox.close()
    for answer in answers:
        with suppress(ValueError, KeyError):
            told = json.loads(answer)
            if "schema" in told["metadata"]:
                seen.services[f"{told['name']} {told['metadata']['id']}"] = told["version"]


def expiry_s(server: str, identity: Credentials) -> float | str:
    """Ask a bus server for its certificate; return when that ends, or why it is unknown."""
    place = urlsplit(server)
    host, port = place.hostname or "", place.port or 4222
    try:
        context = identity.tls.context() if isinstance(identity, Identity) else None
        with socket.create_connection((host, port), timeout=limits.BUS_CONNECT_S) as plain:
            plain.recv(65536)  # The server's INFO comes in clear text, before encryption.
            context = context or ssl.create_default_context()
            with context.wrap_socket(plain, server_hostname=host) as secured:
                ends = (secured.getpeercert() or {}).get("notAfter")
                return ssl.cert_time_to_seconds(str(ends))
    except (OSError, ValueError, SlackwaterError) as error:
        return str(error)


# Judging ------------------------------------------------------------------------------------------


def judge(seen: Seen) -> list[Check]:
    return [
        *_services(seen),
        *_versions(seen.services),
        *_clocks(seen.skew_s),
        *_nodes(seen.nodes),
        *_aggregators(seen.aggregators),
        *_disks(seen.disks),
        *_streams(seen.streams),
        *_certificates(seen.expiries_s, seen.now_s),
    ]


def _services(seen: Seen) -> Iterator[Check]:
    for service, remedy in (
        ("master", "no job starts; `systemctl start slackwater-master` on a machine of [masters]"),
        ("controller", "no job gets parameters; start one with `slackwater run controller`"),
    ):
        if not any(each.startswith(f"{service} ") for each in seen.services):
            yield Check(service, "bad", f"none answers: {remedy}")
    for each in sorted(seen.services):
        health = seen.health.get(each)
        if health is None:
            yield Check(each, "bad", "it is there and does not answer: look into its log")
        elif health.state != "ok":
            why = health.reason or "the bus or the store does not answer it"
            yield Check(each, "poor" if health.state == "draining" else "bad", why)
    for what, why in seen.unanswered.items():
        yield Check(what, "bad", why)
    well = sum(health.state == "ok" for health in seen.health.values())
    yield Check("services", "good" if well else "bad", f"{well} of {len(seen.services)} are well")


def _versions(services: Mapping[str, str]) -> Iterator[Check]:
    versions = sorted(set(services.values()))
    if len(versions) > 1:
        last = {v: sum(each == v for each in services.values()) for v in versions}
        counts = ", ".join(f"{n} of {v}" for v, n in last.items())
        yield Check("versions", "poor", f"{counts}: end the upgrade that has begun")


def _clocks(skew_s: Mapping[str, float]) -> Iterator[Check]:
    for service, ahead_s in sorted(skew_s.items()):
        if abs(ahead_s) > SKEW_POOR_S:
            way = "ahead of" if ahead_s > 0 else "behind"
            why = f"its clock is {abs(ahead_s):,.1f} s {way} this machine's: run an NTP service"
            yield Check(service, "bad" if abs(ahead_s) > SKEW_BAD_S else "poor", why)


def _nodes(nodes: Sequence[NodeInfo]) -> Iterator[Check]:
    for info in nodes:
        beat = info.heartbeat
        if not info.alive:
            why = "it is not heard: look at the machine, or at its network"
            yield Check(f"node {beat.node}", "bad" if info.jobs else "poor", why)
        for gpu in beat.gpus:
            if gpu.fault:
                yield Check(f"node {beat.node}", "poor", f"GPU {gpu.index}: {gpu.fault}")
    if nodes:
        ready = sum(info.alive and not info.heartbeat.cordoned for info in nodes)
        yield Check("nodes", "good" if ready else "bad", f"{ready} of {len(nodes)} take jobs")
    else:
        yield Check("nodes", "poor", "none: `slackwater run worker` on a machine adds it")


def _aggregators(aggregators: Sequence[AggregatorInfo]) -> Iterator[Check]:
    for info in aggregators:
        if not info.alive:
            why = (
                "it is not heard: start it again; if its machine is gone for good, "
                f"`slackwater drain {info.record.id} --lost`"
            )
            yield Check(
                f"aggregator {info.record.id}", "bad" if info.record.cluster else "poor", why
            )
    if not aggregators:
        yield Check("aggregators", "poor", "none: jobs with parameters on aggregators cannot run")


def _disks(disks: Mapping[str, BusState]) -> Iterator[Check]:
    for server, state in sorted(disks.items()):
        free = f"{state.free_bytes / 2**20:,.0f} MiB free of {state.total_bytes / 2**20:,.0f}"
        if state.reason:
            yield Check(f"bus server {server}", "bad", f"{state.reason} ({free})")
        elif state.free_bytes < state.reserve_bytes:
            yield Check(f"bus server {server}", "bad", f"{free}: new jobs are refused; make room")
        elif state.free_bytes < 2 * state.reserve_bytes:
            yield Check(f"bus server {server}", "poor", f"{free}: make room")


def _streams(streams: Mapping[str, StreamInfo]) -> Iterator[Check]:
    for name, info in sorted(streams.items()):
        about = info.cluster
        if info.config.get("num_replicas", 1) == 1:
            continue
        behind = [
            str(each.get("name"))
            for each in about.get("replicas") or ()
            if each.get("offline") or not each.get("current")
        ]
        if not about.get("leader"):
            why = "no server leads it: most of its servers are gone; start them"
            yield Check(f"stream {name}", "bad", why)
        elif behind:
            why = f"the copy at {', '.join(behind)} is not there or behind: start that server"
            yield Check(f"stream {name}", "poor", why)
    for bucket, (noun, what) in KEPT_FOR_PEOPLE.items():
        found = streams[bucket].state.get("subjects") or () if bucket in streams else ()
        if held := sum(not each.endswith("._epoch") for each in found):
            yield Check(
                bucket.removeprefix("KV_"), "poor", f"{number_of(held, noun)} {what}; report them"
            )
    copies = {name: info.config.get("num_replicas", 1) for name, info in streams.items()}
    for name, number in sorted(copies.items()):
        if number < max(copies.values()):
            why = (
                f"kept on {number_of(number, 'server')}, others on {max(copies.values())}: set "
                "`replicas` of its services; for `facts` of an earlier version, remove that stream "
                "(`nats stream rm facts`) and restart the master, which begins a new one"
            )
            yield Check(f"stream {name}", "poor", why)
    if streams:
        kept = number_of(min(copies.values()), "server")
        yield Check("store", "good", f"{len(streams)} streams, each on {kept} at least")


def _certificates(expiries_s: Mapping[str, float | str], now_s: float) -> Iterator[Check]:
    for server, ends_s in sorted(expiries_s.items()):
        place = server.rpartition("@")[2].removeprefix("tls://")
        if isinstance(ends_s, str):
            yield Check(f"bus server {place}", "bad", ends_s)
        elif ends_s - now_s < EXPIRY_POOR_S:
            days = (ends_s - now_s) / 86_400
            why = f"its certificate ends in {days:.0f} days: ansible-playbook rotate.yml"
            yield Check(f"bus server {place}", "poor", why)

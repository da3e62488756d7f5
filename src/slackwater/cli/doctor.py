"""`slackwater doctor`: what a host can do, what it lacks, and what to do about it."""

import asyncio
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
import typer

from slackwater.common.base.errors import SlackwaterError, Unavailable
from slackwater.common.bus.access import address_file, shown
from slackwater.common.bus.server import find_server, server_version
from slackwater.common.native import cgroup
from slackwater.common.native.memlock import capable
from slackwater.common.native.send_calls import CAP_PERFMON
from slackwater.console import tables
from slackwater.console.options import Json, Url
from slackwater.console.outcome import FAILED, print_json, reported
from slackwater.console.where import credentials, resolve

State = Literal["good", "poor", "bad", "absent"]
DESCRIPTORS_POOR: Final = 4096
"""Fewer are poor: a region takes one, a channel some, so a host of a few dozen jobs has thousands
open."""
MEMORY_POOR_BYTES: Final = 2 * 2**30
CAP_NET_RAW: Final = 13
DISK_POOR_BYTES: Final = 2**30
DISK_BAD_BYTES: Final = 64 * 2**20
"""Less free is bad: JetStream stops taking records when its disk is full."""
COMPILED: Final[Mapping[str, str]] = {
    "folds": "common/domains/slots/__pycache__/kernels.*.nbi",
    "streams": "common/transport/__pycache__/target_kernels.*.nbi",
    "pages": "memory/resilience/__pycache__/gather.*.nbi",
}
"""Where numba keeps what `slackwater compile` made, below the package."""


class Check(msgspec.Struct, frozen=True):
    """One thing that was looked at. `poor`: it works, and will be felt; `absent`: it is not there,
    and nothing needs it yet."""

    what: str
    state: State
    why: str


def doctor(
    url: Url = None,
    whole: Annotated[
        bool,
        typer.Option("--whole", help="Look at the whole cluster, not at this host."),
    ] = False,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Check the disk of this folder, for example that of `up --state-dir`.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Say what this host can do: transports, limits, memory, disk, the bus, compiled kernels.

    With --whole, what is wrong with the cluster, and what to do: services that are missing or not
    well, clocks, disks and certificates of bus servers, copies of streams, GPUs, versions. Exits
    with 1 where something that services need is bad.
    """
    with reported():
        if whole:
            _show(asyncio.run(_whole(url)), json)
            return
        found = [
            *transports(),
            descriptors(*resource.getrlimit(resource.RLIMIT_NOFILE)),
            memory(cgroup.memory_bytes(), cgroup.MemoryKills().count()),
            jobs(cgroup.own()),
            traffic(capable(CAP_NET_RAW), capable(CAP_PERFMON)),
            accounts(os.geteuid(), shutil.which("setpriv")),
            disk(state_dir or address_file().parent, "state folder"),
            disk(Path(tempfile.gettempdir()), "temporary folder"),
            server(),
            asyncio.run(bus(url)),
            *compiled(os.environ.get("NUMBA_CACHE_DIR", "")),
        ]
    _show(found, json)


def _show(found: list[Check], json: bool) -> None:
    if json:
        print_json(found)
    else:
        rows = [tables.Row((check.what, check.state, check.why)) for check in found]
        tables.show(tables.lines(("what", "state", "why"), rows))
    if any(check.state == "bad" for check in found):
        raise typer.Exit(FAILED)


async def _whole(url: str | None) -> list[Check]:
    from slackwater.cli import cluster_doctor
    from slackwater.common.bus.nats import NatsBus
    from slackwater.common.shell.client import connect

    where, identity = resolve(url), credentials()
    async with connect(where, "doctor", identity) as client:
        assert isinstance(client.bus, NatsBus)
        seen = await cluster_doctor.gather(client, client.bus, where, identity)
        return cluster_doctor.judge(seen)


def transports() -> Iterator[Check]:
    """Check every kind of transport; without any, no data can be moved."""
    from slackwater.common.transport.negotiate import probe

    found = probe()
    missing: State = "absent" if any(item.usable for item in found) else "bad"
    for item in found:
        yield Check(item.kind, "good" if item.usable else missing, item.why)


def descriptors(soft: int, hard: int) -> Check:
    """Check the descriptor limit. Services raise the soft limit to the hard one by themselves."""
    if 0 <= hard < DESCRIPTORS_POOR:
        why = f"at most {hard:,}: set LimitNOFILE=65536 in the unit, or `ulimit -Hn 65536`"
        return Check("descriptors", "poor", why)
    return Check("descriptors", "good", f"{soft:,} now, {hard:,} at most")


def memory(may_have: int, killed: int) -> Check:
    gib = f"{may_have / 2**30:,.1f} GiB for this cgroup or machine"
    if may_have < MEMORY_POOR_BYTES:
        return Check("memory", "poor", f"{gib}: give each aggregator a memory_bytes_max")
    if killed:
        return Check("memory", "poor", f"{gib}; {killed} processes were killed for want of it")
    return Check("memory", "good", gib)


def jobs(parent: Path | None) -> Check:
    """Check by what a worker service on this host keeps hold of the processes of its jobs."""
    if parent is None:
        why = (
            "found by a mark in their environment: no cgroup can be made here, so a program that "
            "clears its environment may leave processes behind (root, or Delegate=yes in the unit)"
        )
        return Check("job processes", "poor", why)
    return Check("job processes", "good", f"each rank has a cgroup of its own in {parent}")


def traffic(packets: bool, calls: bool) -> Check:
    """Check how a worker service of this account can watch what jobs without an Agent send."""
    if packets and calls:
        return Check("job traffic", "good", "watched by send calls and packets")
    if not packets and not calls:
        why = "not watched: run as root, or with AmbientCapabilities=CAP_NET_RAW CAP_PERFMON"
        return Check("job traffic", "absent", why)
    way, other = ("packets", "CAP_PERFMON") if packets else ("send calls", "CAP_NET_RAW")
    return Check("job traffic", "poor", f"watched by {way} alone: {other} is missing")


def accounts(uid: int, setpriv: str | None) -> Check:
    """Check whether a worker service of this account can give jobs accounts of their own."""
    if uid != 0 or setpriv is None:
        why = "the service runs as root" if uid != 0 else "setpriv (of util-linux) is installed"
        return Check("job accounts", "absent", f"jobs can have their own only where {why}")
    return Check("job accounts", "good", "jobs can have their own: set `accounts` of the worker")


def disk(folder: Path, what: str) -> Check:
    """Check the folder's disk, or that of the nearest folder around it that exists."""
    there = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.is_dir())
    free = shutil.disk_usage(there).free
    said = f"{free / 2**30:,.1f} GiB free at {folder}"
    if not os.access(there, os.W_OK | os.X_OK):
        return Check(what, "bad", f"{there} cannot be written")
    if free < DISK_BAD_BYTES:
        return Check(what, "bad", f"{said}: the bus stops when it is full; free some")
    return Check(what, "poor" if free < DISK_POOR_BYTES else "good", said)


def server() -> Check:
    """Check the binary of the bus, which `slackwater up` starts."""
    try:
        path = find_server()
        return Check("nats-server", "good", f"{server_version(path).strip()} at {path}")
    except SlackwaterError as error:
        return Check("nats-server", "bad", str(error))


async def bus(url: str | None) -> Check:
    """Check the bus that commands talk to: whether it answers, its version, its JetStream."""
    from nats.errors import Error as BusError

    from slackwater.common.bus.nats import NatsBus

    try:
        where = resolve(url)
    except Unavailable as error:
        return Check("bus", "absent", str(error))
    try:
        found = await NatsBus.connect(where, "doctor", credentials=credentials())
    except SlackwaterError as error:
        return Check("bus", "bad", str(error))
    try:
        said = f"nats-server {found.client.connected_server_version} at {shown(where)}"
        try:
            account = await found.client.jetstream().account_info()
        except BusError as error:
            return Check("bus", "bad", f"{said}, without JetStream ({error}): start it with one")
        return Check("bus", "good", f"{said}, JetStream with {account.streams} streams")
    finally:
        await found.close()


def compiled(elsewhere: str) -> Iterator[Check]:
    """Check whether kernels are kept on disk, in the package or in `elsewhere`."""
    import slackwater

    package = Path(slackwater.__file__).parent
    for part, pattern in COMPILED.items():
        kept = [package.glob(pattern)]
        if elsewhere:
            kept.append(Path(elsewhere).rglob(pattern.rpartition("/")[2]))
        if any(next(found, None) for found in kept):
            yield Check(f"kernels: {part}", "good", "compiled before")
        else:
            why = f"compiled when first used: `slackwater compile {part}` does it now"
            yield Check(f"kernels: {part}", "poor", why)

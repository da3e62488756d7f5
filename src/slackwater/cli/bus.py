"""`slackwater bus`: the users of a bus of one's own servers, a watch over their disks, and copies
of all that the bus keeps."""

import asyncio
import getpass
import os
import shutil
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slackwater.common.base.clock import LiveClock
from slackwater.common.base.errors import ConfigRejected, NobodyThere, Rejected
from slackwater.common.base.private_files import own_folder, private_folder, write_private
from slackwater.common.bus.users import BusUser, authorization, new_seed
from slackwater.console import tables
from slackwater.console.options import Json, Url
from slackwater.console.outcome import print_json, reported
from slackwater.console.program import group
from slackwater.console.tables import Row
from slackwater.console.where import credentials, resolve
from slackwater.schemas.permissions import SERVICES, buckets_of

if TYPE_CHECKING:
    from slackwater.common.bus.nats import NatsBus

app = group("Keep a bus of your own servers: users, disks, backups.")

CONFIG = "users.conf"
_FORMER = ".former"

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Keeps their secrets.")]
Names = Annotated[
    list[str],
    typer.Argument(
        metavar="USER",
        help="Names: SERVICE-ID, operator, operator-NAME or tenant-NAME.",
    ),
]


@app.command()
def users(
    folder: Folder,
    names: Names,
    rotate: Annotated[
        bool, typer.Option(help="Make new seeds; the former ones are let in until --retire.")
    ] = False,
    retire: Annotated[bool, typer.Option(help="Let the former seeds in no longer.")] = False,
    json: Json = False,
) -> None:
    """Make an nkey for each user who has none, and the block of a nats-server's configuration that
    lets exactly these users do exactly what is theirs.

    FOLDER/USER.nk holds the seed: hand it to that user alone (`nkey` in [credentials], --nkey). The
    servers need FOLDER/users.conf, which holds no secret: `include` it.
    """
    with reported():
        if rotate and retire:
            raise Rejected("--rotate and --retire: give one; first all users take the new seeds")
        own_folder(folder, CONFIG)
        found = [_user(folder, name, rotate, retire) for name in dict.fromkeys(names)]
        text = authorization([each for user in found for each in user])
        path = folder / CONFIG
        changed = not path.exists() or path.read_text() != text
        if changed:
            write_private(path, text)
    rows = [(user[0].name, user[0].nkey, "yes" if len(user) > 1 else "") for user in found]
    if json:
        told = [dict(zip(("user", "nkey", "former"), row, strict=True)) for row in rows]
        print_json({"changed": changed, "users": told})
    else:
        heads = ("USER", "NKEY", "FORMER TOO")
        tables.show(tables.lines(heads, [Row(row) for row in rows], None))


def _user(folder: Path, name: str, rotate: bool, retire: bool) -> list[BusUser]:
    """Return the user by its key, and by the former one while that counts."""
    try:
        BusUser(name).grants()
    except ValueError as error:
        raise ConfigRejected(str(error)) from error
    path, former = folder / f"{name}.nk", folder / f"{name}{_FORMER}.nk"
    if rotate and path.exists() and not former.exists():
        path.replace(former)
    if retire:
        former.unlink(missing_ok=True)
    if not path.exists():
        write_private(path, new_seed() + "\n")
    return [BusUser.of_seed(name, each) for each in (path, former) if each.exists()]


@app.command()
def watch(
    server: Annotated[str, typer.Argument(help="The server's name.")],
    store_dir: Annotated[Path, typer.Option(help="The folder of JetStream, on the disk to watch.")],
    pid_file: Annotated[Path, typer.Option(help="The file where the server writes its pid.")],
    page: Annotated[
        str, typer.Option(help="The address of the pages that the server shows of itself.")
    ] = "http://127.0.0.1:8222",
    url: Url = None,
) -> None:
    """Say on the bus how much room its disk has, and what the server cannot write; end the server,
    which the service manager starts anew, once the disk takes writes again."""
    with reported():
        asyncio.run(_watch(server, store_dir, pid_file, page, resolve(url)))


async def _watch(server: str, store_dir: Path, pid_file: Path, page: str, url: str) -> None:
    from slackwater.common.bus.disk_watch import DiskWatch
    from slackwater.common.bus.nats import NatsBus
    from slackwater.common.shell.notify import SdNotify

    def restart() -> None:
        with suppress(OSError, ValueError):
            os.kill(int(pid_file.read_text()), signal.SIGTERM)

    notify = SdNotify.from_environment()
    bus = await NatsBus.connect(url, f"bus-{server}", credentials=credentials())
    try:
        notify.ready("watching")
        await DiskWatch(server, store_dir, page, bus, LiveClock(), restart).run()
    finally:
        await bus.close()


@app.command()
def backup(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder that is not there.")],
    url: Url = None,
    json: Json = False,
) -> None:
    """Save all that the bus keeps, each stream in a folder of its own, while services go on.

    The files are those of `nats account backup`. Programs of jobs and secrets in their environment
    are among them: the folder is readable by you alone.
    """
    with reported():
        if folder.exists():
            raise Rejected(f"{folder} exists: name a new folder")
        saved = asyncio.run(_backup(folder, resolve(url)))
    if json:
        print_json({"folder": str(folder), "streams": saved})
        return
    rows = [Row((stream, f"{nbytes:,}")) for stream, nbytes in saved.items()]
    tables.show(tables.lines(("STREAM", "BYTES"), rows, None))


async def _backup(folder: Path, url: str) -> dict[str, int]:
    from slackwater.common.bus.nats import NatsBus
    from slackwater.common.store import snapshots

    bus = await NatsBus.connect(url, "operator", credentials=credentials())
    draft = folder.with_name(f"{folder.name}.incomplete")
    try:
        shutil.rmtree(draft, ignore_errors=True)  # Left by an attempt that was cut short.
        private_folder(draft)
        saved = {
            stream: await snapshots.back_up(bus, stream, draft)
            for stream in await snapshots.streams(bus)
        }
        draft.rename(folder)
        return saved
    finally:
        await bus.close()


@app.command()
def restore(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The folder that `backup` made.")
    ],
    replace: Annotated[
        bool, typer.Option("--replace", help="Remove what the bus keeps now, first.")
    ] = False,
    replicas: Annotated[
        int | None,
        typer.Option(min=1, max=5, metavar="N", help="Keep it on so many servers; else as it was."),
    ] = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Restore what `backup` saved to a bus that no service uses at the moment.

    Stop the services first and start them afterwards: they go on with what was saved. Jobs that
    began since are unknown to it; workers end their processes.
    """
    with reported():
        saved = sorted(path.parent for path in folder.glob("*/backup.json"))
        if not saved:
            raise Rejected(f"{folder} has nothing that `slackwater bus backup` saved")
        restored = asyncio.run(_restore(saved, replace, replicas, resolve(url)))
    if json:
        print_json({"streams": restored})
        return
    rows = [Row((stream, f"{messages:,}")) for stream, messages in restored.items()]
    tables.show(tables.lines(("STREAM", "MESSAGES"), rows, None))


async def _restore(
    saved: list[Path], replace: bool, replicas: int | None, url: str
) -> dict[str, int]:
    from slackwater.common.bus.nats import NatsBus
    from slackwater.common.store import snapshots

    bus = await NatsBus.connect(url, "operator", credentials=credentials())
    try:
        for path in saved:
            await asyncio.to_thread(snapshots.check, path)
        await _refuse_where_used(bus)
        there = await snapshots.streams(bus)
        if there and not replace:
            raise Rejected(
                f"the bus keeps {len(there)} streams ({there[0]} is one): --replace removes them"
            )
        for stream in there:
            await snapshots.remove(bus, stream)
        restored = {
            path.name: (await snapshots.restore(bus, path, replicas=replicas)).state["messages"]
            for path in saved
        }
        buckets = [path.name.removeprefix("KV_") for path in saved if path.name.startswith("KV_")]
        await _accepted(bus, [each for each in buckets if _is_own(each)])
        return restored
    finally:
        await bus.close()


@app.command()
def accept(
    buckets: Annotated[
        list[str], typer.Argument(metavar="BUCKET", help="Buckets, as the refusal names them.")
    ],
    url: Url = None,
    json: Json = False,
) -> None:
    """Let services go on with buckets as they are, though the bus has lost records of them.

    A service that finds records missing does not start, and says which. What they were about is
    forgotten then: jobs have to be submitted again, and their processes are ended. Restore a backup
    instead, if there is one. The bus gets new files for what is left. Stop masters, controllers and
    slabds first.
    """
    with reported():
        found = asyncio.run(_accept(list(dict.fromkeys(buckets)), resolve(url)))
    if json:
        print_json({"buckets": found})
        return
    rows = [Row((bucket, f"{count:,}")) for bucket, count in found.items()]
    tables.show(tables.lines(("BUCKET", "RECORDS"), rows, None))


async def _accept(buckets: list[str], url: str) -> dict[str, int]:
    from slackwater.common.bus.nats import NatsBus
    from slackwater.common.store.rebuilding import rebuild

    for bucket in buckets:
        if not _is_own(bucket):
            raise Rejected(f"bucket {bucket!r} is not one that a service writes alone")
    bus = await NatsBus.connect(url, "operator", credentials=credentials())
    try:
        await _refuse_where_used(bus, ("master", "controller", "slabd"))
        for bucket in buckets:
            await rebuild(bus, bucket)
        return await _accepted(bus, buckets)
    finally:
        await bus.close()


async def _accepted(bus: "NatsBus", buckets: list[str]) -> dict[str, int]:
    from slackwater.common.store.accepted import accept
    from slackwater.common.store.nats import NatsStore

    store, at_s = NatsStore(bus), LiveClock().now_s()
    by = f"{getpass.getuser()} on {socket.gethostname()}"
    return {bucket: (await accept(store, bucket, by, at_s)).count for bucket in buckets}


def _is_own(bucket: str) -> bool:
    """Say whether a bucket has one service that writes it."""
    _, _, id = bucket.partition("_")
    return any(bucket in buckets_of(service, id or "x") for service in SERVICES)


async def _refuse_where_used(bus: "NatsBus", services: Sequence[str] = SERVICES) -> None:
    for service in services:
        try:
            await bus.call(f"$SRV.PING.{service}", b"", timeout_s=2.0)
        except NobodyThere:
            continue
        raise Rejected(
            f"a {service} service runs on this bus: stop all services first "
            "(systemctl stop slackwater.target on each machine)"
        )

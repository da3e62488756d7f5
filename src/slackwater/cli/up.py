"""`slackwater up`: a cluster on this machine, for as long as the command runs."""

import asyncio
import signal
from pathlib import Path
from typing import Annotated, Final

import typer

from slackwater.cli import where
from slackwater.cli.options import Json
from slackwater.cli.outcome import err, out, print_json, reported
from slackwater.cli.sizes import size_bytes
from slackwater.common.bus.access import address_file, shown
from slackwater.common.embedded import ClusterOptions, EmbeddedCluster, Supervisor
from slackwater.common.errors import SlackwaterError
from slackwater.common.private_files import write_private

LOG_KEPT_BYTES: Final = 256 * 1024
"""The end of a failed unit's log, where the logs go with the cluster."""


def up(
    controllers: Annotated[int, typer.Option(min=1, help="Aggregator clusters.")] = 2,
    aggregators: Annotated[int, typer.Option(min=1, help="Warm aggregators in the pool.")] = 10,
    cpu_share: Annotated[
        float,
        typer.Option(
            help="Cores of one aggregator. Less than 1 emulates slower ones, and shrinks until all "
            "of them together take half of the machine."
        ),
    ] = 1.0,
    memory: Annotated[
        str | None,
        typer.Option(
            help="What all aggregators together may hold, e.g. 8G; by default half of the machine."
        ),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            help="How jobs share aggregators: edf (deadlines), cyclic (the paper's), static (own "
            "servers) or an installed policy's name."
        ),
    ] = "edf",
    lenders: Annotated[int, typer.Option(min=0, help="Lenders of idle memory (slabd).")] = 0,
    slab_size: Annotated[str, typer.Option(help="Of the lenders, e.g. 64M.")] = "1G",
    lend: Annotated[str, typer.Option(help="What each lender may lend at most.")] = "4G",
    state_dir: Annotated[
        Path | None, typer.Option(help="Keep records and logs here (else they go at the end).")
    ] = None,
    json: Json = False,
) -> None:
    """Keep a cluster running on this machine until Ctrl-C."""
    with reported():
        options = ClusterOptions(
            controllers=controllers,
            aggregators=aggregators,
            cpu_share=cpu_share,
            memory_bytes=size_bytes(memory, "--memory") if memory is not None else 0,
            policy=policy,
            lenders=lenders,
            slabd={
                "slab_bytes": size_bytes(slab_size, "--slab-size"),
                "lend_bytes_max": size_bytes(lend, "--lend"),
            },
            state_dir=state_dir,
            log_dir=state_dir / "logs" if state_dir is not None else None,
        )
        asyncio.run(keep(options, json))


async def keep(options: ClusterOptions, json: bool) -> None:
    """Until a signal, or until a part of the cluster is gone for good: then its reason is
    raised."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # The last: its terminal went.
        loop.add_signal_handler(number, stop.set)
    async with EmbeddedCluster(options) as cluster:
        with where.remembered(cluster.url) as other:
            _announce(cluster, other, json)
            supervisor = cluster.supervisor
            waits = [asyncio.ensure_future(e.wait()) for e in (stop, supervisor.failed)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        if supervisor.failure is not None and not stop.is_set():
            raise _failure(supervisor, supervisor.failure, options.log_dir)


def _announce(cluster: EmbeddedCluster, other: str, json: bool) -> None:
    url, logs = shown(cluster.url), str(cluster.supervisor.run_dir)
    address = str(cluster.supervisor.address_file if other else address_file())
    if other:
        err.print(
            f"commands find the cluster of process {other}; for this one: "
            f'export SLACKWATER_URL="$(cat {address})"',
            markup=False,
        )
    if json:
        print_json({"url": url, "address_file": address, "run_dir": logs})
        return
    out.print(f"cluster at [bold]{url}[/bold], logs in {logs}", soft_wrap=True)
    out.print(f"its address with the bus's token: {address}", soft_wrap=True)
    out.print("try: slackwater top | tap | submit --id j1 --model vgg19")


def _failure(
    supervisor: Supervisor, error: SlackwaterError, log_dir: Path | None
) -> SlackwaterError:
    """The reason of the end, with a log that is still there after it."""
    log = supervisor.failed_log
    assert log is not None
    kept = (log_dir or address_file().parent) / log.name
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_KEPT_BYTES))
            write_private(kept, file.read().decode(errors="replace"))
    except OSError as trouble:  # A full disk, for instance, which may be why it failed.
        return type(error)(f"the cluster ends: {error}; its log cannot be kept: {trouble}")
    return type(error)(f"the cluster ends: {error}; its log: {kept}")

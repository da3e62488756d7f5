"""What changes a cluster: starting one, submitting and cancelling jobs; and what a host can do."""

import asyncio
import signal
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from slackwater.cli import where
from slackwater.cli.outcome import DATA_ERROR, err, out, print_json, reported
from slackwater.cli.show import Json, Url, with_client
from slackwater.common.errors import Rejected
from slackwater.loadgen.replay.workload import COMPUTE_S, emulated
from slackwater.schemas.jobs import JobSpec


def up(
    controllers: Annotated[int, typer.Option(min=1, help="Aggregator clusters.")] = 2,
    aggregators: Annotated[int, typer.Option(min=1, help="Warm aggregators in the pool.")] = 10,
    cpu_share: Annotated[
        float, typer.Option(help="Cores that one aggregator may keep busy; shrinks to fit.")
    ] = 0.1,
    policy: Annotated[str, typer.Option(help="cyclic or static.")] = "cyclic",
    state_dir: Annotated[
        Path | None, typer.Option(help="Keep records and logs here (else they go at the end).")
    ] = None,
    json: Json = False,
) -> None:
    """Keep a cluster running on this machine until Ctrl-C."""
    from slackwater.common.embedded import ClusterOptions, EmbeddedCluster

    options = ClusterOptions(
        controllers=controllers,
        aggregators=aggregators,
        cpu_share=cpu_share,
        policy=policy,
        state_dir=state_dir,
    )

    async def keep() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        async with EmbeddedCluster(options) as cluster:
            where.remember(cluster.url)
            logs = str(cluster.supervisor.run_dir)
            try:
                if json:
                    print_json({"url": cluster.url, "run_dir": logs})
                else:
                    out.print(f"cluster at [bold]{cluster.url}[/bold], logs in {logs}")
                    out.print("try: slackwater top | tap | submit --id j1 --model vgg19")
                await stop.wait()
            finally:
                where.forget(cluster.url)

    with reported():
        asyncio.run(keep())


def submit(
    id: Annotated[str, typer.Option(help="The job's id; submitting it again changes nothing.")],
    model: Annotated[str | None, typer.Option(help="An emulated network, e.g. vgg19.")] = None,
    file: Annotated[Path | None, typer.Option(help="A JobSpec as JSON instead.")] = None,
    workers: Annotated[int, typer.Option(min=1, max=64)] = 2,
    servers: Annotated[int, typer.Option(min=1, max=64)] = 2,
    iterations: Annotated[int, typer.Option(min=1)] = 100,
    compute_s: Annotated[
        float | None, typer.Option(help="Seconds of computing per iteration.")
    ] = None,
    bytes_scale: Annotated[float, typer.Option(help="Share of the real tensors' sizes.")] = 0.2,
    seed: int = 0,
    url: Url = None,
    json: Json = False,
) -> None:
    """Submit a job; returns once it is stored."""
    with reported():
        if file is not None:
            try:
                spec = msgspec.json.decode(file.read_bytes(), type=JobSpec)
            except msgspec.MsgspecError as error:
                raise Rejected(f"{file}: {error}") from error
        elif model is not None:
            spec = emulated(
                id,
                model,
                workers=workers,
                servers=servers,
                iterations=iterations,
                compute_s=compute_s if compute_s is not None else COMPUTE_S.get(model, 1.0),
                bytes_scale=bytes_scale,
                seed=seed,
            )
        else:
            raise Rejected("nothing to submit: give --model NAME or --file SPEC.json")
    with_client(url, lambda client: client.submit(spec))
    if json:
        print_json(spec)
    else:
        out.print(f"job {spec.id} is stored")


def cancel(id: str, url: Url = None, json: Json = False) -> None:
    """Cancel a job: its processes end, its tensors are dropped."""
    with_client(url, lambda client: client.cancel(id))
    if json:
        print_json({"job": id, "cancelled": True})
    else:
        out.print(f"job {id} is cancelled")


def doctor(json: Json = False) -> None:
    """Say what this host can do: transports, descriptors, memory, the bus server."""
    from slackwater.common.transport.negotiate import probe

    found = probe()
    if json:
        print_json(found)
        return
    table = Table()
    for column in ("transport", "here", "why"):
        table.add_column(column)
    for item in found:
        table.add_row(item.kind, "yes" if item.usable else "no", item.why)
    out.print(table)
    if not any(item.usable for item in found):
        err.print("no transport works on this host")
        raise typer.Exit(DATA_ERROR)

"""What is going on: jobs, aggregators, a live overview, the messages on the bus."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from slackwater.cli.options import Json as Json
from slackwater.cli.options import Url as Url
from slackwater.cli.outcome import out, print_json, reported
from slackwater.cli.where import credentials, resolve
from slackwater.common.bus.base import Delivery
from slackwater.common.client import Client, connect
from slackwater.schemas.cluster import AggregatorInfo
from slackwater.schemas.jobs import JobRecord, JobSpec, JobState, TenantInfo

T = TypeVar("T")
REFRESH_S = 1.0


def with_client(url: str | None, work: Callable[[Client], Awaitable[T]]) -> T:
    """Run `work` on a connected client; expected errors become one line and an exit code."""

    async def connected() -> T:
        async with connect(resolve(url), "slackwater-cli", identity) as client:
            return await work(client)

    identity = credentials()
    with reported():
        return asyncio.run(connected())


def mode(spec: JobSpec) -> str:
    """When its updates are applied."""
    if spec.consistency == "stale-synchronous":
        return f"stale by {spec.staleness}"
    return spec.consistency


def job_table(records: tuple[JobRecord, ...], reasons: bool = True) -> Table:
    table = Table()
    for column in ("job", "model", "state", "node", "cluster", "shape", "mode", "iterations"):
        table.add_column(column)
    if reasons:
        table.add_column("reason")
    for record in records:
        spec = record.spec
        row = [
            spec.id, spec.model or "-", record.state, record.node or "-", record.cluster or "-",
            f"{spec.servers}s-{spec.workers}w", mode(spec), str(spec.iterations),
        ]  # fmt: skip
        table.add_row(*map(escape, [*row, record.reason] if reasons else row))
    return table


def aggregator_table(infos: tuple[AggregatorInfo, ...]) -> Table:
    table = Table()
    for column in ("aggregator", "cluster", "alive", "share", "jobs", "buckets", "held", "moved"):
        table.add_column(column)
    for info in infos:
        beat = info.heartbeat
        row = [info.record.id, info.record.cluster or "free", "yes" if info.alive else "NO"]
        if beat is not None:
            row += [
                f"{beat.cpu_share:.2f}", str(beat.jobs), str(beat.buckets),
                f"{beat.held_bytes / 1e6:,.0f} MB",
                f"{(beat.bytes_in + beat.bytes_out) / 1e6:,.0f} MB",
            ]  # fmt: skip
        table.add_row(*row)
    return table


def jobs(
    state: Annotated[
        str | None, typer.Option(help="pending, running, completed, failed or cancelled.")
    ] = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """List jobs."""
    wanted = None
    if state is not None:
        try:
            wanted = msgspec.convert(state, JobState)
        except msgspec.ValidationError as error:
            choices = ", ".join(get_args(JobState))
            raise typer.BadParameter(f"--state {state!r}: choose one of {choices}") from error
    records = with_client(url, lambda client: client.jobs(wanted))
    if json:
        print_json(records)
    else:
        out.print(job_table(records))


def job(id: str, url: Url = None, json: Json = False) -> None:
    """Show one job: its record, and why it waits or failed."""
    record = with_client(url, lambda client: client.job(id))
    if json:
        print_json(record)
        return
    out.print(job_table((record,), reasons=False))
    if record.reason:
        out.print(f"{record.state}: {record.reason}", markup=False, highlight=False, soft_wrap=True)
    for rank, result in sorted(record.results.items()):
        out.print(f"rank {rank}: {result or 'done, without a result'}", markup=False)


def aggregators(url: Url = None, json: Json = False) -> None:
    """List the pool of aggregators: who uses which."""
    infos = with_client(url, lambda client: client.aggregators())
    if json:
        print_json(infos)
    else:
        out.print(aggregator_table(infos))


def tenants(url: Url = None, json: Json = False) -> None:
    """List tenants: what each may have, what its jobs have now, and what they lose."""
    infos = with_client(url, lambda client: client.tenants())
    if json:
        print_json(infos)
        return
    table = Table()
    for column in (
        "tenant", "cores", "may have", "used", "aggregators", "loss", "limit", "beyond", "running",
        "waiting", "at most",
    ):  # fmt: skip
        table.add_column(column)
    for info in infos:
        limit = f"{info.loss_limit:g}" if info.loss_limit else "the cluster's"
        allowed = f"{info.cpu_fraction * info.pool_cpu:.2f}"
        table.add_row(
            escape(info.tenant) or "-", f"{info.cpu:.2f}", allowed, *_used(info), limit,
            str(info.beyond), str(info.running), str(info.waiting), str(info.queued_max),
        )  # fmt: skip
    out.print(table)


def _used(info: TenantInfo) -> tuple[str, str, str]:
    """Cores, aggregators, the worst loss; before the first window of iterations nobody knows."""
    if not info.measured:
        return "-", "-", "-"
    return f"{info.used_cpu:.2f}", f"{info.used_slots:.2f}", f"{max(0.0, info.loss):.1%}"


def top(
    url: Url = None,
    json: Json = False,
    once: Annotated[bool, typer.Option(help="Print once and end.")] = False,
) -> None:
    """Jobs and aggregators, refreshed every second."""

    async def snapshot(client: Client) -> tuple[tuple[JobRecord, ...], tuple[AggregatorInfo, ...]]:
        return await client.jobs(), await client.aggregators()

    def drawn(
        seen: tuple[tuple[JobRecord, ...], tuple[AggregatorInfo, ...]],
    ) -> RenderableType:
        return Group(job_table(seen[0]), aggregator_table(seen[1]))

    async def refresh(client: Client) -> None:
        with Live(console=out, screen=out.is_terminal) as live:
            while True:
                live.update(drawn(await snapshot(client)))
                await asyncio.sleep(REFRESH_S)

    if json:
        seen = with_client(url, snapshot)
        print_json({"jobs": seen[0], "aggregators": seen[1]})
    elif once or not out.is_terminal:
        out.print(drawn(with_client(url, snapshot)))
    else:
        with_client(url, refresh)


def tap(
    subject: Annotated[str, typer.Argument(help="A subject or pattern.")] = "sw.v1.evt.>",
    url: Url = None,
    json: Json = False,
    count: Annotated[int, typer.Option(min=0, help="End after so many messages (0: never).")] = 0,
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
            _print_delivery(delivery, json)

    with_client(url, listen)


def _print_delivery(delivery: Delivery, json: bool) -> None:
    kind: Literal["json", "msgpack"] = "json" if delivery.json else "msgpack"
    try:
        decoder: Any = msgspec.json if kind == "json" else msgspec.msgpack
        body = decoder.decode(delivery.payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        body = f"<{len(delivery.payload)} bytes that are no {kind}: {error}>"
    if json:
        print_json({"subject": delivery.subject, "message": body})
    else:
        text = msgspec.json.encode(body, enc_hook=repr).decode()
        out.print(f"[bold]{delivery.subject}[/bold] ", end="")
        out.print(text, markup=False, highlight=True, soft_wrap=True)

"""`slackwater aggregators` and `slackwater tenants`: who has which part of the pool."""

from typing import Final

from slackwater.cli.show import with_client
from slackwater.console import figures, tables
from slackwater.console.options import Json, Url
from slackwater.console.outcome import err, out, print_json
from slackwater.console.sizes import human
from slackwater.console.tables import Row
from slackwater.schemas.cluster import AggregatorHeartbeat, AggregatorInfo
from slackwater.schemas.tenants import TenantInfo

AGGREGATOR_HEADS: Final = (
    "AGGREGATOR", "STATE", "CLUSTER", "NODE", "SHARE", "JOBS", "BUCKETS", "HELD", "MOVED",
    "LINK",
)  # fmt: skip
TENANT_HEADS: Final = (
    "TENANT", "CORES", "USED", "BUSY", "LOSS", "LIMIT", "BEYOND", "RUNNING", "WAITING",
)  # fmt: skip


def aggregators(url: Url = None, json: Json = False) -> None:
    """List the pool of aggregators: who uses which.

    STATE: free, serving, profiling (a new job alone), lost (not heard),
    or, by `slackwater drain`, draining, late or drained.
    SHARE: cores that its tasks may take together.
    HELD: the memory of its buckets.
    MOVED: bytes that went in and out since it was started.
    LINK: the load of its machine's link, by whomever, of its budget.
    """
    infos = with_client(url, lambda client: client.aggregators())
    if json:
        print_json(infos)
    elif not infos:
        err.print("There are no aggregators; `slackwater run aggregator` adds one.", markup=False)
    else:
        tables.show(aggregator_table(infos, out.width if out.is_terminal else None))


def aggregator_table(infos: tuple[AggregatorInfo, ...], width: int | None) -> list[str]:
    ordered = sorted(infos, key=lambda info: tables.natural(info.record.id))
    return tables.lines(AGGREGATOR_HEADS, [_aggregator(info) for info in ordered], width)


def aggregator_state(info: AggregatorInfo) -> str:
    if not info.alive:
        return "lost"
    if info.drain:
        return info.drain
    if info.record.cluster is None:
        return "free"
    return "profiling" if info.record.temporary_for else "serving"


def _aggregator(info: AggregatorInfo) -> Row:
    beat = info.heartbeat
    known = [""] * 7
    if beat is not None:
        moved_bytes = beat.bytes_in + beat.bytes_out
        known = [
            beat.node, f"{beat.cpu_share:.2f}", str(beat.jobs), str(beat.buckets),
            figures.megabytes(beat.held_bytes), figures.megabytes(moved_bytes), _link(beat),
        ]  # fmt: skip
    return Row((info.record.id, aggregator_state(info), info.record.cluster or "", *known))


def _link(beat: AggregatorHeartbeat) -> str:
    """Say how busy its machine's link is; empty: what it can carry is not known."""
    budget = beat.network_budget_bytes_s
    return f"{beat.network_load_bytes_s / budget:.0%} of {human(budget)}/s" if budget else ""


def tenants(url: Url = None, json: Json = False) -> None:
    """List tenants: what each may have, what its jobs have now, and what they lose.

    CORES: what its running jobs ask for, of what they may ask for.
    USED, BUSY: cores that their tasks took, aggregators kept busy.
    LOSS: of the job that lost most of its profiled speed.
    LIMIT, BEYOND: what each may lose, how many lost more.
    WAITING: jobs that wait, of those that may.
    """
    infos = with_client(url, lambda client: client.tenants())
    if json:
        print_json(infos)
    elif not infos:
        err.print("There are no tenants: no job runs or waits, and none has limits.", markup=False)
    else:
        tables.show(tenant_table(infos, out.width if out.is_terminal else None))


def tenant_table(infos: tuple[TenantInfo, ...], width: int | None) -> list[str]:
    ordered = sorted(infos, key=lambda info: tables.natural(info.tenant))
    return tables.lines(TENANT_HEADS, [_tenant(info) for info in ordered], width)


def _tenant(info: TenantInfo) -> Row:
    """Lay out a tenant's row. Before the first window of iterations use and loss are unknown."""
    used = ("", "", "")
    if info.measured:
        used = (f"{info.used_cpu:.2f}", f"{info.used_slots:.2f}", figures.loss(info.loss))
    cores = f"{info.cpu:.2f}/{info.cpu_fraction * info.pool_cpu:.2f}"
    limit = f"{info.loss_limit:.3g}" if info.loss_limit else "cluster"
    waiting = f"{info.waiting}/{info.queued_max}"
    return Row((info.tenant, cores, *used, limit, str(info.beyond), str(info.running), waiting))

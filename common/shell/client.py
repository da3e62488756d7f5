"""A typed client of the control plane, for people's tools: the command line, loadgen, the Agent.

One call is one request; Retryable failures are tried again within a budget; `Refused` becomes an
exception named by what the caller does next.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Self, TypeVar

import msgspec

from slackwater.common.base import codec, limits
from slackwater.common.base.clock import Clock
from slackwater.common.base.errors import NobodyThere, Rejected, Retryable
from slackwater.common.base.retry import retry
from slackwater.common.bus.access import Credentials
from slackwater.common.bus.base import Bus
from slackwater.common.bus.identity import tenant_of
from slackwater.common.shell.world import World, live_world
from slackwater.common.store.history import History
from slackwater.common.store.objects import Objects
from slackwater.schemas import cluster, jobs, subjects, tenants
from slackwater.schemas.base import AggregatorId, JobId, Message, Ok, Refused
from slackwater.schemas.checkpoints import CheckpointJob, CheckpointProgress
from slackwater.schemas.job_requests import (
    CancelJob,
    DeleteJob,
    GetJob,
    JobAccepted,
    JobInfo,
    JobList,
    ListJobs,
    PauseJob,
    RerunJob,
    ResumeJob,
    ScaleJob,
    SubmitJob,
)
from slackwater.schemas.job_states import STATE_SAID, TERMINAL_STATES, JobState
from slackwater.schemas.permissions import OF_TENANTS
from slackwater.schemas.progress import JobProgress
from slackwater.schemas.tenants import TenantInfo
from slackwater.schemas.usage import GetUsage, UsageList, UsageRow

M = TypeVar("M", bound=Message)
T = TypeVar("T")


class Client:
    """Requests on a connected bus. Raises Rejected (the request is at fault) or Retryable."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        budget_s: float = limits.REQUEST_TIMEOUT_S,
        rng: Random | None = None,
        history: History | None = None,
        objects: Objects | None = None,
        tenant: str = "",
    ) -> None:
        """Talks to a cluster's master. `rng` draws the waits between attempts: give the world's.
        `history` is needed only to read kept facts, `objects` only to store code. `tenant`: the one
        that this user of the bus is held to; empty: none."""
        self.tenant = tenant
        self.bus = bus
        self.clock = clock
        self._history = history
        self._objects = objects
        self._budget_s = budget_s
        self._rng = rng or Random()

    @classmethod
    async def of(cls, world: World) -> Self:
        """Make the client of a connected user, held to the tenant that the bus tells."""
        return cls(
            world.bus,
            world.clock,
            rng=world.rng,
            history=world.history,
            objects=world.objects,
            tenant=await tenant_of(world.bus),
        )

    def patient(self, budget_s: float = limits.RETRY_BUDGET_S) -> Self:
        """Return the same user's client that tries for longer."""
        return type(self)(
            self.bus, self.clock, budget_s, self._rng, self._history, self._objects, self.tenant
        )

    async def ask(
        self, subject: str, message: Message, answer: type[M], *, again: bool = True
    ) -> M:
        """Send a command. Not `again`: its answer takes long on purpose (Bus.request)."""
        payload = codec.encode(message)

        async def once() -> M:
            raw = await self.bus.request(
                subject, payload, timeout_s=limits.REQUEST_TIMEOUT_S, again=again
            )
            reply: M | Refused = codec.decode(raw, answer | Refused)
            if isinstance(reply, Refused):
                if reply.retry_after_s > 0:
                    raise Retryable(reply.reason, reply.retry_after_s)
                rejected = Rejected(reply.reason)
                rejected.status = reply.status
                raise rejected
            return reply

        return await self._retried(once)

    @property
    def history(self) -> History:
        assert self._history is not None, "this client was made without a history"
        return self._history

    @property
    def objects(self) -> Objects:
        assert self._objects is not None, "this client was made without an object store"
        return self._objects

    async def flush(self) -> None:
        """Return once the server knows the subscriptions made so far."""
        await self._retried(self.bus.flush)

    async def _retried(self, call: Callable[[], Awaitable[T]]) -> T:
        return await retry(call, budget_s=self._budget_s, rng=self._rng, clock=self.clock)

    def subject(self, service: str, id: str, verb: str) -> str:
        """Return the subject under which this user asks for a verb."""
        if self.tenant and verb in OF_TENANTS.get(service, ()):
            return subjects.owned(self.tenant, service, id, verb)
        return subjects.command(service, id, verb)

    async def master(self, verb: str, message: Message, answer: type[M]) -> M:
        subject = self.subject("master", subjects.MASTER, verb)
        try:
            return await self.ask(subject, message, answer)
        except NobodyThere as error:
            raise NobodyThere(
                f"no master answers ({error}): start one with `slackwater run master`, or a whole "
                "cluster with `slackwater up`; a standby takes over within 10 s"
            ) from error

    async def submit(self, spec: jobs.JobSpec) -> jobs.JobRecord | None:
        """Submit a job, and return once it is stored: the record of one that was there already,
        else None. Idempotent by the job's id."""
        return (await self.master("submit", SubmitJob(spec=spec), JobAccepted)).known

    async def cancel(self, job: str) -> None:
        await self.master("cancel", CancelJob(job=job), Ok)

    async def rerun(self, job: str, run: int) -> jobs.JobRecord:
        """Run a job that ended again; `run` is one more than its record's. Idempotent by it."""
        return (await self.master("rerun", RerunJob(job=job, run=run), JobInfo)).job

    async def run_again(self, job: str) -> jobs.JobRecord:
        """Run a job that ended once more, as it was submitted."""
        return await self.rerun(job, (await self.job(job)).run + 1)

    async def delete(self, job: str) -> None:
        """Forget a job that ended."""
        await self.master("delete", DeleteJob(job=job), Ok)

    async def pause(self, job: str, waiting: bool = False) -> jobs.JobRecord:
        """Keep a job from running. `waiting`: refuse it for one that runs."""
        message = PauseJob(job=job, waiting=waiting)
        return (await self.master("pause", message, JobInfo)).job

    async def resume(self, job: str) -> jobs.JobRecord:
        """Let policies start a paused job again."""
        return (await self.master("resume", ResumeJob(job=job), JobInfo)).job

    async def scale(self, job: str, workers: int) -> jobs.JobRecord:
        """Give a job another number of workers."""
        return (await self.master("scale", ScaleJob(job=job, workers=workers), JobInfo)).job

    async def checkpoint(self, job: str, request: str, folder: str) -> CheckpointProgress:
        """Save what aggregators keep of the job in a folder that they see; the same `request` again
        tells how far it is."""
        record = await self.job(job)
        if record.cluster is None or record.state in TERMINAL_STATES:
            ended = record.state in TERMINAL_STATES
            why = f"it {STATE_SAID[record.state]}" if ended else "its program has no Agent yet"
            raise Rejected(f"job {job} has no parameters in aggregators: {why}")
        subject = subjects.command("controller", record.cluster, "checkpoint")
        message = CheckpointJob(job=job, request=request, folder=folder)
        return await self.ask(subject, message, CheckpointProgress)

    async def job(self, job: str) -> jobs.JobRecord:
        return (await self.job_info(job)).job

    async def job_info(self, job: str) -> JobInfo:
        """Return the job's record, and how far it is."""
        return await self.master("get", GetJob(job=job), JobInfo)

    async def job_page(
        self,
        state: JobState | None = None,
        tenant: str | None = None,
        offset: int = 0,
        whole: bool = False,
    ) -> JobList:
        """List jobs, active ones first, with how far they are; at most LIST_JOBS_MAX. `whole`: with
        their programs and results."""
        message = ListJobs(state=state, tenant=tenant, offset=offset, order="active", whole=whole)
        return await self.master("list", message, JobList)

    async def all_jobs(self) -> tuple[dict[str, jobs.JobRecord], dict[JobId, JobProgress]]:
        """Read every page of the list: briefly each job, by id, and how far it is. Active jobs
        come first, in an order that may change between two pages."""
        records: dict[str, jobs.JobRecord] = {}
        progress: dict[JobId, JobProgress] = {}
        offset, total = 0, 1
        while offset < total:
            page = await self.job_page(offset=offset)
            total, offset = page.total, offset + max(1, len(page.jobs))
            records |= {each.spec.id: each for each in page.jobs}
            progress |= page.progress
        return records, progress

    async def jobs(self, state: JobState | None = None) -> tuple[jobs.JobRecord, ...]:
        return (await self.master("list", ListJobs(state=state), JobList)).jobs

    async def drain(self, aggregator: str, request: str, within_s: float) -> cluster.DrainProgress:
        """Empty it within so long; the same `request` again tells how far it is."""
        subject = subjects.command("controller", await self._cluster_of(aggregator), "empty")
        message = cluster.DrainAggregator(request=request, aggregator=aggregator, within_s=within_s)
        return await self.ask(subject, message, cluster.DrainProgress)

    async def restore(self, aggregator: str) -> bool:
        """Cancel the order to empty it. Return whether there was one: none if it serves no
        cluster."""
        cluster_id = await self._cluster_served(aggregator)
        if cluster_id is None:
            return False
        subject = subjects.command("controller", cluster_id, "restore")
        message = cluster.RestoreAggregator(aggregator=aggregator)
        return (await self.ask(subject, message, Ok)).changed

    async def lost(self, aggregator: str) -> None:
        """Tell the aggregator's controller that it will not come back, so that no job waits for
        it."""
        subject = subjects.command("controller", await self._cluster_of(aggregator), "lost")
        await self.ask(subject, cluster.AggregatorLost(aggregator=AggregatorId(aggregator)), Ok)

    async def _cluster_of(self, aggregator: str) -> str:
        served = await self._cluster_served(aggregator)
        if served is None:
            raise Rejected(f"aggregator {aggregator} serves no cluster: it is empty")
        return served

    async def _cluster_served(self, aggregator: str) -> str | None:
        for info in await self.aggregators():
            if info.record.id == aggregator:
                return info.record.cluster
        raise Rejected(f"there is no aggregator {aggregator}: `slackwater aggregators` lists them")

    async def tenants(self) -> tuple[TenantInfo, ...]:
        return (await self.master("tenants", tenants.ListTenants(), tenants.TenantList)).tenants

    async def usage(self, asked: GetUsage) -> tuple[UsageRow, ...]:
        """List what tenants or jobs used, page by page."""
        found: list[UsageRow] = []
        while True:
            message = msgspec.structs.replace(asked, offset=len(found))
            page = await self.master("usage", message, UsageList)
            found += page.rows
            if not page.rows or len(found) >= page.total:
                return tuple(found)

    async def nodes(self) -> tuple[cluster.NodeInfo, ...]:
        """List the worker nodes, page by page."""
        found: list[cluster.NodeInfo] = []
        while True:
            message = cluster.ListNodes(offset=len(found))
            page = await self.master("nodes", message, cluster.NodeList)
            found += page.nodes
            if not page.nodes or len(found) >= page.total:
                return tuple(found)

    async def aggregators(self) -> tuple[cluster.AggregatorInfo, ...]:
        reply = await self.master("aggregators", cluster.ListAggregators(), cluster.AggregatorList)
        return reply.aggregators


@asynccontextmanager
async def connect(
    url: str, name: str = "client", credentials: Credentials | None = None
) -> AsyncIterator[Client]:
    """Raises Unavailable, naming the URL, when nobody listens there, ConfigRejected when whoever
    listens there will not have us."""
    async with live_world(url, name, credentials=credentials) as world:
        yield await Client.of(world)

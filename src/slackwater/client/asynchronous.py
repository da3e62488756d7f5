"""The asyncio client: what the command line does, for programs.

async with AsyncClient.connect() as client:
    await client.submit(JobSpec(id="a", program=("python", "train.py"), workers=2))
    async for line in client.logs("a", follow=True):
        print(line.rank, line.text)
    (ended,) = await client.wait("a")
"""

import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Self

import msgspec

from slackwater.client import contexts, happened, logs, packs, reports, waits
from slackwater.client.address import address
from slackwater.client.happened import Told
from slackwater.client.reports import JobReport
from slackwater.client.waits import Waited, Wanted
from slackwater.common.base import limits
from slackwater.common.base.errors import Rejected
from slackwater.common.bus.access import Credentials, Identity
from slackwater.common.shell import client as control
from slackwater.common.shell.world import live_world
from slackwater.common.store import code_packs
from slackwater.schemas.jobs import JobRecord, JobSpec


class LogLine(msgspec.Struct, frozen=True):
    """A line that a rank printed on a node, without its line feed."""

    rank: int
    node: str
    text: str


class AsyncClient(control.Client):
    """Submits, watches and steers jobs of one cluster.

    Methods raise Rejected where a request is at fault, Retryable (Unavailable among them) where it
    may succeed later, both of `slackwater.common.base.errors`.
    """

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        url: str = "",
        *,
        cluster: str = "",
        credentials: Credentials | None = None,
        name: str = "client",
    ) -> AsyncIterator[Self]:
        """Connect to the cluster at `url`, or the one that `slackwater up --name CLUSTER` started
        here, else to the one that the command line would choose. `credentials`: else those of the
        NATS CLI's variables, else of the context in use.

        Raises Unavailable where no cluster is known or nobody listens, ConfigRejected where it
        refuses these credentials.
        """
        environment = os.environ
        context = None if url or cluster else contexts.chosen("", environment)
        identity = Identity.from_environment(environment)
        if context is not None:
            url = context.url
            identity = context.identity if identity == Identity() else identity
        who = credentials or identity
        found = address(url, cluster, environment)
        async with live_world(found, name, credentials=who) as world:
            yield await cls.of(world)

    async def submit(self, spec: JobSpec, *, workdir: str | Path | None = None) -> JobRecord | None:
        """Submit a job, and return once it is stored: the record of one that was there already,
        else None. Idempotent by the job's id. `workdir`: a folder of code that goes to the nodes
        with it."""
        if workdir is not None:
            if not spec.program:
                raise Rejected(f"workdir {workdir}: job {spec.id} runs no program")
            pack = code_packs.pack(Path(workdir))
            await packs.store(self, packs.Sent(pack))
            spec = msgspec.structs.replace(spec, code=pack.digest)
        return await super().submit(spec)

    async def wait(
        self, *jobs: str, wanted: Wanted = "ended", timeout_s: float = 0.0
    ) -> list[Waited]:
        """Wait until all jobs have reached a state, one never can, or the time is over (0: no
        limit). Return what became of each."""
        return await waits.until(self, jobs, wanted, timeout_s)

    async def logs(
        self,
        job: str,
        *,
        ranks: Iterable[int] | None = None,
        tail: int = -1,
        follow: bool = False,
    ) -> AsyncGenerator[LogLine, None]:
        """Yield lines that the job's ranks printed (None: all of them), `tail` of each at most (-1:
        all). `follow`: as they come, until the job has ended. A rank whose machine does not answer
        raises Unavailable after what can be read."""
        record = await logs.started(self, job, follow)
        wanted = list(logs.ranks_of(record) if ranks is None else ranks)
        source = logs.printed(self, record, wanted, tail, follow, by_line=True)
        async with aclosing(source) as said:
            async for each in said:
                text = each.data.decode(errors="replace").rstrip("\r")
                yield LogLine(each.rank, each.node, text)

    async def events(
        self,
        job: str = "",
        *,
        since_s: float = 0.0,
        limit: int = limits.FACTS_SHOWN_MAX,
        follow: bool = False,
        routine: bool = False,
    ) -> AsyncGenerator[Told, None]:
        """Yield the newest facts that are kept of a job, or of everything, the oldest first, each
        with its sentence (`Told.text`). `since_s`: seconds since 1970. `follow`: and then those
        that come. Raises NothingKept where none are kept."""
        past = await happened.recent(self, job, limit, since_s, routine=routine)
        for each in past:
            yield each
        if not follow:
            return
        after = past[-1].kept.sequence if past else 0
        async with aclosing(happened.told(self, job, since_s, after, follow=True)) as facts:
            async for each in facts:
                if routine or not each.routine:
                    yield each

    async def report(self, job: str) -> JobReport:
        """Return what became of a job so far: times, places, speed, use, and what befell it."""
        return await reports.read(self, job)

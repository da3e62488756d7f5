"""The same client for programs without asyncio: scripts, notebooks, tests.

with Client() as client:
    client.submit(JobSpec(id="a", program=("python", "train.py"), workers=2))
    for line in client.logs("a", follow=True):
        print(line.rank, line.text)
    (ended,) = client.wait("a")
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from slackwater.client.asynchronous import AsyncClient, LogLine
from slackwater.client.happened import Told
from slackwater.client.reports import JobReport
from slackwater.client.waits import Waited, Wanted
from slackwater.common.base import limits
from slackwater.common.base.errors import Rejected
from slackwater.common.bus.access import Credentials
from slackwater.schemas.cluster import AggregatorInfo, NodeInfo
from slackwater.schemas.job_requests import JobInfo
from slackwater.schemas.job_states import JobState
from slackwater.schemas.jobs import JobRecord, JobSpec
from slackwater.schemas.tenants import TenantInfo
from slackwater.schemas.usage import GetUsage, UsageRow

T = TypeVar("T")


async def _cancelled() -> None:
    """Cancel what is left on the loop, and wait for it: an attempt to connect, for instance."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


class _End:
    """Takes the place of the next value where there is none."""


class Client:
    """An `AsyncClient` on an event loop in a thread of its own; threads may share it.

    Its methods are those of `AsyncClient`, with the same arguments, answers and errors; `close`, or
    the end of a `with` block, disconnects it.
    """

    def __init__(
        self,
        url: str = "",
        *,
        cluster: str = "",
        credentials: Credentials | None = None,
        name: str = "client",
    ) -> None:
        """Connect, as `AsyncClient.connect` does, with the same errors."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self._stack = AsyncExitStack()
        self._open = True

        async def connect() -> AsyncClient:
            connecting = AsyncClient.connect(
                url, cluster=cluster, credentials=credentials, name=name
            )
            return await self._stack.enter_async_context(connecting)

        try:
            self._client = self._run(connect())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Disconnect. Idempotent."""
        if not self._open:
            return
        try:
            self._run(self._stack.aclose())
        finally:
            self._run(_cancelled())
            self._open = False
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def submit(self, spec: JobSpec, *, workdir: str | Path | None = None) -> JobRecord | None:
        return self._run(self._client.submit(spec, workdir=workdir))

    def wait(self, *jobs: str, wanted: Wanted = "ended", timeout_s: float = 0.0) -> list[Waited]:
        return self._run(self._client.wait(*jobs, wanted=wanted, timeout_s=timeout_s))

    def logs(
        self,
        job: str,
        *,
        ranks: Iterable[int] | None = None,
        tail: int = -1,
        follow: bool = False,
    ) -> Iterator[LogLine]:
        return self._each(self._client.logs(job, ranks=ranks, tail=tail, follow=follow))

    def events(
        self,
        job: str = "",
        *,
        since_s: float = 0.0,
        limit: int = limits.FACTS_SHOWN_MAX,
        follow: bool = False,
        routine: bool = False,
    ) -> Iterator[Told]:
        facts = self._client.events(
            job, since_s=since_s, limit=limit, follow=follow, routine=routine
        )
        return self._each(facts)

    def report(self, job: str) -> JobReport:
        return self._run(self._client.report(job))

    def job(self, job: str) -> JobInfo:
        """Return the job's record, and how far it is."""
        return self._run(self._client.job_info(job))

    def jobs(self, state: JobState | None = None) -> tuple[JobRecord, ...]:
        return self._run(self._client.jobs(state))

    def cancel(self, job: str) -> None:
        self._run(self._client.cancel(job))

    def pause(self, job: str) -> JobRecord:
        return self._run(self._client.pause(job))

    def resume(self, job: str) -> JobRecord:
        return self._run(self._client.resume(job))

    def scale(self, job: str, workers: int) -> JobRecord:
        return self._run(self._client.scale(job, workers))

    def rerun(self, job: str) -> JobRecord:
        """Run a job that ended once more, as it was submitted."""
        return self._run(self._client.run_again(job))

    def delete(self, job: str) -> None:
        self._run(self._client.delete(job))

    def nodes(self) -> tuple[NodeInfo, ...]:
        return self._run(self._client.nodes())

    def aggregators(self) -> tuple[AggregatorInfo, ...]:
        return self._run(self._client.aggregators())

    def tenants(self) -> tuple[TenantInfo, ...]:
        return self._run(self._client.tenants())

    def usage(self, asked: GetUsage | None = None) -> tuple[UsageRow, ...]:
        return self._run(self._client.usage(asked or GetUsage()))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it on the loop, and wait; an interrupt cancels it."""
        if not self._open:
            work.close()
            raise Rejected("the client is closed: make another one")
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _each(self, source: AsyncGenerator[T, None]) -> Iterator[T]:
        async def following() -> T | _End:
            return await anext(source, _End())

        try:
            while not isinstance(found := self._run(following()), _End):
                yield found
        finally:
            if self._open:
                self._run(source.aclose())

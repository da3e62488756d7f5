"""More submissions than a master can take: each has an answer, taken or refused with a time to come
again, and afterwards all is as before.
"""

import asyncio
import multiprocessing
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Final

import psutil

from slackwater.common.base import codec
from slackwater.common.base.errors import Retryable
from slackwater.common.bus.nats import NatsBus
from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.shell.client import connect
from slackwater.schemas import subjects
from slackwater.schemas.base import Refused
from slackwater.schemas.job_requests import JobAccepted, SubmitJob
from slackwater.schemas.jobs import JobSpec

SENDERS: Final = 2
IN_FLIGHT: Final = 64
ANSWER_S: Final = 60.0
"""A request without an answer for so long has none."""
PROBE_S: Final = 3.0
SUBJECT: Final = subjects.command("master", subjects.MASTER, "submit")


@dataclass
class Told:
    """`capacity`: submissions a second that are answered where 64 are in flight; `offered`: so many
    were sent a second."""

    capacity: float = 0.0
    offered: float = 0.0
    answers: Counter[str] = field(default_factory=Counter)
    resident_bytes: tuple[int, int] = (0, 0)
    after_s: float = 0.0
    """Seconds that a submission takes afterwards."""
    wrong: list[str] = field(default_factory=list)


async def _ask(bus: NatsBus, id: str) -> str:
    spec = JobSpec(id=id, tenant=id[-2:])
    request = codec.encode(SubmitJob(spec=spec))
    try:
        raw = await bus.request(SUBJECT, request, timeout_s=ANSWER_S)
    except Retryable as error:
        return f"unanswered: {type(error).__name__}"
    answer = codec.decode(raw, JobAccepted | Refused)
    if isinstance(answer, JobAccepted):
        return "taken"
    return "refused with a time" if answer.retry_after_s > 0 else f"refused: {answer.reason}"


async def _probe(bus: NatsBus, seconds: float) -> float:
    """Return answers a second."""
    answered, until_s = 0, time.monotonic() + seconds

    async def one(lane: int) -> None:
        nonlocal answered
        while time.monotonic() < until_s:
            await _ask(bus, f"probe-{lane}-{answered}")
            answered += 1

    await asyncio.gather(*map(one, range(IN_FLIGHT)))
    return answered / seconds


def _send(url: str, name: str, rate: float, seconds: float) -> tuple[int, Counter[str]]:
    """Send at that rate, whatever is answered; return how many were sent, and the answers."""

    async def main() -> tuple[int, Counter[str]]:
        answers: Counter[str] = Counter()
        open_: set[asyncio.Task[str]] = set()
        bus = await NatsBus.connect(url, name)
        began_s, sent = time.monotonic(), 0
        while (passed_s := time.monotonic() - began_s) < seconds:
            while sent < passed_s * rate:
                sent += 1
                task = asyncio.ensure_future(_ask(bus, f"{name}-{sent:06}"))
                open_.add(task)
                task.add_done_callback(lambda done: answers.update([done.result()]))
                task.add_done_callback(open_.discard)
            await asyncio.sleep(0.002)
        while open_:
            await asyncio.wait(set(open_))
        await bus.close()
        return sent, answers

    return asyncio.run(main())


async def overload(seconds: float, times: float) -> Told:
    """Offer `times` what a master answers for so many seconds."""
    told, loop = Told(), asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        options = ClusterOptions(controllers=1, aggregators=1)
        cluster = await stack.enter_async_context(EmbeddedCluster(options))
        client = await stack.enter_async_context(connect(cluster.url, "overload"))
        assert isinstance(client.bus, NatsBus)
        told.capacity = await _probe(client.bus, PROBE_S)
        (pid,) = (unit.pid for unit in cluster.supervisor.status() if unit.name == "master-m1")
        process = psutil.Process(pid)
        before = process.memory_info().rss
        rate = told.capacity * times / SENDERS
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(SENDERS, context) as pool:
            sent = await asyncio.gather(
                *(
                    loop.run_in_executor(pool, _send, cluster.url, f"s{n}", rate, seconds)
                    for n in range(SENDERS)
                )
            )
        told.resident_bytes = before, process.memory_info().rss
        for count, answers in sent:
            told.offered += count / seconds
            told.answers += answers
        told.wrong += [
            f"{count} x {what}"
            for what, count in told.answers.items()
            if what not in ("taken", "refused with a time")
        ]
        await asyncio.sleep(1.0)
        began_s = time.monotonic()
        await client.submit(JobSpec(id="after"))
        told.after_s = time.monotonic() - began_s
        restarts = {unit.name: unit.restarts for unit in cluster.supervisor.status()}
        told.wrong += [f"{name} began {n + 1} times" for name, n in restarts.items() if n]
    return told


def lines(told: Told) -> list[str]:
    """Return the report as a person reads it."""
    before, after = (each / 2**20 for each in told.resident_bytes)
    return [
        f"{told.capacity:,.0f} submissions a second are answered with {IN_FLIGHT} in flight; "
        f"{told.offered:,.0f} a second were offered",
        *(f"{count:10,} {what}" for what, count in told.answers.most_common()),
        f"the master's memory: {before:.0f} MB before, {after:.0f} MB after; a submission then "
        f"takes {told.after_s * 1e3:.0f} ms",
        *(f"WRONG: {each}" for each in told.wrong),
        f"{len(told.wrong)} anomalies",
    ]

"""Watch a cluster for the dashboard: its lists, the facts that it keeps, heartbeats of lenders.

Everything goes onto one board. What cannot be read is said there, and read again.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final

import structlog

from slackwater.client import AsyncClient, happened
from slackwater.common.base import codec
from slackwater.common.base.errors import DecodeRejected, Rejected, Retryable
from slackwater.common.bus.base import Delivery
from slackwater.common.domains.facts.lives import Life, Lives
from slackwater.schemas import subjects
from slackwater.schemas.base import JobId
from slackwater.schemas.job_states import TERMINAL_STATES
from slackwater.schemas.memory import DeviceHeartbeat, SlabdHeartbeat
from slackwater.schemas.scheduling import GetPolicy, PolicyInfo
from slackwater.schemas.usage import DAY_S, GetUsage
from slackwater.web import rows
from slackwater.web.board import Board

WHOLE_S: Final = 60.0
"""Seconds between two readings of all ended jobs."""
SLOW_S: Final = 10.0
"""Seconds between two readings of tenants and use."""
FLUSH_S: Final = 0.5
SILENT_S: Final = 30.0
"""Seconds after which a lender or device that is not heard leaves the page."""
EVENTS_MAX: Final = 2_000
EVENTS_OF_JOB_MAX: Final = 200
USE_DAYS: Final = 30
BUSY_PART: Final = 0.1
"""Part of the time that reading the lists may take."""

_log = structlog.get_logger("web")


class Watch:
    """Keeps a board up to date with a cluster."""

    def __init__(self, client: AsyncClient, every_s: float = 1.0) -> None:
        """Read the lists of jobs, nodes and aggregators each `every_s`, or less often where that
        takes long."""
        self.board = Board()
        self.lives = Lives()
        self.client = client
        self._every_s = every_s
        self._changed = asyncio.Event()
        self._events: deque[str] = deque()
        self._of_job: dict[str, deque[rows.Row]] = {}
        self._moved: set[str] = set()
        self._heard_s: dict[tuple[str, str], float] = {}
        self._sequence = 0

    async def run(self) -> None:
        """Watch until it is cancelled."""
        heard = (("slabd", self._lender), ("device", self._device))
        for service, hear in heard if not self.client.tenant else ():  # Tenants hear jobs alone.
            await self.client.bus.subscribe(subjects.telemetries(service, what="heartbeat"), hear)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._each("jobs", self._jobs, self._every_s))
            group.create_task(self._each("pools", self._pools, self._every_s))
            group.create_task(self._each("tenants", self._tenants, SLOW_S))
            group.create_task(self._facts())
            group.create_task(self._flush())

    async def changed(self, version: int, within_s: float) -> bool:
        """Wait until the board has a newer version. Return whether it has."""
        try:
            async with asyncio.timeout(within_s):
                while self.board.version <= version:
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def events_of(self, job: str) -> list[rows.Row]:
        """Return the newest facts about the job, the oldest first."""
        return list(self._of_job.get(job, ()))

    def life_of(self, job: str) -> Life | None:
        return self.lives.jobs.get(job)

    def _tell(self) -> None:
        """Wake those who wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _each(self, what: str, read: Callable[[], Awaitable[None]], every_s: float) -> None:
        clock = self.client.clock
        while True:
            began_s = clock.now_s()
            try:
                await read()
                self.board.remove("problems", what)
            except (Retryable, Rejected) as error:
                _log.warning("web.unread", what=what, reason=str(error))
                self.board.put("problems", what, {"text": str(error), "since_s": self._since(what)})
            self._tell()
            took_s = clock.now_s() - began_s
            await asyncio.sleep(max(every_s, took_s / BUSY_PART - took_s))

    def _since(self, what: str) -> float:
        known = self.board.get("problems", what)
        return self.client.clock.now_s() if known is None else float(known["since_s"])

    # Lists ----------------------------------------------------------------------------------------

    async def _jobs(self) -> None:
        """Read the pages of jobs that do not end, and those that ended since; now and then all."""
        now_s = self.client.clock.now_s()
        whole = now_s - self._heard_s.get(("list", "jobs"), 0.0) > WHOLE_S
        found: dict[str, rows.Row] = {}
        offset, total = 0, 1
        while offset < total:
            page = await self.client.job_page(offset=offset)
            total, offset = page.total, offset + max(1, len(page.jobs))
            known = True
            for record in page.jobs:
                id, progress = record.spec.id, page.progress.get(JobId(record.spec.id))
                row = found[id] = rows.job(record, progress)
                known = known and record.state in TERMINAL_STATES
                known = known and self.board.get("jobs", id) == row
                self.board.put("jobs", id, row)
                self.board.put("going", id, rows.going(progress))
            self.board.put("counts", "jobs", {k: v for k, v in page.counts.items() if v})
            if known and not whole:
                return
        for kind in ("jobs", "going"):
            for id in self.board.kind(kind).keys() - found.keys():
                self.board.remove(kind, id)
        self._heard_s["list", "jobs"] = now_s

    async def _pools(self) -> None:
        client, board = self.client, self.board
        nodes = await client.nodes()
        board.replace("nodes", {each.heartbeat.node: rows.node(each) for each in nodes})
        info = await client.master("policy", GetPolicy(), PolicyInfo)
        board.put("pools", "gpus", rows.policy(info))
        if not client.tenant:
            found = await client.aggregators()
            before = board.kind("aggregators")
            board.replace(
                "aggregators",
                {each.record.id: rows.aggregator(each, before.get(each.record.id))
                 for each in found},
            )  # fmt: skip
        now_s = client.clock.now_s()
        for (kind, id), heard_s in list(self._heard_s.items()):
            if kind in ("lenders", "devices") and now_s - heard_s > SILENT_S:
                board.remove(kind, id)
                del self._heard_s[kind, id]

    async def _tenants(self) -> None:
        client = self.client
        since_day = int(client.clock.now_s() // DAY_S) - USE_DAYS
        used = {row.tenant: row.sums for row in await client.usage(GetUsage(since_day=since_day))}
        infos = {} if client.tenant else {each.tenant: each for each in await client.tenants()}
        self.board.replace(
            "tenants",
            {name: rows.tenant(infos.get(name), used.get(name)) for name in {*used, *infos}},
        )

    # Facts and heartbeats -------------------------------------------------------------------------

    async def _facts(self) -> None:
        """Follow the facts from the oldest that is kept, through whatever becomes of the bus."""
        while True:
            try:
                facts = happened.told(self.client, "", 0.0, self._sequence, follow=True)
                async with aclosing(facts) as told:
                    async for each in told:
                        self._take(each)
                        self.board.remove("problems", "facts")
            except (Retryable, Rejected) as error:
                known = {"text": str(error), "since_s": self._since("facts")}
                self.board.put("problems", "facts", known)
            await asyncio.sleep(SLOW_S)

    def _take(self, told: happened.Told) -> None:
        kept = told.kept
        self._sequence = kept.sequence
        about = str(getattr(told.fact, "job", ""))
        *_, noun, _, fact = kept.subject.split(".")
        row = rows.event(kept.at_s, told.text, noun, fact, about)
        if told.fact is not None and (job := self.lives.tell(told.fact, kept.at_s)) is not None:
            self._moved.add(job)
        if about:
            of_job = self._of_job.setdefault(about, deque(maxlen=EVENTS_OF_JOB_MAX))
            of_job.append(row)
        if row["fact"] == "deleted":
            self._of_job.pop(about, None)
            for kind in ("jobs", "going"):
                self.board.remove(kind, about)
        if told.routine:
            return
        id = str(kept.sequence)
        self.board.put("events", id, row)
        self._events.append(id)
        if len(self._events) > EVENTS_MAX:
            self.board.forget("events", self._events.popleft())

    async def _flush(self) -> None:
        """Put what facts changed onto the board, many at a time."""
        sequence = -1
        while True:
            await asyncio.sleep(FLUSH_S)
            if sequence == self._sequence:
                continue
            sequence, moved, self._moved = self._sequence, self._moved, set()
            for job in moved:
                if (life := self.lives.jobs.get(job)) is not None:
                    self.board.put("lives", job, rows.life(life))
            for job in self._of_job.keys() - self.lives.jobs.keys():
                self.board.remove("lives", job)
                del self._of_job[job]
            self.board.put("levels", "aggregators", levels(self.lives.used.points))
            for lender, points in self.lives.lent.items():
                self.board.put("lent", lender, levels(points.points))
            self._tell()

    async def _lender(self, delivery: Delivery) -> None:
        self._hear("lenders", delivery, SlabdHeartbeat, rows.lender)

    async def _device(self, delivery: Delivery) -> None:
        self._hear("devices", delivery, DeviceHeartbeat, rows.device)

    def _hear(self, kind: str, delivery: Delivery, of: Any, row: Callable[[Any], rows.Row]) -> None:
        try:
            beat = codec.decode(delivery.payload, of)
        except DecodeRejected as error:
            _log.warning("web.undecodable", subject=delivery.subject, reason=str(error))
            return
        self._heard_s[kind, beat.id] = self.client.clock.now_s()
        self.board.put(kind, beat.id, row(beat))


def levels(points: list[tuple[float, float]]) -> list[list[float | None]]:
    return [[rows.rounded(at_s), level] for at_s, level in points]

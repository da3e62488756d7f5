"""ReportThread: sends a job's reports of goodput, from a thread of its own.

Rank 0 of a job to which the cluster gave GPUs reports, every `report_s` and a little before the
cluster's next round (Qiao, thesis, section 3.4.1). Reports are measurements: while the bus is away
they are lost, and training goes on.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from typing import Final

import msgspec

from slackwater.agent.identity import way
from slackwater.agent.line import Line, connected
from slackwater.common.base import codec
from slackwater.common.base.errors import Rejected, Retryable
from slackwater.common.bus.access import Access, Credentials
from slackwater.common.bus.relay import Ticket
from slackwater.common.domains.models.pollux_agent import next_report_s
from slackwater.schemas import subjects
from slackwater.schemas.telemetry import GoodputReport

_log = logging.getLogger("slackwater.agent")
GPUS: Final = "SLACKWATER_GPUS"
REPORT_S: Final = 30.0
LEAD_S: Final = 2.0
"""Seconds before a multiple of the period at which a report leaves: rounds are at multiples."""
_CLOSE_S: Final = 5.0


def reports_to(
    job: str, rank: int, url: str | None = None, credentials: Credentials | None = None
) -> Access | Ticket | None:
    """Return the way to the bus, for rank 0 of a job that was given GPUs; None: nobody asks."""
    tells = job and rank == 0 and os.environ.get(GPUS)
    return way(job, url, credentials) if tells else None


def check_period(report_s: float) -> None:
    """Raise Rejected for a period that cannot be."""
    if not report_s > 0.0:
        raise Rejected(f"report_s is {report_s}; give seconds above 0, 30 for instance")


class ReportThread:
    """Calls `learn` every `report_s`, and once more at the end; sends what it returns. Without a
    way to the bus it only calls."""

    def __init__(
        self,
        job: str,
        rank: int,
        to: Access | Ticket | None,
        report_s: float,
        learn: Callable[[], GoodputReport | None],
    ) -> None:
        self._job, self._rank, self._way = job, rank, to
        self._report_s, self._report_of = report_s, learn
        self.reports = 0
        """Reports that were sent."""
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._live, name="slackwater-goodput", daemon=True)
        self._closing = asyncio.Event()
        self._ready = threading.Event()
        self._thread.start()
        self._ready.wait()

    def close(self) -> None:
        """Send the last report, and end. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(_CLOSE_S)
        self.check()

    def check(self) -> None:
        """Raise whatever ended the thread."""
        if self._failure is not None:
            raise self._failure

    # The thread -----------------------------------------------------------------------------------

    def _live(self) -> None:
        try:
            with asyncio.Runner() as runner:
                runner.run(self._main())
        except Exception as error:  # The program hears of it at its next call.
            self._failure = error
            _log.exception("the reporter of goodput ended")
        finally:
            self._ready.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready.set()
        while not self._closing.is_set():
            if self._way is None:
                await self._repeat(None)
                return
            try:
                async with connected(self._way, f"goodput-{self._job}") as line:
                    await self._repeat(line)
            except Retryable as error:
                _log.info("job %s: goodput is not reported: %s", self._job, error)
                await self._pause(self._report_s)

    async def _repeat(self, line: Line | None) -> None:
        """Until the program closes; then once more."""
        while not self._closing.is_set():
            await self._pause(self._wait_s(line))
            report = self._report_of()
            if line is not None and report is not None:
                await self._send(line, report)

    def _wait_s(self, line: Line | None) -> float:
        if line is None:
            return self._report_s
        lead_s = min(LEAD_S, self._report_s / 2)
        now_s = line.clock.now_s() + lead_s
        return next_report_s(now_s, self._report_s) - now_s

    async def _pause(self, wait_s: float) -> None:
        try:
            await asyncio.wait_for(self._closing.wait(), wait_s)
        except TimeoutError:
            return  # That long nothing was to be done.

    async def _send(self, line: Line, report: GoodputReport) -> None:
        report = msgspec.structs.replace(report, sender=f"agent.{self._job}.{self._rank}")
        try:
            subject = subjects.telemetry("job", self._job, "goodput")
            await line.bus.publish(subject, codec.encode(report))
            self.reports += 1
        except Retryable as error:
            _log.info("job %s: goodput is not reported: %s", self._job, error)

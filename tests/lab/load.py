"""Work that the lab's cluster has while parts of it fail: jobs that are submitted one after another
from another machine, and a record of what was acknowledged."""

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from tests.lab.lab import Lab

from slackwater.common.base.errors import Rejected, SlackwaterError
from slackwater.common.bus.access import Identity, Tls
from slackwater.common.shell.client import Client, connect
from slackwater.schemas.jobs import JobRecord, JobSpec

T = TypeVar("T")
EVERY_S: Final = 0.5
RETRY_S: Final = 0.2


@dataclass
class Load:
    """Submits from now on, every half second, by a client that tries again what fails."""

    lab: Lab
    acknowledged: dict[str, float] = field(default_factory=dict)
    """Job -> when the master said that it is stored, by this process's clock."""
    refusals: list[str] = field(default_factory=list)
    _completed: set[str] = field(default_factory=set)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _stop: threading.Event = field(default_factory=threading.Event)
    _paused: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "Load":
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._submitting = asyncio.run_coroutine_threadsafe(self._submit(), self._loop)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._submitting.result(60.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        self._loop.close()

    async def _submit(self) -> None:
        number, began = 0, f"{time.time_ns() // 10**9 % 10**6:06d}"
        while not self._stop.is_set():
            try:
                async with self._client() as client:
                    while not self._stop.is_set():
                        if self._paused.is_set():
                            await asyncio.sleep(RETRY_S)
                            continue
                        id = f"load-{began}-{number}"
                        await client.submit(JobSpec(id=id, program=("true",)))
                        self.acknowledged[id] = time.monotonic()
                        number += 1
                        await asyncio.sleep(EVERY_S)
            except Rejected as error:  # A slot is free soon, or it is a defect: `settled` says so.
                self.refusals.append(str(error))
                await asyncio.sleep(RETRY_S)
            except SlackwaterError as error:
                self.refusals.append(str(error))
                await asyncio.sleep(RETRY_S)

    def _client(self) -> Any:
        secrets = self.lab.secrets
        identity = Identity(
            nkey=str(secrets / "users/operator.nk"), tls=Tls(ca=str(secrets / "ca.pem"))
        )
        return connect(self.lab.url, "load", identity)

    def run(self, work: Callable[[Client], Coroutine[Any, Any, T]], within_s: float = 60.0) -> T:
        """Ask the cluster from outside, again while it does not answer.

        Raises:
            AssertionError: there was no answer within that time; the text is the last refusal.
        """

        async def asked() -> T:
            why, until_s = "nothing", time.monotonic() + within_s
            while time.monotonic() < until_s:
                try:
                    async with self._client() as client:
                        return await work(client)
                except SlackwaterError as error:
                    why = str(error)
                    await asyncio.sleep(RETRY_S)
            raise AssertionError(f"no answer within {within_s:g} s: {why}")

        return asyncio.run(asked())

    def accepts(self, within_s: float) -> float:
        """Wait until another job is acknowledged; return the seconds until then."""
        began_s = time.monotonic()
        while time.monotonic() < began_s + within_s:
            if any(at_s > began_s for at_s in list(self.acknowledged.values())):
                return time.monotonic() - began_s
            time.sleep(0.05)
        raise AssertionError(f"no job was accepted within {within_s:g} s: {self.refusals[-1:]}")

    def gap_s(self, since_s: float) -> float:
        """Return the longest time without an acknowledged job since then."""
        times = sorted(at_s for at_s in self.acknowledged.values() if at_s >= since_s)
        marks = [since_s, *times, time.monotonic()]
        return max(b - a for a, b in itertools.pairwise(marks))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Submit nothing meanwhile."""
        self._paused.set()
        time.sleep(2 * EVERY_S)
        try:
            yield
        finally:
            self._paused.clear()

    def records(self) -> dict[str, JobRecord]:
        return self.run(_all)

    def settled(self, within_s: float = 60.0) -> None:
        """Wait until all acknowledged jobs are known, and have completed. Those that have are not
        asked for again: a master forgets the oldest of more than 1,000 jobs that have ended.

        Raises:
            AssertionError: one is lost or failed, or does not end.
        """
        until_s = time.monotonic() + within_s
        while True:
            expected = [id for id in list(self.acknowledged) if id not in self._completed]
            records = self.records()
            lost = [id for id in expected if id not in records]
            failed = [
                id for id in expected
                if id in records and records[id].state in ("failed", "cancelled")
            ]  # fmt: skip
            for id in (*lost, *failed):
                del self.acknowledged[id]  # The next fault is not blamed for it.
            assert not lost, f"acknowledged and lost: {lost[:5]}, {len(lost)} of {len(expected)}"
            assert not failed, f"{failed[0]}: {records[failed[0]].reason}"
            slow = [id for id in expected if records[id].state != "completed"]
            self._completed |= set(expected) - set(slow)
            if len(slow) <= 4:  # They were submitted a moment ago.
                return
            if time.monotonic() > until_s:
                raise AssertionError(
                    f"{len(slow)} jobs have not ended: {slow[0]} is {records[slow[0]].state}, "
                    f"{records[slow[0]].reason}"
                )
            time.sleep(0.5)


async def _all(client: Client) -> dict[str, JobRecord]:
    records, _ = await client.all_jobs()
    return records

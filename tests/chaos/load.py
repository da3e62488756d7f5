"""Clients that submit, read and cancel jobs at a rate while parts of a cluster fail, and what each
was told.

Most jobs are by hand: nobody starts them, and they live until they are cancelled. Some have a
program that writes a line into a file of its job, so that each start of it is seen from outside.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.chaos.history import BY_HAND, PROGRAM, Call, Kind, Model, Outcome, open_call

from slackwater.common.base import limits
from slackwater.common.base.errors import Rejected, Retryable
from slackwater.common.shell.client import Client
from slackwater.schemas.job_states import JobState
from slackwater.schemas.jobs import JobSpec

LIFE_S: Final = (0.5, 8.0)
"""Seconds after which a job by hand is cancelled."""
READS: Final = 0.5
"""The share of jobs that are read now and then by other clients."""
TWICE: Final = 0.1
"""The share that two clients submit at the same time."""
SEEN: Final[dict[JobState, Outcome]] = {
    "completed": "completed", "cancelled": "cancelled", "failed": "failed",
}  # fmt: skip
"""States of jobs that ended; all others look alike to a client."""
CANCELS_MAX: Final = 10
"""Cancels of one job that are called one after another while none is answered."""
LATE_S: Final = 20.0
"""A call that has no answer after so long is left open."""


@dataclass
class Load:
    """`clients`: connections of their own. `rate`: submissions a second; `programs` of them have a
    program, which writes into `folder`."""

    clients: list[Client]
    rate: float
    programs: float
    folder: Path
    rng: random.Random
    calls: list[Call] = field(default_factory=list)
    models: dict[str, Model] = field(default_factory=dict)
    sent: int = 0
    unanswered: dict[str, int] = field(default_factory=dict)
    """Why calls had no answer -> how many."""
    wrong: list[str] = field(default_factory=list)
    """Refusals for good that no fault explains, and whatever else ended a job's life here."""
    taken: list[Call] = field(default_factory=list)
    """The submissions that were acknowledged, as the answers came."""
    _lives: set[asyncio.Task[None]] = field(default_factory=set)
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Submit until `end`, evenly, and return once each job's life is over."""
        began_s = time.monotonic()
        while not self._ended.is_set():
            due = int((time.monotonic() - began_s) * self.rate) - self.sent
            for _ in range(max(0, due)):
                self._begin()
            await asyncio.sleep(0.5 / self.rate)
        while self._lives:
            await asyncio.wait(set(self._lives))

    def end(self) -> None:
        self._ended.set()

    def _begin(self) -> None:
        self.sent += 1
        program = self.rng.random() < self.programs
        id = f"{'program' if program else 'hand'}-{self.sent}"
        self.models[id] = PROGRAM if program else BY_HAND
        life = asyncio.get_running_loop().create_task(self._life(id, program), name=id)
        self._lives.add(life)
        life.add_done_callback(self._over)

    def _over(self, life: asyncio.Task[None]) -> None:
        self._lives.discard(life)
        error = life.exception()
        if error is not None:
            self.wrong.append(f"{life.get_name()}: {error!r}")

    async def _life(self, id: str, program: bool) -> None:
        rng = random.Random(f"{id}/{self.rng.random()}")
        spec = JobSpec(id=id, workers=1, servers=1, program=self._program(id) if program else ())
        submits = [self._submit(spec, rng) for _ in range(2 if rng.random() < TWICE else 1)]
        others = [asyncio.ensure_future(self._read(id, rng))] if rng.random() < READS else []
        await asyncio.gather(*submits)
        if not program:
            await asyncio.sleep(rng.uniform(*LIFE_S))
            for _ in range(CANCELS_MAX):  # Without an answer nobody knows whether it lives.
                if await self._cancel(id, rng):
                    break
        await asyncio.gather(*others)

    def _program(self, id: str) -> tuple[str, ...]:
        return ("/bin/sh", "-c", f"echo $$ >> {self.folder / id}")

    async def _submit(self, spec: JobSpec, rng: random.Random) -> None:
        client = rng.choice(self.clients)

        async def submit() -> Outcome:
            return "fresh" if await client.submit(spec) is None else "known"

        await self._call("submit", spec.id, submit)

    async def _cancel(self, id: str, rng: random.Random) -> bool:
        """Say whether it was answered."""
        client = rng.choice(self.clients)

        async def cancel() -> Outcome:
            await client.cancel(id)
            return "done"

        return await self._call("cancel", id, cancel, missing="no-such")

    async def _read(self, id: str, rng: random.Random) -> None:
        for _ in range(3):
            await asyncio.sleep(rng.uniform(0.0, 2.0))
            client = rng.choice(self.clients)

            async def get(client: Client = client) -> Outcome:
                return SEEN.get((await client.job(id)).state, "live")

            await self._call("get", id, get, missing="absent")

    async def _call(
        self,
        kind: Kind,
        job: str,
        ask: Callable[[], Awaitable[Outcome]],
        missing: Outcome | None = None,
    ) -> bool:
        """Note what a call was told, and say whether it was answered. `missing`: the outcome where
        the job is unknown. Raises Rejected, which ends the job's life here, for any other refusal.
        """
        called_s = time.monotonic()
        try:
            async with asyncio.timeout(LATE_S):
                outcome = await ask()
        except Rejected as error:
            if missing is None or not str(error).startswith("there is no job"):
                raise
            outcome = missing
        except (Retryable, TimeoutError) as error:
            why = f"{kind}: {type(error).__name__}"
            self.unanswered[why] = self.unanswered.get(why, 0) + 1
            self.calls.append(open_call(kind, job, called_s))
            return False
        self.calls.append(Call(kind, job, called_s, time.monotonic(), outcome))
        if outcome in ("fresh", "known"):
            self.taken.append(self.calls[-1])
        return True

    def ran(self) -> dict[str, int]:
        """Count the lines that each program's file has: how often it was started."""
        return {
            path.name: len(path.read_text().splitlines()) for path in sorted(self.folder.iterdir())
        }


def patient(client: Client) -> Client:
    """Return the same client with the budget of one that waits for a cluster to come back."""
    return Client(client.bus, client.clock, budget_s=min(LATE_S, limits.RETRY_BUDGET_S))

"""Ask the worker service of the machine that a rank runs on, wherever the rank goes."""

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

from slackwater.common.base import codec, limits
from slackwater.common.base.errors import Retryable, SlackwaterError, Unavailable
from slackwater.common.bus.base import Delivery
from slackwater.common.shell.client import Client
from slackwater.schemas import subjects
from slackwater.schemas.base import Message, NodeId
from slackwater.schemas.cluster import WorkerHeartbeat
from slackwater.schemas.jobs import JobRecord
from slackwater.schemas.logs import LogPiece, ReadLog
from slackwater.services.master.gangs import node_of

M = TypeVar("M", bound=Message)
HEARD_S: Final = 2.5
"""Seconds to wait for a heartbeat, which worker services send every second."""
Note = Callable[[str], None]
"""Takes a sentence about what is missing, or is waited for."""


def unnoted(_: str) -> None:
    """Take a note and tell nobody."""


def place_of(record: JobRecord, rank: int) -> NodeId | None:
    """The node on which the rank runs or ran; where the record does not say, the job's first."""
    return node_of(record, rank) or record.node


class Worker:
    """Asks the worker service of a rank's machine about it."""

    def __init__(self, client: Client, record: JobRecord, rank: int, note: Note = unnoted) -> None:
        self._client, self._record, self._rank = client, record, rank
        self._note = note
        self.node: str = place_of(record, rank) or ""
        self._id = self.node
        """The service's id: most often the name of its node."""
        self._heard = False
        self._told = False

    async def moved(self) -> "Worker":
        """Return who is to be asked now: another service, where the rank went to another node."""
        try:
            now = await self._client.job(self._record.spec.id)
        except Retryable:
            return self
        node = node_of(now, self._rank)
        same = node is None or node == self.node
        return self if same else Worker(self._client, now, self._rank, self._note)

    async def piece(self, place: int | None, tail: int, patient: bool) -> LogPiece:
        """Ask for a piece. `patient`: wait for what will be printed, and for a service that is
        away. Raises Unavailable, Rejected."""
        wait_s = limits.LOG_WAIT_S if patient else 0.0
        asked = ReadLog(
            job=self._record.spec.id, rank=self._rank, offset=place, tail=max(tail, 0),
            wait_s=wait_s,
        )  # fmt: skip
        return await self.asked("log", asked, LogPiece, patient, again=not patient)

    async def asked(
        self, verb: str, message: Message, kind: type[M], patient: bool, again: bool = True
    ) -> M:
        """Ask the service; `patient`: until it answers; not `again`: its answer takes long on
        purpose. Raises Unavailable, Rejected."""
        while True:
            subject = self._client.subject("worker", self._id, verb)
            try:
                return await self._client.ask(subject, message, kind, again=again)
            except SlackwaterError as error:
                if not self._heard and await self._hear():
                    continue
                if not isinstance(error, Retryable):
                    raise
                if not patient:
                    raise self._away() from error
            if not self._told:
                self._told = True
                self._note(f"{self._away()}; waiting for it")

    def _away(self) -> Unavailable:
        return Unavailable(
            f"the worker service of node {self.node} does not answer: is the machine up? "
            f"The log is there, in jobs/{self._record.spec.id} of its state_dir"
        )

    async def _hear(self) -> bool:
        """Find out whether a service of another name beats for the node."""
        heard: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def beat(delivery: Delivery) -> None:
            found = codec.decode(delivery.payload, WorkerHeartbeat)
            if found.node == self.node and not heard.done():
                heard.set_result(found.id)

        pattern = subjects.telemetries("worker", what="heartbeat")
        try:
            subscription = await self._client.bus.subscribe(pattern, beat)
            async with asyncio.timeout(HEARD_S):
                found = await heard
            await subscription.unsubscribe()
        except (TimeoutError, Retryable):
            return False
        self._heard, changed = True, found != self._id
        self._id = found
        return changed

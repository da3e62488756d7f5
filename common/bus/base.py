"""The seam of the bus: NATS (`nats.py`) and in memory (`memory.py`) implement it.

Both pass one conformance suite. The bus moves bytes and may lose or repeat a message; nobody builds
on more. Payloads are encoded and decoded by `common.codec`, never here.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message as it came in. `json` is true where the sender wrote (and wants) JSON."""

    subject: str
    payload: bytes
    json: bool = False


Handler = Callable[[Delivery], Awaitable[None]]
Responder = Callable[[Delivery], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A verb that a service answers: registered with NATS micro, so that operators see it."""

    name: str
    subject: str
    respond: Responder
    metadata: Mapping[str, str]
    concurrency: int


@dataclass(frozen=True, slots=True)
class ServiceInfo:
    """What `nats micro ls` shows: name, instance id and facts about the instance."""

    name: str
    version: str
    description: str
    metadata: Mapping[str, str]


class Subscription(Protocol):
    async def unsubscribe(self) -> None: ...


class Bus(Protocol):
    """Raises Unavailable (no listener, no connection), DeadlineExceeded, Rejected (too large)."""

    @property
    def connected(self) -> bool: ...

    async def publish(self, subject: str, payload: bytes) -> None: ...

    async def request(
        self, subject: str, payload: bytes, *, timeout_s: float, json: bool = False
    ) -> bytes: ...

    async def subscribe(self, pattern: str, handler: Handler) -> Subscription:
        """Deliver in order, one at a time per subscription; when more than
        SUBSCRIPTION_PENDING_MAX wait, the oldest are dropped and counted."""
        ...

    async def serve(self, info: ServiceInfo, endpoints: list[Endpoint]) -> None:
        """Answer requests, each endpoint up to its concurrency at once; beyond it the request is
        answered with a `Refused` that says when to retry."""
        ...

    async def flush(self) -> None: ...

    async def close(self) -> None:
        """Stop intake, let handlers finish (within DRAIN_S), flush, disconnect."""
        ...

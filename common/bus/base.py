"""The seam of the bus: NATS (`nats.py`) and in memory (`memory.py`) implement it, and the relay
(`relay.py`) for programs of jobs, which only ask and tell.

All pass one conformance suite. The bus moves bytes and may lose or repeat a message; nobody builds
on more. Payloads are encoded and decoded by `common.codec`, never here.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from slackwater.common.base.histogram import LATENCY_S, Histogram


class Delivery(NamedTuple):
    """One message as it came in. `json` is true where the sender wrote (and wants) JSON, `trace` is
    the trace context that it came with (base/tracing.py)."""

    subject: str
    payload: bytes
    json: bool = False
    trace: str = ""


class Failed(NamedTuple):
    """An answer that says why the request was not done: for the requester `payload`, for operators'
    tools code and reason."""

    payload: bytes
    code: int
    reason: str


Handler = Callable[[Delivery], Awaitable[None]]
Answer = bytes | Failed
Responder = Callable[[Delivery], Answer | Awaitable[Answer]]
"""Returns a `Failed` or bytes directly where there is nothing to wait for, which costs no task."""


class EndpointFigures:
    """Counts what an endpoint did since the process began."""

    __slots__ = ("codes", "last_error", "requests", "took_s")

    def __init__(self) -> None:
        self.requests = 0
        self.codes: dict[int, int] = {}
        """Requests that were not done, by code."""
        self.last_error = ""
        self.took_s = Histogram(LATENCY_S)
        """Seconds from requests' arrival to their answers."""

    @property
    def errors(self) -> int:
        return sum(self.codes.values())

    def failed(self, failure: Failed) -> None:
        self.codes[failure.code] = self.codes.get(failure.code, 0) + 1
        self.last_error = f"{failure.code}:{failure.reason}"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A verb that a service answers: registered with NATS micro, so that operators see it."""

    name: str
    subject: str
    respond: Responder
    metadata: Mapping[str, str]
    concurrency: int
    of_tenants: str = ""
    """A second subject, for users who act for one tenant; empty: none."""
    figures: EndpointFigures = field(default_factory=EndpointFigures, compare=False)


@dataclass(frozen=True, slots=True)
class ServiceInfo:
    """The entry that `nats micro ls` shows: name, instance id and facts about the instance."""

    name: str
    version: str
    description: str
    metadata: Mapping[str, str]


@dataclass(slots=True)
class BusCounters:
    """Counts since the bus was connected."""

    published: int = 0
    received: int = 0
    requested: int = 0
    answered: int = 0
    overloaded: int = 0
    """Requests refused because their endpoint was full."""
    dropped: int = 0
    """Messages dropped because their subscriber was too slow, or answers without a connection."""
    failed: int = 0
    """Handlers that raised an error which is not ours."""
    errors: int = 0
    """Errors that the client library reported."""
    forbidden: int = 0
    """Subjects that the bus did not let this user publish or listen to."""
    reconnects: int = 0


class Subscription(Protocol):
    async def unsubscribe(self) -> None: ...


class Bus(Protocol):
    """Raises Unavailable (no listener, no connection), DeadlineExceeded, Rejected (too large)."""

    @property
    def connected(self) -> bool: ...

    @property
    def counters(self) -> BusCounters: ...

    async def publish(self, subject: str, payload: bytes) -> None: ...

    async def request(
        self,
        subject: str,
        payload: bytes,
        *,
        timeout_s: float,
        json: bool = False,
        again: bool = True,
    ) -> bytes:
        """Send it, wait for the answer, and send it again meanwhile (repeats.py), unless `again`
        says that its answer takes long on purpose."""
        ...

    async def subscribe(self, pattern: str, handler: Handler) -> Subscription:
        """Deliver in order, one at a time per subscription; when more than
        SUBSCRIPTION_PENDING_MAX wait, the oldest are dropped and counted."""
        ...

    async def serve(self, info: ServiceInfo, endpoints: list[Endpoint]) -> None:
        """Answer requests, each endpoint up to its concurrency at once; beyond it the request is
        answered with a `Refused` that says when to retry."""
        ...

    async def stop_serving(self) -> None:
        """Take no further requests, which other instances may take."""
        ...

    async def flush(self) -> None: ...

    async def close(self) -> None:
        """Stop intake, let handlers finish (within DRAIN_S), flush, disconnect. A request of this
        client that is under way ends with DeadlineExceeded."""
        ...

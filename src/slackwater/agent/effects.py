"""Actions of the Agent's core, which the session carries out."""

from dataclasses import dataclass

from slackwater.common.base.effects import Action
from slackwater.common.domains.slots.frames import Attach, PushRefused
from slackwater.schemas.base import AggregatorId
from slackwater.schemas.placement import Endpoint


@dataclass(frozen=True, slots=True)
class Connect(Action):
    """Open a channel at `at_s`; say connected() or connect_failed()."""

    endpoint: Endpoint
    at_s: float


@dataclass(frozen=True, slots=True)
class Locate(Action):
    """Ask the controller at `at_s`; say located(), or not_located()."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Reattach(Action):
    """Call reattach() at `at_s`."""

    aggregator: AggregatorId
    at_s: float


@dataclass(frozen=True, slots=True)
class Send(Action):
    """One control frame to an aggregator whose channel is open."""

    aggregator: AggregatorId
    frame: Attach


@dataclass(frozen=True, slots=True)
class MakeOffer(Action):
    """Say that this worker could fill the bare region with what it has; `wanted`: the version that
    the job's other buckets have, where it has no parameters."""

    aggregator: AggregatorId
    bucket: int
    handle: int
    version: int
    wanted: int = 0


@dataclass(frozen=True, slots=True)
class Ring(Action):
    """See that the slot holds the gradient and the pushed word says so, then ring."""

    aggregator: AggregatorId
    bucket: int
    handle: int
    iteration: int


@dataclass(frozen=True, slots=True)
class WriteSeed(Action):
    """Write this worker's parameters of `version` into the bare region, or only what it has of the
    optimiser's states, beside another's parameters; then send Seed."""

    aggregator: AggregatorId
    bucket: int
    handle: int
    version: int
    only_states: bool = False


@dataclass(frozen=True, slots=True)
class WriteSize(Action):
    """Write into the region how many workers count from version + 1 on, and let its aggregator look
    there."""

    aggregator: AggregatorId
    bucket: int
    handle: int
    version: int


@dataclass(frozen=True, slots=True)
class Deliver(Action):
    """The parameters of `version` are complete: bring them if need be, wake who waits."""

    bucket: int
    version: int


@dataclass(frozen=True, slots=True)
class Resume(Action):
    """First attachment: the bucket's next iteration is `iteration` + 1."""

    bucket: int
    iteration: int


@dataclass(frozen=True, slots=True)
class Refuse(Action):
    """This worker's push was refused: tell the program, which may push the iteration again."""

    bucket: int
    refused: PushRefused


@dataclass(frozen=True, slots=True)
class Fail(Action):
    """The job cannot go on: every wait raises Rejected with this reason."""

    reason: str


AgentAction = (
    Connect
    | Locate
    | Reattach
    | Send
    | MakeOffer
    | Ring
    | WriteSeed
    | WriteSize
    | Deliver
    | Resume
    | Refuse
    | Fail
)

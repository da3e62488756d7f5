"""Frames between the driver of an elastic program and its hosts, and the lines of the journal.

A frame may be followed by a payload, an executor's state, that is not part of it. Tasks and results
are the program's own, packed (common/base/packing.py).
"""

from typing import Annotated, Final

import msgspec

from slackwater.schemas.base import (
    WORKERS_MAX,
    Count,
    IdText,
    Message,
    Name,
    Positive,
    Rank,
    Record,
    Seconds,
    Secret,
    Text,
    Workers,
    cut_texts,
)

EXECUTORS_MAX: Final = 4096
"""Executors of one program."""
ORDERS_MAX: Final = 4096
"""Orders, or completions, of one frame."""
PACKED_BYTES_MAX: Final = 65_536
"""Bytes of a task, or of its result."""
FRAME_PACKED_BYTES: Final = 262_144
"""Bytes of tasks, or of results, that go into one frame; one more may be in it."""
OUT_MAX: Final = 65_536
"""Orders of a run that is written down as it stands."""
DRIVER_BYTES_MAX: Final = 16 * 1024**2
"""Bytes of a driver's state."""
Executor = Annotated[int, msgspec.Meta(ge=0, lt=EXECUTORS_MAX)]
Packed = Annotated[bytes, msgspec.Meta(max_length=PACKED_BYTES_MAX)]
Moves = Annotated[tuple[tuple[Executor, Count], ...], msgspec.Meta(max_length=EXECUTORS_MAX)]
RunId = Annotated[str, msgspec.Meta(max_length=64)]
"""Tells the run of a program from others under the same job."""
Numbers = Annotated[tuple[Count, ...], msgspec.Meta(max_length=4 * ORDERS_MAX)]


class Order(Record, kw_only=True, frozen=True):
    """A micro-task for an executor (Qiao 2021, section 4.3)."""

    number: Count
    executor: Executor
    version: Count
    """Completions that had been told when it was dispatched: their updates are in what it reads."""
    task: Packed


class Completion(Record, kw_only=True, frozen=True):
    order: Count
    result: Packed


Completions = Annotated[tuple[Completion, ...], msgspec.Meta(max_length=4 * ORDERS_MAX)]


# From hosts ---------------------------------------------------------------------------------------


class HostHello(Message, kw_only=True, frozen=True, tag="elastic.hello"):
    """The first frame of a host's process. Answered by HostWelcome, or Over and the end."""

    job: IdText
    rank: Rank
    secret: Secret
    release: Name
    program: Text
    """Its executors, tables and driver, in words: all hosts must run the same."""


class HostReady(Message, kw_only=True, frozen=True, tag="elastic.ready"):
    """Says what a host holds after a Welcome. Answered by what it lacks."""

    completions: Completions = ()
    """Its newest batch's."""
    number: Count = 0
    """That batch's number: all of its updates are applied."""
    orders: Numbers = ()
    """The orders that wait, or were run and are not told yet."""
    executors: Moves = ()
    """Its executors, each with the move by which it came."""
    parked: Moves = ()
    """Executors that it let go, and was not told to forget."""


class Told(Message, kw_only=True, frozen=True, tag="elastic.told"):
    """These tasks are complete, and every update of theirs is applied. Answered by Noted."""

    number: Positive
    completions: Completions
    computed_s: Seconds = 0.0
    """Seconds that they computed, without what they waited for tables; 0: not said."""


class ExecutorGiven(Message, kw_only=True, frozen=True, tag="elastic.given"):
    """The executor runs no more here; its state follows, if it has any. Answered by
    ForgetExecutor."""

    executor: Executor
    move: Count
    """The move by which it had come."""
    has_state: bool = False


class HostLeaving(Message, kw_only=True, frozen=True, tag="elastic.leaving"):
    """The host was asked to end. Answered by GiveExecutor for each of its own, then by Over."""


class TaskFailed(Message, kw_only=True, frozen=True, tag="elastic.failed"):
    """The program raised in a task, or while it loaded an executor."""

    executor: Executor
    reason: Text

    def __post_init__(self) -> None:
        cut_texts(self)


# From the driver ----------------------------------------------------------------------------------


class HostWelcome(Message, kw_only=True, frozen=True, tag="elastic.welcome"):
    run: RunId


class Orders(Message, kw_only=True, frozen=True, tag="elastic.orders"):
    orders: Annotated[tuple[Order, ...], msgspec.Meta(max_length=ORDERS_MAX)]


class Noted(Message, kw_only=True, frozen=True, tag="elastic.noted"):
    """The batch's completions are in the journal."""

    number: Count


class GiveExecutor(Message, kw_only=True, frozen=True, tag="elastic.give"):
    """Let the executor go once its task is done, and its updates are applied."""

    executor: Executor


class TakeExecutor(Message, kw_only=True, frozen=True, tag="elastic.take"):
    """Load the executor; its state follows, if it has any."""

    executor: Executor
    move: Positive
    """Counts the places that it had."""
    has_state: bool = False
    parked: Count = 0
    """The move by which the host has it loaded still, as it gave it back; 0: it does not."""


class ForgetExecutor(Message, kw_only=True, frozen=True, tag="elastic.forget"):
    """Drop the executor's state: it is not needed here any more."""

    executor: Executor


class Over(Message, kw_only=True, frozen=True, tag="elastic.over"):
    """The program has ended, or this host is not needed any more."""

    reason: Text = ""
    """Empty, unless something failed."""
    refused: bool = False
    """The host cannot take part in the run, which goes on."""

    def __post_init__(self) -> None:
        cut_texts(self)


FromHost = HostHello | HostReady | Told | ExecutorGiven | HostLeaving | TaskFailed
FromDriver = (
    HostWelcome | Orders | Noted | GiveExecutor | TakeExecutor | ForgetExecutor | Over
)  # fmt: skip


# The journal --------------------------------------------------------------------------------------


class RunBegun(Record, kw_only=True, frozen=True, tag="begun"):
    """The first line of a run."""

    run: RunId
    program: Text
    placement: Count = 0
    """The number under which the tables are placed: another one is another run of the job."""


class BatchTold(Record, kw_only=True, frozen=True, tag="told"):
    """A host's batch was heard of: its completions count, in this order."""

    rank: Rank
    number: Positive
    completions: Completions


class ExecutorPlaced(Record, kw_only=True, frozen=True, tag="placed"):
    """An executor's place; None: nowhere, it was given back."""

    executor: Executor
    move: Positive
    rank: Annotated[int, msgspec.Meta(ge=0, lt=WORKERS_MAX)] | None
    state: Count = 0
    """The move under which its state is kept beside the journal, as it was when it left its last
    place; 0: it has none."""


class RunStands(Record, kw_only=True, frozen=True, tag="stands"):
    """A run as it stands: the only line of a journal that was shortened, or its first."""

    run: RunId
    program: Text
    placement: Count
    version: Count
    next_order: Count
    moves: Count
    told: Annotated[tuple[tuple[Rank, Positive], ...], msgspec.Meta(max_length=WORKERS_MAX)]
    """The newest batch of each rank."""
    places: Annotated[tuple[ExecutorPlaced, ...], msgspec.Meta(max_length=EXECUTORS_MAX)]
    orders: Annotated[tuple[Order, ...], msgspec.Meta(max_length=OUT_MAX)]
    """Orders that are not complete."""
    driver: Annotated[bytes, msgspec.Meta(max_length=DRIVER_BYTES_MAX)]
    """The state of the program's driver, packed."""
    hosts_asked: Workers | None = None
    """Hosts that the driver asked for, if the master may not know that yet."""


class HostsUsed(Record, kw_only=True, frozen=True, tag="used"):
    """The master knows how many hosts the program's driver asked for last."""

    hosts: Workers


class RunEnded(Record, kw_only=True, frozen=True, tag="ended"):
    reason: Text = ""
    """Empty: the driver said that it is over."""

    def __post_init__(self) -> None:
        cut_texts(self)


Entry = RunBegun | RunStands | BatchTold | ExecutorPlaced | HostsUsed | RunEnded

"""The part that every message on the bus has in common, and the ids that messages use.

A message is a frozen msgspec struct, encoded as a msgpack map (any msgpack reader decodes it), or
as JSON where a person asks for it. Every message names its type (`t`), its schema version (`v`),
its sender and the sender's epoch: the fencing token that a receiver compares with the highest it
has seen. A person's request may leave sender and epoch out; only commands between services are
fenced.
"""

from typing import Annotated, Any, Final, NewType

import msgspec

SCHEMA_VERSION = 1

ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}\Z"
"""Ids become tokens of a subject and keys of a bucket: no dot, blank or wildcard. `$` would let a
line feed pass at the end."""

AN_ID: Final = "letters, digits, - and _, at most 63, a letter or digit first"
"""Tells people which characters an id may have."""

IdText = Annotated[str, msgspec.Meta(pattern=ID_PATTERN)]
JobId = NewType("JobId", IdText)
AggregatorId = NewType("AggregatorId", IdText)
ClusterId = NewType("ClusterId", IdText)
NodeId = NewType("NodeId", IdText)

MaybeId = Annotated[str, msgspec.Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9_-]{0,62})?\Z")]
"""An id, or empty: there is none."""

REASON_CHARS_MAX: Final = 1024
TEXT_CHARS_MAX: Final = 4096
Text = Annotated[str, msgspec.Meta(max_length=TEXT_CHARS_MAX)]
SECRET_CHARS_MAX: Final = 64
Secret = Annotated[str, msgspec.Meta(max_length=SECRET_CHARS_MAX)]
"""A token that only its holders know, in hex."""
NAME_CHARS_MAX: Final = 64
Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)]
"""A word of ours, or a tenant's name. An id has a type of its own, or `MaybeId`."""
SECONDS_MAX: Final = 1e10
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=SECONDS_MAX)]
"""A duration, or a time since 1970: three hundred years."""
FINITE_MAX: Final = 1e15
Finite = Annotated[float, msgspec.Meta(ge=-FINITE_MAX, le=FINITE_MAX)]
"""Something measured. Sums and products of a few are finite, too."""
COUNT_MAX: Final = 2**53
Count = Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=COUNT_MAX)]
Epoch = Annotated[int, msgspec.Meta(ge=0, le=2**32)]
"""A location epoch that others tell. Records take more, so that one higher can be stored."""
RUNS_MAX: Final = 4000
"""How often one job may be run again."""
Run = Annotated[int, msgspec.Meta(ge=0, le=RUNS_MAX)]
"""The number of a job's run, from 0. It keeps what is left of a former run from being taken for
this one's."""
ATTEMPTS_MAX: Final = 10**9
Attempt = Annotated[int, msgspec.Meta(ge=0, le=ATTEMPTS_MAX)]
"""The number of a job's attempt, from 0: what it does between being given an allocation and losing
it. It grows with every pause, loss of a node, change of size and run, and keeps what is left of a
former attempt from being taken for this one's."""
RUN_ATTEMPTS: Final = 1024
"""Processes of one rank in one attempt of its job: they are numbered on from attempt to attempt, so
that number `RUN_ATTEMPTS * attempt + n` is the n-th restart of the rank."""
AGGREGATORS_MAX: Final = 1024
"""Aggregators that one message tells of."""
WORKERS_MAX: Final = 64
"""Processes that train in one job: a region has so many slots."""
GPUS_MAX: Final = 65_536
"""GPUs of one job."""
NODE_GPUS_MAX: Final = 1024
"""GPUs, or parts of them, of one node."""
NODE_SLOTS_MAX: Final = 1024
BUCKETS_MAX: Final = 20_000
"""Buckets of one job."""
TENSORS_MAX: Final = 20_000
"""Tensors of one job."""
TASKS_MAX: Final = 20_000
"""Tasks, or jobs, of one aggregator that one message tells of."""
Index = Annotated[int, msgspec.Meta(ge=0, lt=BUCKETS_MAX)]
"""The number of a bucket, or of a tensor: a bucket has one at least."""
Rank = Annotated[int, msgspec.Meta(ge=0, le=2**16 - 1)]
Workers = Annotated[int, msgspec.Meta(ge=1, le=WORKERS_MAX)]
VirtualRanks = Annotated[int, msgspec.Meta(ge=0, le=WORKERS_MAX)]
"""Gradients of one iteration, whatever the number of processes that compute them; 0: one each."""
CORES_MAX: Final = 1e6
Cores = Annotated[float, msgspec.Meta(ge=0.0, le=CORES_MAX)]
"""Cores of CPU."""
LossLimit = Annotated[float, msgspec.Meta(ge=0.0, le=0.999)]
"""The part of its speed that a job may lose. All of it would let an iteration last for ever."""


class Message(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, tag_field="t"):
    """A message on the bus. Unknown fields are ignored, an unknown version is refused."""

    v: Annotated[int, msgspec.Meta(ge=1, le=2**31)] = SCHEMA_VERSION
    sender: Annotated[str, msgspec.Meta(max_length=128)] = ""
    epoch: Count = 0


class Record(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """A value inside a message or a bucket: carries no envelope of its own."""


def cut_texts(value: Any) -> None:
    """Cut the `reason`, in the `__post_init__` of all that has one: texts that are put together out
    of others' do not outgrow what the readers of a refusal, fact or record take."""
    if len(value.reason) > REASON_CHARS_MAX:
        msgspec.structs.force_setattr(value, "reason", value.reason[:REASON_CHARS_MAX])


def cut_details(value: Any) -> None:
    """Cut the texts of a fact's `detail`, which may list many ids."""
    detail = value.detail
    if any(len(text) > REASON_CHARS_MAX for text in detail.values()):
        cut = {name: text[:REASON_CHARS_MAX] for name, text in detail.items()}
        msgspec.structs.force_setattr(value, "detail", cut)


def bound(value: Any, *names: str, most: float = FINITE_MAX) -> None:
    """Keep quotients and sums of what others told within what readers take, in the `__post_init__`
    of what reports them: one odd figure must not cost the whole report."""
    for name in names:
        found = getattr(value, name)
        if not -most <= found <= most:
            msgspec.structs.force_setattr(value, name, min(most, max(-most, found)))


class Ok(Message, kw_only=True, frozen=True, tag="ok"):
    """The command is done (or was done before: commands are idempotent by id)."""

    changed: bool = True
    """False: it was so before, and nothing had to be done."""


BAD_REQUEST: Final = 400
NOT_FOUND: Final = 404
CONFLICT: Final = 409
TOO_MANY: Final = 429
INTERNAL: Final = 500
UNAVAILABLE: Final = 503
NO_ANSWER: Final = 504


class Refused(Message, kw_only=True, frozen=True, tag="refused"):
    """The command is not done: why, and when to try again (0: never)."""

    reason: Text
    retry_after_s: Seconds = 0.0
    code: Annotated[int, msgspec.Meta(ge=0, le=599)] = 0
    """The kind of refusal by HTTP's codes; 0: see `status`."""
    higher_epoch: Count = 0
    """The sender's command is refused because this epoch of it was heard; 0: another reason."""

    def __post_init__(self) -> None:
        cut_texts(self)

    @property
    def status(self) -> int:
        """The code that operators' tools show. Without one of its own a refusal is UNAVAILABLE if
        trying again helps, and BAD_REQUEST if not."""
        return self.code or (UNAVAILABLE if self.retry_after_s > 0.0 else BAD_REQUEST)

"""What every message on the bus has in common, and the ids they use.

A message is a frozen msgspec struct, encoded as a msgpack map (any msgpack reader decodes it), or
as JSON where a person asks for it. Every message names its type (`t`), its schema version (`v`),
its sender and the sender's epoch: the fencing token that a receiver compares with the highest it
has seen. A person's request may leave sender and epoch out; only commands between services are
fenced.
"""

from typing import Annotated, NewType

import msgspec

SCHEMA_VERSION = 1

ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$"
"""Ids become tokens of a subject and keys of a bucket: no dot, blank or wildcard."""

IdText = Annotated[str, msgspec.Meta(pattern=ID_PATTERN)]
JobId = NewType("JobId", IdText)
AggregatorId = NewType("AggregatorId", IdText)
ClusterId = NewType("ClusterId", IdText)
NodeId = NewType("NodeId", IdText)

Text = Annotated[str, msgspec.Meta(max_length=4096)]
Name = Annotated[str, msgspec.Meta(max_length=64)]
"""A word of ours, or an id that may be missing (empty)."""
Seconds = Annotated[float, msgspec.Meta(ge=0.0)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**53)]


class Message(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, tag_field="t"):
    """A message on the bus. Unknown fields are ignored, an unknown version is refused."""

    v: Annotated[int, msgspec.Meta(ge=1)] = SCHEMA_VERSION
    sender: Annotated[str, msgspec.Meta(max_length=128)] = ""
    epoch: Count = 0


class Record(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """A value inside a message or a bucket: carries no envelope of its own."""


class Ok(Message, kw_only=True, frozen=True, tag="ok"):
    """The command is done (or was done before: commands are idempotent by id)."""


class Refused(Message, kw_only=True, frozen=True, tag="refused"):
    """The command is not done: why, and when to try again (0: never)."""

    reason: Text
    retry_after_s: Seconds = 0.0

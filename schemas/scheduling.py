"""The policy that gives GPUs to jobs: what it is, how it is set, and what it must not forget."""

from typing import Annotated, Literal

import msgspec

from slackwater.schemas.base import (
    Count,
    Message,
    Name,
    NodeId,
    Record,
    Seconds,
    Text,
    cut_texts,
)

POLICY_FACTS_BYTES_MAX = 256 * 1024
PolicySettings = Annotated[dict[Name, Name], msgspec.Meta(max_length=64)]
"""Option of a policy -> its value, as text."""


class PolicyRecord(Record, kw_only=True, frozen=True):
    """The master's durable record of a pool's policy: one key of the bucket `policies`."""

    policy: Name
    settings: PolicySettings = msgspec.field(default_factory=dict)
    chosen: bool = False
    """Set where it was chosen on the running cluster; that overrides the master's configuration."""
    facts: Annotated[bytes, msgspec.Meta(max_length=POLICY_FACTS_BYTES_MAX)] = b""
    """Facts that the policy must not forget (see scheduling/scheduler.py)."""
    set_s: Seconds = 0.0
    epoch: Count = 0


ScalingState = Literal["steady", "adding", "awaiting", "draining", "returning", "leaving"]


class ScalingRecord(Record, kw_only=True, frozen=True):
    """The master's durable record of the last order to the operator's hook that adds and returns
    machines: one key of the bucket `scaling`."""

    state: ScalingState = "steady"
    id: Name = ""
    """The order's, under which the hook is told it again."""
    number: Count = 0
    """Orders so far."""
    count: Count = 0
    """Machines that it adds or returns."""
    goal: Count = 0
    """Machines that there are afterwards."""
    nodes: Annotated[tuple[NodeId, ...], msgspec.Meta(max_length=1024)] = ()
    """Machines that it returns."""
    ordered_s: Seconds = 0.0
    """When it began; 0: there was none yet."""
    since_s: Seconds = 0.0
    """Since when it is in this state."""
    reason: Text = ""
    """Why it was not carried out; empty: it was, or is at work."""
    epoch: Count = 0

    def __post_init__(self) -> None:
        cut_texts(self)


class SetPolicy(Message, kw_only=True, frozen=True, tag="policy.set"):
    """Give GPUs by this policy from now on, also after a restart. Answered by PolicyInfo once it
    is stored, or Refused. Idempotent."""

    policy: Name
    settings: PolicySettings = msgspec.field(default_factory=dict)


class GetPolicy(Message, kw_only=True, frozen=True, tag="policy.get"):
    pass


class PolicyInfo(Message, kw_only=True, frozen=True, tag="policy.info"):
    """The policy that gives GPUs to jobs, and how it fares."""

    policy: Name
    settings: PolicySettings = msgspec.field(default_factory=dict)
    """Every option that differs from its default."""
    chosen: bool = False
    """Set where it was chosen on the running cluster; else it comes from the master's
    configuration."""
    set_s: Seconds = 0.0
    """When it was set; 0: it is the configuration's."""
    gpus: Count = 0
    """GPUs of all nodes that are heard."""
    gpus_used: Count = 0
    running: Count = 0
    """Jobs that hold GPUs."""
    waiting: Count = 0
    """Jobs that wait for some."""
    decisions: Count = 0
    """How often this master asked it."""
    failures: Count = 0
    """How often it failed, so that everybody kept what they had."""
    reason: Text = ""
    """Why it failed last; empty: its last decision was carried out."""
    quotas: Annotated[dict[Name, Count], msgspec.Meta(max_length=10_000)] = msgspec.field(
        default_factory=dict
    )
    """Tenant -> GPUs of its own, under every policy; empty: all share alike."""
    min_run_s: Seconds = 0.0
    """Seconds that a job keeps its GPUs at least, under every policy."""
    machines: Text = ""
    """How many machines there are and are wanted, where a hook adds and returns them."""

    def __post_init__(self) -> None:
        cut_texts(self)


class PolicyEvent(Message, kw_only=True, frozen=True, tag="policy.event"):
    """sw.v1.evt.policy.<pool>.set: another policy gives GPUs from now on."""

    pool: Name
    fact: Name
    policy: Name
    settings: PolicySettings = msgspec.field(default_factory=dict)
    before: Name = ""
    at_s: Seconds

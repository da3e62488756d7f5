"""Every fact that services publish, by the noun and the past tense of its subject."""

from typing import Any, Final, TypeAlias, get_args

from slackwater.schemas.base import Message
from slackwater.schemas.cluster import AggregatorFact, AllocationEvent
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.memory import SlabEvent, SpanEvent
from slackwater.schemas.placement import MigrationEvent, TensorCopyDone, WorkerDone
from slackwater.schemas.scheduling import PolicyEvent
from slackwater.schemas.telemetry import JobProfiled, WindowMeasured

Fact: TypeAlias = (
    JobEvent
    | JobProfiled
    | WindowMeasured
    | AllocationEvent
    | AggregatorFact
    | MigrationEvent
    | TensorCopyDone
    | WorkerDone
    | SlabEvent
    | SpanEvent
    | PolicyEvent
)


def _all(kind: type[Message], *facts: str) -> dict[str, type[Any]]:
    return dict.fromkeys(facts, kind)


def _said(kind: type[Message]) -> dict[str, type[Any]]:
    """List the facts that the message's own type names."""
    return _all(kind, *get_args(kind.__annotations__["fact"]))


FACTS: Final[dict[str, dict[str, type[Any]]]] = {
    "job": {
        **_all(JobEvent, "pending", "waiting", "running", "placed"),
        **_all(JobEvent, "starting", "stopping", "paused", "held", "released", "resized"),
        **_all(JobEvent, "completed", "failed", "cancelled"),
        **_all(JobEvent, "located", "measured", "assigned", "steady", "rehosted"),
        **_all(JobEvent, "reverted", "expanded", "protected", "interfered"),
        **_all(JobEvent, "corrected", "unprofiled"),
        **_all(JobEvent, "optimizer-state-recovered", "optimizer-state-lost", "checkpointed"),
        **_all(JobEvent, "save-interval"),
        **_all(JobEvent, "restored", "checkpoint-failed"),
        **_all(JobEvent, "rank-restarted", "rolled-back", "hung", "gpus-idle", "deleted"),
        **_all(
            JobEvent, "scaling", "joining", "resizing", "scaled", "executors-moved", "gives-way"
        ),
        "profiled": JobProfiled,
        "window": WindowMeasured,
    },
    "aggregator": {
        **_said(AllocationEvent),
        **_all(AggregatorFact, "congested", "cleared"),
        **_all(AggregatorFact, "draining", "late", "drained", "restored", "vanished"),
    },
    "migration": {
        **_said(MigrationEvent),
        "copied": TensorCopyDone,
        "worker-done": WorkerDone,
    },
    "slab": _said(SlabEvent),
    "device": _said(SpanEvent),
    "policy": _all(PolicyEvent, "set"),
}
_OF_ONE: Final = {
    kind: (noun, fact)
    for noun, facts in FACTS.items()
    for fact, kind in facts.items()
    if "fact" not in kind.__struct_fields__ and list(facts.values()).count(kind) == 1
}
"""Messages that do not say which fact they tell, as each tells one."""
_NOUNS: Final = {kind: noun for noun, facts in FACTS.items() for kind in facts.values()}


def named(fact: Fact) -> tuple[str, str]:
    """Return the noun and the past tense of a fact's subject."""
    kind = type(fact)
    return _OF_ONE.get(kind) or (_NOUNS[kind], str(getattr(fact, "fact", "set")))

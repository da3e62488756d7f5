"""Turn facts into sentences for people, the same ones wherever facts are shown. Pure."""

from collections.abc import Callable, Sequence
from typing import Final, assert_never

from slackwater.common.base.words import number_of
from slackwater.schemas.cluster import AggregatorFact, AllocationEvent
from slackwater.schemas.facts import Fact
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.memory import SlabEvent, SpanEvent
from slackwater.schemas.placement import MigrationEvent, TensorCopyDone, WorkerDone
from slackwater.schemas.scheduling import PolicyEvent
from slackwater.schemas.telemetry import JobProfiled, WindowMeasured

ROUTINE: Final = frozenset(
    {"window", "copied", "worker-done", "profiled", "measured", "steady", "placed"}
)
"""Facts that come again and again, or say what others said; shown to whoever asks for all."""
_CAUSES: Final = {
    "profiled": "as it was measured",
    "reverted": "to leave those whom sharing hurts",
    "expanded": "for more room",
    "recycled": "so that an aggregator can be released",
    "lost": "because an aggregator is lost",
    "interfered": "away from a congested link",
    "drained": "off a machine that goes",
    "unprofiled": "so that others can share its aggregators",
    "protected": "to aggregators of its own",
    "asked": "as asked",
}


def sentence(fact: Fact) -> str:
    match fact:
        case JobEvent():
            return _of_job(fact)
        case JobProfiled(job=job, profile=profile):
            cores = sum(profile.task_cpu_s) / profile.iteration_s if profile.iteration_s else 0.0
            return (
                f"{job} was profiled over {number_of(profile.iterations, 'iteration')}: "
                f"{profile.iteration_s:.3g} s each, {cores:.2g} cores of aggregation"
            )
        case WindowMeasured():
            return (
                f"{fact.job} took {fact.iteration_s:.3g} s an iteration over the last "
                f"{fact.iterations}, to iteration {fact.last_iteration}"
            )
        case AllocationEvent():
            return allocation(fact)
        case AggregatorFact():
            return _of_aggregator(fact)
        case MigrationEvent():
            return migration(fact.job, fact.fact, fact.sources, fact.targets, fact.cause)
        case TensorCopyDone():
            return (
                f"{fact.job}: bucket {fact.bucket} ({fact.nbytes / 1e6:.1f} MB) is copied from "
                f"{fact.source} to {fact.target} in {fact.copy_s:.3g} s"
            )
        case WorkerDone():
            return f"{fact.job}: all workers push bucket {fact.bucket} to {fact.target} now"
        case SlabEvent():
            return _of_slab(fact)
        case SpanEvent():
            return _of_device(fact)
        case PolicyEvent():
            chosen = "".join(f", {key} {value}" for key, value in sorted(fact.settings.items()))
            return f"{fact.pool} are given by {fact.policy}{chosen}, no longer by {fact.before}"
    assert_never(fact)


# Jobs ---------------------------------------------------------------------------------------------


def ended(job: str, state: str, reason: str = "", iterations: int | None = None) -> str:
    after = "" if iterations is None else f" after {iterations} iterations"
    return f"{job} {state}{after}" + (f" ({reason})" if reason else "")


def shares(job: str, aggregators: Sequence[str], beside: Sequence[str]) -> str:
    """Where a job goes on once it is known what it needs."""
    if beside:
        return f"{job} was measured alone, and shares {listed(aggregators)} with {listed(beside)}"
    return f"{job} was measured alone, and gets {listed(aggregators)} for itself"


def loss(fact: JobEvent, limit: float = 0.0) -> str:
    """Say which job lost how much beside which others, and what follows. `limit` counts where the
    fact has none."""
    detail = fact.detail
    mover, loser = fact.job, detail.get("loser", fact.job)
    where, beside = named(detail, "aggregators"), named(detail, "beside")
    limit = _number(detail, "limit") or limit
    text = f"{loser} runs {_number(detail, 'loss'):.1%} slower than alone"
    text += f" (limit {limit:.0%})" if limit else ""
    if fact.fact == "expanded":
        return f"{text} on {listed(where)}: it gets more"
    if beside:
        text += f": bursts of {listed(beside)} on {listed(where)} hurt it"
    if fact.fact == "protected":
        return f"{text}; it gets aggregators of its own"
    return text if mover == loser else f"{text}; {mover}, the newest there, has to leave"


def _of_job(fact: JobEvent) -> str:
    tell = _JOB.get(fact.fact)
    if tell is not None:
        return tell(fact)
    why = fact.reason or ", ".join(f"{key} {text}" for key, text in fact.detail.items() if text)
    return f"{fact.job} {fact.fact}" + (f": {why}" if why else "")


def _held(fact: JobEvent) -> str:
    """Say on what it runs; where the fact does not tell how much, on which node."""
    if len(fact.allocation) > 1:
        return f" on {listed([f'{node} ({number})' for node, number in fact.allocation])}"
    node = fact.allocation[0][0] if fact.allocation else fact.detail.get("node", "")
    return f" on {node}" if node else ""


def _waits(reason: str) -> str:
    if not reason or reason.startswith("waits"):
        return reason.removeprefix("waits")
    return f" {reason}" if reason.startswith(("for ", "until ")) else f": {reason}"


def _why(fact: JobEvent) -> str:
    return f": {fact.reason}" if fact.reason else ""


def _where(fact: JobEvent) -> str:
    return listed(named(fact.detail, "aggregators")) or "no aggregator"


def _assigned(fact: JobEvent) -> str:
    if fact.detail.get("cause") == "profiled":
        return shares(fact.job, named(fact.detail, "aggregators"), named(fact.detail, "beside"))
    return f"{fact.job} is assigned to {_where(fact)}"


def _located(fact: JobEvent) -> str:
    alone = " for a while, to be measured alone" if fact.detail.get("temporary") else ""
    return f"{fact.job} has its parameters on {_where(fact)}{alone}"


def _rehosted(fact: JobEvent) -> str:
    lost = listed(named(fact.detail, "lost"))
    buckets = number_of(int(_number(fact.detail, "buckets")), "bucket")
    return f"{fact.job} begins anew on {_where(fact)} with {buckets} that {lost} had"


def _interfered(fact: JobEvent) -> str:
    lost, slower = _number(fact.detail, "loss"), _number(fact.detail, "slowdown")
    return (
        f"{fact.job} runs {lost:.1%} slower than alone: the link of {_where(fact)} is "
        f"{slower:.1f} times slower than usual; it leaves"
    )


def _measured(fact: JobEvent) -> str:
    return (
        f"{fact.job} was measured alone: {_number(fact.detail, 'iteration_s'):.3g} s an iteration"
    )


def _corrected(fact: JobEvent) -> str:
    new, old = _number(fact.detail, "iteration_s"), _number(fact.detail, "profiled_s")
    return (
        f"{fact.job} is faster than it was measured: {new:.3g} s an iteration instead of {old:.3g}"
    )


_JOB: Final[dict[str, Callable[[JobEvent], str]]] = {
    "pending": lambda fact: f"{fact.job} {fact.reason or 'is submitted'}",
    "deleted": lambda fact: f"{fact.job} is deleted",
    "waiting": lambda fact: f"{fact.job} waits" + _waits(fact.reason),
    "starting": lambda fact: f"{fact.job} starts" + _held(fact),
    "running": lambda fact: f"{fact.job} runs" + _held(fact),
    "stopping": lambda fact: f"{fact.job} is told to save and to stop" + _why(fact),
    "paused": lambda fact: f"{fact.job} is paused" + _why(fact),
    "held": lambda fact: f"{fact.job} is held back by its user",
    "released": lambda fact: f"{fact.job} may run again: its user lets it go on",
    "hung": lambda fact: f"{fact.job} hangs: {fact.reason}",
    "gpus-idle": lambda fact: f"{fact.job} wastes GPUs: {fact.reason}",
    "resized": lambda fact: f"{fact.job} is resized" + _held(fact) + _why(fact),
    "placed": lambda fact: f"{fact.job} is sent to cluster {fact.cluster}",
    "completed": lambda fact: ended(fact.job, "completed"),
    "failed": lambda fact: ended(fact.job, "failed", fact.reason),
    "cancelled": lambda fact: ended(fact.job, "cancelled", fact.reason),
    **dict.fromkeys(
        (
            "rank-restarted",
            "rolled-back",
            "scaling",
            "joining",
            "resizing",
            "scaled",
            "executors-moved",
        ),
        lambda fact: f"{fact.job}: {fact.reason}",
    ),
    "gives-way": lambda fact: f"{fact.job} gives way" + _why(fact),
    "save-interval": lambda fact: f"{fact.job} is {fact.detail.get('why', 'saved')}",
    "located": _located,
    "measured": _measured,
    "assigned": _assigned,
    "steady": lambda fact: f"{fact.job} trains on {_where(fact)}",
    "rehosted": _rehosted,
    "reverted": loss,
    "expanded": loss,
    "protected": loss,
    "interfered": _interfered,
    "corrected": _corrected,
    "unprofiled": lambda fact: (
        f"{fact.job} has not iterated for {fact.detail.get('idle_s', 'some')} s: others may share "
        f"{_where(fact)}"
    ),
    "optimizer-state-lost": lambda fact: f"{fact.job} lost optimiser state: {fact.reason}",
    "restored": lambda fact: f"{fact.job} goes on from a checkpoint: {fact.reason}",
    "checkpoint-failed": lambda fact: (
        f"{fact.job} is not saved: {fact.detail.get('why', fact.reason)}"
    ),
    "checkpointed": lambda fact: (
        f"{fact.job} is saved at iteration {fact.detail.get('iteration', '?')} in "
        f"{fact.detail.get('folder', '?')}"
    ),
    "optimizer-state-recovered": lambda fact: f"{fact.job} kept its optimiser state: {fact.reason}",
}


# Aggregators and migrations -----------------------------------------------------------------------


def allocation(fact: AllocationEvent) -> str:
    id = fact.aggregator
    match fact.fact:
        case "allocated":
            return f"{id} is added" + (f" to measure {_for(fact)}" if fact.temporary_for else "")
        case "released":
            return f"{id} is released: " + (
                f"{_for(fact)} is measured" if fact.temporary_for else "nobody needs it"
            )
        case "lost":
            return f"{id} is lost: it is not heard any more"
        case "returned":
            return f"{id} is back"
        case "adopted":
            return f"{id} stays: it serves jobs for good now"
    assert_never(fact.fact)


def _for(fact: AllocationEvent) -> str:
    return f"{fact.temporary_for} alone"


def migration(
    job: str, fact: str, sources: Sequence[str], targets: Sequence[str], cause: str = ""
) -> str:
    """Say what a migration does; without `cause` as an onlooker sees it."""
    between = f"from {listed(sources)} to {listed(targets)}"
    why = f", {_CAUSES.get(cause, cause)}" if cause else ""
    match fact:
        case "started":
            return f"{job} begins to move {between}{why}"
        case "finished":
            return f"{job} is moved {between} while it trains{why}"
        case _:
            return f"{job} does not move {between}: an aggregator is gone"


def _of_aggregator(fact: AggregatorFact) -> str:
    id, detail = fact.aggregator, fact.detail
    jobs, left = listed(named(detail, "jobs")), _number(detail, "nbytes") / 1e6
    has = f"{left:.1f} MB of {jobs} are there" if jobs else "nothing is there"
    match fact.fact:
        case "congested":
            slower = _number(detail, "slowdown")
            return f"{id} has a congested link: {detail.get('job')} is {slower:.1f} times slower"
        case "cleared":
            return f"{id} has a free link again"
        case "draining":
            return f"{id} is emptied within {detail.get('within_s')} s: {has}"
        case "late":
            return f"{id} is not empty in time: {has}; what is left {detail.get('then')}"
        case "drained":
            return f"{id} is empty, {detail.get('spare_s')} s before its time: the machine may go"
        case "restored":
            return f"{id} is to be used again"
        case "vanished":
            return f"{id} went before it was empty: {has}; what is left {detail.get('then')}"
        case _:
            return f"{id} {fact.fact}"


# Memory -------------------------------------------------------------------------------------------


def _of_slab(fact: SlabEvent) -> str:
    slab = f"slab {fact.slab} of {fact.lender}"
    why = f": {fact.reason}" if fact.reason else ""
    match fact.fact:
        case "lent":
            return f"{slab} is lent to {fact.device}, for span {fact.span}"
        case "returned":
            return f"{slab} is given back by {fact.device}"
        case "evicted":
            return f"{slab} is taken back from {fact.device} in {fact.took_s:.3g} s{why}"
        case "revoked":
            return f"{slab} is taken from {fact.device} without its leave{why}"
        case "claimed":
            return f"{slab} is claimed again by {fact.device}"
        case "lost":
            return f"{slab} is lost to {fact.device}{why}"
    assert_never(fact.fact)


def _of_device(fact: SpanEvent) -> str:
    span = f"{fact.device}: span {fact.span}"
    at = f" at {fact.lender}" if fact.lender else ""
    why = f": {fact.reason}" if fact.reason else ""
    match fact.fact:
        case "mapped":
            return f"{span} is in remote memory{at}, after {fact.took_s:.3g} s"
        case "unmapped":
            return f"{span} has left remote memory{at}{why}"
        case "suspended":
            return f"{span} waits for its lender{at}{why}"
        case "resumed":
            return f"{span} has its lender back{at}"
        case "refused":
            return f"{span} was refused{at}{why}"
    assert_never(fact.fact)


# Words --------------------------------------------------------------------------------------------


def listed(names: Sequence[str]) -> str:
    if len(names) < 2:
        return "".join(names)
    return ", ".join(names[:-1]) + " and " + names[-1]


def named(detail: dict[str, str], key: str) -> tuple[str, ...]:
    """Return a fact's detail that lists ids."""
    return tuple(filter(None, detail.get(key, "").split(",")))


def _number(detail: dict[str, str], key: str) -> float:
    """Return a number of a fact's detail; 0 where it is missing, or was cut."""
    try:
        return float(detail.get(key, "0"))
    except ValueError:
        return 0.0

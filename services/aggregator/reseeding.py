"""Tells what became of a bucket whose region was lost and filled anew by its workers. Pure."""

from slackwater.common.base.effects import Effect, Log, Publish
from slackwater.common.domains.slots.rules import RULES
from slackwater.schemas import subjects
from slackwater.schemas.job_events import JobEvent
from slackwater.services.aggregator.bucket import Bucket, SeededStates, Spare
from slackwater.services.aggregator.events import BucketRestored, BucketSeeded


def filled_anew(
    aggregator: str, bucket: Bucket, event: BucketSeeded | BucketRestored, now_s: float
) -> list[Effect]:
    """Tell where the values of a region that was lost come from."""
    if isinstance(event, BucketRestored):
        return _restored(aggregator, bucket, event.iteration, now_s)
    return _reseeded(aggregator, bucket, event, now_s)


def _reseeded(aggregator: str, bucket: Bucket, event: BucketSeeded, now_s: float) -> list[Effect]:
    """Tell how much of the optimiser's states the workers' copies held: what is lost of a job is
    partial (SCAR: Qiao 2021, section 5.4)."""
    (job, index), rank, states = bucket.key, event.rank, event.states
    logged = Log("bucket.reseeded", {"job": job, "bucket": index, "rank": rank}, "warning")
    if not RULES[bucket.plan.update.name].states and not event.first:
        return [logged]  # There was none to lose.
    elements = bucket.layout.elements
    lost = states.elements < elements and bucket.spare is None
    fact = "optimizer-state-lost" if lost else "optimizer-state-recovered"
    told = JobEvent(
        job=job,
        fact=fact,
        at_s=now_s,
        reason=f"bucket {index}: its region was lost; {_of_parameters(event, bucket.version)}, "
        f"{_of_states(states, elements, bucket.spare)}",
        detail={
            "bucket": str(index), "version": str(bucket.version), "aggregator": aggregator,
            "recovered": str(states.elements), "elements": str(elements),
            "behind": str(states.behind),
        },
    )  # fmt: skip
    return [Publish(subjects.event("job", job, fact), told), logged]


def _restored(aggregator: str, bucket: Bucket, iteration: int, now_s: float) -> list[Effect]:
    """Tell that a checkpoint's values stand in for all that was lost of a bucket."""
    (job, index), version = bucket.key, bucket.version
    behind = version - iteration
    age = f", {behind} iteration{'s' * (behind > 1)} old," if behind else ""
    told = JobEvent(
        job=job,
        fact="restored",
        at_s=now_s,
        reason=f"bucket {index}: its region was lost, and no worker had its parameters; those of "
        f"its checkpoint of iteration {iteration}{age} are in it",
        detail={"bucket": str(index), "version": str(version), "behind": str(behind),
                "aggregator": aggregator},
    )  # fmt: skip
    logged = Log("bucket.restored", {"job": job, "bucket": index, "behind": behind}, "warning")
    return [Publish(subjects.event("job", job, "restored"), told), logged]


def _of_parameters(event: BucketSeeded, version: int) -> str:
    if event.first:
        return (
            "no worker had its parameters: those that the program begins with are in it, as "
            f"version {version}"
        )
    return f"parameters of version {version} came from worker {event.rank}"


def _of_states(states: SeededStates, elements: int, spare: Spare | None) -> str:
    rest = "starts afresh"
    if spare is not None:
        rest = f"is that of its checkpoint of iteration {spare.iteration}"
    if not states.elements:
        return f"the optimiser's state {rest}"
    whose = f"worker{'s' * (len(states.ranks) > 1)} {', '.join(map(str, states.ranks))}"
    age = "of that version"
    if states.behind:
        age = f"at most {states.behind} iteration{'s' * (states.behind > 1)} old"
    if states.elements >= elements:
        return f"the optimiser's state from {whose}, {age}"
    part = f"{states.elements} of {elements} elements of the optimiser's state"
    return f"{part} from {whose}, {age}; the rest {rest}"

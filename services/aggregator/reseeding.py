"""Tells what became of a bucket whose region was lost and filled anew by its workers. Pure."""

from slackwater.common.base.effects import Effect, Log, Publish
from slackwater.common.domains.slots.rules import RULES
from slackwater.schemas import subjects
from slackwater.schemas.job_events import JobEvent
from slackwater.services.aggregator.bucket import Bucket, SeededStates
from slackwater.services.aggregator.events import BucketSeeded


def reseeded(aggregator: str, bucket: Bucket, event: BucketSeeded, now_s: float) -> list[Effect]:
    """Tell how much of the optimiser's states the workers' copies held: what is lost of a job is
    partial (SCAR: Qiao 2021, section 5.4)."""
    (job, index), rank, states = bucket.key, event.rank, event.states
    logged = Log("bucket.reseeded", {"job": job, "bucket": index, "rank": rank}, "warning")
    if not RULES[bucket.plan.update.name].states:
        return [logged]  # There was none to lose.
    elements = bucket.layout.elements
    fact = "optimizer-state-lost" if states.elements < elements else "optimizer-state-recovered"
    told = JobEvent(
        job=job,
        fact=fact,
        at_s=now_s,
        reason=f"bucket {index}: its region was lost; parameters of version {bucket.version} came "
        f"from worker {rank}, {_of_states(states, elements)}",
        detail={
            "bucket": str(index), "version": str(bucket.version), "aggregator": aggregator,
            "recovered": str(states.elements), "elements": str(elements),
            "behind": str(states.behind),
        },
    )  # fmt: skip
    return [Publish(subjects.event("job", job, fact), told), logged]


def _of_states(states: SeededStates, elements: int) -> str:
    if not states.elements:
        return "the optimiser's state starts afresh"
    whose = f"worker{'s' * (len(states.ranks) > 1)} {', '.join(map(str, states.ranks))}"
    age = "of that version"
    if states.behind:
        age = f"at most {states.behind} iteration{'s' * (states.behind > 1)} old"
    if states.elements >= elements:
        return f"the optimiser's state from {whose}, {age}"
    part = f"{states.elements} of {elements} elements of the optimiser's state"
    return f"{part} from {whose}, {age}; the rest starts afresh"

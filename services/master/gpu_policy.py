"""The policy of the GPU pool on a running cluster: which one, since when, what it must not forget.

Pure. The one that an operator set is stored, and counts before the configuration's. What a policy
must not forget when its master ends is stored beside it, whenever a decision changed it.
"""

from collections.abc import Mapping
from typing import Final

from slackwater.common.base.effects import Log, Persist, Publish
from slackwater.common.base.errors import ConfigRejected, Rejected
from slackwater.schemas import subjects
from slackwater.schemas.base import Message, Refused
from slackwater.schemas.scheduling import (
    POLICY_FACTS_BYTES_MAX,
    PolicyEvent,
    PolicyInfo,
    PolicyRecord,
    SetPolicy,
)
from slackwater.services.master.config import MasterConfig, gpu_rules
from slackwater.services.master.scheduling.registry import make, names
from slackwater.services.master.scheduling.scheduler import Scheduler
from slackwater.services.master.state import State

POLICIES_BUCKET: Final = "policies"
POOL: Final = "gpus"


def restore(state: State, record: PolicyRecord | None) -> None:
    """Go on with what a former master stored."""
    if record is None:
        return
    schedule = state.gpus
    try:
        if record.chosen:
            schedule.scheduler = scheduler(
                state.config, record.policy, record.settings, state.durations_known
            )
        if schedule.policy == record.policy:
            schedule.scheduler.restore(record.facts)
            state.policy = record
    except Rejected as error:  # It was uninstalled since, or another version wrote its facts.
        fields = {"policy": record.policy, "reason": str(error)}
        state.out.append(Log("policy.not-restored", fields, "error"))


def set_policy(state: State, message: SetPolicy, now_s: float) -> Message:
    """Give GPUs by another policy. Refused: nothing was changed."""
    schedule, before = state.gpus, state.policy
    same = (before.policy, before.settings) == (message.policy, message.settings)
    if same and before.chosen:
        return info(state)  # It was told before.
    try:
        made = scheduler(state.config, message.policy, message.settings, state.durations_known)
        for job in schedule.snapshot.jobs.values():
            made.admit(job)
    except Rejected as error:
        return Refused(reason=str(error))
    schedule.scheduler, schedule.due = made, True
    schedule.failure = ""
    state.policy = PolicyRecord(
        policy=message.policy,
        settings=message.settings,
        chosen=True,
        set_s=now_s,
        epoch=state.epoch,
    )
    state.out.append(Persist(POLICIES_BUCKET, POOL, state.policy))
    told = PolicyEvent(
        pool=POOL,
        fact="set",
        policy=message.policy,
        settings=message.settings,
        before=before.policy,
        at_s=now_s,
    )
    state.out.append(Publish(subjects.event("policy", POOL, "set"), told))
    return info(state)


def remember(state: State) -> None:
    """Store what the policy must not forget, where a decision changed it."""
    facts = state.gpus.scheduler.durable()
    if facts == state.policy.facts:
        return
    if len(facts) > POLICY_FACTS_BYTES_MAX:
        fields = {"policy": state.gpus.policy, "bytes": len(facts)}
        state.out.append(Log("policy.facts-too-large", fields, "error"))
        return
    record = state.policy
    state.policy = PolicyRecord(
        policy=record.policy,
        settings=record.settings,
        chosen=record.chosen,
        facts=facts,
        set_s=record.set_s,
        epoch=state.epoch,
    )
    state.out.append(Persist(POLICIES_BUCKET, POOL, state.policy))


def info(state: State) -> PolicyInfo:
    schedule, record = state.gpus, state.policy
    jobs, rules = schedule.snapshot.jobs.values(), schedule.scheduler.rules
    return PolicyInfo(
        policy=record.policy,
        settings=record.settings,
        chosen=record.chosen,
        set_s=record.set_s,
        gpus=sum(each.number for each in schedule.capacities),
        gpus_used=sum(job.held_gpus for job in jobs),
        running=sum(job.running for job in jobs),
        waiting=schedule.queued,
        decisions=schedule.decisions,
        failures=schedule.failures,
        reason=schedule.failure,
        quotas=dict(rules.quotas),
        min_run_s=rules.min_run_s,
    )


def scheduler(
    config: MasterConfig, policy: str, settings: Mapping[str, str], durations_known: bool = False
) -> Scheduler:
    """Make the scheduler of the GPU pool. Raises ConfigRejected for a policy that plans with what
    only a simulator knows."""
    needs = NEEDS.get(policy)
    if needs is not None and not (needs == _DURATIONS and durations_known):
        raise ConfigRejected(
            f"the GPU policy {policy!r} plans with {needs}, which a running cluster does not know; "
            f"`loadgen simulate` plays it; here choose one of {', '.join(live_policies())}"
        )
    if needs is None and policy not in live_policies():
        raise ConfigRejected(
            f"there is no GPU policy {policy!r}; choose one of {', '.join(live_policies())}"
        )
    if config.autoscale_hook and policy == "pollux":
        settings = {"scale_nodes_max": str(config.autoscale_nodes_max)} | dict(settings)
    return Scheduler(make(policy, settings), gpu_rules(config))


def live_policies() -> list[str]:
    """List the policies that a running cluster can give GPUs by, sorted."""
    return [each for each in names() if each not in NEEDS]


_DURATIONS: Final = "the time that each job still needs"
_CURVES: Final = "each job's speed on any number of GPUs"
_STAGES: Final = "the times of each stage of a job's iteration"
NEEDS: Final[Mapping[str, str]] = {
    "srtf": _DURATIONS,
    "srsf": _DURATIONS,
    "optimus": _CURVES,
    "jsq-chunk": _CURVES,
    "harmony": _STAGES,
    "isolated": _STAGES,
    "naive-colocation": _STAGES,
}
"""Policy -> what it plans with that agents do not report."""

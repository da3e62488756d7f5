"""The decision protocol around a policy: one object for the live master and for the simulator.

    scheduler = Scheduler(policy, rules)
    decision = scheduler.decide(view)

A driver builds a `View` (of records and heartbeats, or of a simulated world), asks once at every
instant at which something happened and at `wake_s`, and carries the decision out. The scheduler
owns what lies between: the policy's memory, which jobs changed since the last decision, the check
of the plan, and what the operator's rules ask of the policy. It is a function of views: it knows
neither records nor time.

**Changes.** A driver that notes which jobs' structs changed says so in `view.changed`; for one that
leaves it None, the scheduler compares with the last view. A policy is told None, "compare
everything", at the first decision and after `forget`.

**Failures.** A plan that breaks a rule raises PlanRefused, and nothing of it may be carried out:
everybody keeps what they hold. The memory is then rebuilt from the view at the next decision. So is
it after `forget`, which a driver calls when it could not carry a decision out.

**Restarts.** `durable()` gives what the policy must not forget when its process ends, as bytes of
bounded size; `restore` takes them back in the next process.
"""

from collections.abc import Mapping, Sequence
from math import inf
from types import MappingProxyType
from typing import Any, Final

import msgspec

from slackwater.common.base.errors import Rejected
from slackwater.schemas.base import JobId
from slackwater.services.master.scheduling.rules import (
    refuse_job,
    refuse_rules,
    refuse_types,
    refuse_within,
)
from slackwater.services.master.scheduling.tenants import Divided
from slackwater.services.master.scheduling.validation import PlanRefused, validate
from slackwater.services.master.scheduling.view import (
    NO_RULES,
    Allocation,
    ClusterView,
    JobView,
    Pending,
    Plan,
    Policy,
    Remembers,
    Rules,
    View,
    name_of,
)

_NO_JOBS: Final[Mapping[JobId, Any]] = MappingProxyType({})


class Decision(msgspec.Struct, frozen=True, gc=False):
    """Changes from now on; everybody else keeps what they have.

    Pauses and resizes free GPUs first, then resizes and starts take theirs, in this order.
    """

    start: Mapping[JobId, Allocation] = msgspec.field(default_factory=dict)
    """Waiting jobs, and the GPUs that they get."""
    resize: Mapping[JobId, Allocation] = msgspec.field(default_factory=dict)
    """Running jobs, and the GPUs that they get instead of those they hold. The same GPUs, where
    only the group changes."""
    pause: tuple[JobId, ...] = ()
    """Running jobs that lose their GPUs and wait."""
    groups: Mapping[JobId, str] = msgspec.field(default_factory=dict)
    """Label under which a started or resized job shares its GPUs; left out: it shares none."""
    wake_s: float = inf
    """When to ask again even if nothing happens; later than the view's instant."""
    desired_nodes: int | None = None
    """How many nodes the policy would like; None: it has no opinion."""


class Scheduler:
    """A policy under the operator's rules.

    Raises ConfigRejected for a rule that the policy ignores.
    """

    def __init__(self, policy: Policy, rules: Rules = NO_RULES) -> None:
        refuse_rules(policy, rules)
        self.policy, self.rules = policy, rules
        divided = bool(rules.quotas) and getattr(policy, "divisible", False)
        self._asked: Policy = Divided(policy) if divided else policy
        self._memory: Any = None
        self._cluster: ClusterView | None = None
        self._seen: Mapping[JobId, JobView | None] | None = None
        """The jobs of the last view, where the driver does not note changes."""
        self._compare = True
        """The next decision tells the policy to compare everything."""

    def admit(self, job: JobView) -> None:
        """Raise ConfigRejected for a job that asks for what the policy ignores: a priority, say."""
        if job.priority or job.needs_host:
            refuse_job(self.policy, job)
        if job.within:
            refuse_within(self.policy, job)

    def decide(self, view: View) -> Decision:
        """Ask the policy and check its plan. Raises PlanRefused for one that breaks a rule."""
        if view.cluster is not self._cluster:
            refuse_types(self.policy, view.cluster)
            self._cluster = view.cluster
        changed = view.changed
        if self._compare:
            changed = None
        elif changed is None:
            changed = self._changed(view)
        asked = view
        if changed is not view.changed or view.rules is not self.rules:
            asked = View(view.now_s, view.cluster, view.jobs, view.free, changed, self.rules)
        try:
            plan, self._memory = self._asked.allocate(asked, self._memory)
            decision = _checked(plan, asked)
        except Exception:  # Any failure: the policy's memory counts on this plan.
            self.forget()
            raise
        self._compare = False
        self._seen = None if view.changed is not None else _shown(view.jobs, decision)
        return decision

    def explain(self, view: View) -> list[Pending]:
        """Say why each pending job waits, asked after `decide` at the same instant.

        `view` shows the decision carried out.
        """
        asked = View(view.now_s, view.cluster, view.jobs, view.free, None, self.rules)
        return self._asked.explain(asked, self._memory)

    def forget(self) -> None:
        """Drop the memory but for what must not be forgotten: the next decision compares all."""
        facts = self._facts()
        self._memory = None
        if facts is not None and isinstance(self._asked, Remembers):
            self._memory = self._asked.restored(facts)
        self._compare, self._seen = True, None

    # Durable facts --------------------------------------------------------------------------------

    def durable(self) -> bytes:
        """Encode what the policy must not forget, for `restore`; empty: nothing."""
        facts = self._facts()
        return b"" if facts is None else msgspec.msgpack.encode(facts)

    def restore(self, facts: bytes) -> None:
        """Take back what `durable` gave, before the first decision.

        Raises Rejected for facts of another policy; start without them then.
        """
        if not facts:
            return
        if not isinstance(self._asked, Remembers):
            raise Rejected(f"{name_of(self.policy)} keeps no durable facts; start without them")
        try:
            found = msgspec.msgpack.decode(facts, type=self._asked.facts)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Rejected(
                f"these are not durable facts of {name_of(self.policy)} ({error}); start without "
                "them"
            ) from error
        self._memory = self._asked.restored(found)
        self._compare, self._seen = True, None

    def _facts(self) -> msgspec.Struct | None:
        if self._memory is None or not isinstance(self._asked, Remembers):
            return None
        return self._asked.durable(self._memory)

    def _changed(self, view: View) -> Sequence[JobId] | None:
        """Compare with the last view; None: its driver noted changes, so nothing was kept."""
        if self._seen is None:
            return None
        seen = self._seen
        changed = [job_id for job_id, job in view.jobs.items() if seen.get(job_id) != job]
        return changed + [job_id for job_id in seen if job_id not in view.jobs]


def _shown(jobs: Mapping[JobId, JobView], decision: Decision) -> dict[JobId, JobView | None]:
    """Keep what the next view is compared with.

    A job that the decision touches counts as changed even if its driver could not carry that out:
    the policy believes that it did.
    """
    shown: dict[JobId, JobView | None] = dict(jobs)
    shown.update(dict.fromkeys((*decision.start, *decision.resize, *decision.pause)))
    return shown


def _checked(plan: Plan, view: View) -> Decision:
    """The plan as a decision. Raises PlanRefused."""
    if not plan.next_decision_s > view.now_s:
        raise PlanRefused(
            f"the policy wants to decide again at {plan.next_decision_s} s, which is not after "
            f"{view.now_s} s"
        )
    if not plan.allocations:
        return Decision(_NO_JOBS, _NO_JOBS, (), _NO_JOBS, plan.next_decision_s, plan.desired_nodes)
    validate(plan, view)
    start: dict[JobId, Allocation] = {}
    resize: dict[JobId, Allocation] = {}
    pause: list[JobId] = []
    jobs, groups = view.jobs, plan.groups
    for job_id, allocation in plan.allocations.items():
        job = jobs[job_id]
        held = job.allocation
        if not held:
            if allocation:
                start[job_id] = allocation
        elif not allocation:
            pause.append(job_id)
        elif allocation != held or (groups.get(job_id, "") if groups else "") != job.group:
            resize[job_id] = allocation
    return Decision(start, resize, tuple(pause), groups, plan.next_decision_s, plan.desired_nodes)

"""The operator's rules that a policy honours, and the refusal of those that it does not.

A policy's class declares `honours`, a frozenset of rule names; one that declares nothing honours
nothing. A rule that a policy ignores is refused by name: a tenant's guarantee that nobody keeps is
worse than an error. One that is `divisible` need not know quotas: `tenants` keeps them around it.
"""

from typing import Final, Literal, Protocol, get_args

from slackwater.common.base.errors import ConfigRejected
from slackwater.services.master.scheduling.view import ClusterView, Rules, name_of

Rule = Literal["quotas", "priorities", "min_run_s", "gpu_types", "cores_and_memory", "within"]
"""`quotas`: tenants' guarantees and limits. `priorities`: a waiting job of higher priority comes
first. `min_run_s`: a running job keeps its GPUs so long. `gpu_types`: a job lies on one type, one
that it can run on. `cores_and_memory`: a machine has what its jobs need beside their GPUs.
`within`: a job that must lie on one machine, or in one rack, does."""

NOTHING_HONOURED: Final[frozenset[Rule]] = frozenset()
EVERY_RULE: Final[frozenset[Rule]] = frozenset(get_args(Rule))
ORDERED: Final = "use a policy that orders a queue (fifo, srsf, tiresias-las ...)"
"""The remedy: queue-ordered policies honour every rule."""


class Ranked(Protocol):
    """A job as far as rules concern it: a JobView, or what becomes one."""

    @property
    def id(self) -> str: ...
    @property
    def priority(self) -> int: ...
    @property
    def needs_host(self) -> bool: ...
    @property
    def within(self) -> str: ...


def honours_of(policy: object) -> frozenset[Rule]:
    """The rules that hold under a policy, by itself or because it is divisible.

    Raises ConfigRejected for a declaration that names no rule.
    """
    declared: frozenset[Rule] = frozenset(getattr(policy, "honours", NOTHING_HONOURED))
    if strange := declared - EVERY_RULE:
        raise ConfigRejected(
            f"{name_of(policy)} honours {sorted(strange)[0]!r}, which names no rule; there are "
            f"{', '.join(sorted(EVERY_RULE))}"
        )
    return declared | {"quotas"} if getattr(policy, "divisible", False) else declared


def refuse_rules(policy: object, rules: Rules) -> None:
    """Raise ConfigRejected where a rule is set that the policy ignores."""
    honoured = honours_of(policy)
    if rules.quotas and "quotas" not in honoured:
        raise ConfigRejected(
            f"{name_of(policy)} does not keep tenants' quotas; leave them out, or {ORDERED}"
        )
    if rules.min_run_s > 0 and "min_run_s" not in honoured:
        raise ConfigRejected(
            f"{name_of(policy)} protects no job for a minimum run time ({rules.min_run_s} s); "
            f"leave it out, or {ORDERED}"
        )


def refuse_job(policy: object, job: Ranked) -> None:
    """Raise ConfigRejected for a job that asks for what the policy ignores."""
    if job.priority and "priorities" not in honours_of(policy):
        raise ConfigRejected(
            f"{name_of(policy)} knows no priorities, and job {job.id} has priority "
            f"{job.priority}; leave priorities out, or {ORDERED}"
        )
    if job.needs_host and "cores_and_memory" not in honours_of(policy):
        raise ConfigRejected(
            f"{name_of(policy)} counts neither cores nor main memory, and job {job.id} asks for "
            f"them; leave them out, or {ORDERED}"
        )


def refuse_within(policy: object, job: Ranked) -> None:
    """Raise ConfigRejected for a job that must lie together under a policy that may spread it."""
    if job.within and "within" not in honours_of(policy):
        raise ConfigRejected(
            f"{name_of(policy)} spreads jobs over machines and racks as it likes, and job {job.id} "
            f"must lie within one {job.within}; leave `within` out, or {ORDERED}"
        )


def refuse_types(policy: object, cluster: ClusterView) -> None:
    """Raise ConfigRejected for several GPU types under a policy that places without regard to them:
    jobs would wait for ever."""
    if len(cluster.gpu_types) > 1 and "gpu_types" not in honours_of(policy):
        raise ConfigRejected(
            f"{name_of(policy)} knows one GPU type, and this cluster has "
            f"{', '.join(cluster.gpu_types)}; simulate one type, use pollux, or {ORDERED}"
        )

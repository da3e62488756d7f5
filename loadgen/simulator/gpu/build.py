"""Build the parts of one run from its options: cluster, rules, costs, policy, job model.

Nothing here depends on the clock, on the environment or on the order of processes.
"""

import inspect
from collections.abc import Mapping, Sequence
from math import inf

from slackwater.common.base.errors import ConfigRejected
from slackwater.loadgen.simulator.gpu.cluster import Cluster, parse_nodes, racks_for
from slackwater.loadgen.simulator.gpu.failures import Failures
from slackwater.loadgen.simulator.gpu.interference import Slowdowns
from slackwater.loadgen.simulator.gpu.jobmodels.base import JobModel
from slackwater.loadgen.simulator.gpu.jobmodels.registry import make_model
from slackwater.loadgen.simulator.gpu.outcome import Costs, Scaling, Settings
from slackwater.loadgen.simulator.gpu.workload import Submission
from slackwater.loadgen.simulator.options import Options, pairs, settings_of
from slackwater.services.master.scheduling import registry
from slackwater.services.master.scheduling.policies.colocation import Colocated
from slackwater.services.master.scheduling.rules import refuse_job, refuse_rules, refuse_types
from slackwater.services.master.scheduling.view import Policy, Rules

COLOCATION = ("colocate_gain", "colocate_stay")
"""Options that --set takes for a policy beside its own: how much sharing must add to begin, to go
on."""


def build_cluster(options: Options) -> Cluster:
    nodes = (
        parse_nodes(options.cluster)
        if options.cluster
        else [(options.gpus_per_node, "")] * options.nodes
    )
    if options.overhead == "none":
        if len({kind for _, kind in nodes}) > 1:
            raise ConfigRejected(
                "--overhead none only counts GPUs, and this cluster has several types; "
                "leave one of the two out"
            )
        return Cluster([(sum(gpus for gpus, _ in nodes), nodes[0][1])])
    if 0 < options.nodes_max < len(nodes):
        raise ConfigRejected(
            f"--nodes-max {options.nodes_max} is below the {len(nodes)} nodes that there are"
        )
    first = len(nodes)
    nodes = nodes + [nodes[0]] * (options.nodes_max - first)
    if options.racks > len(nodes):
        raise ConfigRejected(f"--racks {options.racks} is above the {len(nodes)} nodes; give fewer")
    return Cluster(nodes, up=first, racks=racks_for(len(nodes), options.racks))


def build_rules(options: Options, jobs: Sequence[Submission]) -> Rules:
    quotas: dict[str, int] = {}
    if options.quotas == "equal":
        tenants = sorted({job.spec.tenant for job in jobs})
        total = sum(build_cluster(options).sizes)
        share, rest = divmod(total, len(tenants))
        quotas = {tenant: share + (i < rest) for i, tenant in enumerate(tenants)}
    elif options.quotas:
        quotas = {k: int(v) for k, v in pairs(options.quotas, "--quotas").items()}
        _refuse_strangers("--quotas", "tenant", quotas, {job.spec.tenant for job in jobs})
    return Rules(quotas, options.borrowing, options.min_run_s, options.restart_s)


def _refuse_strangers(option: str, kind: str, named: Mapping[str, object], known: set[str]) -> None:
    """A name that no job has is a slip, and would be ignored in silence."""
    strange = sorted(set(named) - known)
    if strange:
        some = ", ".join(map(repr, sorted(known)[:8]))
        more = f" and {len(known) - 8} more" if len(known) > 8 else ""
        raise ConfigRejected(
            f"{option}: no job has the {kind} {strange[0]!r}; there are {some}{more}"
        )


def build_settings(options: Options, jobs: Sequence[Submission], seed: int) -> Settings:
    free = options.overhead == "none"
    costs = options.restart_s, options.start_s, options.stop_s, options.restart_by_model
    if free and any(costs):
        raise ConfigRejected("--overhead none makes restarts free; leave the restart costs out")
    if free and (options.spread_slowdown or options.interference or options.mtbf_s):
        raise ConfigRejected(
            "--overhead none only counts GPUs, and knows no machines to be spread over or to "
            "fail; leave --spread-slowdown, --interference and --mtbf-s out"
        )
    scaling = None
    if options.nodes_max:
        scaling = Scaling(1, options.nodes_max, options.provision_s)
    by_model = pairs(options.restart_by_model, "--restart-by-model")
    _refuse_strangers("--restart-by-model", "model", by_model, {job.spec.model for job in jobs})
    return Settings(
        rules=build_rules(options, jobs),
        costs=Costs(
            _whole(options.start_s),
            _whole(options.restart_s),
            {k: _whole(v) for k, v in by_model.items()},
            _whole(options.stop_s),
        ),
        slowdowns=Slowdowns(spread=options.spread_slowdown, interference=options.interference),
        failures=Failures(options.mtbf_s, options.repair_s, options.checkpoint_s, seed),
        scaling=scaling,
        ask_why_s=options.why_at,
    )


def _whole(value: float) -> float:
    """An integer where it is one, so that integer instants stay integers."""
    return int(value) if value == int(value) else value


def build_policy(options: Options, name: str) -> Policy:
    values = settings_of(options, name)
    knobs = registry.options_of(name)
    if options.mode != "rigid" and "mode" in knobs:
        values.setdefault("mode", options.mode)
    own = {k: values.pop(k) for k in COLOCATION if k in values and k not in knobs}
    sharing = {k.removeprefix("colocate_"): _share(f"{name}.{k}", v) for k, v in own.items()}
    if own and options.colocate < 2:
        key, value = next(iter(own.items()))
        raise ConfigRejected(
            f"--set {name}.{key}={value} says when jobs share GPUs, and with --colocate "
            f"{options.colocate} none do; add --colocate 2, or leave it out"
        )
    policy = registry.make(name, values)
    if options.nodes_max and not getattr(policy, "scale", False):
        raise ConfigRejected(
            f"--nodes-max {options.nodes_max} is for a policy that scales the cluster, and {name} "
            "does not; add --set pollux.scale=true, or leave it out"
        )
    if options.colocate > 1:
        if options.stop_s:
            raise ConfigRejected("--colocate shares GPUs, and --stop-s knows one job on each")
        if options.quotas or len(build_cluster(options).gpu_types) > 1:
            raise ConfigRejected("--colocate knows neither quotas nor several GPU types")
        return Colocated(policy, ways=options.colocate, **sharing)
    return policy


def _share(label: str, text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < inf:
        raise ConfigRejected(f"--set {label}={text}: give a share of at least 0, such as 0.1")
    return share


def build_model(options: Options, seed: int) -> JobModel:
    name = options.job_model
    if options.colocate > 1 and name == "fixed":
        name = "interleaved"
    return make_model(name, settings_of(options, options.job_model), seed)


def policy_knobs(name: str, options: Options) -> dict[str, object]:
    """Every knob of a policy as it runs: defaults, overridden."""
    knobs = {k: v for k, v in registry.options_of(name).items() if v is not inspect.Parameter.empty}
    return {**knobs, **settings_of(options, name)}


def refuse_ignored(options: Options, jobs: Sequence[Submission]) -> None:
    """Raise ConfigRejected, naming the policy, the rule and the remedy."""
    cluster, rules = build_cluster(options).view, build_rules(options, jobs)
    for name in options.policies:
        policy = build_policy(options, name)
        refuse_rules(policy, rules)
        refuse_types(policy, cluster)
        for job in jobs:
            refuse_job(policy, job.spec)

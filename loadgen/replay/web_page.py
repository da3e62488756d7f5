"""The page of a replay: what `report` has, and each job's life from the facts that the bus told."""

import base64
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from slackwater.common.domains.facts.timeline import JobTrack, Timeline
from slackwater.loadgen.replay.measures import LOSS_LIMIT, JobFigures
from slackwater.loadgen.replay.story import story
from slackwater.web import report as web

SMOOTHED_S = 3.0
"""A point of the chart of speeds is over so many seconds."""


def page(
    title: str,
    timelines: Sequence[Timeline],
    figures: Sequence[JobFigures],
    *,
    tiles: Iterable[tuple[str, str]] = (),
    notes: Iterable[web.Note] = (),
    tables: Sequence[web.Table] = (),
    images: Iterable[tuple[Path, str]] = (),
) -> web.Report:
    """Make the page of runs one after another. `tiles`: (figure, what it is); `images`: (file,
    caption)."""
    origin_s = timelines[0].started_s
    changes, details = _folded(timelines, origin_s)
    told = sorted((each.at_s - origin_s, each.text) for one in timelines for each in story(one))
    return web.Report(
        title=title,
        figures=[web.Figure(value, what) for value, what in tiles],
        notes=list(notes),
        charts=[_speeds(timelines[0], figures)],
        tables=tables,
        images=[_image(path, caption) for path, caption in images],
        story=told,
        changes=changes,
        details=details,
        now_s=max(_ends(one) for one in timelines) - origin_s,
    )


def results(timeline: Timeline, **more: float | None) -> web.Result:
    """Return what two replays are compared by; figures that are None are left out."""
    jobs = {
        id: track.ended_s - track.submitted_s
        for id, track in timeline.tracks.items()
        if track.ended_s is not None
    }
    return web.Result({name: value for name, value in more.items() if value is not None}, jobs)


def _folded(
    timelines: Sequence[Timeline], origin_s: float
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    facts = [(at_s - origin_s, fact) for one in timelines for at_s, fact in one.events]
    jobs = {
        id: web.job_row(
            gpus=track.spec.gpus, servers=track.spec.servers, workers=track.spec.workers,
            tenant=track.spec.tenant, model=track.spec.model,
        )
        for one in timelines
        for id, track in one.tracks.items()
    }  # fmt: skip
    return web.of_facts(sorted(facts, key=lambda each: each[0]), jobs)


def _ends(timeline: Timeline) -> float:
    ends = [track.ended_s or track.submitted_s for track in timeline.tracks.values()]
    return max([timeline.started_s, *ends])


def _speeds(timeline: Timeline, figures: Sequence[JobFigures]) -> web.Chart:
    """Draw each job's speed over time against its speed alone (the AutoPS paper's figure 10)."""
    alone = {row.job: row.standalone_s for row in figures}
    lines = [
        web.Series(id, web.thinned(_speed(track, alone_s, timeline.started_s)), step=False)
        for id, track in timeline.tracks.items()
        if (alone_s := alone.get(id)) and track.iterations
    ]
    end_s = max((line.points[-1][0] for line in lines if line.points), default=1.0)
    limit = web.Series(
        "loss limit", [(0.0, 1 - LOSS_LIMIT), (end_s, 1 - LOSS_LIMIT)], step=False, dash=True
    )
    title = "Each job's speed over its speed alone"
    return web.Chart(title, [*lines, limit], y="share", y_max=1.15)


def _speed(track: JobTrack, alone_s: float, origin_s: float) -> list[tuple[float, float]]:
    found, spent_s, count = [], 0.0, 0
    for each in track.iterations:
        spent_s, count = spent_s + each.duration_s, count + 1
        if spent_s >= SMOOTHED_S:
            found.append((each.at_s - origin_s, alone_s * count / spent_s))
            spent_s, count = 0.0, 0
    return found


def _image(path: Path, caption: str) -> web.Image:
    encoded = base64.b64encode(path.read_bytes()).decode()
    return web.Image(f"data:image/png;base64,{encoded}", caption)

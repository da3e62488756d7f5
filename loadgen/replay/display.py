"""The live display of a replay: what each job does and how fast, the scaling timeline (aggregators
in use against servers asked for), and what happened last. Off a terminal: a line an event."""

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slackwater.common.domains.facts.timeline import JobTrack, Timeline
from slackwater.loadgen.replay.story import story
from slackwater.schemas.job_states import STATE_SAID

RECENT = 8
WIDTH = 56
"""Columns of the scaling timeline, the whole replay so far: all of it fits into 80."""
BAR_WIDTH = 10
_BARS = " ▁▂▃▄▅▆▇█"


def render(phase: str, timeline: Timeline, now_s: float) -> RenderableType:
    """A picture of the timeline at `now_s`. Pure."""
    title = f"{phase} · {now_s - timeline.started_s:.0f} s"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("job", no_wrap=True)
    table.add_column("what it does", min_width=26)
    table.add_column("progress", width=BAR_WIDTH)
    table.add_column("iterations", justify="right", no_wrap=True)
    table.add_column("it/s", justify="right", no_wrap=True)
    table.add_column("of alone", justify="right", no_wrap=True)
    for id, track in timeline.tracks.items():
        speed = track.speed(now_s) if track.ended_s is None else 0.0
        alone_s = track.alone_s
        table.add_row(
            id,
            state_text(id, track, timeline),
            ProgressBar(total=track.spec.iterations, completed=track.reported, width=BAR_WIDTH),
            f"{track.reported}/{track.spec.iterations}",
            f"{speed:.2f}" if speed else "-",
            f"{min(1.0, speed * alone_s):.0%}" if speed and alone_s else "-",
        )
    return Group(table, *scaling(timeline, now_s), *happenings(timeline))


def state_text(id: str, track: JobTrack, timeline: Timeline) -> str:
    """A job's state in words that need no glossary."""
    if track.ended_s is not None:
        return track.state
    if track.state in ("stopping", "paused"):
        return STATE_SAID[track.state]
    where = track.aggregators
    if not where:
        return "is starting" if track.state == "running" else "waits for its turn"
    if any(m.job == id and m.ended_s is None for m in timeline.migrations.values()):
        return f"is being moved to {', '.join(where)}"
    if track.profile is None:
        return f"is measured alone on {', '.join(where)}"
    others = [
        other
        for other, its in timeline.tracks.items()
        if other != id and its.ended_s is None and set(its.aggregators) & set(where)
    ]
    if others:
        return f"shares {', '.join(where)} with {', '.join(others)}"
    return f"has {', '.join(where)} for itself"


def scaling(timeline: Timeline, now_s: float) -> list[Text]:
    """Aggregators in use and servers asked for over the replay so far, one column a moment; below,
    marks where a slow-down was found (!), a job was moved away (x), an aggregator added (+) or
    released (-)."""
    begun_s, span_s = timeline.started_s, max(now_s - timeline.started_s, 1e-9)
    moments_s = [begun_s + span_s * (column + 1) / WIDTH for column in range(WIDTH)]
    lines = []
    most = max((level for _, level in timeline.aggregators + timeline.required), default=0)
    for label, steps, style in (
        ("servers asked for ", timeline.required, "dim"),
        ("aggregators in use", timeline.aggregators, "green"),
    ):
        levels = [_level(steps, at_s) for at_s in moments_s]
        bars = "".join(_BARS[round(level * (len(_BARS) - 1) / max(most, 1))] for level in levels)
        lines.append(Text(f"{label} {bars} {levels[-1]}", style=style))
    marks = [" "] * WIDTH
    for each in story(timeline):
        mark = {"added": "+", "released": "-", "reverted": "x", "slow-down": "!"}.get(each.kind)
        if mark is not None:
            column = min(WIDTH - 1, int((each.at_s - begun_s) / span_s * WIDTH))
            while marks[column] != " " and column < WIDTH - 1:
                column += 1  # Beside what happened in the same moment.
            marks[column] = mark
    lines.append(Text(f"{'':18} {''.join(marks)}", style="yellow"))
    return lines


def _level(steps: list[tuple[float, int]], at_s: float) -> int:
    return next((level for from_s, level in reversed(steps) if from_s <= at_s), 0)


def happenings(timeline: Timeline) -> list[Text]:
    """The newest events, oldest first."""
    return [Text(each, style="dim") for each in news(timeline, 0)[-RECENT:]]


def line(phase: str, timeline: Timeline, now_s: float) -> str:
    """How far the jobs are, in one line."""
    jobs = ", ".join(
        f"{id} {track.reported}/{track.spec.iterations}"
        for id, track in timeline.tracks.items()
        if track.ended_s is None
    )
    return (
        f"{phase} {now_s - timeline.started_s:.0f} s: aggregators {timeline.in_use}, "
        f"asked for {timeline.required_now}; {jobs or 'no job running'}"
    )


def news(timeline: Timeline, told: int) -> list[str]:
    """Return the events since the first `told`, a line each."""
    return [
        f"{each.at_s - timeline.started_s:6.1f} s  {each.text}" for each in story(timeline)[told:]
    ]

"""The live display of a replay: jobs and their speeds, the scaling timeline (aggregators in use
against servers asked for), and what happened last."""

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slackwater.loadgen.replay.story import story
from slackwater.loadgen.replay.timeline import Timeline

RECENT = 8
WIDTH = 72
"""Columns of the scaling timeline, the whole replay so far."""
_BARS = " ▁▂▃▄▅▆▇█"


def render(phase: str, timeline: Timeline, now_s: float) -> RenderableType:
    """Pure: a picture of the timeline at `now_s`."""
    table = Table(title=f"{phase} · {now_s - timeline.started_s:.0f} s", title_justify="left")
    table.add_column("job")
    table.add_column("state")
    table.add_column("progress", width=24)
    table.add_column("iterations", justify="right")
    table.add_column("it/s", justify="right")
    table.add_column("last event")
    for id, track in timeline.tracks.items():
        last = track.facts[-1][1] if track.facts else ""
        table.add_row(
            id,
            track.state,
            ProgressBar(total=track.spec.iterations, completed=track.reported, width=22),
            f"{track.reported}/{track.spec.iterations}",
            f"{track.speed(now_s):.2f}" if track.ended_s is None else "-",
            last,
        )
    totals = Text(
        f"aggregators in use {timeline.in_use} · servers asked for {timeline.required_now} · "
        f"moved {timeline.bytes_moved / 1e6:,.0f} MB · "
        f"migrations {sum(m.fact == 'finished' for m in timeline.migrations.values())}"
    )
    return Group(table, *scaling(timeline, now_s), totals, *happenings(timeline))


def scaling(timeline: Timeline, now_s: float) -> list[Text]:
    """Aggregators in use and servers asked for over the replay so far, one column a moment; below,
    marks where an assignment was reverted (x), an aggregator added (+) or released (-)."""
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
            marks[min(WIDTH - 1, int((each.at_s - begun_s) / span_s * WIDTH))] = mark
    lines.append(Text(f"{'':18} {''.join(marks)}", style="yellow"))
    return lines


def _level(steps: list[tuple[float, int]], at_s: float) -> int:
    return next((level for from_s, level in reversed(steps) if from_s <= at_s), 0)


def happenings(timeline: Timeline) -> list[Text]:
    """The newest events, oldest first."""
    return [
        Text(f"{each.at_s - timeline.started_s:6.1f} s  {each.text}", style="dim")
        for each in story(timeline)[-RECENT:]
    ]


def line(phase: str, timeline: Timeline, now_s: float) -> str:
    """The same for a log or a pipe: one line."""
    jobs = ", ".join(
        f"{id} {track.reported}/{track.spec.iterations}"
        for id, track in timeline.tracks.items()
        if track.ended_s is None
    )
    return (
        f"{phase} {now_s - timeline.started_s:.0f} s: aggregators {timeline.in_use}, "
        f"asked for {timeline.required_now}; {jobs or 'no job running'}"
    )


def news(phase: str, timeline: Timeline, told: int) -> list[str]:
    """What happened since `told` events were, for a log."""
    return [
        f"{phase} {each.at_s - timeline.started_s:.1f} s: {each.text}"
        for each in story(timeline)[told:]
    ]

"""The live display of a replay: jobs, iterations per second, aggregators against servers asked."""

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slackwater.loadgen.replay.timeline import Timeline

RECENT = 6


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
    recent = sorted(timeline.migrations.values(), key=lambda m: m.started_s)[-RECENT:]
    moves = [
        Text(
            f"{m.started_s - timeline.started_s:6.1f} s  {m.job}: {m.cause}, {m.buckets} buckets "
            f"{','.join(m.sources)} -> {','.join(m.targets)}  {m.fact}",
            style="dim",
        )
        for m in recent
    ]
    return Group(table, totals, *moves)


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

"""How a live replay is shown while it runs: a display on a terminal, elsewhere a line an event."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live

from slackwater.common.domains.facts.timeline import Timeline
from slackwater.console.outcome import err
from slackwater.loadgen.replay import display
from slackwater.loadgen.replay.experiment import OnPhase


@contextmanager
def progress() -> Iterator[OnPhase]:
    """Yield the function that a replay calls at each tick. A phase is named once, where it
    begins."""
    if err.is_terminal:
        # Not `err`: it leaves wrapping to the terminal, which would cut a table's last columns.
        screen = Console(stderr=True, highlight=False)
        with Live(console=screen, refresh_per_second=4) as live:
            yield lambda phase, timeline, now_s: live.update(display.render(phase, timeline, now_s))
        return
    told, heard = 0, ""

    def say(phase: str, timeline: Timeline, now_s: float) -> None:
        nonlocal told, heard
        if phase != heard:
            told, heard = 0, phase
            err.print(f"{phase}:", markup=False)
        for news in display.news(timeline, told):
            told += 1
            err.print(news, markup=False)

    yield say

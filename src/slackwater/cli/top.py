"""`slackwater top`: jobs and aggregators on one screen, each second anew.

The screen is the terminal's other one. Whatever ends the command (q, Ctrl-C, SIGTERM, a closed
window) gives the terminal back as it was.
"""

import asyncio
import importlib.util
import os
import signal
import sys
import termios
import tty
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated, Any, Final

import msgspec
import typer

from slackwater.cli import jobs as listing
from slackwater.cli import pool
from slackwater.cli.jobs import Listed
from slackwater.cli.show import REFRESH_S, with_client
from slackwater.client import AsyncClient
from slackwater.common.base.errors import Retryable
from slackwater.common.shell.client import Client
from slackwater.console import documents, figures, tables
from slackwater.console.interrupt import INTERRUPTED
from slackwater.console.options import Json, Url
from slackwater.console.outcome import out, print_json
from slackwater.schemas.cluster import AggregatorInfo
from slackwater.schemas.job_states import HOLDING_STATES, TERMINAL_STATES

ENTER: Final = "\x1b[?1049h\x1b[?25l"
LEAVE: Final = "\x1b[?25h\x1b[?1049l"
HOME: Final = "\x1b[H"
CLEAR_LINE: Final = "\x1b[K"
CLEAR_REST: Final = "\x1b[J"
PIPED_WIDTH: Final = 120
QUITS: Final = (signal.SIGINT,)
ENDS: Final = (signal.SIGTERM, signal.SIGHUP)


class Seen(msgspec.Struct, frozen=True):
    """Holds what is shown."""

    jobs: Listed
    aggregators: tuple[AggregatorInfo, ...]
    problem: str = ""
    """Why the next look failed; the figures are older ones."""


def top(
    url: Url = None,
    json: Json = False,
    once: Annotated[bool, typer.Option(help="Print once and end.")] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="Redraw one screen, without scrolling and keys.")
    ] = False,
) -> None:
    """Show jobs, nodes, aggregators and events, refreshed every second; q ends it, ? shows keys.

    Scrolls, sorts, filters (/) and drills down to a job (Enter) and its log (l), where the extra
    `top` is installed; else, and with --plain, it redraws one screen.

    The columns are those of `slackwater jobs` and `slackwater aggregators`. Ended with q or
    Ctrl-C it exits with 0.
    """
    if json:
        seen = with_client(url, look)
        print_json(
            {
                "jobs": [documents.job(job.record, job.progress) for job in seen.jobs.jobs],
                "aggregators": seen.aggregators,
            }
        )
    elif once or not (out.is_terminal and sys.stdin.isatty()):
        tables.show(screen(with_client(url, look), out.width if out.is_terminal else None, None))
    else:
        raise typer.Exit(with_client(url, watch if plain else _full_screen() or watch))


def _full_screen() -> Callable[[AsyncClient], Awaitable[int]] | None:
    """Return what shows the application; None where its library is not installed."""
    if importlib.util.find_spec("textual") is None:
        return None
    from slackwater.cli import full_screen

    return full_screen.show


async def look(client: Client) -> Seen:
    return Seen(await listing.read(client), await client.aggregators())


async def watch(client: Client) -> int:
    """Show the screen until the user ends it. Return the exit code."""
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    seen = await look(client)
    with _signals(ended), _screen(ended):
        while not ended.done():
            size = out.size
            _draw(screen(seen, size.width, size.height))
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(ended), REFRESH_S)
            if not ended.done():
                seen = await _next(client, seen, ended)
    return ended.result()


async def _next(client: Client, seen: Seen, ended: "asyncio.Future[int]") -> Seen:
    """Look once more. If that fails, or the user ends it, return the last look, with the reason of
    a failure."""
    looking = asyncio.ensure_future(look(client))
    waited: set[asyncio.Future[Any]] = {looking, ended}
    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    if not looking.done():
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        return seen
    try:
        return looking.result()
    except Retryable as error:
        return msgspec.structs.replace(seen, problem=str(error))


def screen(seen: Seen, width: int | None, height: int | None) -> list[str]:
    """Draw as many lines as fit: `height` rows of `width` cells; None: all, uncut."""
    head = [_title(seen, width, quits=height is not None)]
    if seen.problem:
        head.append(tables.cut(f"no answer: {seen.problem}", width or PIPED_WIDTH))
    infos = seen.aggregators
    jobs = listing.table(seen.jobs, wide=False, width=width) or ["No jobs."]
    pools = pool.aggregator_table(infos, width) if infos else ["No aggregators."]
    more = seen.jobs.hidden
    if height is None:
        return [*head, "", *_part(jobs, len(jobs), more), "", *pools]
    room = max(4, height - len(head) - 3)
    for_pools = min(len(pools), max(room // 3, room - len(jobs) - bool(more)))
    parts = [*_part(jobs, room - for_pools, more), "", *_part(pools, for_pools, 0)]
    return [*head, "", *parts][:height]


def _part(lines: Sequence[str], room: int, hidden: int) -> list[str]:
    """Cut a table to the lines that fit, and say how many do not."""
    if len(lines) + bool(hidden) <= room or room < 2:
        shown = list(lines[: max(1, room)])
    else:
        shown = list(lines[: room - 1])
    left = len(lines) - len(shown) + hidden
    return [*shown, f"and {left:,} more"] if left else shown


def _title(seen: Seen, width: int | None, quits: bool) -> str:
    counts, infos = seen.jobs.counts, seen.aggregators
    ended = sum(number for state, number in counts.items() if state in TERMINAL_STATES)
    running = sum(number for state, number in counts.items() if state in HOLDING_STATES)
    paused = counts.get("paused", 0)
    used = len([info for info in infos if info.record.cluster is not None])
    parts = [
        figures.at(seen.jobs.at_s)[11:19],
        f"{running:,} running, {counts.get('pending', 0):,} pending, "
        + (f"{paused:,} paused, " if paused else "")
        + f"{ended:,} ended",
        f"{used:,} of {len(infos):,} aggregators in use",
        *(["q quits"] if quits else []),
    ]
    return tables.cut("  ".join(parts), width or PIPED_WIDTH)


# The terminal -------------------------------------------------------------------------------------


def _draw(lines: Sequence[str]) -> None:
    """Draw over the old screen, so that nothing flickers."""
    text = "\n".join(line + CLEAR_LINE for line in lines)
    sys.stdout.write(HOME + text + CLEAR_REST)
    sys.stdout.flush()


@contextmanager
def _screen(ended: "asyncio.Future[int]") -> Iterator[None]:
    """Switch to the other screen, and read keys as they are typed; afterwards restore both, if the
    terminal is still there."""
    loop, keys = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    sys.stdout.write(ENTER)
    try:
        tty.setcbreak(keys)
        loop.add_reader(keys, _typed, keys, ended)
        yield
    finally:
        loop.remove_reader(keys)
        with suppress(OSError, termios.error):  # Its window may be closed.
            termios.tcsetattr(keys, termios.TCSADRAIN, before)
            sys.stdout.write(LEAVE)
            sys.stdout.flush()


def _typed(keys: int, ended: "asyncio.Future[int]") -> None:
    typed = os.read(keys, 64)
    if not typed or b"q" in typed or b"Q" in typed:
        _end(ended, 0)


@contextmanager
def _signals(ended: "asyncio.Future[int]") -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in (*QUITS, *ENDS):
        loop.add_signal_handler(number, _end, ended, 0 if number in QUITS else INTERRUPTED)
    try:
        yield
    finally:
        for number in (*QUITS, *ENDS):
            loop.remove_signal_handler(number)


def _end(ended: "asyncio.Future[int]", code: int) -> None:
    if not ended.done():
        ended.set_result(code)

"""`slackwater top` as an application of the terminal: scrolls, sorts, filters and drills down.

It looks at the same board as the dashboard (web/watch.py). Keys are those of k9s and less.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import ClassVar, Final

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.coordinate import Coordinate
from textual.screen import ModalScreen, Screen
from textual.widgets import DataTable, Footer, Input, RichLog, Static, TabbedContent, TabPane
from textual.widgets.data_table import RowDoesNotExist

from slackwater.cli.ends import foretold
from slackwater.cli.job import described, past_of
from slackwater.cli.screen_rows import (
    AGGREGATORS,
    DEVICES,
    EVENTS,
    JOBS,
    LENDERS,
    NODES,
    Column,
    Row,
    arranged,
    color,
)
from slackwater.client import AsyncClient
from slackwater.common.base.errors import Rejected, Retryable
from slackwater.web.watch import Watch

REFRESH_S: Final = 1.0
WIDE_FROM: Final = 120
"""Columns of a terminal from which on all of a table's are shown."""
WHY_MAX: Final = 200
LOG_LINES: Final = 5_000
TAIL_LINES: Final = 500
SAID_S: Final = 5.0
TABLES: Final[dict[str, tuple[Column, ...]]] = {
    "jobs": JOBS,
    "nodes": NODES,
    "aggregators": AGGREGATORS,
    "events": EVENTS,
    "lenders": LENDERS,
    "devices": DEVICES,
}
SORTED_BY: Final = {"jobs": ("state", False), "events": ("at_s", True)}
KEYS: Final = """\
 1 2 3 4 5 6   jobs, nodes, aggregators, events, lenders and devices of memory
 /             filter by words; Esc shows all again
 arrows, j k   walk; PgUp PgDn Home End
 s S           sort by the next column; turn the order round
 Enter         details of a job, or of an event's job
 l             the log of a job, as it grows
 c             cancel a job
 p             pause a job, or let a paused one go on
 r             run a job again that has ended
 Esc           back
 ?             these keys
 q             quit"""


class Listing(DataTable[Text]):
    """A table of the board: sorted, filtered, and refreshed without losing its place."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "cursor_down", show=False),
        Binding("k", "cursor_up", show=False),
        Binding("home", "scroll_top", show=False),
        Binding("end", "scroll_bottom", show=False),
    ]

    def __init__(self, kind: str) -> None:
        super().__init__(id=f"table-{kind}", cursor_type="row", zebra_stripes=True)
        self.kind = kind
        self.sort_key, self.descending = SORTED_BY.get(kind, ("id", False))
        self.words = ""
        self.shown: list[Row] = []
        self._cells: dict[str, tuple[str, ...]] = {}
        self._columns: tuple[Column, ...] = ()

    def refresh_rows(self, rows: Iterable[Row], now_s: float, width: int) -> None:
        """Show these rows, as they are sorted and filtered now."""
        columns = tuple(c for c in TABLES[self.kind] if width >= WIDE_FROM or not c.wide)
        found = arranged(
            rows, columns, sort=self.sort_key, descending=self.descending, words=self.words,
            now_s=now_s,
        )  # fmt: skip
        cells = {row["id"]: tuple(c.show(row, now_s)[:WHY_MAX] for c in columns) for row in found}
        same = list(cells) == list(self._cells) and columns == self._columns
        self.shown = found
        if same:
            for at, (id, texts) in enumerate(cells.items()):
                for place, text in enumerate(texts):
                    if text != self._cells[id][place]:
                        value = _cell(columns[place], text)
                        self.update_cell_at(Coordinate(at, place), value, update_width=True)
        else:
            self._fill(columns, cells)
        self._cells, self._columns = cells, columns

    def _fill(self, columns: tuple[Column, ...], cells: dict[str, tuple[str, ...]]) -> None:
        """Fill it anew, and stay on the row that was chosen."""
        chosen, scrolled = self.chosen(), self.scroll_offset
        self.clear(columns=True)
        for column in columns:
            mark = " ↓" if self.descending else " ↑"
            title = column.title + (mark if column.key == self.sort_key else "")
            self.add_column(Text(title, justify="right" if column.right else "left"),
                            key=column.key)  # fmt: skip
        for id, texts in cells.items():
            pairs = zip(columns, texts, strict=True)
            self.add_row(*(_cell(column, text) for column, text in pairs), key=id)
        if chosen is not None:
            with suppress(RowDoesNotExist):  # It is gone, or the filter leaves it out.
                self.move_cursor(row=self.get_row_index(chosen), scroll=False)
        self.scroll_to(x=scrolled.x, y=scrolled.y, animate=False)

    def chosen(self) -> str | None:
        """Return the id of the row under the cursor; None: the table is empty."""
        if not self.row_count:
            return None
        return self.coordinate_to_cell_key(self.cursor_coordinate).row_key.value

    def chosen_row(self) -> Row | None:
        id = self.chosen()
        return next((each for each in self.shown if each["id"] == id), None)

    def chosen_job(self) -> str | None:
        if self.kind == "jobs":
            return self.chosen()
        return (self.chosen_row() or {}).get("job") or None

    def sort_next(self) -> None:
        keys = [column.key for column in self._columns]
        self.sort_by(keys[(keys.index(self.sort_key) + 1) % len(keys)])

    def sort_by(self, key: str) -> None:
        """Sort by this column; once more: the other way round."""
        self.descending = not self.descending if key == self.sort_key else False
        self.sort_key = key
        self._cells = {}


class Top(App[int]):
    """The application."""

    CSS = """
    #title { height: 1; background: $panel; padding: 0 1; }
    #problem { height: auto; background: $error; color: $text; padding: 0 1; display: none; }
    #filter { display: none; height: 1; border: none; padding: 0 1; }
    #filter.open { display: block; }
    TabPane { padding: 0; }
    #tabs, Listing { height: 1fr; }
    Screen { overflow: hidden; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "quit_now", "quit", key_display="q"),
        Binding("slash", "filter", "filter", key_display="/"),
        Binding("enter", "details", "details"),
        Binding("l", "logs", "log"),
        Binding("c", "act('cancel')", "cancel"),
        Binding("p", "act('pause')", "pause"),
        Binding("r", "act('run again')", show=False),
        Binding("s", "sort", "sort"),
        Binding("S", "turn", "turn", show=False),
        Binding("question_mark", "help", "keys", key_display="?"),
        Binding("escape", "all", show=False),
        *(Binding(str(at), f"tab('{kind}')", show=False) for at, kind in enumerate(TABLES, 1)),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, client: AsyncClient) -> None:
        super().__init__()
        self.client = client
        self.watch_cluster = Watch(client)

    def compose(self) -> ComposeResult:
        yield Static(id="title")
        yield Static(id="problem")
        with TabbedContent(id="tabs"):
            for at, kind in enumerate(TABLES, 1):
                with TabPane(f"{at} {kind}", id=kind):
                    yield Listing(kind)
        yield Input(placeholder="words to filter by; Enter keeps them, Esc shows all", id="filter")
        yield Footer()

    def on_mount(self) -> None:
        self.run_worker(self.watch_cluster.run(), name="watch", exit_on_error=True)
        self.set_interval(REFRESH_S, self.look)
        self.call_later(self.look)
        self.listing.focus()

    @property
    def listing(self) -> Listing:
        """Return the table that is shown."""
        active = self.query_one("#tabs", TabbedContent).active
        return self.query_one(f"#table-{active}", Listing)

    def look(self) -> None:
        """Show what the board has now."""
        if isinstance(self.screen, ModalScreen) or self.screen is not self.screen_stack[0]:
            return
        board, now_s = self.watch_cluster.board, self.client.clock.now_s()
        listing = self.listing
        listing.refresh_rows(self.rows(listing.kind), now_s, self.size.width)
        self.query_one("#title", Static).update(self._title())
        problems = [each["text"] for each in board.kind("problems").values()]
        shown = self.query_one("#problem", Static)
        shown.display = bool(problems)
        shown.update(Text(problems[0] if problems else "", no_wrap=True, overflow="ellipsis"))

    def rows(self, kind: str) -> list[Row]:
        board = self.watch_cluster.board
        found = [{"id": id, **row} for id, row in board.kind(kind).items()]
        if kind == "jobs":
            for row in found:
                names = ("iteration", "speed", "eta_s", "loss", "moves")
                row |= dict(zip(names, board.get("going", row["id"]) or (None,) * 5, strict=True))
        return found

    def _title(self) -> Text:
        board = self.watch_cluster.board
        counts: dict[str, int] = board.get("counts", "jobs") or {}
        nodes = board.kind("nodes").values()
        pool = board.kind("aggregators").values()
        used = sum(each["gpus_used"] for each in nodes)
        parts = [f"{number:,} {state}" for state, number in counts.items()] or ["no jobs"]
        parts += [f"GPUs {used}/{sum(each['gpus'] for each in nodes)}"]
        parts += [f"aggregators {sum(bool(each['cluster']) for each in pool)}/{len(pool)}"]
        words = self.listing.words
        return Text("  ".join(parts) + (f"  filter: {words}" if words else ""), no_wrap=True)

    # Keys -----------------------------------------------------------------------------------------

    def action_quit_now(self) -> None:
        self.exit(0)

    def action_tab(self, kind: str) -> None:
        self.query_one("#tabs", TabbedContent).active = kind
        self.listing.focus()
        self.look()

    def on_tabbed_content_tab_activated(self) -> None:
        self.look()

    def action_filter(self) -> None:
        box = self.query_one("#filter", Input)
        box.value = self.listing.words
        box.add_class("open")
        box.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        if event.input.has_class("open"):
            self.listing.words = event.value
            self.look()

    def on_input_submitted(self) -> None:
        self._close_filter()

    def _close_filter(self) -> None:
        self.query_one("#filter", Input).remove_class("open")
        self.listing.focus()

    def action_all(self) -> None:
        if self.query_one("#filter", Input).has_class("open") or self.listing.words:
            self.listing.words = ""
            self._close_filter()
            self.look()

    def action_sort(self) -> None:
        self.listing.sort_next()
        self.look()

    def action_turn(self) -> None:
        self.listing.sort_by(self.listing.sort_key)
        self.look()

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        if isinstance(event.data_table, Listing) and event.column_key.value is not None:
            event.data_table.sort_by(event.column_key.value)
            self.look()

    def on_data_table_row_selected(self) -> None:
        self.action_details()

    def action_details(self) -> None:
        if (job := self.listing.chosen_job()) is not None:
            self.push_screen(JobScreen(self.client, job))

    def action_logs(self) -> None:
        if (job := self.listing.chosen_job()) is not None:
            self.push_screen(LogScreen(self.client, job))

    def action_act(self, verb: str) -> None:
        """Ask whether that is meant, and do it."""
        row = self.listing.chosen_row()
        if self.listing.kind != "jobs" or row is None:
            return
        if verb == "pause" and row["state"] == "paused":
            verb = "resume"

        async def answered(yes: bool | None) -> None:
            if yes:
                self.run_worker(self._act(verb, row["id"]))

        self.push_screen(
            Question(f"{verb} job {row['id']}, which is {row['state']}?  y / n"), answered
        )

    async def _act(self, verb: str, job: str) -> None:
        acts: dict[str, Callable[[str], Awaitable[object]]] = {
            "cancel": self.client.cancel, "pause": self.client.pause,
            "resume": self.client.resume, "run again": self.client.run_again,
        }  # fmt: skip
        try:
            await acts[verb](job)
        except (Rejected, Retryable) as error:
            self.notify(str(error), severity="error", timeout=SAID_S, markup=False)
            return
        self.notify(f"job {job}: {verb}", timeout=SAID_S, markup=False)

    def action_help(self) -> None:
        self.push_screen(Keys(KEYS))


class JobScreen(Screen[None]):
    """One job, as `slackwater job` describes it, each two seconds anew."""

    CSS = "JobScreen VerticalScroll { padding: 0 1; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "app.pop_screen", "back"),
        Binding("l", "logs", "log"),
    ]

    def __init__(self, client: AsyncClient, job: str) -> None:
        super().__init__()
        self._client, self._job = client, job

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static("...", id="job", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self.set_interval(2.0, self._look)
        self._look()

    def _look(self) -> None:
        self.run_worker(self._read(), exclusive=True)

    async def _read(self) -> None:
        try:
            info = await self._client.job_info(self._job)
            ends = await foretold(self._client, info.job)
            past = await past_of(self._client, info)
            now_s = self._client.clock.now_s()
            lines = [*described(info, now_s, self.size.width - 4, ends), *past]
        except (Rejected, Retryable) as error:
            lines = [str(error)]
        self.query_one("#job", Static).update("\n".join(lines))

    def action_logs(self) -> None:
        self.app.push_screen(LogScreen(self._client, self._job))


class LogScreen(Screen[None]):
    """The lines that a job's ranks print, as they come."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "app.pop_screen", "back"),
        Binding("f", "follow", "follow"),
    ]

    def __init__(self, client: AsyncClient, job: str) -> None:
        super().__init__()
        self._client, self._job = client, job

    def compose(self) -> ComposeResult:
        yield Static(f"log of {self._job}", id="head", markup=False)
        yield RichLog(max_lines=LOG_LINES, wrap=True, id="log")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#log", RichLog).focus()
        self.run_worker(self._read(), exclusive=True)

    async def _read(self) -> None:
        log = self.query_one("#log", RichLog)
        try:
            async for line in self._client.logs(self._job, tail=TAIL_LINES, follow=True):
                log.write(Text(f"{line.rank} | {line.text}"))
            log.write(Text("(the job has ended)", style="dim"))
        except (Rejected, Retryable) as error:
            log.write(Text(str(error), style="red"))

    def action_follow(self) -> None:
        log = self.query_one("#log", RichLog)
        log.auto_scroll = not log.auto_scroll
        if log.auto_scroll:
            log.scroll_end(animate=False)


class Box(ModalScreen[bool]):
    """A text in the middle of the screen."""

    CSS = """
    Box { align: center middle; }
    Box Static { width: auto; height: auto; border: round $accent; padding: 1 2;
                 background: $panel; }
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        yield Static(self._text, markup=False)


class Question(Box):
    """A question that is answered by y or n."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "yes"),
        Binding("n,escape,q,enter", "dismiss(False)", "no"),
    ]


class Keys(Box):
    """The keys."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark,enter", "app.pop_screen", "back")
    ]


def _cell(column: Column, text: str) -> Text:
    style = color(text) if column.key == "state" else ""
    return Text(text, style=style, justify="right" if column.right else "left")


async def show(client: AsyncClient) -> int:
    """Show the application until the user quits, or a signal ends it; the terminal is as before
    then. Return the exit code."""
    app = Top(client)
    loop = asyncio.get_running_loop()
    for number, code in ((signal.SIGINT, 0), (signal.SIGTERM, 130), (signal.SIGHUP, 130)):
        loop.add_signal_handler(number, app.exit, code)
    return await app.run_async() or 0

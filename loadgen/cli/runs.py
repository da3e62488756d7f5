"""Show simulations while they run, and write their reports: for the commands of all pools."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from slackwater.common.base.errors import Rejected

Tick = Callable[[int, int, float], None]
"""Is told the number of a run, how many of its jobs are done, and its time in seconds."""


@contextmanager
def bars(names: Sequence[str], jobs: int, shown: bool) -> Iterator[Tick | None]:
    """Show a bar for each run; None where there is no terminal, or it is not to be `shown`."""
    console = Console(stderr=True)
    if not shown or not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("day {task.fields[day]:.1f}"), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as bar:
        rows = [bar.add_task(name, total=jobs, day=0.0) for name in names]

        def tick(number: int, done: int, now_s: float) -> None:
            bar.update(rows[number], completed=done, day=now_s / 86400)

        yield tick


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Write a report there. Raises Rejected where that cannot be done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise Rejected(
            f"--report {folder}: cannot be written ({error.strerror}); name another folder"
        ) from error

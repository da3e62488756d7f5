"""The result of a play: a table for people, and a folder.

summary.json    the result, options and seed included
seconds.csv     requests that ended, by second
latency.png     percentiles of reads and writes; seconds.png: requests a second
"""

from pathlib import Path

from rich.table import Table

from slackwater.common.base.errors import Rejected
from slackwater.loadgen.files import table_text, write_json
from slackwater.loadgen.memory.play import PlayResult
from slackwater.loadgen.plots import COLORS, figure


def table(result: PlayResult) -> Table:
    options = result.options
    made = Table(title=f"{options.workload}, {options.pages:,} pages, seed {options.seed}")
    for column in ("", "requests", "p50 us", "p95", "p99", "p99.9"):
        made.add_column(column, justify="right" if column else "left")
    writes = result.requests - result.reads
    for name, count, found in (
        ("reads", result.reads, result.read_us),
        ("writes", writes, result.write_us),
    ):
        made.add_row(name, f"{count:,}", *(f"{value:,.1f}" for value in found.values()))
    return made


def lines(result: PlayResult) -> list[str]:
    found = [
        f"{result.per_s:,.0f} requests/s, {result.mib_per_s:,.1f} MiB/s in {result.seconds:.1f} s"
    ]
    if result.rates:
        rates = (f"{name} {value:.1%}" for name, value in result.rates.items())
        found.append(f"hit rates: {', '.join(rates)}")
    if result.options.check:
        found.append(f"{result.checked_pages:,} pages read and right")
    return found


def write_report(folder: Path, result: PlayResult) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "summary.json", result)
        rows = table_text(("second", "requests"), enumerate(result.by_second))
        (folder / "seconds.csv").write_text(rows)
    except OSError as error:
        raise Rejected(
            f"--report {folder}: cannot be written ({error.strerror}); name another folder"
        ) from error
    with figure(folder / "seconds.png") as (_, axes):
        axes.plot(result.by_second, color=COLORS[0])
        axes.set_xlabel("time (s)")
        axes.set_ylabel("requests a second")
    with figure(folder / "latency.png") as (_, axes):
        kinds = (("reads", result.read_us), ("writes", result.write_us))
        for color, (name, found) in zip(COLORS, kinds, strict=False):
            axes.plot(list(found), list(found.values()), "o-", color=color, label=name)
        axes.set_yscale("log")
        axes.set_ylabel("microseconds")
        axes.legend()

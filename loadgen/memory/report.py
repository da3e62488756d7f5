"""The result of a play: a table for people, and a folder.

summary.json    the result, options and seed included
seconds.csv     requests that ended, by second
index.html      a page that opens without a server; results.json: for `loadgen compare`
latency.png     percentiles of reads and writes; seconds.png: requests a second
"""

from pathlib import Path

from rich.table import Table

from slackwater.common.base.errors import Rejected
from slackwater.loadgen.files import table_text, write_json
from slackwater.loadgen.memory.play import PlayResult
from slackwater.loadgen.plots import COLORS, figure
from slackwater.web import report as web


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


def figures(result: PlayResult) -> dict[str, float]:
    """Return what two plays are compared by."""
    found = {"requests_per_s": result.per_s, "mib_per_s": result.mib_per_s}
    for name, of in (("read", result.read_us), ("write", result.write_us)):
        found |= {f"{name}_{quantile}_us": value for quantile, value in of.items()}
    return found | {f"{name}_hit_rate": value for name, value in result.rates.items()}


def made_page(result: PlayResult) -> web.Report:
    requests = [(float(second), float(count)) for second, count in enumerate(result.by_second)]
    writes = result.requests - result.reads
    rows = [
        [name, f"{count:,}", *(f"{value:,.1f}" for value in of.values())]
        for name, count, of in (("reads", result.reads, result.read_us),
                                ("writes", writes, result.write_us))
    ]  # fmt: skip
    columns = ["", "requests", *(f"{name} us" for name in result.read_us)]
    return web.Report(
        title=f"{result.options.workload}, {result.options.pages:,} pages",
        subtitle=f"seed {result.options.seed}",
        figures=[
            web.Figure(f"{result.per_s:,.0f}", "requests a second"),
            web.Figure(f"{result.mib_per_s:,.1f}", "MiB a second"),
        ],
        notes=[web.Note(text) for text in lines(result)],
        charts=[web.Chart("Requests a second", [web.Series("requests", requests)])],
        tables=[web.Table("Latency", columns, rows, tuple(range(1, len(columns))))],
        now_s=float(len(result.by_second) or 1),
    )


def write_report(folder: Path, result: PlayResult) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "summary.json", result)
        rows = table_text(("second", "requests"), enumerate(result.by_second))
        (folder / "seconds.csv").write_text(rows)
        web.write(folder, made_page(result), {result.options.workload: web.Result(figures(result))})
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

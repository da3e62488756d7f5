"""`loadgen compare`: two reports side by side."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from slackwater.common.base.errors import Rejected
from slackwater.console.options import Json
from slackwater.console.outcome import Usage, out, print_json, reported
from slackwater.loadgen.cli.runs import writing
from slackwater.loadgen.compare import Comparison, chosen, compare, pairs
from slackwater.web import report
from slackwater.web.report import Chart, Figure, Report, Result, Results, Series

_Folder = Annotated[
    Path, typer.Argument(metavar="REPORT", help="A folder that --report of a command wrote.")
]


def compare_command(
    a: _Folder,
    b: _Folder,
    of: Annotated[
        str, typer.Option("--of", metavar="SET", help="Take this set (a policy, say) of the first.")
    ] = "",
    against: Annotated[
        str, typer.Option("--against", metavar="SET", help="Take this set of the second.")
    ] = "",
    folder: Annotated[
        Path | None,
        typer.Option("--report", metavar="FOLDER", help="Write the comparison to this folder."),
    ] = None,
    json: Json = False,
) -> None:
    """Set two reports side by side: figures and their ratios, and the same jobs' times.

    Of reports with several sets (policies) those of equal names are compared, or the two that --of
    and --against name, which may come from one report.
    """
    with reported():
        first, second = _read(a), _read(b)
        found = [
            (compare(name, one, other, another), one, another)
            for (name, one), (other, another) in _chosen(first, second, of, against, a, b)
        ]
        if folder is not None:
            with writing(folder):
                _write(folder, str(a), str(b), found)
    if json:
        print_json([each for each, _, _ in found])
        return
    for each, _, _ in found:
        _show(each)
    if folder is not None:
        out.print(f"report: {folder}/index.html", highlight=False)


def _read(folder: Path) -> Results:
    try:
        return report.results(folder)
    except OSError as error:
        raise Usage(
            f"{folder}: no results.json can be read there ({error.strerror}); give a folder that "
            "--report of `loadgen` wrote"
        ) from error
    except msgspec.MsgspecError as error:
        raise Rejected(f"{folder}/results.json: {error}") from error


def _chosen(
    first: Results, second: Results, of: str, against: str, a: Path, b: Path
) -> list[tuple[tuple[str, Result], tuple[str, Result]]]:
    """Pair the sets. Raises Rejected."""
    common = pairs(first, second)
    if not of and not against and (len(common) > 1 or (common and len(first.sets) > 1)):
        return [((name, first.sets[name]), (name, second.sets[name])) for name in common]
    return [(chosen(first, of, str(a)), chosen(second, against, str(b)))]


def _show(found: Comparison) -> None:
    title = f"{found.a} and {found.b}" if found.a != found.b else found.a
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in ("first", "second", "ratio"):
        table.add_column(name, justify="right")
    for each in found.figures:
        cells = (report.shown(value) if value is not None else "-" for value in (each.a, each.b))
        ratio = "-" if each.ratio is None else f"{each.ratio:.3f}"
        table.add_row(each.figure.replace("_", " "), *cells, ratio)
    out.print(table)
    if found.jobs:
        out.print(_jobs(found), markup=False, highlight=False)


def _jobs(found: Comparison) -> str:
    return (
        f"of {found.jobs:,} jobs that both have {found.faster:,} took less time in the second, "
        f"{found.slower:,} took more; their times are {found.mean_ratio:.3f} of those in the first "
        "(geometric mean)"
    )


def _write(folder: Path, a: str, b: str, found: list[tuple[Comparison, Result, Result]]) -> None:
    charts, tables, notes, figures = [], [], [], []
    for each, one, other in found:
        what = each.a if each.a == each.b else f"{each.a} and {each.b}"
        rows = [
            [each_figure.figure.replace("_", " "),
             *("-" if v is None else report.shown(v) for v in (each_figure.a, each_figure.b)),
             "-" if each_figure.ratio is None else f"{each_figure.ratio:.3f}"]
            for each_figure in each.figures
        ]  # fmt: skip
        columns = ["figure", "first", "second", "ratio"]
        tables.append(report.Table(f"{what}: figures", columns, rows, (1, 2, 3)))
        if each.jobs:
            notes.append(report.Note(f"{what}: {_jobs(each)}."))
            figures.append(Figure(f"{each.mean_ratio:.3f}", f"{what}: jobs' times, second / first"))
            curves = [
                Series(name, report.distribution(side.jobs.values()))
                for name, side in (("first", one), ("second", other))
            ]
            charts.append(Chart(f"{what}: jobs that took at most so long", curves, y="share",
                                y_max=1.02))  # fmt: skip
            changed = [
                [job.job, report.shown(job.a_s), report.shown(job.b_s), f"{job.ratio:.3f}"]
                for job in each.changed
            ]
            columns = ["job", "first, s", "second, s", "ratio"]
            tables.append(report.Table(f"{what}: jobs that changed most", columns, changed,
                                       (1, 2, 3)))  # fmt: skip
    page = Report(
        title="Two reports side by side", subtitle=f"first: {a}; second: {b}", figures=figures,
        notes=notes, charts=charts, tables=tables,
    )  # fmt: skip
    sets = {
        f"{name}, {each.a if name == 'first' else each.b}": side
        for each, one, other in found
        for name, side in (("first", one), ("second", other))
    }
    report.write(folder, page, sets)

"""A report as a page in one file, and its results for comparisons: what `--report` ends with.

index.html     opens without a server: figures, charts, tables, jobs one by one
results.json   figures and jobs' times by set (a policy, say), as `loadgen compare` reads them
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from slackwater.common.domains.facts.lives import Life, Lives
from slackwater.common.domains.facts.sentences import sentence
from slackwater.schemas.facts import Fact, named
from slackwater.web import page, rows

POINTS_MAX: Final = 400
JOBS_MAX: Final = 5_000
"""Jobs that a page shows one by one: a file of some megabytes."""
JOB_SECONDS_MAX: Final = 200_000
"""Jobs whose times results.json has."""
Axis = Literal["", "seconds", "share", "bytes"]


class Figure(msgspec.Struct, frozen=True):
    """A figure that a reader should see first, as text, and what it is."""

    value: str
    label: str


class Note(msgspec.Struct, frozen=True):
    text: str
    bad: bool = False


class Series(msgspec.Struct, frozen=True):
    """A line of a chart. `step`: each value holds until the next; else points are joined."""

    label: str
    points: Sequence[tuple[float, float]]
    step: bool = True
    fill: bool = False
    dash: bool = False


class Chart(msgspec.Struct, frozen=True):
    title: str
    series: Sequence[Series]
    x: str = "seconds"
    """The name of the horizontal axis; seconds are written as durations."""
    y: Axis = ""
    stacked: bool = False
    y_max: float | None = None
    x_min: float | None = None
    x_max: float | None = None
    """The end of the horizontal axis; None: the last point."""


class Table(msgspec.Struct, frozen=True):
    """`numbers`: the columns that are aligned to the right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[int] = ()


class Image(msgspec.Struct, frozen=True):
    """`src`: a data URL."""

    src: str
    caption: str


class Result(msgspec.Struct, frozen=True):
    """Results of one set: figures by name, and each job's seconds from submission to end."""

    figures: Mapping[str, float] = {}
    jobs: Mapping[str, float] = {}


class Results(msgspec.Struct, frozen=True):
    title: str
    sets: Mapping[str, Result]


class Report(msgspec.Struct, kw_only=True):
    """The document of a page. Times are seconds since the run began."""

    title: str
    subtitle: str = ""
    figures: Sequence[Figure] = ()
    notes: Sequence[Note] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    images: Sequence[Image] = ()
    story: Sequence[tuple[float, str]] = ()
    """(second, sentence)."""
    changes: Mapping[str, Mapping[str, Any]] = {}
    """Entries by kind and id, as the live page has them."""
    details: Mapping[str, Any] = {}
    """Job -> its page."""
    now_s: float = 0.0
    kind: str = "report"
    relative: bool = True


def write(folder: Path, report: Report, sets: Mapping[str, Result]) -> None:
    """Write index.html and results.json. Raises OSError."""
    page.write(folder / "index.html", report.title, msgspec.to_builtins(report))
    results = Results(report.title, sets)
    (folder / "results.json").write_bytes(msgspec.json.encode(results) + b"\n")


def results(folder: Path) -> Results:
    """Read results.json. Raises OSError and msgspec's errors."""
    return msgspec.json.decode((folder / "results.json").read_bytes(), type=Results)


def distribution(values: Iterable[float]) -> list[tuple[float, float]]:
    """Return the share of values at most as large, at each of them; thinned where they are many."""
    ordered = sorted(values)
    count = len(ordered)
    found = [(value, (at + 1) / count) for at, value in enumerate(ordered)]
    return thinned(found)


def most(curves: Iterable[Series], share: float = 0.99) -> float | None:
    """Return how far an axis must reach for so much of each distribution; None: there is none."""
    reached = (next((x for x, part in c.points if part >= share), None) for c in curves)
    return max((x for x in reached if x is not None), default=None)


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most `POINTS_MAX` of them, the first and the last among these."""
    if len(points) <= POINTS_MAX:
        return list(points)
    step = (len(points) - 1) / (POINTS_MAX - 1)
    return [points[round(index * step)] for index in range(POINTS_MAX)]


def table_of(title: str, structs: Sequence[msgspec.Struct], skip: Iterable[str] = ()) -> Table:
    """Lay out structs of one type, a row each: numbers, texts and flags, without other fields."""
    names = [
        name
        for name in structs[0].__struct_fields__
        if name not in skip and isinstance(getattr(structs[0], name), int | float | str)
    ]
    body = [[shown(getattr(each, name)) for name in names] for each in structs]
    numbers = [
        at for at, name in enumerate(names) if not isinstance(getattr(structs[0], name), str)
    ]
    return Table(title, [name.replace("_", " ") for name in names], body, numbers)


def figures_of(struct: msgspec.Struct, skip: Iterable[str] = ()) -> dict[str, float]:
    """Return the struct's numbers by name."""
    return {
        name: float(value)
        for name in struct.__struct_fields__
        if name not in skip
        and isinstance(value := getattr(struct, name), int | float)
        and not isinstance(value, bool)
    }


def shown(value: Any) -> str:
    """Write a value as a table shows it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return f"{value:,.0f}"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.4g}"
    return str(value)


def of_facts(
    facts: Iterable[tuple[float, Fact]], jobs: Mapping[str, rows.Row]
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Fold facts (second, fact) into what pages show: (changes, details). `jobs`: the row of each,
    as `rows.job` describes one, without its state and its places."""
    lives = Lives()
    events: dict[str, rows.Row] = {}
    of_job: dict[str, list[rows.Row]] = {id: [] for id in jobs}
    for number, (at_s, fact) in enumerate(facts):
        lives.tell(fact, at_s)
        about, (noun, name) = str(getattr(fact, "job", "")), named(fact)
        row = rows.event(at_s, sentence(fact), noun, name, about)
        if about in of_job:
            of_job[about].append(row)
        if not row["routine"]:
            events[str(number)] = row
    told = {id: lives.jobs[id] for id in jobs if id in lives.jobs}
    for id, life in told.items():
        life.servers = jobs[id]["servers"] if life.servers is None else life.servers
        life.gpus = jobs[id]["gpus"] if life.gpus is None else life.gpus
    changes: dict[str, dict[str, Any]] = {
        "jobs": {id: jobs[id] | _state(life) for id, life in told.items()},
        "lives": {id: rows.life(life) for id, life in told.items()},
        "levels": {"aggregators": [[at_s, level] for at_s, level in lives.used.points]},
        "events": events,
    }
    details = {
        id: {"life": rows.history(life), "events": of_job[id], "job": changes["jobs"][id],
             "going": [], "ranks": [], "tuning": [], "results": {}}
        for id, life in told.items()
    }  # fmt: skip
    return changes, details


def _state(life: Life) -> rows.Row:
    return {
        "state": life.state,
        "submitted_s": life.submitted_s,
        "finished_s": life.ended_s or 0.0,
        "aggregators": list(life.aggregators),
        "reason": life.stretches[-1].reason if life.stretches else "",
    }


def job_row(
    *, gpus: int, servers: int, workers: int, tenant: str = "", model: str = ""
) -> rows.Row:
    """Describe a job of a report, before its facts are known."""
    return {
        "state": "pending", "held": False, "tenant": tenant, "model": model, "program": "",
        "workers": workers, "servers": servers, "gpus": gpus, "has": 0, "nodes": [],
        "aggregators": [], "priority": 0, "submitted_s": 0.0, "started_s": 0.0, "finished_s": 0.0,
        "reason": "", "iterations": 0, "run": 0, "preemptions": 0, "restarts": 0,
    }  # fmt: skip

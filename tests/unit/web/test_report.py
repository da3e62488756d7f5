"""Reports as pages: what facts become, how values are written, what two reports are compared by."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.common.base.errors import Rejected
from slackwater.loadgen.compare import chosen, compare, pairs
from slackwater.schemas.base import JobId, NodeId
from slackwater.schemas.job_events import JobEvent
from slackwater.web import report
from slackwater.web.report import Result, Results


def event(job: str, fact: str, gpus: int = 0) -> JobEvent:
    allocation = ((NodeId("n1"), gpus),) if gpus else ()
    return JobEvent(job=JobId(job), fact=fact, at_s=0.0, allocation=allocation)


def test_facts_become_rows_lives_and_pages_of_jobs() -> None:
    facts = [
        (1.0, event("a", "pending")), (2.0, event("a", "running", 4)), (5.0, event("a", "steady")),
        (9.0, event("a", "completed")), (3.0, event("unknown", "pending")),
    ]  # fmt: skip
    row = report.job_row(gpus=4, servers=2, workers=2)
    changes, details = report.of_facts(facts, {"a": row, "never": row})
    assert changes["jobs"].keys() == {"a"}
    assert changes["jobs"]["a"]["state"] == "completed"
    assert changes["jobs"]["a"]["finished_s"] == 9.0
    assert changes["lives"]["a"]["stretches"][1] == ["running", 2.0, 9.0, 4]
    texts = [each["text"] for each in changes["events"].values()]
    assert "a completed" in texts
    assert not any("trains on" in text for text in texts), "routine"
    assert "a trains on no aggregator" in [each["text"] for each in details["a"]["events"]]


def test_it_is_written_and_read_again(tmp_path: Path) -> None:
    made = report.Report(title="A <title>", figures=[report.Figure("3", "jobs")], now_s=1.0)
    report.write(tmp_path, made, {"fifo": Result({"avg_jct_s": 4.0}, {"a": 2.0})})
    assert "A &lt;title&gt;" in (tmp_path / "index.html").read_text()
    assert report.results(tmp_path).sets["fifo"].jobs == {"a": 2.0}


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=2000))
def test_a_distribution_ascends_to_all_of_it(values: list[float]) -> None:
    points = report.distribution(values)
    assert len(points) <= report.POINTS_MAX
    assert points == sorted(points)
    assert points[-1] == (max(values), 1.0)
    assert points[0][0] == min(values)


class Row(msgspec.Struct):
    name: str
    jobs: int
    part: float
    conclusive: bool
    detail: dict[str, int]


def test_structs_become_tables_and_figures() -> None:
    rows = [Row("fifo", 1200, 0.25, True, {}), Row("las", 3, 1234.56, False, {})]
    table = report.table_of("t", rows)
    assert table.columns == ["name", "jobs", "part", "conclusive"]
    assert table.rows == [["fifo", "1,200", "0.25", "yes"], ["las", "3", "1,234.6", "no"]]
    assert report.figures_of(rows[0], skip=("part",)) == {"jobs": 1200.0}


A = Results("a", {"fifo": Result({"avg": 4.0, "gone": 1.0, "zero": 0.0}, {"x": 2.0, "y": 4.0})})
B = Results("b", {"fifo": Result({"avg": 2.0, "new": 5.0, "zero": 3.0}, {"x": 1.0, "y": 8.0})})


def test_two_reports_are_set_side_by_side() -> None:
    found = compare("fifo", A.sets["fifo"], "fifo", B.sets["fifo"])
    by = {each.figure: (each.a, each.b, each.ratio) for each in found.figures}
    assert by == {
        "avg": (4.0, 2.0, 0.5), "gone": (1.0, None, None), "zero": (0.0, 3.0, None),
        "new": (None, 5.0, None),
    }  # fmt: skip
    assert (found.jobs, found.faster, found.slower) == (2, 1, 1)
    assert found.mean_ratio == pytest.approx(1.0)
    assert [each.ratio for each in found.changed] == [0.5, 2.0]


@given(st.dictionaries(st.text(max_size=3), st.floats(0.01, 1e6), max_size=20))
def test_a_report_equals_itself(jobs: dict[str, float]) -> None:
    one = Result({"n": float(len(jobs))}, jobs)
    found = compare("s", one, "s", one)
    assert (found.faster, found.slower) == (0, 0)
    assert found.mean_ratio == (pytest.approx(1.0) if jobs else None)


def test_sets_are_chosen_by_name() -> None:
    two = Results("two", {"fifo": Result(), "las": Result()})
    assert pairs(two, A) == ["fifo"]
    assert chosen(two, "las", "r")[0] == "las"
    assert chosen(A, "", "r")[0] == "fifo"
    with pytest.raises(Rejected, match="r has 2 sets: choose one of fifo, las"):
        chosen(two, "", "r")
    with pytest.raises(Rejected, match="r has no 'nosuch': choose one of fifo"):
        chosen(A, "nosuch", "r")

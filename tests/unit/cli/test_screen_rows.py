"""Tables of the full-screen `top`: what is shown, how it is sorted, what a filter leaves."""

from typing import Any

import pytest
from tests.integration.web.test_scale import job, node

from slackwater.cli.screen_rows import AGGREGATORS, EVENTS, JOBS, NODES, arranged


def a_job(id: str, state: str, **more: Any) -> dict[str, Any]:
    return {"id": id, **job(1), "state": state, "submitted_s": 10.0, **more}


ROWS = [
    a_job("b", "completed", finished_s=40.0), a_job("a10", "running", iteration=7, speed=2.0),
    a_job("a2", "running", iteration=1_500, speed=0.5, submitted_s=20.0),
    a_job("w", "pending", reason="waits for 8 GPUs"), a_job("c", "failed", finished_s=60.0),
    a_job("d", "completed", finished_s=50.0),
]  # fmt: skip


def ids(sort: str, *, descending: bool = False, words: str = "") -> list[str]:
    found = arranged(ROWS, JOBS, sort=sort, descending=descending, words=words, now_s=100.0)
    return [row["id"] for row in found]


def test_jobs_come_as_the_list_has_them() -> None:
    assert ids("state") == ["a10", "a2", "w", "c", "d", "b"]


def test_what_is_not_known_comes_last_either_way() -> None:
    assert ids("iteration")[:2] == ["a10", "a2"]
    assert ids("iteration", descending=True)[:2] == ["a2", "a10"]
    assert ids("id") == ["a2", "a10", "b", "c", "d", "w"], "as people count"


@pytest.mark.parametrize(
    ("words", "left"),
    [
        ("waits gpus", {"w"}),
        ("COMPLETED", {"b", "d"}),
        ("nosuch", set()),
        ("a running", {"a10", "a2"}),
    ],
)
def test_a_filter_looks_at_all_cells(words: str, left: set[str]) -> None:
    assert set(ids("state", words=words)) == left


def test_cells_say_what_they_mean() -> None:
    cells = {column.key: column.show(ROWS[2], 100.0) for column in JOBS}
    assert cells["iteration"] == "1,500/1,000,000"
    assert cells["age"] == "1m20s"
    assert cells["has"] == "1/1"
    assert cells["loss"] == "-" or not cells["loss"].strip("-–")
    shown = {column.key: column.show({"id": "n1", **node(1, 3)}, 0.0) for column in NODES}
    assert (shown["gpus"], shown["state"]) == ("3/8", "up")
    free = {"id": "a1", "alive": True, "drain": "", "cluster": None}
    assert [c.show(free, 0.0) for c in AGGREGATORS][1] == "free"
    event = {"id": "7", "at_s": 0.0, "kind": "job", "text": "a completed"}
    assert [c.show(event, 0.0) for c in EVENTS][-1] == "a completed"

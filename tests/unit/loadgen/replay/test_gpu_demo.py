"""The GPU part of `make run`: what its table says of facts that were heard."""

from pathlib import Path

import pytest

from slackwater.common.domains.facts.timeline import Iteration, Timeline
from slackwater.loadgen.replay import gpu_demo, report
from slackwater.loadgen.replay.story import story
from slackwater.schemas.base import JobId, NodeId
from slackwater.schemas.job_events import JobEvent

BEGAN_S = 100.0
LIFE = (
    ("pending", 0.0, ""), ("starting", 1.0, ""), ("running", 1.5, ""),
    ("stopping", 5.0, "its GPUs go to other jobs"), ("paused", 5.25, "its GPUs go to other jobs"),
    ("starting", 8.0, ""), ("running", 8.5, ""), ("completed", 12.0, ""),
)  # fmt: skip


@pytest.fixture
def timeline() -> Timeline:
    """Return what is heard of one job that is paused once."""
    made = Timeline(started_s=BEGAN_S)
    (long, *_) = gpu_demo.workload(seed=1).jobs
    made.expect(long.spec, BEGAN_S)
    for number, (fact, at_s, reason) in enumerate(LIFE):
        event = JobEvent(
            sender="master.main", epoch=1, job=JobId(long.spec.id), fact=fact, reason=reason,
            at_s=BEGAN_S + at_s, attempt=number // 5,
            allocation=((NodeId("w1"), 4), (NodeId("w2"), 4)) if fact == "running" else (),
        )  # fmt: skip
        made.observe(event, BEGAN_S + at_s)
    track = made.tracks[long.spec.id]
    track.iterations += [Iteration(40, BEGAN_S + 4.9, 0.1), Iteration(41, BEGAN_S + 9.0, 0.1)]
    return made


def test_a_row_tells_of_waits_runs_pauses_and_of_where_it_went_on(timeline: Timeline) -> None:
    (row,) = gpu_demo.rows(timeline, {})
    assert (row.state, row.gpus, row.equal) == ("completed", 8, True)
    assert row.waited_s == pytest.approx(1.0 + 2.75)
    assert row.ran_s == pytest.approx(3.5 + 3.5)
    assert row.stops == ("its GPUs go to other jobs",)
    assert row.stop_s == (pytest.approx(0.25),)
    assert row.resumed_at == (41,)
    assert row.resume_s == (pytest.approx(1.0),)


def test_what_is_not_shown_is_a_failure(timeline: Timeline) -> None:
    rows = gpu_demo.rows(timeline, {})
    assert gpu_demo.failures(rows, {}) == ()
    (row,) = gpu_demo.rows(timeline, {"long": "its parameters differ"})
    assert not row.equal
    assert gpu_demo.failures((row,), {"long": "its parameters differ"}) == (
        "its parameters differ",
    )
    never = gpu_demo.rows(Timeline(BEGAN_S, tracks=timeline.tracks), {})
    assert gpu_demo.failures(never, {}) == ("long was never paused",)
    timeline.tracks["long"].state = "failed"
    assert gpu_demo.failures(gpu_demo.rows(timeline, {}), {}) == ("long failed",)


def test_the_story_says_who_gets_gpus_and_gives_them_up(timeline: Timeline) -> None:
    told = [each.text for each in story(timeline)]
    assert told[0] == "long arrives: 2 workers, asks for 1 server and 8 GPUs"
    assert "long runs on w1 (4) and w2 (4)" in told
    assert "long is paused: its GPUs go to other jobs" in told


def test_held_gpus_are_drawn(timeline: Timeline, tmp_path: Path) -> None:
    report.draw_gpus(tmp_path / "gpus.png", timeline)
    assert (tmp_path / "gpus.png").stat().st_size > 1000


def test_the_jobs_take_turns_by_the_policys_limit() -> None:
    """`long` has had more than the limit when the others come; neither of them gets so far."""
    limit_gpu_s = float(gpu_demo.SETTINGS["limits"])
    long, *others = gpu_demo.JOBS
    assert long.gpus == gpu_demo.NODES * gpu_demo.GPUS_PER_NODE
    assert all(long.gpus * each.at_s > 2 * limit_gpu_s for each in others)
    assert all(each.gpus * each.iterations * gpu_demo.COMPUTE_S < limit_gpu_s for each in others)
    assert sum(each.gpus for each in others) <= long.gpus

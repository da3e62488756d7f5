"""The cells of the evaluation: which, how long, and what a run of one proves."""

import msgspec
import pytest

from slackwater.common.base.errors import Rejected
from slackwater.common.domains.facts.timeline import Timeline
from slackwater.loadgen.replay import cells
from slackwater.loadgen.replay.cells import Cell, CellResult
from slackwater.loadgen.replay.experiment import CONTROL_DUTY, Outcome, crowded
from slackwater.loadgen.replay.measures import JobFigures, stable
from slackwater.schemas.base import AggregatorId, ClusterId, JobId
from slackwater.schemas.cluster import AllocationEvent
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.jobs import JobSpec

PAIR = Cell("figure 8", ("vgg19", "vgg19"), "edf", goal=0.5)


def row(job: str, loss: float | None, duty: float = 0.3) -> JobFigures:
    return JobFigures(
        job=job, model="vgg19", cluster="c1", state="completed", iterations=60, standalone_s=0.5,
        shared_s=None if loss is None else 0.5 / (1 - loss), static_s=0.5, steady_iterations=20,
        loss=loss, loss_whole_life=0.1, loss_against_standalone=0.0, duty=duty, cpu_s=1.0,
        migrations=1, reverts=0, reason="",
    )  # fmt: skip


def timeline() -> Timeline:
    """Two jobs from 0 to 30 and 40, placed for good at 10; four servers asked for, two used."""
    made = Timeline(started_s=0.0)
    for id, end_s in (("vgg19-1", 30.0), ("vgg19-2", 40.0)):
        made.expect(JobSpec(id=id, model="vgg19", workers=2, servers=2, iterations=60), 0.0)
        for fact, at_s in (("located", 1.0), ("steady", 10.0), ("completed", end_s)):
            event = JobEvent(job=JobId(id), fact=fact, at_s=at_s, cluster=ClusterId("c1"))
            made.observe(event, at_s)
    for in_use, at_s in ((4, 1.0), (2, 9.0), (0, 40.0)):
        event_of_pool = AllocationEvent(
            aggregator=AggregatorId("a1"), fact="allocated", cluster=ClusterId("c1"),
            in_use=in_use, at_s=at_s,
        )  # fmt: skip
        made.observe(event_of_pool, at_s)
    made.required = [(1.0, 4), (30.0, 2), (40.0, 0)]
    return made


def outcome(*rows: JobFigures, control_loss: float | None = 0.4) -> Outcome:
    seen = timeline()
    return Outcome(
        timeline=seen, until_s=40.0, figures=list(rows), cpu_share=0.1, within=stable(seen),
        control_loss=control_loss, verified=len(rows),
    )  # fmt: skip


def test_every_cell_of_the_tables_is_there_once_under_both_policies() -> None:
    ids = [cell.id for cell in cells.all_cells()]
    assert len(ids) == len(set(ids)) == 2 * (12 + 4 + 4 + 4)
    assert [cell.id for cell in cells.choose(["fig8-vgg19-*-edf"])] == [
        f"fig8-vgg19-x{jobs}-edf" for jobs in (2, 3, 4)
    ]
    goals = {cell.id: cell.goal for cell in cells.choose(["fig8-*-x2-cyclic", "table2-*-cyclic"])}
    assert goals["fig8-alexnet-x2-cyclic"] == 0.25
    assert goals["table2-alexnet-x2-cyclic"] == 0.375
    with pytest.raises(Rejected, match="no cell fits 'fig9"):
        cells.choose(["fig9-*"])


def test_jobs_of_a_cell_end_together_long_after_the_last_arrived() -> None:
    work = cells.workload(Cell("mix", ("alexnet", "vgg19"), "edf"), time_scale=0.5, bytes_scale=0.1)
    ends_s = [job.at_s + job.compute_s * job.spec.iterations for job in work.jobs]
    assert ends_s == pytest.approx([ends_s[0]] * 2, abs=0.5)
    assert ends_s[0] > 2.0 + cells.START_S + 3 * cells.WINDOW * 0.5
    assert PAIR.window(PAIR.time_scale) == cells.WINDOW
    fast = Cell("figure 8", ("alexnet", "alexnet"), "edf")
    assert (fast.time_scale, fast.window(1.0)) == (1.0, 31), "four seconds of .13"
    assert {job.spec.aggregation for job in work.jobs} == {"edf"}


def test_the_saving_is_that_of_the_time_in_which_all_share() -> None:
    found = cells.result(PAIR, outcome(row("vgg19-1", 0.02), row("vgg19-2", 0.04)))
    assert found.reduction == pytest.approx(0.5), "2 of 4 between 10 and 30"
    assert found.loss_median == pytest.approx(0.03)
    assert found.loss_max == pytest.approx(0.04)
    assert found.doubts == []
    assert found.met is True


@pytest.mark.parametrize(
    ("losses", "met"), [((0.02, 0.12), False), ((0.06, 0.08), False), ((0.04, 0.09), None)],
    ids=["worst", "median", "unharmed-control"],
)  # fmt: skip
def test_a_cell_is_met_within_its_losses_and_conclusive_with_its_control(
    losses: tuple[float, float], met: bool | None
) -> None:
    control = 0.05 if met is None else 0.4
    rows = [row("vgg19-1", losses[0]), row("vgg19-2", losses[1])]
    found = cells.result(PAIR, outcome(*rows, control_loss=control))
    assert found.met is met


def test_a_lone_job_is_compared_with_its_twin() -> None:
    lone = Cell("figure 7", ("vgg19",), "edf")
    assert cells.result(lone, outcome(row("vgg19-1", -0.02))).met is True
    slower = cells.result(lone, outcome(row("vgg19-1", 0.03)))
    assert slower.speed_ratio == pytest.approx(0.97)
    assert slower.met is False
    assert cells.result(lone, outcome(row("vgg19-1", None))).met is None


def test_the_control_asks_for_more_than_one_aggregator_has() -> None:
    work = cells.workload(PAIR, time_scale=0.5, bytes_scale=0.1)
    crowd = crowded(work, 0.6)
    assert len(crowd.jobs) == 5, "five of .3 are the first to exceed 1.3"
    assert len({job.spec.id for job in crowd.jobs}) == 5
    assert 0.3 * len(crowd.jobs) >= CONTROL_DUTY
    assert crowded(work, 2.0).jobs == work.jobs


def test_a_result_survives_its_file() -> None:
    found = cells.result(PAIR, outcome(row("vgg19-1", 0.02), row("vgg19-2", 0.04)))
    assert msgspec.json.decode(msgspec.json.encode(found), type=CellResult) == found

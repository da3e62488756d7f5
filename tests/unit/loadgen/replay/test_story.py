"""The events of figure 10, and the picture of them while they happen."""

from rich.console import Console

from slackwater.loadgen.replay import display
from slackwater.loadgen.replay.story import story
from slackwater.loadgen.replay.timeline import Timeline
from slackwater.schemas.base import AggregatorId, ClusterId, JobId
from slackwater.schemas.cluster import AllocationEvent
from slackwater.schemas.jobs import JobEvent, JobSpec
from slackwater.schemas.placement import MigrationEvent

CLUSTER = ClusterId("c1")


def case_study() -> Timeline:
    """VGG19 runs on two; AlexNet comes, slows, is undone; one is added, and released at its end."""
    timeline = Timeline(started_s=100.0)
    for id, at_s in (("vgg19", 100.0), ("alexnet", 111.0)):
        timeline.expect(JobSpec(id=id, model=id, workers=2, servers=2, iterations=50), at_s)

    def job(fact: str, at_s: float, **detail: str) -> None:
        event = JobEvent(job=JobId("alexnet"), fact=fact, at_s=at_s, cluster=CLUSTER, detail=detail)
        timeline.observe(event, at_s)

    def pool(fact: str, in_use: int, at_s: float, temporary_for: str = "") -> None:
        event = AllocationEvent(
            aggregator=AggregatorId("a3"), fact=fact, cluster=CLUSTER, in_use=in_use,  # type: ignore[arg-type]
            at_s=at_s, temporary_for=temporary_for,
        )  # fmt: skip
        timeline.observe(event, at_s)

    pool("allocated", 2, 101.0, "vgg19")
    job("assigned", 112.0, cause="profiled", aggregators="a1,a2")
    job("reverted", 127.0, cause="profiled", loss="0.2212", loser="alexnet")
    pool("allocated", 3, 127.5)
    for fact, at_s in (("started", 127.6), ("finished", 128.0)):
        event = MigrationEvent(
            migration="m2", job=JobId("alexnet"), fact=fact, cause="reverted",  # type: ignore[arg-type]
            buckets=(0,), sources=(AggregatorId("a1"),), targets=(AggregatorId("a3"),), at_s=at_s,
        )  # fmt: skip
        timeline.observe(event, at_s)
    job("completed", 142.0)
    pool("released", 2, 142.5)
    return timeline


def test_the_case_study_is_told_in_the_order_of_figure_10() -> None:
    told = [(each.kind, each.text) for each in story(case_study())]
    assert told == [
        ("arrival", "vgg19 arrives"),
        ("arrival", "alexnet arrives"),
        ("shared", "alexnet placed on a1, a2"),
        ("slow-down", "alexnet lost 22.1%: alexnet must go"),
        ("added", "a3 added"),
        ("reverted", "alexnet: reverted, now on a3"),
        ("exit", "alexnet completed"),
        ("released", "a3 released"),
    ]


def test_the_display_shows_the_scaling_while_it_happens() -> None:
    timeline = case_study()
    console = Console(width=110, force_terminal=False)
    with console.capture() as captured:
        console.print(display.render("shared aggregation", timeline, 150.0))
    text = captured.get()
    assert "42.5 s  a3 released" in text
    (marks,) = [line for line in text.splitlines() if set(line.strip()) == set("!+x- ")]
    assert marks.index("!") <= marks.index("+") <= marks.index("x") < marks.index("-")
    levels = display.scaling(timeline, 150.0)[1].plain
    assert levels.endswith(" 2")
    assert levels.count("█") > 10, "three in use for 15 of 50 seconds"


def test_news_are_what_was_not_told_yet() -> None:
    timeline = case_study()
    assert len(display.news("shared", timeline, 0)) == 8
    assert display.news("shared", timeline, 7) == ["shared 42.5 s: a3 released"]

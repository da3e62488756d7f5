"""The events of figure 10 in sentences, and the picture of them while they happen."""

from rich.console import Console

from slackwater.common.domains.facts.timeline import Timeline
from slackwater.loadgen.replay import display
from slackwater.loadgen.replay.story import story
from slackwater.schemas.base import AggregatorId, ClusterId, JobId
from slackwater.schemas.cluster import AllocationEvent
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.placement import MigrationEvent, Profile
from slackwater.schemas.telemetry import JobProfiled, WindowMeasured

CLUSTER = ClusterId("c1")


def tell(timeline: Timeline, job: str, fact: str, at_s: float, **detail: str) -> None:
    event = JobEvent(job=JobId(job), fact=fact, at_s=at_s, cluster=CLUSTER, detail=detail)
    timeline.observe(event, at_s)


def window(timeline: Timeline, job: str, iteration_s: float, at_s: float) -> None:
    fact = WindowMeasured(
        job=JobId(job), location_epoch=2, last_iteration=40, iterations=10, iteration_s=iteration_s
    )
    timeline.observe(fact, at_s)


def case_study() -> Timeline:
    """VGG19 runs on two; AlexNet comes, slows, is undone; one is added, and released at its end."""
    timeline = Timeline(started_s=100.0)
    for id, at_s in (("vgg19", 100.0), ("alexnet", 111.0)):
        timeline.expect(JobSpec(id=id, model=id, workers=2, servers=2, iterations=50), at_s)

    def pool(fact: str, in_use: int, at_s: float, temporary_for: str = "") -> None:
        event = AllocationEvent(
            aggregator=AggregatorId("a3"), fact=fact, cluster=CLUSTER, in_use=in_use,  # type: ignore[arg-type]
            at_s=at_s, temporary_for=temporary_for,
        )  # fmt: skip
        timeline.observe(event, at_s)

    pool("allocated", 2, 101.0, "vgg19")
    tell(timeline, "vgg19", "located", 101.5, aggregators="a1,a2")
    tell(timeline, "alexnet", "located", 111.5, aggregators="a3,a4")
    profile = Profile(iteration_s=0.10, task_cpu_s=(0.01,))
    timeline.observe(JobProfiled(job=JobId("alexnet"), location_epoch=1, profile=profile), 111.9)
    tell(
        timeline,
        "alexnet",
        "assigned",
        112.0,
        cause="profiled",
        aggregators="a1,a2",
        beside="vgg19",
    )
    window(timeline, "alexnet", 0.13, 126.0)
    tell(
        timeline, "alexnet", "reverted", 127.0,
        cause="profiled", loss="0.2212", loser="alexnet", aggregators="a1,a2",
        beside="vgg19",
    )  # fmt: skip
    pool("allocated", 3, 127.5)
    for fact, at_s in (("started", 127.6), ("finished", 128.0)):
        event = MigrationEvent(
            migration="m2", job=JobId("alexnet"), fact=fact, cause="reverted",  # type: ignore[arg-type]
            buckets=(0,), sources=(AggregatorId("a1"),), targets=(AggregatorId("a3"),), at_s=at_s,
        )  # fmt: skip
        timeline.observe(event, at_s)
    tell(timeline, "alexnet", "steady", 128.1, aggregators="a3")
    window(timeline, "alexnet", 0.12, 128.5)  # Most of it was before the move.
    window(timeline, "alexnet", 0.101, 130.0)
    tell(timeline, "alexnet", "completed", 142.0)
    pool("released", 2, 142.5)
    return timeline


def test_the_case_study_is_told_in_the_order_of_figure_10() -> None:
    told = [(each.kind, each.text) for each in story(case_study())]
    assert told == [
        ("arrival", "vgg19 arrives: 2 workers, asks for 2 servers"),
        ("arrival", "alexnet arrives: 2 workers, asks for 2 servers"),
        ("shared", "alexnet was measured alone, and shares a1 and a2 with vgg19"),
        (
            "slow-down",
            "alexnet runs 22.1% slower than alone (limit 10%): bursts of vgg19 on a1 and a2 hurt "
            "it",
        ),
        ("added", "a3 is added"),
        ("reverted", "alexnet is moved from a1 to a3 while it trains"),
        ("relieved", "alexnet loses 1.0% since it was moved"),
        ("exit", "alexnet completed after 0 iterations"),
        ("released", "a3 is released: nobody needs it"),
    ]


def test_another_job_that_has_to_leave_is_named_beside_the_one_that_was_hurt() -> None:
    timeline = case_study()
    tell(
        timeline, "vgg19", "reverted", 150.0, loss="0.12", loser="alexnet", aggregators="a1"
    )  # fmt: skip
    assert story(timeline)[-1].text.endswith("vgg19, the newest there, has to leave")


def test_everybody_is_where_the_last_fact_said() -> None:
    found = {id: track.aggregators for id, track in case_study().tracks.items()}
    assert found == {"vgg19": ("a1", "a2"), "alexnet": ("a3",)}


def test_the_display_says_what_each_job_does_and_shows_the_scaling() -> None:
    timeline = case_study()
    console = Console(width=120, force_terminal=False)
    with console.capture() as captured:
        console.print(display.render("sharing", timeline, 150.0))
    text = captured.get()
    assert "42.5 s  a3 is released" in text
    assert "is measured alone on a1, a2" in text, "no profile of VGG19 was told"
    (marks,) = [line for line in text.splitlines() if set(line.strip()) == set("!+x- ")]
    assert marks.index("!") <= marks.index("+") <= marks.index("x") < marks.index("-")
    levels = display.scaling(timeline, 150.0)[1].plain
    assert levels.endswith(" 2")
    assert levels.count("▆") > 10, "three of the four asked for, for 15 of 50 seconds"


def test_the_display_fits_into_80_columns() -> None:
    timeline = case_study()
    console = Console(width=80, force_terminal=False)
    with console.capture() as captured:
        console.print(display.render("sharing", timeline, 150.0))
    text = captured.get()
    assert "of alone" in text, "the last column"
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_news_are_what_was_not_told_yet() -> None:
    timeline = case_study()
    assert len(display.news(timeline, 0)) == 9
    assert display.news(timeline, 8) == ["  42.5 s  a3 is released: nobody needs it"]

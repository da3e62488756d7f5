"""The index says of every record what reckoning it anew from all of them would say."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from slackwater.schemas.base import AggregatorId, JobId
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.placement import BucketPlace, JobPlacement, JobPlan
from slackwater.services.controller.index import Index, Whereabouts

PRIVATE = "static"
NAMES = st.sampled_from([AggregatorId(f"a{n}") for n in range(5)])
PLACES = st.lists(NAMES, max_size=3).map(
    lambda names: tuple(BucketPlace(aggregator=name) for name in names)
)
SETS = st.sets(NAMES, max_size=3).map(lambda names: tuple(sorted(names)))


@st.composite
def records(draw: st.DrawFn) -> JobPlacement:
    id = f"j{draw(st.integers(0, 4))}"
    spec = JobSpec(id=id, aggregation=draw(st.sampled_from(["edf", "cyclic", PRIVATE])))
    plan = JobPlan(
        job=JobId(id), workers=1, gradient_dtype="float32", update=spec.update, layout_epoch=1,
        token="",
    )  # fmt: skip
    return msgspec.structs.replace(
        JobPlacement(spec=spec, tensors=(), plan=plan, buckets=()),
        phase=draw(st.sampled_from(["waiting", "hosting", "profiling", "steady", "released"])),
        places=draw(PLACES),
        target=draw(PLACES),
        temporary=draw(SETS),
        crowded=draw(SETS),
        protected=draw(st.sampled_from(["", "it lost"])),
        cause=draw(st.sampled_from(["", "unprofiled"])),
    )


def put(index: Index, record: JobPlacement) -> None:
    policy = record.spec.aggregation
    index.follow(Whereabouts.of(record), policy, shares=policy != PRIVATE)


def shared(living: list[JobPlacement], policy: str) -> set[AggregatorId]:
    """By the definition, looking at every record."""
    private: set[AggregatorId] = set()
    used: set[AggregatorId] = set()
    for record in living:
        where = Whereabouts.of(record)
        private.update(record.temporary)
        if policy != PRIVATE and record.spec.aggregation == policy and not record.protected:
            used |= where.involved if record.cause == "unprofiled" else where.homes
        else:
            private |= where.homes
    return used - private


@given(st.lists(st.one_of(records(), st.integers(0, 4)), max_size=30))
def test_what_it_says_follows_from_the_records(events: list[JobPlacement | int]) -> None:
    index, known = Index(), dict[str, JobPlacement]()
    for event in events:
        if isinstance(event, int):
            index.forget(JobId(f"j{event}"))
            known.pop(f"j{event}", None)
        else:
            put(index, event)
            known[event.spec.id] = event
        anew = Index()
        for record in known.values():
            put(anew, record)
        assert index.everything() == anew.everything()
    living = [record for record in known.values() if record.phase != "released"]
    assert index.living == sorted(record.spec.id for record in living)
    for policy in ("edf", "cyclic", PRIVATE):
        assert index.shared(policy) == sorted(shared(living, policy))
        counted = {
            record.spec.id
            for record in living
            if record.spec.aggregation == policy
            and not record.protected
            and record.places
            and (record.target or not record.temporary)
        }
        assert index.settled(policy) == sorted(counted)
    for record in living:
        homes = Whereabouts.of(record).homes
        near = {each.spec.id for each in living if Whereabouts.of(each).homes & homes}
        assert index.users(homes) == sorted(near)

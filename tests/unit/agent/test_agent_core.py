"""The Agent's core: the mapping table and what is outstanding, under every answer it can get."""

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.agent.core import AgentCore
from slackwater.agent.effects import (
    AgentAction,
    Connect,
    Deliver,
    Fail,
    Locate,
    MakeOffer,
    Reattach,
    Refuse,
    Resume,
    Ring,
    Send,
    WriteSeed,
)
from slackwater.common.domains.slots.frames import (
    Attach,
    Denied,
    Done,
    Granted,
    Moved,
    PushRefused,
    SeedAsked,
)
from slackwater.schemas.base import AggregatorId, JobId
from slackwater.schemas.placement import BucketLayout, BucketPlace, Endpoint, JobPlan, Located
from slackwater.schemas.tensors import UpdateRule

A1, A2 = AggregatorId("a1"), AggregatorId("a2")


def endpoint(aggregator: AggregatorId) -> Endpoint:
    return Endpoint(aggregator=aggregator, addresses=(("memory", aggregator),))


def located(*places: tuple[AggregatorId, int], layout_epoch: int = 1) -> Located:
    return Located(
        job=JobId("j"),
        plan=JobPlan(
            job=JobId("j"),
            workers=2,
            gradient_dtype="float32",
            update=UpdateRule(),
            layout_epoch=layout_epoch,
            token="ab",
        ),
        buckets=tuple(
            BucketLayout(index=i, first=i, count=1, elements=4) for i in range(len(places))
        ),
        places=tuple(BucketPlace(aggregator=a, location_epoch=e) for a, e in places),
        endpoints=tuple(endpoint(a) for a in sorted({a for a, _ in places})),
    )


def granted(bucket: int, *, version: int = 0, epoch: int = 0, initialized: bool = True) -> Granted:
    return Granted(
        bucket=bucket,
        handle=100 + bucket,
        key=b"k",
        region=b"r",
        location_epoch=epoch,
        initialized=initialized,
        version=version,
    )


def moved(bucket: int, version: int, epoch: int, to: AggregatorId = A2) -> Moved:
    return Moved(
        bucket=bucket, version=version, initialized=True, location_epoch=epoch, to=endpoint(to)
    )


def refused(iteration: int, worker: int = 1) -> PushRefused:
    return PushRefused(
        handle=100, iteration=iteration, job="j", tensor="t0", worker=worker, why="NaN"
    )


def fresh() -> AgentCore:
    return AgentCore(rank=1, rng=random.Random(1))


def running(version: int = 0) -> AgentCore:
    """One bucket at a1, attached, its parameters of `version` held."""
    core = fresh()
    core.start(0.0)
    core.located(located((A1, 0)), 0.0)
    core.connected(A1, 0.0)
    core.granted(A1, granted(0, version=version), pushed=version)
    core.held(0, version)
    return core


def test_a_start_locates_connects_attaches_and_begins_where_the_job_is() -> None:
    core = fresh()
    assert core.start(1.0) == [Locate(1.0)]
    assert core.located(located((A1, 0), (A2, 0), (A1, 0)), 1.0) == [
        Connect(endpoint(A1), 1.0),
        Connect(endpoint(A2), 1.0),
    ]
    assert core.connected(A1, 1.0) == [Send(A1, Attach(buckets=(0, 2)))]
    assert core.granted(A1, granted(2, version=7), pushed=7) == [Resume(2, 7), Deliver(2, 7)]
    assert core.pushed(2, 8) == [Ring(A1, 2, 102, 8)]
    assert core.done(A1, Done(102, 8, 0)) == [Deliver(2, 8)]


def test_a_bare_region_is_offered_to_and_seeded_when_asked() -> None:
    core = fresh()
    core.start(0.0)
    core.located(located((A1, 0)), 0.0)
    core.connected(A1, 0.0)
    assert core.granted(A1, granted(0, initialized=False), pushed=0) == [MakeOffer(A1, 0, 100, 0)]
    assert core.seed_asked(A1, SeedAsked(handle=100)) == [WriteSeed(A1, 0, 100, 0)]
    assert core.done(A1, Done(100, 0, 0)) == [Resume(0, 0), Deliver(0, 0)]


def test_a_process_without_parameters_says_which_version_the_other_buckets_have() -> None:
    """Not before it has seen them all: a checkpoint stands in at that version."""
    core = fresh()
    core.start(0.0)
    core.located(located((A1, 0), (A1, 0), (A2, 0)), 0.0)
    core.connected(A1, 0.0)
    core.connected(A2, 0.0)
    assert core.granted(A1, granted(0, initialized=False), pushed=0) == []
    core.repeat(5.0)
    assert not any(isinstance(each, MakeOffer) for each in core.repeat(10.0))
    assert core.granted(A1, granted(1, version=9), pushed=9) == [Resume(1, 9), Deliver(1, 9)]
    late = core.granted(A2, granted(2, initialized=False), pushed=0)
    assert set(late) == {MakeOffer(A2, 2, 102, 0, 9), MakeOffer(A1, 0, 100, 0, 9)}
    again = core.granted(A1, granted(0, initialized=False), pushed=0)
    assert again == [MakeOffer(A1, 0, 100, 0, 9)], "by now it knows"
    asked = SeedAsked(handle=100, version=9)
    assert core.seed_asked(A1, asked) == [WriteSeed(A1, 0, 100, 9)], "no checkpoint was there"


def test_what_nobody_answers_is_said_again() -> None:
    """At the second look: an Attach, an Offer, a doorbell; and nothing that is on its way."""
    core = fresh()
    core.start(0.0)
    core.located(located((A1, 0)), 0.0)
    assert core.repeat(5.0) == []
    assert core.repeat(10.0) == [], "no channel: connecting is repeated by itself"
    attach, offer = Send(A1, Attach(buckets=(0,))), MakeOffer(A1, 0, 100, 0)
    assert core.connected(A1, 11.0) == [attach]
    assert core.repeat(15.0) == []
    assert core.repeat(20.0) == [Locate(20.0), attach]
    assert core.granted(A1, granted(0, initialized=False), pushed=0) == [offer]
    assert core.repeat(25.0) == []
    assert core.repeat(30.0) == [offer]
    core.done(A1, Done(100, 0, 0))
    assert core.repeat(35.0) == core.repeat(40.0) == [], "nothing is outstanding"
    ring = Ring(A1, 0, 100, 1)
    assert core.pushed(0, 1) == [ring]
    assert core.repeat(45.0) == []
    assert core.repeat(50.0) == [ring]
    core.done(A1, Done(100, 1, 0))
    core.pushed(0, 2)
    assert core.repeat(55.0) == [], "another one than at the last look"


def test_a_bucket_that_nothing_attaches_is_asked_for() -> None:
    """Denied, and the controller's answer is on its way for ever: the channel is there."""
    core = running()
    core.denied(A1, Denied(bucket=0, why="not here"), 0.0)
    assert core.repeat(5.0) == []
    assert core.repeat(10.0) == [Send(A1, Attach(buckets=(0,)))]


def test_a_restarted_program_leaves_a_push_of_its_former_life_alone() -> None:
    """The pushed word says 8, version 8 has not come: it rings 8 again and goes on with 9."""
    core = fresh()
    core.start(0.0)
    core.located(located((A1, 0)), 0.0)
    core.connected(A1, 0.0)
    assert core.granted(A1, granted(0, version=7), pushed=8) == [
        Resume(0, 8),
        Deliver(0, 7),
        Ring(A1, 0, 100, 8),
    ]


def test_a_redirect_delivers_the_version_and_the_next_push_rings_the_new_aggregator() -> None:
    core = running(4)
    core.pushed(0, 5)
    assert core.moved(A1, moved(0, 5, epoch=1), 2.0) == [Deliver(0, 5), Connect(endpoint(A2), 2.0)]
    core.held(0, 5)
    assert core.pushed(0, 6) == []  # Pushed while the bucket is being copied.
    assert core.connected(A2, 2.1) == [Send(A2, Attach(buckets=(0,)))]
    assert core.granted(A2, granted(0, version=5, epoch=1), pushed=5) == [Ring(A2, 0, 100, 6)]
    assert core.location_epoch == 1


def test_a_redirect_in_the_answer_to_attach_delivers_only_at_the_new_place() -> None:
    """The old mapping may be of a region that is gone: the version counts where it is granted."""
    core = running(4)
    core.pushed(0, 5)
    core.channel_lost(A1, 1.0)
    core.connected(A1, 1.1)
    assert core.moved(A1, moved(0, 5, epoch=1), 1.2) == [Connect(endpoint(A2), 1.2)]
    core.connected(A2, 1.3)
    assert core.granted(A2, granted(0, version=5, epoch=1), pushed=5) == [Deliver(0, 5)]


def test_after_a_lost_channel_only_what_is_outstanding_rings_again() -> None:
    core = running(4)
    core.pushed(0, 5)
    (connect,) = core.channel_lost(A1, 10.0)
    assert isinstance(connect, Connect)
    assert 10.0 < connect.at_s <= 10.1
    core.connected(A1, 10.1)
    assert core.granted(A1, granted(0, version=4), pushed=5) == [Ring(A1, 0, 100, 5)]

    idle = running(4)
    idle.channel_lost(A1, 10.0)
    idle.connected(A1, 10.1)
    assert idle.granted(A1, granted(0, version=4), pushed=4) == []


def test_a_push_answered_while_the_channel_was_down_is_delivered_not_rung() -> None:
    core = running(4)
    core.pushed(0, 5)
    core.channel_lost(A1, 10.0)
    core.connected(A1, 10.1)
    assert core.granted(A1, granted(0, version=5), pushed=5) == [Deliver(0, 5)]


def test_a_lost_region_is_offered_the_held_version_then_the_push_rings() -> None:
    core = running(4)
    core.pushed(0, 5)
    core.channel_lost(A1, 10.0)
    core.connected(A1, 10.1)
    (offer,) = core.granted(A1, granted(0, initialized=False), pushed=0)
    assert offer == MakeOffer(A1, 0, 100, 4)
    assert core.done(A1, Done(100, 4, 0)) == [Ring(A1, 0, 100, 5)]


def test_parameters_that_could_not_be_read_are_delivered_again_at_the_new_place() -> None:
    """Version 5 was announced and its region lost before this worker (over tcp) had read it."""
    core = running(4)
    core.pushed(0, 5)
    assert core.done(A1, Done(100, 5, 0)) == [Deliver(0, 5)]
    core.channel_lost(A1, 10.0)
    core.connected(A1, 10.1)
    assert core.granted(A1, granted(0, version=5), pushed=5) == [Deliver(0, 5)]


def test_a_version_that_nobody_held_when_its_region_was_lost_is_computed_again() -> None:
    core = running(4)
    core.pushed(0, 5)
    core.done(A1, Done(100, 5, 0))
    core.channel_lost(A1, 10.0)
    core.connected(A1, 10.1)
    (offer,) = core.granted(A1, granted(0, initialized=False), pushed=0)
    assert offer == MakeOffer(A1, 0, 100, 4)
    assert core.done(A1, Done(100, 4, 0)) == [Ring(A1, 0, 100, 5)]
    assert core.done(A1, Done(100, 5, 0)) == [Deliver(0, 5)]


def test_a_lost_region_that_another_worker_seeds_further_needs_no_push() -> None:
    """The other worker saw version 5 before the region was lost, this one did not."""
    core = running(4)
    core.pushed(0, 5)
    core.channel_lost(A1, 10.0)
    core.connected(A1, 10.1)
    core.granted(A1, granted(0, initialized=False), pushed=0)
    assert core.done(A1, Done(100, 5, 0)) == [Deliver(0, 5)]


def test_a_version_the_program_has_seen_may_not_vanish() -> None:
    core = running(5)
    core.channel_lost(A1, 10.0)
    core.connected(A1, 10.1)
    (fail,) = core.granted(A1, granted(0, version=4), pushed=4)
    assert isinstance(fail, Fail)
    assert "went back from version 5 to 4" in fail.reason


def test_denied_asks_the_controller_and_attaches_where_it_says() -> None:
    core = running(4)
    core.channel_lost(A1, 1.0)
    core.connected(A1, 1.1)
    denied = Denied(bucket=0, why="not here", retry_after_s=0.5)
    assert core.denied(A1, denied, 2.0) == [Locate(2.5)]
    assert core.denied(A1, denied, 2.0) == []  # Asked already.
    assert core.located(located((A1, 0)), 3.0) == [Send(A1, Attach(buckets=(0,)))]
    core.denied(A1, denied, 3.0)
    assert core.located(located((A2, 1)), 4.0) == [Connect(endpoint(A2), 4.0)]


def test_after_a_redirect_the_bucket_is_waited_for_before_the_controller_is_asked() -> None:
    """The copy takes milliseconds: asking the controller would take longer."""
    core = running(4)
    core.pushed(0, 5)
    core.moved(A1, moved(0, 5, epoch=1), 2.0)
    core.connected(A2, 2.0)
    denied = Denied(bucket=0, why="not here yet", retry_after_s=0.1)
    waits = []
    now_s = 2.0
    while True:
        (effect,) = core.denied(A2, denied, now_s)
        if isinstance(effect, Locate):
            break
        assert isinstance(effect, Reattach)
        waits.append(effect.at_s - now_s)
        now_s = effect.at_s
        assert core.reattach(A2, now_s) == [Send(A2, Attach(buckets=(0,)))]
    assert waits == sorted(waits)
    assert waits[0] <= 0.002 + 1e-9
    assert 0.1 < sum(waits) < 1.0


def test_a_table_older_than_a_redirect_is_ignored() -> None:
    core = running(4)
    core.pushed(0, 5)
    core.moved(A1, moved(0, 5, epoch=3), 1.0)
    assert core.located(located((A1, 2)), 2.0) == []
    assert core.aggregators == (A2,)


def test_a_layout_that_changed_ends_the_program() -> None:
    (fail,) = running().located(located((A1, 0), layout_epoch=2), 1.0)
    assert isinstance(fail, Fail)


def test_an_aggregator_that_cannot_be_reached_is_looked_up_again() -> None:
    core = running()
    core.channel_lost(A1, 0.0)
    assert [type(e) for e in core.connect_failed(A1, 0.1)] == [Connect]
    assert [type(e) for e in core.connect_failed(A1, 0.2)] == [Locate, Connect]
    assert "not connected after 2 attempts" in core.describe(0)
    (again,) = core.not_located("controller is away", 1.0, 0.3)
    assert isinstance(again, Locate)
    assert again.at_s >= 1.3
    assert core.not_located("job j was cancelled", 0.0, 0.3) == [Fail("job j was cancelled")]


def test_a_refused_push_can_be_pushed_again_and_others_refusals_are_waited_out() -> None:
    core = running(4)
    core.pushed(0, 5)
    assert core.push_refused(A1, refused(5, worker=0)) == []
    assert core.push_refused(A1, refused(4)) == []  # Late: of an iteration that is over.
    assert core.push_refused(A1, refused(5)) == [Refuse(0, refused(5))]
    assert core.pushed(0, 5) == [Ring(A1, 0, 100, 5)]


def test_a_refused_push_is_not_rung_by_a_reconnect() -> None:
    core = running(4)
    core.pushed(0, 5)
    core.push_refused(A1, refused(5))
    core.channel_lost(A1, 1.0)
    core.connected(A1, 1.1)
    assert core.granted(A1, granted(0, version=4), pushed=5) == []


@dataclass
class World:
    """An obvious aggregator pair: a counter per bucket that grows when this worker's push of the
    next iteration has rung. Channels break and buckets move at the wildest moments."""

    core: AgentCore
    home: AggregatorId = A1
    epoch: int = 0
    version: int = 0
    delivered: list[int] = field(default_factory=list)
    rung: int = 0
    up: set[AggregatorId] = field(default_factory=set)
    inbox: list[tuple[str, AggregatorId, int]] = field(default_factory=list)

    def play(self, effects: list[AgentAction]) -> None:
        for effect in effects:
            match effect:
                case Locate():
                    self.inbox.append(("located", A1, 0))
                case Reattach(aggregator=at):
                    self.inbox.append(("reattach", at, 0))
                case Connect(endpoint=at):
                    self.inbox.append(("connected", at.aggregator, 0))
                case Send(aggregator=at, frame=Attach()):
                    self.inbox.append(("attach", at, 0))
                case Ring(aggregator=at, iteration=iteration):
                    self.inbox.append(("ring", at, iteration))
                case Deliver(version=version):
                    self.delivered.append(version)
                    self.core.held(0, version)
                case Resume():
                    pass
                case _:
                    raise AssertionError(effect)

    def handle(self, now_s: float) -> None:
        what, at, iteration = self.inbox.pop(0)
        if what == "located":
            self.play(self.core.located(located((self.home, self.epoch)), now_s))
        elif what == "reattach":
            self.play(self.core.reattach(at, now_s))
        elif what == "connected":
            self.up.add(at)
            self.play(self.core.connected(at, now_s))
        elif at not in self.up:
            return  # The frame went down with its channel.
        elif what == "attach" and at == self.home:
            grant = granted(0, version=self.version, epoch=self.epoch)
            self.play(self.core.granted(at, grant, pushed=0))
        elif what == "attach":
            self.play(self.core.denied(at, Denied(bucket=0, why="moved"), now_s))
        elif what == "ring" and at == self.home:
            if iteration == self.version + 1:
                self.version += 1
            self.play(self.core.done(at, Done(100, self.version, self.epoch)))

    def lose(self, at: AggregatorId, now_s: float) -> None:
        if at in self.up:
            self.up.discard(at)
            self.inbox = [m for m in self.inbox if m[1] != at or m[0] in ("located", "connected")]
            self.play(self.core.channel_lost(at, now_s))

    def move(self, now_s: float) -> None:
        """After an update, as aggregators do: the redirect is the pull response."""
        old, self.home = self.home, A2 if self.home == A1 else A1
        self.epoch += 1
        if old in self.up:
            self.play(self.core.moved(old, moved(0, self.version, self.epoch, self.home), now_s))


@settings(max_examples=200)
@given(st.lists(st.sampled_from(["step", "lose1", "lose2", "move", "push"]), max_size=60))
def test_whatever_breaks_every_iteration_is_delivered_once_and_in_order(script: list[str]) -> None:
    """Channels break and buckets move between any two frames: at the end, once things are quiet,
    each push has been answered by its version, in order, and none is counted twice."""
    core = fresh()
    world = World(core)
    world.play(core.start(0.0))
    pushes = 0
    for now_s, action in enumerate([*script, *["step"] * 200, "push", *["step"] * 200]):
        may_push = world.delivered and world.delivered[-1] == pushes
        if action == "push" and may_push:
            pushes += 1
            world.play(core.pushed(0, pushes))
        elif action == "lose1":
            world.lose(A1, now_s)
        elif action == "lose2":
            world.lose(A2, now_s)
        elif action == "move" and world.delivered and world.version == pushes:
            world.move(now_s)
        elif action == "step" and world.inbox:
            world.handle(now_s)
    assert pushes >= 1
    assert world.delivered == list(range(pushes + 1))
    assert world.version == pushes

"""The device's decisions: activity, placement, eviction, lenders that come and go (2.4)."""

import random
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.common.base.effects import (
    Action,
    Effect,
    EffectKey,
    Publish,
    StartTimer,
    TimerFired,
)
from slackwater.common.domains.memory.coding_sets import groups
from slackwater.common.domains.memory.placement import candidates, lower
from slackwater.memory.control.core import DeviceCore
from slackwater.memory.control.effects import (
    ClaimDue,
    ConnectLender,
    LeaveSlab,
    LossDue,
    OpenSlab,
    PlacementDue,
    SendToLender,
    SuspendSlab,
)
from slackwater.memory.control.events import (
    ActivityMeasured,
    Connected,
    Disconnected,
    Fenced,
    Heard,
    Left,
    LenderSeen,
    Opened,
    Restored,
    Stopping,
)
from slackwater.memory.control.lender_directory import SLACK
from slackwater.memory.control.spans import DeviceSettings, Member
from slackwater.schemas.base import Message, NodeId
from slackwater.schemas.memory import (
    Activity,
    CheckActivity,
    ClaimSlab,
    DeviceId,
    EvictDone,
    EvictLater,
    EvictSlabs,
    FreeMemory,
    LenderId,
    MapSlab,
    NotMapped,
    QueryMemory,
    SlabdHeartbeat,
    SlabId,
    SlabMapped,
    UnmapSlab,
)

SLAB = 1024 * 1024
SPANS = 4


def slab_id(number: int) -> SlabId:
    return SlabId(f"{number:012x}")


A = TypeVar("A", bound=Action)


class World:
    """A core, and lenders that answer what they are told to."""

    def __init__(self, lenders: int = 4, **settings: Any) -> None:
        self.core = DeviceCore(
            DeviceSettings(id=DeviceId("d"), node="here", spans=SPANS, secret="s", **settings),
            SLAB,
            random.Random(3),
        )
        self.now_s = 0.0
        self.total = 100 * SLAB
        self.names = [LenderId(f"s{n}") for n in range(lenders)]
        self.free = dict.fromkeys(self.names, 4)
        self.used = dict.fromkeys(self.names, 0.5)
        self.mute: set[LenderId] = set()
        self.down: set[LenderId] = set()
        self.sent: list[tuple[LenderId, Message]] = []
        self.did: list[Action] = []
        self.facts: list[str] = []
        self.reasons: list[str] = []
        self.refusal = ""
        self.timers: dict[EffectKey, float] = {}
        self.given = 0
        self.beat()

    def beat(self) -> None:
        for name in self.names:
            if name not in self.down:
                self.feed(
                    LenderSeen(
                        SlabdHeartbeat(
                            service="slabd", id=name, incarnation=1, at_s=self.now_s,
                            node=NodeId(f"n-{name}"), addresses=(("shm", name),), slab_bytes=SLAB,
                            free_slabs=self.free[name], lent_slabs=0, devices=0,
                            total_bytes=self.total, used_bytes=int(self.used[name] * self.total),
                            headroom_bytes=1,
                        )
                    )
                )  # fmt: skip

    def feed(self, event: Any) -> None:
        effects = self.core.step(event, self.now_s)
        self.core.spans.check_invariants()
        for effect in effects:
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case ConnectLender(lender=lender):
                self.did.append(effect)
                if lender in self.down:
                    self.feed(Disconnected(lender, "nobody there"))
                else:
                    self.feed(Connected(lender))
            case SendToLender(lender=lender, message=message):
                self.sent.append((lender, message))
                self._answer(lender, message)
            case Action():
                self.did.append(effect)
                if isinstance(effect, OpenSlab):
                    self.feed(Opened(effect.member))
            case Publish(message=message):
                self.facts.append(message.fact)  # type: ignore[attr-defined]
                self.reasons.append(message.reason)  # type: ignore[attr-defined]
            case StartTimer(key=key, at_s=at_s):
                self.timers[key] = at_s

    def _answer(self, lender: LenderId, message: Message) -> None:
        if lender in self.mute:
            return
        match message:
            case QueryMemory(request=request):
                used = self.used[lender]
                free = self.free[lender]
                self.feed(
                    Heard(lender, FreeMemory(request=request, free_slabs=free, used_share=used))
                )
            case MapSlab(request=request, usage_max=most) if 0.0 < most < self.used[lender]:
                self._answer(lender, QueryMemory(request=request))
            case MapSlab(request=request):
                self.feed(Heard(lender, self._map(lender, request, 1, None)))
            case ClaimSlab(request=request, slab=slab, generation=generation):
                self.feed(Heard(lender, self._map(lender, request, generation, slab)))

    def _map(
        self, lender: LenderId, request: int, generation: int, slab: SlabId | None
    ) -> SlabMapped | NotMapped:
        if slab is None:
            if self.free[lender] == 0 or self.refusal:
                return NotMapped(request=request, reason=self.refusal or "full")
            self.free[lender] -= 1
            self.given += 1
            slab = slab_id(self.given)
        return SlabMapped(
            request=request, slab=slab, generation=generation, slab_bytes=SLAB, key=b"k"
        )

    def use(self, rate: float, *spans: int, seconds: int = 1, beat: bool = True) -> None:
        for _ in range(seconds):
            self.now_s += 1.0
            if beat:
                self.beat()
            counts = np.zeros(SPANS, np.int64)
            counts[list(spans)] = int(rate)
            self.feed(ActivityMeasured(counts))

    def leave(self) -> None:
        """The driver has seen the last request of every slab that is left."""
        for effect in self.took(LeaveSlab):
            self.feed(Left(effect.member))

    def fire(self, kind: type[EffectKey]) -> None:
        for key in [key for key in self.timers if isinstance(key, kind)]:
            self.now_s = max(self.now_s, self.timers.pop(key))
            self.feed(TimerFired(key))

    def lender_of(self, span: int) -> LenderId:
        [member] = self.core.spans.of(span)
        assert member.lender is not None
        return member.lender

    def slab_of(self, span: int) -> SlabId:
        [member] = self.core.spans.of(span)
        assert member.slab is not None
        return member.slab

    def to(self, kind: type[Message]) -> list[tuple[LenderId, Any]]:
        return [(lender, message) for lender, message in self.sent if isinstance(message, kind)]

    def took(self, kind: type[A]) -> list[A]:
        return [each for each in self.did if isinstance(each, kind)]


def test_a_span_is_mapped_when_its_average_crosses_hot_slab() -> None:
    """A = .2 * 25 + .8 * A from zero: 5, 9, 12.2, ... crosses 20 in the eighth second."""
    world = World()
    world.use(25, 0, seconds=7)
    assert world.core.activity[0] == pytest.approx(25 * (1 - 0.8**7))
    assert not world.sent
    world.use(25, 0)
    assert world.core.spans.state(0) == "mapped"
    assert [fact for fact in world.facts] == ["mapped"]


def test_a_burst_is_enough_when_it_is_large() -> None:
    world = World()
    world.use(101, 2)
    assert world.core.spans.state(2) == "mapped"
    assert world.core.spans.state(0) == "unmapped"


def test_of_two_that_were_asked_the_less_used_gives_the_slab() -> None:
    world = World()
    world.used.update({name: 0.1 * index for index, name in enumerate(world.names)})
    world.use(1000, 0)
    asked = [lender for lender, _ in world.to(QueryMemory)]
    assert len(asked) == 2
    assert world.lender_of(0) == min(asked, key=lambda lender: world.used[lender])


def connected(lenders: int = 2, **used: float) -> World:
    """Every lender is connected, heartbeats have told what it uses, and none gave a slab."""
    world = World(lenders=lenders)
    world.total = 1000 * SLAB
    for name in world.names:
        world.feed(Connected(name))
        world.used[name] = used.get(name, 0.5)
    return world


def test_connected_lenders_are_compared_by_what_they_told_and_one_is_asked() -> None:
    """One round trip: MAP to the less used one, with the other's usage and some slack."""
    world = connected(s0=0.4, s1=0.3)
    world.use(1000, 0)
    assert not world.to(QueryMemory)
    [(lender, message)] = world.to(MapSlab)
    assert lender == world.names[1]
    assert message.usage_max == pytest.approx(0.4 + SLACK)
    assert world.lender_of(0) == lender


def test_a_lender_that_has_become_fuller_than_the_other_says_so_and_both_are_asked() -> None:
    world = connected(s0=0.4, s1=0.3)
    world.beat()
    world.used[world.names[1]] = 0.9
    world.use(1000, 0, beat=False)
    assert [lender for lender, _ in world.to(QueryMemory)] == [world.names[0]]
    assert [lender for lender, _ in world.to(MapSlab)] == [world.names[1], world.names[0]]
    assert world.to(MapSlab)[1][1].usage_max == 0.0, "it was compared"
    assert world.lender_of(0) == world.names[0]


@pytest.mark.parametrize("silent", [False, True], ids=["gone", "silent"])
def test_a_fuller_lender_gives_its_slab_after_all_when_the_other_is_gone(silent: bool) -> None:
    world = connected(s0=0.4, s1=0.3)
    world.beat()
    world.used[world.names[1]] = 0.9
    if silent:
        world.mute.add(world.names[0])
    else:
        world.down.add(world.names[0])
        world.feed(Disconnected(world.names[0], "cut"))
    world.use(1000, 0, beat=False)
    if silent:
        world.fire(PlacementDue)
    assert world.lender_of(0) == world.names[1]


def test_spans_that_get_hot_at_once_know_of_each_other_before_a_heartbeat_does() -> None:
    """Two lenders that told the same: what this device takes meanwhile is added to that."""
    world = connected(lenders=2, s0=0.5, s1=0.5)
    world.total = 4 * SLAB
    world.beat()
    world.mute.update(world.names)
    world.use(1000, 0, 1, 2, 3, beat=False)
    asked = [lender for lender, _ in world.to(MapSlab)]
    assert sorted(asked) == [*world.names[:1] * 2, *world.names[1:] * 2]


def test_lenders_without_a_slab_of_this_device_come_first() -> None:
    """M_new, then M_old: four spans on four lenders, each on its own."""
    world = World(lenders=4)
    for span in range(4):
        world.use(1000, span)
    assert len({world.lender_of(span) for span in range(4)}) == 4


def test_old_lenders_serve_when_there_is_no_new_one() -> None:
    world = World(lenders=1)
    world.use(1000, 0, 1)
    assert world.lender_of(0) == world.lender_of(1)


def test_its_own_machine_is_no_lender() -> None:
    world = World(lenders=1, hot=5.0)
    world.core.settings = DeviceSettings(id=DeviceId("d"), node="n-s0", spans=SPANS)
    world.use(1000, 0)
    assert "refused" in world.facts


def test_why_a_lender_gave_no_slab_is_told() -> None:
    """Regression: a device at its quota was told that nobody had a free slab."""
    world = World(lenders=1)
    why = "lender s0 gives one device at most 3 slabs (quota_slabs), d has 3"
    world.refusal = why
    world.use(1000, 0)
    assert world.facts == ["refused"]
    assert world.reasons == [f"{why}; its pages go to the backup"]


def test_a_full_cluster_is_asked_less_and_less_often() -> None:
    world = World()
    world.free.update(dict.fromkeys(world.names, 0))
    world.use(1000, 0, seconds=20)
    assert world.facts.count("refused") == 5, "after 0, 1, 3, 7 and 15 seconds"
    assert world.core.spans.state(0) == "unmapped"
    world.free.update(dict.fromkeys(world.names, 1))
    world.use(1000, 0, seconds=20)
    assert world.core.spans.state(0) == "mapped"


def test_a_lender_that_refuses_after_all_is_left_out() -> None:
    world = World(lenders=2)
    world.used.update({world.names[0]: 0.0, world.names[1]: 0.9})
    world.free[world.names[0]] = 1

    def full(lender: LenderId, request: int, generation: int, slab: SlabId | None) -> Any:
        if lender == world.names[0]:
            return NotMapped(request=request, reason="somebody was quicker")
        return World._map(world, lender, request, generation, slab)

    world._map = full  # type: ignore[method-assign]
    world.use(1000, 0)
    assert world.lender_of(0) == world.names[1]


def test_a_lender_that_does_not_answer_is_left_out_after_a_while() -> None:
    world = World(lenders=2)
    world.mute = {world.names[0]}
    world.use(1000, 0)
    assert world.core.spans.state(0) == "placing"
    world.fire(PlacementDue)
    assert world.lender_of(0) == world.names[1]


def test_a_slab_that_comes_after_all_goes_back() -> None:
    """The lender was slow: the device has found another one meanwhile."""
    world = World(lenders=1)
    world.use(1000, 0)
    stray = SlabMapped(request=999, slab=slab_id(77), generation=5, slab_bytes=SLAB, key=b"k")
    world.feed(Heard(world.names[0], stray))
    [(_, back)] = world.to(UnmapSlab)
    assert (back.slab, back.generation) == (slab_id(77), 5)


def test_eviction_ends_with_done_and_a_hot_span_is_mapped_again_at_once() -> None:
    """2.4.4: unmapped first, DONE when nothing is under way, remapped because it is hot."""
    world = World()
    world.use(1000, 0)
    lender, slab = world.lender_of(0), world.slab_of(0)
    world.feed(Heard(lender, EvictSlabs(slabs=(slab,), deadline_s=0.5)))
    assert world.core.spans.state(0) == "retreating"
    assert not world.to(EvictDone)
    world.leave()
    assert world.to(EvictDone) == [(lender, EvictDone(slabs=(slab,)))]
    assert world.core.spans.state(0) == "mapped"
    assert world.slab_of(0) != slab


def test_a_cold_span_is_not_mapped_again_after_its_eviction() -> None:
    world = World()
    world.use(1000, 0)
    world.use(0, 0, seconds=30)
    lender, slab = world.lender_of(0), world.slab_of(0)
    world.feed(Heard(lender, EvictSlabs(slabs=(slab,), deadline_s=0.5)))
    world.leave()
    assert world.core.spans.state(0) == "unmapped"


def test_an_unknown_slab_is_done_at_once() -> None:
    """It was given back, or its mapping was given up: a lender must not wait for it."""
    world = World()
    world.use(1000, 0)
    lender = world.lender_of(0)
    world.feed(Heard(lender, EvictSlabs(slabs=(slab_id(9999),), deadline_s=0.5)))
    assert world.to(EvictDone) == [(lender, EvictDone(slabs=(slab_id(9999),)))]


def test_of_two_lenders_of_one_id_the_newer_counts_while_it_is_heard() -> None:
    """The older one ends by itself. One whose state was lost may begin anew when nobody answers."""
    world = World(lenders=1)
    [(beat, _)] = world.core.directory.beats.values()
    newer = msgspec.structs.replace(beat, incarnation=2, addresses=(("shm", "newer"),))
    for second in range(3):
        world.now_s = float(second)
        world.feed(LenderSeen(newer))
        world.feed(LenderSeen(beat))
    assert world.core.directory.beats[world.names[0]][0] is newer
    world.now_s += 10.0
    world.feed(LenderSeen(beat))
    assert world.core.directory.beats[world.names[0]][0] is beat


def test_activity_is_told_for_each_slab() -> None:
    world = World()
    world.use(1000, 0)
    lender, slab = world.lender_of(0), world.slab_of(0)
    world.feed(Heard(lender, CheckActivity(round=5, slabs=(slab, slab_id(9999)))))
    [(_, told)] = world.to(Activity)
    assert told == Activity(round=5, activity=((slab, 200.0), (slab_id(9999), 0.0)))


def test_a_cold_slab_is_given_back_where_that_is_wanted() -> None:
    world = World(cold=1.0)
    world.use(1000, 0)
    lender, slab = world.lender_of(0), world.slab_of(0)
    world.use(0, 0, seconds=25)
    world.leave()
    assert world.core.spans.state(0) == "unmapped"
    assert [(at, message.slab) for at, message in world.to(UnmapSlab)] == [(lender, slab)]


def test_a_lost_channel_suspends_and_a_claim_resumes() -> None:
    world = World()
    world.use(1000, 0)
    lender, slab = world.lender_of(0), world.slab_of(0)
    world.feed(Disconnected(lender, "cut"))
    assert world.core.spans.state(0) == "suspended"
    assert world.took(SuspendSlab)
    world.fire(ClaimDue)
    assert [message.slab for _, message in world.to(ClaimSlab)] == [slab]
    assert world.core.spans.state(0) == "mapped"
    assert world.facts[-2:] == ["suspended", "resumed"]


def test_a_lender_that_stays_away_has_lost_the_slab() -> None:
    world = World(hold_s=3.0)
    world.use(1000, 0)
    lender = world.lender_of(0)
    world.down.add(lender)
    world.feed(Disconnected(lender, "dead"))
    began_s = world.now_s
    world.fire(ClaimDue)
    assert world.timers[LossDue(1)] == began_s + 3.0
    world.fire(LossDue)
    world.leave()
    assert world.lender_of(0) != lender, "it is hot: placed elsewhere"


def test_a_claim_that_is_refused_for_good_loses_the_slab() -> None:
    world = World(lenders=2)
    world.use(1000, 0)
    lender = world.lender_of(0)
    world.mute = {lender}
    world.feed(Disconnected(lender, "restarted"))
    world.fire(ClaimDue)
    [(_, claim)] = world.to(ClaimSlab)
    gone = NotMapped(request=claim.request, reason="gone", retry_after_s=0.0)
    world.feed(Heard(lender, gone))
    assert world.took(LeaveSlab)


def test_a_claim_is_repeated_while_the_lender_says_so() -> None:
    world = World(lenders=1)
    world.use(1000, 0)
    lender = world.lender_of(0)
    world.mute = {lender}
    world.feed(Disconnected(lender, "cut"))
    world.fire(ClaimDue)
    [(_, claim)] = world.to(ClaimSlab)
    world.feed(Heard(lender, NotMapped(request=claim.request, reason="wait", retry_after_s=0.1)))
    world.mute = set()
    world.fire(ClaimDue)
    assert world.core.spans.state(0) == "mapped"


def test_a_fenced_slab_is_lost_without_a_word_from_its_lender() -> None:
    world = World()
    world.use(1000, 0)
    slab = world.slab_of(0)
    world.feed(Fenced(0))
    world.leave()
    assert world.slab_of(0) != slab


def test_a_device_that_ends_gives_everything_back() -> None:
    world = World()
    world.use(1000, 0, 1)
    slabs = {world.slab_of(0), world.slab_of(1)}
    world.feed(Stopping())
    world.leave()
    assert {message.slab for _, message in world.to(UnmapSlab)} == slabs
    world.use(1000, 0)
    assert world.core.spans.state(0) == "unmapped"


def test_the_slab_map_names_what_counts() -> None:
    world = World()
    world.use(1000, 1)
    [record] = world.core.spans.span_records()
    [member] = record.members
    assert member is not None
    assert (record.span, member.lender, member.slab) == (1, world.lender_of(1), world.slab_of(1))


# Placement ----------------------------------------------------------------------------------------


def test_power_of_two_choices_balances_better_than_one() -> None:
    """1,000 slabs on 100 lenders: the fullest has 14 or fewer by two choices, 17 or more by one."""

    def fullest(choices: int) -> int:
        rng = random.Random(5)
        names = [LenderId(f"s{n}") for n in range(100)]
        has = dict.fromkeys(names, 0)
        for _ in range(1000):
            asked = candidates(dict.fromkeys(names, 1), (), (), rng, choices)
            answers = [
                (one, FreeMemory(request=1, free_slabs=1, used_share=float(has[one])))
                for one in asked
            ]
            chosen = lower(answers)
            assert chosen is not None
            has[chosen] += 1
        return max(has.values())

    assert fullest(2) <= 14
    assert fullest(1) >= 17


def test_new_lenders_alone_decide_while_there_are_enough() -> None:
    names = [LenderId(f"s{n}") for n in range(6)]
    lenders = dict.fromkeys(names, 3)
    for seed in range(50):
        asked = candidates(lenders, set(names[:4]), (), random.Random(seed))
        assert set(asked) == set(names[4:])
    assert candidates(lenders, set(names[:5]), (), random.Random(1)) == [names[5]]
    assert set(candidates(lenders, set(names), {names[0]}, random.Random(1))) <= set(names[1:])


def test_a_lender_is_drawn_in_proportion_to_its_free_slabs() -> None:
    """One with 30 of 40 free slabs is the first of three draws in four; by even odds of one."""
    lenders = {LenderId("empty"): 30, **{LenderId(f"s{n}"): 1 for n in range(10)}}
    rng = random.Random(3)
    first = sum(candidates(lenders, (), (), rng, 1) == ["empty"] for _ in range(2000))
    assert 0.72 < first / 2000 < 0.78


# Coded spans --------------------------------------------------------------------------------------


def coded(lenders: int = 8, **settings: Any) -> World:
    return World(lenders, width=4, needed=3, **settings)


def backing(world: World, span: int = 0) -> list[str]:
    return [member.lender or "" for member in world.core.spans.of(span) if member.usable]


def test_the_members_of_a_span_are_on_lenders_of_their_own() -> None:
    world = coded()
    world.use(200.0, 0, 1)
    for span in (0, 1):
        assert len(set(backing(world, span))) == 4
        assert [m.index for m in world.core.spans.of(span)] == [0, 1, 2, 3]
        assert world.core.spans.state(span) == "mapped"


def test_spans_share_their_sets_of_lenders() -> None:
    """26 lenders are four groups of six and more; a span stays within one."""
    world = coded(26)
    world.use(200.0, 0, 1, 2, 3)
    made = groups(world.names, 4)
    for span in range(SPANS):
        assert sum(set(backing(world, span)) <= group for group in made) == 1


def test_a_lost_member_is_put_back_elsewhere_also_when_the_span_is_idle() -> None:
    world = coded()
    world.use(200.0, 0)
    world.use(0.0, 0, seconds=60)
    before = backing(world)
    lost = LenderId(before[1])
    member = world.core.spans.on(lost)[0]
    assert member.slab is not None
    world.feed(Heard(lost, EvictSlabs(slabs=(member.slab,), deadline_s=5.0)))
    world.free[lost] = 0
    world.feed(Left(member.number))
    world.use(0.0, 0)
    assert len(set(backing(world))) == 4
    assert lost not in backing(world)
    assert set(before) - {lost} <= set(backing(world))


def test_a_cold_coded_span_is_given_back_whole() -> None:
    world = coded(cold=1.0)
    world.use(200.0, 0)
    members = world.core.spans.of(0)
    world.use(0.0, 0, seconds=40)
    for member in members:
        world.feed(Left(member.number))
        world.use(0.0, 0)
    assert world.core.spans.of(0) == []


def test_too_few_lenders_leave_a_coded_span_unmapped() -> None:
    world = coded(2)
    world.use(200.0, 0)
    assert world.core.spans.state(0) == "unmapped" or len(backing(world)) == 2
    assert "refused" in world.facts


class Coded(World):
    """One coded span, whole, 4 + 2 of ten lenders; LATER_S is what a lender gives."""

    LATER_S = 10.0

    def __init__(self) -> None:
        super().__init__(10, width=6, needed=4)
        self.free = dict.fromkeys(self.names, 100)
        self.use(1000, 0)
        self.restore()

    def members(self) -> list[Member]:
        return self.core.spans.of(0)

    def restore(self) -> None:
        for member in self.members():
            self.feed(Restored(member.number))

    def evict(self, member: Member, later_s: float = LATER_S) -> None:
        assert member.lender is not None
        assert member.slab is not None
        slabs = (member.slab,)
        self.feed(Heard(member.lender, EvictSlabs(slabs=slabs, deadline_s=0.5, later_s=later_s)))

    def whole(self) -> int:
        return sum(member.usable and member.whole for member in self.members())


def test_a_coded_span_keeps_what_it_needs_until_others_are_made() -> None:
    """Three of six are asked for at once: two go, the third once one is made again."""
    world = Coded()
    first, second, third, *_ = world.members()
    for member in (first, second, third):
        world.evict(member)
    assert world.whole() == 4
    assert world.to(EvictLater) == [(third.lender, EvictLater(slabs=(third.slab,)))]
    world.leave()
    assert len(world.to(EvictDone)) == 2
    assert world.whole() == 4, "the new ones lack what was written"
    assert third.usable
    world.restore()
    assert not third.usable
    world.leave()
    assert (third.lender, EvictDone(slabs=(third.slab,))) in world.to(EvictDone)


def test_a_lender_is_told_which_slabs_a_span_needs() -> None:
    world = Coded()
    first, second, third, *_ = world.members()
    assert third.lender is not None
    assert third.slab is not None

    def needed() -> tuple[SlabId, ...]:
        assert third.lender is not None
        assert third.slab is not None
        world.feed(Heard(third.lender, CheckActivity(round=1, slabs=(third.slab,))))
        found: tuple[SlabId, ...] = world.to(Activity)[-1][1].needed
        return found

    assert needed() == ()
    world.evict(first)
    world.evict(second)
    assert needed() == (third.slab,)


def test_a_lender_that_cannot_wait_gets_its_slab() -> None:
    """One of an older version gives no more time; what is taken by force is gone in any case."""
    world = Coded()
    for member in world.members()[:3]:
        world.evict(member, later_s=0.0)
    assert world.whole() == 3
    assert not world.to(EvictLater)


_CODED = st.lists(
    st.tuples(st.sampled_from(["evict", "restore", "leave", "lose", "back", "use"]),
              st.integers(0, 5)),
    max_size=60,
)  # fmt: skip


@given(_CODED)
def test_evictions_alone_never_cost_a_coded_span_a_page(steps: list[tuple[str, int]]) -> None:
    """In any order of evictions, while at most r lenders are away, the span is readable, or it lost
    members because lenders went. Each member that was asked for goes in the end."""
    world = Coded()
    away: list[LenderId] = []
    for what, index in steps:
        members = world.members()
        if what == "evict" and index < len(members) and members[index].usable:
            world.evict(members[index])
        elif what == "restore" and index < len(members):
            world.feed(Restored(members[index].number))
        elif what == "leave":
            world.leave()
        elif what == "use":
            world.use(1000, 0)
        elif what == "lose" and index < len(members) and world.whole() > 4:
            lender = members[index].lender
            if lender is not None and lender not in away and members[index].usable:
                away.append(lender)
                world.down.add(lender)
                world.feed(Disconnected(lender, "killed"))
        elif what == "back" and away:
            world.down.discard(lender := away.pop())
            world.feed(Connected(lender))
        assert world.whole() >= 4
    wanted = [member for member in world.members() if member.wanted]
    for _ in range(8):
        world.fire(LossDue)
        world.leave()
        world.use(1000, 0, seconds=4)
        world.restore()
    assert not any(member.usable for member in wanted)

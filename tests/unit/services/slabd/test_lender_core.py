"""The lender's decisions: how many slabs, who has them, which go (Gu, dissertation, 2.5)."""

import random
from collections.abc import Sequence
from typing import Any, TypeVar

import pytest

from slackwater.common.base.effects import (
    Action,
    Count,
    Effect,
    EffectKey,
    Persist,
    Publish,
    Recovered,
    Reply,
    Requested,
    StartTimer,
    TimerFired,
)
from slackwater.common.domains.memory import trailer
from slackwater.schemas.base import Message, NodeId, Ok, Refused
from slackwater.schemas.memory import (
    Activity,
    CheckActivity,
    ClaimSlab,
    DeviceHello,
    DeviceId,
    EvictBegun,
    EvictDone,
    EvictNow,
    EvictSlabs,
    FreeMemory,
    LenderId,
    LenderRecord,
    MapSlab,
    NotMapped,
    QueryMemory,
    SetLending,
    SlabId,
    UnmapSlab,
)
from slackwater.services.slabd.config import SlabdConfig
from slackwater.services.slabd.core import LenderCore
from slackwater.services.slabd.effects import (
    CloseSession,
    EvictionDue,
    HoldDue,
    LendSlab,
    MakeSlab,
    ReleaseSlab,
    RenewSlab,
    RoundDue,
    SendToDevice,
)
from slackwater.services.slabd.events import (
    Heard,
    MemorySampled,
    SessionClosed,
    SessionOpened,
    SlabGone,
    SlabMade,
    SlabsFound,
)
from slackwater.services.slabd.eviction import candidates, light_probability
from slackwater.services.slabd.slab import check_invariants

SLAB = 1024 * 1024
WHOLE = SLAB + trailer.TRAILER_BYTES

A = TypeVar("A", bound=Action)


class Lender:
    """A core whose effects are carried out at once, as far as memory is concerned."""

    def __init__(self, slabs: int = 8, **config: Any) -> None:
        self.total = (slabs + 2) * WHOLE + WHOLE // 4
        self.core = LenderCore(
            SlabdConfig(slab_bytes=SLAB, headroom_bytes=2 * WHOLE, **config), random.Random(1)
        )
        self.now_s = 0.0
        self.sent: list[tuple[int, Message]] = []
        self.done: list[Action] = []
        self.facts: list[str] = []
        self.counted: list[str] = []
        self.timers: dict[EffectKey, float] = {}
        self.replies: list[Message] = []

    def feed(self, event: Any) -> None:
        effects = self.core.step(event, self.now_s)
        check_invariants(self.core.slabs, self.core.sessions)
        for effect in effects:
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case SendToDevice(session=session, message=message):
                self.sent.append((session, message))
            case Action():
                self.done.append(effect)
                if isinstance(effect, MakeSlab):
                    self.feed(SlabMade(effect.slab))
            case Count(name=name):
                self.counted.append(name)
            case Publish(message=message):
                self.facts.append(message.fact)  # type: ignore[attr-defined]
            case StartTimer(key=key, at_s=at_s):
                self.timers[key] = at_s
            case Reply(message=message):
                self.replies.append(message)

    def sample(self, others: float, times: int = 1, pressure: float = 0.0) -> None:
        """`others` in slabs."""
        for _ in range(times):
            self.now_s += 1.0
            self.feed(MemorySampled(self.total, int(others * WHOLE), pressure))

    def join(self, session: int, device: str = "") -> None:
        hello = DeviceHello(
            device=DeviceId(device or f"d{session}"), node=NodeId("n"), incarnation=1
        )
        self.feed(SessionOpened(session, hello))

    def borrow(self, session: int, count: int = 1, **fields: Any) -> list[SlabId]:
        before = {slab.id for slab in self.core.having("lent")}
        for span in range(count):
            self.feed(Heard(session, MapSlab(request=span, span=span, **fields)))
        return [slab.id for slab in self.core.having("lent") if slab.id not in before]

    def fire(self, kind: type[EffectKey]) -> None:
        for key in [key for key in self.timers if isinstance(key, kind)]:
            self.now_s = max(self.now_s, self.timers.pop(key))
            self.feed(TimerFired(key))

    def last(self, kind: type[Message]) -> list[Any]:
        return [message for _, message in self.sent if isinstance(message, kind)]

    def took(self, action: type[A]) -> list[A]:
        return [each for each in self.done if isinstance(each, action)]


def lending(slabs: int = 8, **config: Any) -> Lender:
    """A lender on an otherwise idle machine, with all its slabs made."""
    lender = Lender(slabs, **config)
    lender.sample(0.0, times=12)
    assert len(lender.core.having("free")) == slabs
    return lender


def test_a_lender_above_the_usage_that_map_names_tells_its_own_instead() -> None:
    """The device compared what two had told; this one has become the fuller since."""
    lender = Lender()
    lender.sample(2, times=20)
    lender.join(1)
    used = lender.core.used_share
    assert not lender.borrow(1, usage_max=used - 0.01)
    [told] = lender.last(FreeMemory)
    assert (told.request, told.used_share) == (0, used)
    assert not lender.last(NotMapped)
    assert lender.borrow(1, usage_max=used + 0.01)
    assert lender.borrow(1), "0: whatever it uses"


def test_slabs_are_made_until_only_headroom_is_left() -> None:
    lender = lending(8)
    assert len(lender.core.slabs) == 8


def test_the_average_begins_with_the_first_sample() -> None:
    """From zero it would climb for seconds, and lend memory that is in use."""
    lender = Lender(8)
    lender.sample(5.0)
    assert lender.core.sizing.average.value == pytest.approx(5.0 * WHOLE, rel=1e-6)
    lender.sample(10.0)
    assert lender.core.sizing.average.value == pytest.approx(6.0 * WHOLE, rel=1e-6)


def test_a_burst_takes_slabs_at_once_and_they_come_back_slowly() -> None:
    """Shrinking acts on the instantaneous value, growing on the average: after a burst of one
    second no slab is added for several."""
    lender = lending(8)
    lender.sample(4.0)
    assert len(lender.took(ReleaseSlab)) == 4
    for arguments in lender.took(ReleaseSlab):
        lender.feed(SlabGone(arguments.slab))
    lender.sample(0.0, times=2)
    assert len(lender.core.slabs) == 4
    lender.sample(0.0, times=30)
    assert len(lender.core.slabs) == 8


def test_headroom_is_an_eighth_by_default() -> None:
    core = LenderCore(SlabdConfig(slab_bytes=SLAB), random.Random(1))
    core.step(MemorySampled(64 * 1024**3, 0), 0.0)
    assert core.sizing.headroom_bytes == 8 * 1024**3


def test_unmapped_slabs_go_first_and_no_device_is_asked() -> None:
    lender = lending(8)
    lender.join(1)
    lent = lender.borrow(1, 3)
    lender.sample(5.0)
    assert len(lender.took(ReleaseSlab)) == 5
    assert not lender.last(CheckActivity)
    assert {slab.id for slab in lender.core.having("lent")} == set(lent)


def test_eviction_asks_e_plus_e_and_takes_the_least_active() -> None:
    """E = 2 of 8 lent, E' = 2: four are asked about, the two with the lowest activity go."""
    lender = lending(8)
    lender.join(1)
    lender.borrow(1, 8)
    lender.sample(2.0)
    [check] = lender.last(CheckActivity)
    assert len(check.slabs) == 4
    activity = tuple((slab, float(index)) for index, slab in enumerate(reversed(check.slabs)))
    lender.feed(Heard(1, Activity(round=check.round, activity=activity)))
    [evict] = lender.last(EvictSlabs)
    assert set(evict.slabs) == {slab for slab, _ in activity[:2]}
    assert not lender.took(ReleaseSlab), "not before DONE"
    lender.now_s += 0.01
    lender.feed(Heard(1, EvictDone(slabs=evict.slabs)))
    assert [one.forced for one in lender.took(ReleaseSlab)] == [False, False]
    assert lender.facts.count("evicted") == 2


def test_an_eviction_under_way_is_counted_and_not_asked_for_again() -> None:
    lender = lending(8)
    lender.join(1)
    lender.borrow(1, 8)
    lender.sample(2.0, times=3)
    assert len(lender.last(CheckActivity)) == 1
    lender.fire(RoundDue)
    lender.sample(2.0, times=3)
    assert sum(len(message.slabs) for message in lender.last(EvictSlabs)) == 2


def test_a_device_that_tells_no_activity_loses_its_slabs_first() -> None:
    lender = lending(8)
    lender.join(1)
    lender.join(2)
    silent = set(lender.borrow(1, 4))
    lender.borrow(2, 4)
    lender.sample(4.0)
    for session, check in [(s, m) for s, m in lender.sent if isinstance(m, CheckActivity)]:
        if session == 2:
            told = tuple((slab, 0.0) for slab in check.slabs)
            lender.feed(Heard(2, Activity(round=check.round, activity=told)))
    assert not lender.last(EvictSlabs), "it waits for the other one"
    lender.fire(RoundDue)
    evicted = [slab for message in lender.last(EvictSlabs) for slab in message.slabs]
    assert len(evicted) == 4
    assert silent <= set(evicted)


def test_a_dead_device_never_blocks_the_lender() -> None:
    """No DONE by the deadline: the slab is taken by force, and its memory is not lent again."""
    lender = lending(2)
    lender.join(1)
    [slab] = lender.borrow(1)
    lender.sample(2.0)
    assert lender.last(EvictSlabs)[0].slabs == (slab,)
    lender.fire(EvictionDue)
    forced = [one for one in lender.took(ReleaseSlab) if one.slab == slab]
    assert [one.forced for one in forced] == [True]
    assert "revoked" in lender.facts
    lender.feed(Heard(1, EvictDone(slabs=(slab,))))  # Too late: nothing happens.
    lender.feed(SlabGone(slab))
    lender.sample(0.0, times=40)
    assert slab not in lender.core.slabs


def test_a_returned_slab_is_made_anew_before_it_is_lent_again() -> None:
    lender = lending(1)
    lender.join(1)
    [slab] = lender.borrow(1)
    lender.feed(Heard(1, UnmapSlab(slab=slab, generation=1)))
    assert lender.took(RenewSlab) == [RenewSlab(slab, session=1, generation=1)]
    lender.sample(0.0, times=5)
    assert list(lender.core.slabs) == [slab], "it counts once meanwhile"
    assert not lender.borrow(1), "not yet"
    lender.feed(SlabMade(slab))
    assert lender.borrow(1) == [slab]
    assert lender.core.slabs[slab].generation == 2


def test_unmap_of_an_old_generation_or_by_another_device_is_ignored() -> None:
    lender = lending(1)
    lender.join(1)
    lender.join(2)
    [slab] = lender.borrow(1)
    lender.feed(Heard(2, UnmapSlab(slab=slab, generation=1)))
    lender.feed(Heard(1, UnmapSlab(slab=slab, generation=7)))
    assert lender.core.slabs[slab].state == "lent"


def test_a_lost_device_may_claim_its_slab_with_its_secret() -> None:
    lender = lending(1)
    lender.join(1, "d")
    [slab] = lender.borrow(1, secret="s3", hold_s=5.0)
    lender.feed(SessionClosed(1))
    assert lender.core.slabs[slab].state == "held"
    lender.join(2, "d")
    lender.feed(Heard(2, ClaimSlab(request=9, slab=slab, generation=1, secret="wrong")))
    assert lender.last(NotMapped)[-1].retry_after_s == 0.0
    lender.feed(Heard(2, ClaimSlab(request=9, slab=slab, generation=1, secret="s3")))
    assert lender.core.slabs[slab].state == "lent"
    assert lender.core.slabs[slab].generation == 1, "the same lending goes on"
    assert lender.took(LendSlab)[-1].session == 2


def test_a_claim_waits_until_the_old_channel_is_over() -> None:
    """Writes that the old channel has on its way must not land after the claim."""
    lender = lending(1)
    lender.join(1, "d")
    [slab] = lender.borrow(1, secret="s", hold_s=5.0)
    lender.join(2, "d")
    lender.feed(Heard(2, ClaimSlab(request=1, slab=slab, generation=1, secret="s")))
    assert lender.took(CloseSession) == [CloseSession(1)]
    assert lender.last(NotMapped)[-1].retry_after_s > 0
    lender.feed(SessionClosed(1))
    lender.feed(Heard(2, ClaimSlab(request=2, slab=slab, generation=1, secret="s")))
    assert lender.core.slabs[slab].session == 2


def test_a_slab_that_nobody_claims_is_never_lent_again() -> None:
    lender = lending(1, hold_s_max=3.0)
    lender.join(1)
    [slab] = lender.borrow(1, hold_s=60.0)
    lender.feed(SessionClosed(1))
    assert lender.timers[HoldDue(slab)] == lender.now_s + 3.0
    lender.fire(HoldDue)
    assert [one.slab for one in lender.took(ReleaseSlab)] == [slab]


def test_without_a_hold_a_lost_device_loses_its_slab_at_once() -> None:
    lender = lending(1)
    lender.join(1)
    [slab] = lender.borrow(1)
    lender.feed(SessionClosed(1))
    assert [one.slab for one in lender.took(ReleaseSlab)] == [slab]


def test_a_quota_bounds_one_device() -> None:
    lender = lending(4, quota_slabs=2)
    lender.join(1, "d")
    lender.join(2, "d")
    lender.join(3, "e")
    assert len(lender.borrow(1, 2)) == 2
    assert not lender.borrow(2), "another channel of the same device"
    assert "quota_slabs" in lender.last(NotMapped)[-1].reason
    assert len(lender.borrow(3, 2)) == 2


def test_a_full_lender_says_so() -> None:
    lender = lending(1)
    lender.join(1)
    lender.borrow(1)
    lender.feed(Heard(1, QueryMemory(request=4)))
    assert lender.last(FreeMemory)[-1].free_slabs == 0
    lender.borrow(1)
    assert "no free slab" in lender.last(NotMapped)[-1].reason


def test_usage_counts_lent_slabs_and_not_those_that_wait() -> None:
    lender = lending(8)
    lender.join(1)
    assert lender.core.used_share == pytest.approx(0.0)
    lender.borrow(1, 4)
    assert lender.core.used_share == pytest.approx(4 / 10.25)


def test_pressure_stops_growth_and_gives_up_one_slab_a_second() -> None:
    lender = lending(8)
    lender.sample(0.0, times=3, pressure=0.5)
    assert len(lender.took(ReleaseSlab)) == 3


def test_a_restarted_daemon_finds_its_slabs() -> None:
    """Lent ones wait for their claim, free ones are free, one that was being revoked goes."""
    lender = Lender(8)
    found = []
    for state, name in ((trailer.FREE, "a"), (trailer.LENT, "b"), (trailer.REVOKED, "c")):
        identity = trailer.SlabIdentity(
            slab=SlabId(name * 12),
            slab_bytes=SLAB,
            generation=3,
            device="d",
            secret="s",
            hold_s=5.0,
        )
        found.append((trailer.fence(state, 3), identity))  # type: ignore[arg-type]
    lender.feed(SlabsFound(tuple(found)))
    assert [s.id[0] for s in lender.core.having("free")] == ["a"]
    assert [s.id[0] for s in lender.core.having("held")] == ["b"]
    assert [one.slab[0] for one in lender.took(ReleaseSlab)] == ["c"]
    lender.join(1, "d")
    lender.feed(Heard(1, ClaimSlab(request=1, slab=SlabId("b" * 12), generation=3, secret="s")))
    assert lender.core.slabs[SlabId("b" * 12)].state == "lent"


def test_a_lent_slab_that_nobody_may_claim_is_told_as_lost_by_a_restarted_daemon() -> None:
    lender = Lender(8)
    slab = SlabId("b" * 12)
    identity = trailer.SlabIdentity(slab=slab, slab_bytes=SLAB, generation=3, device="d")
    lender.feed(SlabsFound(((trailer.fence(trailer.LENT, 3), identity),)))
    assert lender.facts == ["lost"]
    assert [one.slab for one in lender.took(ReleaseSlab)] == [slab]
    lender.join(1, "d")
    lender.feed(Heard(1, ClaimSlab(request=1, slab=slab, generation=3, secret="")))
    assert lender.last(NotMapped)[0].retry_after_s == 0.0


def test_a_drained_lender_empties_itself_and_lends_again_when_told() -> None:
    lender = lending(4)
    lender.join(1)
    lent = lender.borrow(1, 2)
    lender.feed(Requested(1, SetLending(lending=False)))
    assert lender.replies == [Ok()]
    assert len(lender.took(ReleaseSlab)) == 2
    assert set(lender.last(EvictSlabs)[0].slabs) == set(lent)
    lender.feed(Heard(1, EvictDone(slabs=tuple(lent))))
    for arguments in lender.took(ReleaseSlab):
        lender.feed(SlabGone(arguments.slab))
    lender.sample(0.0, times=20)
    assert not lender.core.slabs
    lender.feed(Requested(2, SetLending(lending=True)))
    lender.sample(0.0, times=20)
    assert len(lender.core.having("free")) == 4


DRAINED = {"lender_s1": {"drained": LenderRecord(lender=LenderId("s1"), drained_s=7.0)}}


def test_a_drain_is_one_record_which_its_answer_waits_for() -> None:
    """The shell says nothing of a step before its record is durable."""
    lender = Lender()
    lender.now_s = 7.0
    effects = lender.core.step(Requested(1, SetLending(lending=False)), 7.0)
    record = DRAINED["lender_s1"]["drained"]
    assert effects == [Persist("lender_s1", "drained", record), Reply(1, Ok())]
    again = lender.core.step(Requested(2, SetLending(lending=False)), 8.0)
    assert again == [Reply(2, Ok())], "a repeated order is the same one"
    effects = lender.core.step(Requested(3, SetLending(lending=True)), 9.0)
    assert effects == [Persist("lender_s1", "drained", None), Reply(3, Ok())]


def test_a_lender_that_was_drained_in_its_last_life_takes_back_in_good_order() -> None:
    """Free slabs go at once; a device that claims one gets it, to be asked for it at once."""
    lender = Lender(8)
    lender.feed(Recovered(2, DRAINED))
    found = []
    for state, name in ((trailer.FREE, "a"), (trailer.LENT, "b")):
        identity = trailer.SlabIdentity(
            slab=SlabId(name * 12), slab_bytes=SLAB, generation=3, device="d", hold_s=5.0
        )
        found.append((trailer.fence(state, 3), identity))  # type: ignore[arg-type]
    lender.feed(SlabsFound(tuple(found)))
    assert [one.slab[0] for one in lender.took(ReleaseSlab)] == ["a"]
    lender.join(1, "d")
    lender.feed(Heard(1, MapSlab(request=1, span=0)))
    assert "is being drained" in lender.last(NotMapped)[0].reason
    slab = SlabId("b" * 12)
    lender.feed(Heard(1, ClaimSlab(request=2, slab=slab, generation=3, secret="")))
    assert lender.took(LendSlab)[0].identity.slab == slab
    assert lender.last(EvictSlabs)[0].slabs == (slab,)
    lender.feed(Heard(1, EvictDone(slabs=(slab,))))
    assert lender.facts == ["claimed", "evicted"]
    lender.sample(0.0, times=20)
    assert not lender.took(MakeSlab)


def test_an_operator_is_told_how_many_slabs_go() -> None:
    lender = lending(4)
    lender.join(1)
    lender.join(2, "d2")
    lender.borrow(1, 2)
    lender.borrow(2, 1, hold_s=5.0)
    lender.feed(SessionClosed(2))
    lender.feed(Requested(1, EvictNow(count=9)))
    assert lender.replies[-1] == EvictBegun(slabs=3)
    assert lender.facts[-1] == "revoked", "whose device is gone goes first"
    lender.feed(Requested(2, EvictNow(count=1)))
    assert isinstance(lender.replies[-1], Refused), "these two are on their way already"
    assert "lends nothing that is not being evicted" in lender.replies[-1].reason


def test_a_slab_named_twice_goes_once() -> None:
    lender = lending(2)
    lender.join(1)
    [slab] = lender.borrow(1)
    lender.feed(Requested(1, EvictNow(slabs=(slab, slab))))
    assert lender.replies == [EvictBegun(slabs=1)]
    assert lender.last(EvictSlabs)[0].slabs == (slab,)


def test_every_fact_is_counted() -> None:
    lender = lending(2)
    lender.join(1)
    [slab] = lender.borrow(1)
    lender.feed(Requested(1, EvictNow(count=1)))
    lender.feed(Heard(1, EvictDone(slabs=(slab,))))
    lender.borrow(1)
    lender.feed(SessionClosed(1))
    counted = lender.counted
    assert counted == ["slabs_lent", "slabs_evicted", "slabs_lent", "slabs_revoked"]


def test_an_operator_evicts_named_slabs_and_is_told_of_wrong_ones() -> None:
    lender = lending(2)
    lender.join(1)
    [slab] = lender.borrow(1)
    lender.feed(Requested(1, EvictNow(slabs=(SlabId("0" * 12),))))
    assert isinstance(lender.replies[-1], Refused)
    lender.feed(Requested(2, EvictNow(slabs=(slab,))))
    assert lender.last(EvictSlabs)[-1].slabs == (slab,)


def test_what_a_stranger_says_about_slabs_of_others_changes_nothing() -> None:
    lender = lending(2)
    lender.join(1)
    lender.join(2)
    [slab] = lender.borrow(1)
    lender.feed(Requested(1, EvictNow(slabs=(slab,))))
    lender.feed(Heard(2, EvictDone(slabs=(slab,))))
    assert lender.core.slabs[slab].state == "evicting"
    lender.feed(Heard(3, EvictDone(slabs=(slab,))))
    assert lender.core.slabs[slab].state == "evicting"


# Figure 2.7 ---------------------------------------------------------------------------------------


def found_light(need: int, extra: int, busy: float, rounds: int, rng: random.Random) -> float:
    """How often the real selection finds E lightly active slabs among 200."""
    slabs = [SlabId(f"{n:012x}") for n in range(200)]
    hits = 0
    for _ in range(rounds):
        heavy = {slab for slab in slabs if rng.random() < busy}
        asked = candidates(slabs, need, extra, rng)
        ordered = sorted(asked, key=lambda slab: slab in heavy)
        hits += not heavy.intersection(ordered[:need])
    return hits / rounds


@pytest.mark.parametrize("extra", [0, 2, 5, 10])
@pytest.mark.parametrize("busy", [0.1, 0.3, 0.5])
def test_batch_eviction_finds_lightly_active_slabs_as_the_formula_says(
    extra: int, busy: float
) -> None:
    """E = 10, as in figure 2.7, within four standard errors of sampling."""
    rounds = 2000
    expected = light_probability(10, extra, busy)
    measured = found_light(10, extra, busy, rounds, random.Random(f"{extra}/{busy}"))
    error = (max(expected * (1 - expected), 1 / rounds) / rounds) ** 0.5
    assert abs(measured - expected) <= 4 * error


def test_the_formula_without_extra_is_the_random_choice() -> None:
    assert light_probability(10, 0, 0.2) == pytest.approx(0.8**10)
    assert light_probability(10, 10, 0.2) == pytest.approx(0.9994, abs=1e-4)


def test_no_more_than_twice_e_are_asked() -> None:
    slabs: Sequence[SlabId] = [SlabId(f"{n:012x}") for n in range(50)]
    assert len(candidates(slabs, 3, 10, random.Random(1))) == 6


def test_a_damaged_order_to_drain_still_stands() -> None:
    """A lender that cannot read the operator's order must not lend again."""
    lender = Lender()
    lender.core.step(Recovered(2, {}, {"lender_s1": frozenset({"drained"})}), 0.0)
    assert not lender.core.lending

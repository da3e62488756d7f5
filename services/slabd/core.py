"""A lender's core: how many slabs there are, who has them, which go when memory gets short. Pure.

Gu, dissertation, 2.5: memory in use by everything else is averaged (EWMA, beta 0.2, one second);
HeadRoom stays free. Slabs are added on the average, and given up on the instantaneous value: those
that are not mapped first, then E mapped ones by batch eviction (eviction.py). A slab that was taken
by force, or whose device was lost, is never lent again: its memory is let go and a fresh one made.
One that was given back is made anew (slabs.py) before it is free, and counts once meanwhile.
"""

import hmac
from collections.abc import Iterable, Sequence
from random import Random
from typing import Final, Literal, assert_never

from slackwater.common.base import limits
from slackwater.common.base.effects import (
    Answered,
    CancelTimer,
    Count,
    Draining,
    Effect,
    Log,
    Observed,
    Publish,
    Recovered,
    RefusedSoFar,
    Reply,
    Requested,
    StartTimer,
    TimerFired,
)
from slackwater.common.domains.memory import trailer
from slackwater.schemas import subjects
from slackwater.schemas.base import CONFLICT, NOT_FOUND, Message, Ok, Refused
from slackwater.schemas.memory import (
    Activity,
    CheckActivity,
    ClaimSlab,
    DeviceHello,
    EvictBegun,
    EvictDone,
    EvictLater,
    EvictNow,
    EvictSlabs,
    FreeMemory,
    LenderId,
    ListSlabs,
    MapSlab,
    NotMapped,
    QueryMemory,
    SetLending,
    SlabEvent,
    SlabId,
    SlabList,
    SlabState,
    ToDevice,
    ToLender,
    UnmapSlab,
)
from slackwater.services.slabd import drain_record, events
from slackwater.services.slabd.config import SlabdConfig
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
from slackwater.services.slabd.eviction import Round, candidates
from slackwater.services.slabd.sizing import Sizing
from slackwater.services.slabd.slab import Slab, by_session, state_found

_ID_BITS: Final = 48

Fact = Literal["lent", "returned", "evicted", "revoked", "claimed", "lost"]


class LenderCore:
    """`rng` draws slab ids and the candidates of evictions."""

    def __init__(self, config: SlabdConfig, rng: Random) -> None:
        self.id = LenderId(config.id)
        self.slabs: dict[SlabId, Slab] = {}
        self.sessions: dict[int, DeviceHello] = {}
        self.lending = True
        self.sizing = Sizing(config)
        self._config = config
        self._rng = rng
        self._rounds: dict[int, Round] = {}
        self._last_round = 0

    def step(self, event: events.Event, now_s: float) -> Sequence[Effect]:
        match event:
            case events.MemorySampled():
                return self._sampled(event, now_s)
            case events.Heard(session=session, message=message):
                return self._heard(session, message, now_s)
            case events.SlabMade(slab=slab, failure=failure):
                return self._made(slab, failure, now_s)
            case events.SlabGone(slab=slab):
                self.slabs.pop(slab, None)
                return []
            case events.SlabsFound(found=found):
                return self._found(found, now_s)
            case events.SessionOpened(session=session, hello=hello):
                self.sessions[session] = hello
                return []
            case events.SessionClosed(session=session):
                return self._session_closed(session, now_s)
            case TimerFired(key=key):
                return self._timer(key, now_s)
            case Requested(token=token, message=message):
                return self._command(token, message, now_s)
            case Recovered(records=records, damaged=damaged):
                self.lending = not drain_record.found(self.id, records, damaged)
                return []
            case Draining() | Answered() | RefusedSoFar() | Observed():
                return []
        assert_never(event)

    # Inventory ------------------------------------------------------------------------------------

    def having(self, *states: SlabState) -> list[Slab]:
        return [slab for slab in self.slabs.values() if slab.state in states]

    @property
    def used_share(self) -> float:
        """Slabs that nobody has could be given up at once: they do not count as used."""
        lent = len(self.slabs) - len(self.having("free", "making"))
        return self.sizing.used_share(lent)

    # Memory (2.5.1) -------------------------------------------------------------------------------

    def _sampled(self, event: events.MemorySampled, now_s: float) -> list[Effect]:
        staying = len(self.slabs) - len(self.having("leaving", "evicting"))
        excess = self.sizing.sampled(event, staying)
        if excess > 0:
            return self._give_up(excess, now_s)
        return self._grow()

    def _grow(self) -> list[Effect]:
        """Make one slab at a time: faulting it in takes a second per GB."""
        full = len(self.slabs) >= limits.SLABS_HELD_MAX
        if not self.lending or full or not self.sizing.may_add(len(self.slabs)):
            return []
        return [] if self.having("making") else [self._make()]

    def _make(self) -> Effect:
        slab = SlabId(f"{self._rng.getrandbits(_ID_BITS):012x}")
        self.slabs[slab] = Slab(slab, "making")
        return MakeSlab(slab)

    def _made(self, slab: SlabId, failure: str, now_s: float) -> list[Effect]:
        if failure:
            self.slabs.pop(slab, None)
            self.sizing.pause()
            return [Log("slab.not-made", {"slab": slab, "reason": failure}, "warning")]
        self.slabs[slab].become_free()
        return self._grow() if self.lending else self._give_up(1, now_s)

    def _give_up(self, count: int, now_s: float) -> list[Effect]:
        """Unmapped slabs first, then those whose device is gone, then lent ones by a round."""
        effects: list[Effect] = []
        for slab in self.having("free")[:count]:
            effects.append(self._let_go(slab))
            count -= 1
        for slab in self.having("held")[:count]:
            effects += self._revoke(slab, "memory is needed", now_s)
            count -= 1
        coming = sum(one.need for one in self._rounds.values())
        if count > coming:
            effects += self._begin_round(count - coming, now_s)
        return effects

    # Eviction (2.5.2) -----------------------------------------------------------------------------

    def _begin_round(self, need: int, now_s: float) -> list[Effect]:
        lent = self.having("lent")
        need = min(need, len(lent))
        if need == 0:
            return []
        chosen = candidates([s.id for s in lent], need, self._config.extra_candidates, self._rng)
        if len(chosen) == need:
            return self._evict(chosen, now_s)
        self._last_round += 1
        number = self._last_round
        self._rounds[number] = Round(need, tuple(chosen))
        effects: list[Effect] = [
            self._send(session, CheckActivity(round=number, slabs=part))
            for session, part in by_session(self.slabs[slab] for slab in chosen)
        ]
        return [*effects, StartTimer(RoundDue(number), now_s + self._config.check_s)]

    def _activity(self, message: Activity, session: int, now_s: float) -> list[Effect]:
        current = self._rounds.get(message.round)
        if current is None:
            return []
        for slab, activity in message.activity:
            found = self.slabs.get(slab)
            if found is not None and found.session == session:
                current.answers[slab] = activity
        current.needed.update(current.answers.keys() & message.needed)
        if len(current.answers) < len(current.candidates):
            return []
        return [CancelTimer(RoundDue(message.round)), *self._end_round(message.round, now_s)]

    def _end_round(self, number: int, now_s: float) -> list[Effect]:
        ended = self._rounds.pop(number, None)
        if ended is None:
            return []
        still = [slab for slab in ended.least_active() if self._state(slab) == "lent"]
        return self._evict(still[: ended.need], now_s)

    def _evict(self, chosen: Sequence[SlabId], now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        for slab in chosen:
            found = self.slabs[slab]
            found.move("evicting", "EVICT is sent")
            found.asked_s = now_s
            effects.append(StartTimer(EvictionDue(slab), now_s + self._config.evict_s))
        for session, part in by_session(self.slabs[slab] for slab in chosen):
            evict_s, later_s = self._config.evict_s, self._config.evict_later_s
            message = EvictSlabs(slabs=part, deadline_s=evict_s, later_s=later_s)
            effects.insert(0, self._send(session, message))
        return effects

    def _done(self, message: EvictDone, session: int, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        facts: list[Effect] = []
        for slab in message.slabs:
            found = self.slabs.get(slab)
            if found is None or found.session != session or found.state != "evicting":
                continue
            facts += self._fact(found, "evicted", now_s, took_s=now_s - found.asked_s)
            effects += [CancelTimer(EvictionDue(slab)), self._let_go(found)]
        return effects + facts

    def _later(self, slabs: Sequence[SlabId], session: int) -> list[Effect]:
        """Give the device time to make coded pages again elsewhere, once only, whatever it says."""
        mine = [found for slab in slabs if (found := self.slabs.get(slab)) is not None]
        asked = [slab for slab in mine if slab.session == session and slab.state == "evicting"]
        wait_s = self._config.evict_later_s
        return [StartTimer(EvictionDue(slab.id), slab.asked_s + wait_s) for slab in asked]

    @staticmethod
    def _let_go(slab: Slab, *, forced: bool = False) -> Effect:
        slab.move("leaving", "by force" if forced else "let go")
        return ReleaseSlab(slab.id, slab.session, slab.generation, forced)

    def _revoke(self, slab: Slab, reason: str, now_s: float) -> list[Effect]:
        """Take the slab without its device's consent."""
        fact = self._fact(slab, "revoked", now_s, reason=reason)
        return [CancelTimer(HoldDue(slab.id)), self._let_go(slab, forced=True), *fact]

    def _timer(self, key: object, now_s: float) -> list[Effect]:
        match key:
            case RoundDue(number=number):
                return self._end_round(number, now_s)
            case EvictionDue(slab=id) if self._state(id) == "evicting":
                slab = self.slabs[id]
                return self._revoke(slab, f"no DONE within {now_s - slab.asked_s:.3g} s", now_s)
            case HoldDue(slab=id) if self._state(id) == "held":
                return self._revoke(self.slabs[id], "its device did not come back", now_s)
        return []

    # Messages from devices ------------------------------------------------------------------------

    def _heard(self, session: int, message: ToLender, now_s: float) -> list[Effect]:
        if session not in self.sessions:
            return []
        match message:
            case QueryMemory(request=request):
                return [self._send(session, self._free_memory(request))]
            case MapSlab():
                return self._map(session, message, now_s)
            case ClaimSlab():
                return self._claim(session, message, now_s)
            case UnmapSlab(slab=slab, generation=generation):
                return self._unmap(session, slab, generation, now_s)
            case Activity():
                return self._activity(message, session, now_s)
            case EvictDone():
                return self._done(message, session, now_s)
            case EvictLater(slabs=slabs):
                return self._later(slabs, session)
        assert_never(message)

    def _free_memory(self, request: int) -> FreeMemory:
        free = len(self.having("free")) if self.lending else 0
        return FreeMemory(request=request, free_slabs=free, used_share=self.used_share)

    def _map(self, session: int, message: MapSlab, now_s: float) -> list[Effect]:
        device = self.sessions[session].device
        free = self.having("free")
        quota = self._config.quota_slabs
        has = sum(s.device == device for s in self.having("lent", "evicting", "held"))
        if not self.lending or not free:
            why = "has no free slab" if self.lending else "is being drained and lends nothing"
        elif quota and has >= quota:
            why = f"gives one device at most {quota} slabs (quota_slabs), {device} has {has}"
        elif 0.0 < message.usage_max < self.used_share:
            return [self._send(session, self._free_memory(message.request))]
        else:
            slab = free[0]
            slab.move("lent", f"MAP of {device}")
            slab.session, slab.device = session, device
            slab.generation += 1
            slab.span, slab.member = message.span, message.member
            slab.secret, slab.hold_s, slab.since_s = message.secret, message.hold_s, now_s
            return [self._lend(slab, message.request), *self._fact(slab, "lent", now_s)]
        refusal = NotMapped(request=message.request, reason=f"lender {self.id} {why}")
        return [self._send(session, refusal)]

    def _lend(self, slab: Slab, request: int) -> Effect:
        identity = trailer.SlabIdentity(
            slab=slab.id,
            slab_bytes=self._config.slab_bytes,
            generation=slab.generation,
            device=slab.device,
            span=slab.span,
            member=slab.member,
            secret=slab.secret,
            hold_s=slab.hold_s,
            since_s=slab.since_s,
        )
        return LendSlab(slab.session, request, identity)

    def _claim(self, session: int, message: ClaimSlab, now_s: float) -> list[Effect]:
        slab = self.slabs.get(message.slab)
        device = self.sessions[session].device
        right = (
            slab is not None
            and slab.state in ("held", "lent")
            and slab.device == device
            and slab.generation == message.generation
            and hmac.compare_digest(slab.secret.encode(), message.secret.encode())
        )
        if slab is None or not right:
            reason = f"lender {self.id} does not hold slab {message.slab} for {device} any more"
            gone = NotMapped(request=message.request, reason=reason, retry_after_s=0.0)
            return [self._send(session, gone)]
        if slab.state == "lent" and slab.session != session:
            # Writes still under way on the old channel must not land after the claim.
            wait = NotMapped(
                request=message.request,
                reason=f"lender {self.id} is closing the channel that had slab {slab.id}",
                retry_after_s=0.1,
            )
            return [CloseSession(slab.session), self._send(session, wait)]
        slab.move("lent", f"CLAIM of {device}")
        slab.session = session
        effects = [CancelTimer(HoldDue(slab.id)), self._lend(slab, message.request)]
        if not self.lending:  # It was started anew while it was drained: in good order, then.
            effects += self._evict([slab.id], now_s)
        return [*effects, *self._fact(slab, "claimed", now_s)]

    def _unmap(self, session: int, slab: SlabId, generation: int, now_s: float) -> list[Effect]:
        found = self.slabs.get(slab)
        if found is None or found.session != session or found.generation != generation:
            return []
        if found.state == "evicting":  # They crossed on the way.
            return self._done(EvictDone(slabs=(slab,)), session, now_s)
        if found.state != "lent":
            return []
        fact = self._fact(found, "returned", now_s)
        found.move("renewing", "UNMAP")
        return [RenewSlab(slab, session, generation), *fact]

    def _session_closed(self, session: int, now_s: float) -> list[Effect]:
        """Keep the device's slabs for a claim, if it wanted that; slabs under eviction are not
        kept."""
        self.sessions.pop(session, None)
        effects: list[Effect] = []
        for slab in self.having("lent", "evicting"):
            if slab.session != session:
                continue
            slab.session = 0
            hold_s = min(slab.hold_s, self._config.hold_s_max)
            if slab.state == "lent" and hold_s > 0:
                slab.move("held", "its device is gone")
                effects.append(StartTimer(HoldDue(slab.id), now_s + hold_s))
            else:
                effects += [
                    CancelTimer(EvictionDue(slab.id)),
                    *self._revoke(slab, "its device is gone", now_s),
                ]
        return effects

    # A new life -----------------------------------------------------------------------------------

    def _found(
        self, found: Iterable[tuple[int, trailer.SlabIdentity]], now_s: float
    ) -> list[Effect]:
        """A lent slab waits for its claim, or is lost; a free one is as good as new; one that was
        being taken away goes."""
        effects: list[Effect] = []
        for word, identity in found:
            state = state_found(word, identity.hold_s)
            slab = Slab(identity.slab, state, identity.generation, identity.device)
            slab.span, slab.member = identity.span, identity.member
            slab.secret, slab.hold_s = identity.secret, identity.hold_s
            slab.since_s = identity.since_s
            self.slabs[slab.id] = slab
            if state == "renewing":
                slab.become_free()
            elif state == "held":
                hold_s = min(identity.hold_s, self._config.hold_s_max)
                effects.append(StartTimer(HoldDue(slab.id), now_s + hold_s))
            else:
                if trailer.fence_state(word) == trailer.LENT:
                    why = "the daemon was started again, and its device did not ask to wait"
                    effects += self._fact(slab, "lost", now_s, reason=why)
                effects.append(self._let_go(slab))
        return effects if self.lending else [*effects, *map(self._let_go, self.having("free"))]

    # Operators ------------------------------------------------------------------------------------

    def _command(self, token: int, message: Message, now_s: float) -> list[Effect]:
        match message:
            case ListSlabs():
                infos = tuple(slab.info() for slab in self.slabs.values())
                return [
                    Reply(
                        token,
                        SlabList(lender=self.id, slab_bytes=self._config.slab_bytes, slabs=infos),
                    )
                ]
            case EvictNow(count=count, slabs=slabs):
                wrong = [slab for slab in slabs if self._state(slab) not in ("lent", "held")]
                if wrong:
                    why = f"slab {wrong[0]} is not lent by {self.id}; see `slackwater memory map`"
                    return [Reply(token, Refused(reason=why, code=NOT_FOUND))]
                return self._evict_now(token, slabs, count, now_s)
            case SetLending(lending=lending):
                return [*self._set_lending(lending, now_s), Reply(token, Ok())]
        return [Reply(token, Refused(reason=f"slabd does not know {type(message).__name__}"))]

    def _evict_now(
        self, token: int, slabs: Sequence[SlabId], count: int, now_s: float
    ) -> list[Effect]:
        """These, and so many others: those whose device is gone first, which asks nobody."""
        named = [self.slabs[slab] for slab in dict.fromkeys(slabs)]
        lent = [slab.id for slab in named if slab.state == "lent"]
        others = [slab for slab in self.having("held") if slab not in named][:count]
        gone = [slab for slab in named if slab.state == "held"] + others
        effects: list[Effect] = []
        for slab in gone:
            effects += self._revoke(slab, "an operator evicted it", now_s)
        effects += self._evict(lent, now_s)
        going = sum(one.need for one in self._rounds.values())
        count = max(0, min(count - len(others), len(self.having("lent")) - going))
        begun = len(gone) + len(lent) + count
        if begun == 0:
            why = f"lender {self.id} lends nothing that is not being evicted already"
            why += "; see `slackwater memory map`"
            return [Reply(token, Refused(reason=why, code=CONFLICT))]
        return [*effects, *self._begin_round(count, now_s), Reply(token, EvictBegun(slabs=begun))]

    def _set_lending(self, lending: bool, now_s: float) -> list[Effect]:
        """Set whether memory is lent. The shell answers once the record is durable."""
        changed, self.lending = lending != self.lending, lending
        if lending:
            return [drain_record.forget(self.id)] if changed else []
        given = self._give_up(len(self.slabs), now_s)
        return [drain_record.keep(self.id, now_s), *given] if changed else given

    # Small things ---------------------------------------------------------------------------------

    def _state(self, slab: SlabId) -> SlabState | None:
        found = self.slabs.get(slab)
        return found.state if found is not None else None

    @staticmethod
    def _send(session: int, message: ToDevice) -> Effect:
        return SendToDevice(session, message)

    def _fact(
        self, slab: Slab, fact: Fact, now_s: float, *, took_s: float = 0.0, reason: str = ""
    ) -> list[Effect]:
        event = SlabEvent(
            slab=slab.id,
            fact=fact,
            lender=self.id,
            device=slab.device,
            span=slab.span,
            took_s=took_s,
            reason=reason,
            at_s=now_s,
        )
        told = Publish(subjects.event("slab", slab.id, fact), event)
        return [Count(f"slabs_{fact}"), told]

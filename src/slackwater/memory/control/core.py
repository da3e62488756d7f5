"""A device's core: which spans are backed by which slabs, when they move. Pure.

Gu, dissertation, 2.4. Each second a span's page I/O goes into its average (EWMA, alpha 0.2); an
unmapped span above HotSlab is placed: two lenders are asked (placement.py), the less used one gives
a slab. EVICT makes it retreat: nothing new goes there, DONE when nothing is under way. A lender
whose channel is lost is not a lost slab at once (the paper's "possible optimization"): its spans
are suspended, keep their bits and use the backup; the slabs are claimed when the lender answers
again, within `hold_s`. Pages are not known here: the driver (lenders.py) carries the effects out.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from random import Random
from typing import Final, Literal, assert_never

import numpy as np
from numpy.typing import NDArray

from slackwater.common.base import limits
from slackwater.common.base.effects import CancelTimer, Effect, Publish, StartTimer, TimerFired
from slackwater.common.domains.memory import coding_sets
from slackwater.common.domains.memory.placement import candidates, lower
from slackwater.memory.control import events
from slackwater.memory.control.effects import (
    AdmitSlab,
    ClaimDue,
    ConnectLender,
    LeaveSlab,
    LossDue,
    MemberKey,
    OpenSlab,
    PlacementDue,
    SaveMap,
    SendToLender,
    SuspendSlab,
)
from slackwater.memory.control.lender_directory import LenderDirectory
from slackwater.memory.control.spans import DeviceSettings, Member, Spans, Why
from slackwater.schemas import subjects
from slackwater.schemas.memory import (
    CheckActivity,
    ClaimSlab,
    EvictDone,
    EvictLater,
    EvictSlabs,
    FreeMemory,
    LenderId,
    MapSlab,
    NotMapped,
    QueryMemory,
    SlabId,
    SlabMapped,
    SlabsLost,
    SpanEvent,
    ToDevice,
    ToLender,
    UnmapSlab,
)

ALPHA: Final = 0.2
_ATTEMPTS_MAX: Final = 4
"""Lenders that may refuse before a placement is given up."""

Fact = Literal["mapped", "unmapped", "suspended", "resumed", "refused"]


class DeviceCore:
    """`rng` draws the lenders to ask."""

    def __init__(self, settings: DeviceSettings, slab_bytes: int, rng: Random) -> None:
        self.settings = settings
        self.activity: NDArray[np.float64] = np.zeros(settings.spans)
        self.spans = Spans(settings)
        self.directory = LenderDirectory(slab_bytes)
        self.connected: set[LenderId] = set()
        self._slab_bytes = slab_bytes
        self._rng = rng
        self._request = 0
        self._requests: dict[int, tuple[Member, LenderId]] = {}
        self._connecting: set[LenderId] = set()
        self._paused: dict[int, tuple[float, float]] = {}
        """Span -> (not before, the pause after that): nobody had room."""
        self._sets: dict[int, set[LenderId]] = {}
        """Span -> the lenders that should back it together, where several do (CodingSets)."""
        self.departed: Counter[Why] = Counter()
        self._stopping = False

    def step(self, event: events.Event, now_s: float) -> Sequence[Effect]:
        match event:
            case events.ActivityMeasured():
                return self._measured(event, now_s)
            case events.Heard(lender=lender, message=message):
                return self._heard(lender, message, now_s)
            case events.LenderSeen(heartbeat=heartbeat):
                self.directory.update(heartbeat, now_s)
                return []
            case events.Connected(lender=lender):
                return self._connected(lender)
            case events.Disconnected(lender=lender, reason=reason):
                return self._disconnected(lender, reason, now_s)
            case events.Opened(member=number, failure=failure):
                return self._opened(number, failure, now_s)
            case events.Left(member=number):
                return self._left(number, now_s)
            case events.Restored(member=number):
                return self._restored(number)
            case events.Fenced(span=span):
                lost = [m for m in self.spans.of(span) if m.usable]
                return [effect for m in lost for effect in self._leave(m, "lost")]
            case TimerFired(key=key):
                return self._timer(key, now_s)
            case events.Stopping():
                return self._stop()
        assert_never(event)

    # Activity (2.4.1) -----------------------------------------------------------------------------

    def _measured(self, event: events.ActivityMeasured, now_s: float) -> list[Effect]:
        rates = event.counts / event.period_s
        self.activity += ALPHA * (rates - self.activity)
        effects: list[Effect] = []
        wanted = set(np.flatnonzero(self.activity > self.settings.hot).tolist())
        for span in sorted(wanted.union(self.spans.thinned())):
            effects += self._place(span, now_s)
        if self.settings.cold > 0:
            for span in self.spans.in_use():
                if self.activity[span] < self.settings.cold:
                    open_ones = [m for m in self.spans.of(span) if m.usable]
                    effects += [e for m in open_ones for e in self._leave(m, "cold")]
        return effects

    # Placement (2.4.2) ----------------------------------------------------------------------------

    def _place(self, span: int, now_s: float) -> list[Effect]:
        """Look for every member that is missing."""
        if self._stopping or now_s < self._paused.get(span, (0.0, 0.0))[0]:
            return []
        if not self.spans.of(span):
            self._sets.pop(span, None)
        effects: list[Effect] = []
        for member in self.spans.fill(span, now_s):
            effects += self._ask(member, now_s)
        return effects

    def _ask(self, member: Member, now_s: float) -> list[Effect]:
        """MAP to the less used of two lenders, as they told it (lender_directory.py), none of which
        backs the span already; where that one is not connected, QUERY_MEM to both. If the span has
        several members, no two ask the same: each has one to ask."""
        others = {m.lender for m in self.spans.of(member.span) if m is not member and m.lender}
        excluded = others | member.excluded
        if self.settings.width == 1:
            able = self.directory.eligible(now_s, self.settings.node)
            chosen = candidates(able, self._old(), excluded, self._rng)
        else:
            chosen = self._from_set(member, excluded, now_s)
        member.search(f"asks {sorted(chosen)}")
        member.asked, member.answers = set(chosen), []
        member.attempts += 1
        if not chosen or member.attempts > _ATTEMPTS_MAX:
            return self._refused(member, now_s)
        best, usage_max = self.directory.pick_least_used(chosen, self._old(), self.spans.all())
        if best in self.connected:
            return self._map(member, best, now_s, usage_max)
        return self._query_all(member, chosen, now_s)

    def _query_all(self, member: Member, lenders: Sequence[LenderId], now_s: float) -> list[Effect]:
        effects = [effect for lender in lenders for effect in self._query(member, lender)]
        due_s = now_s + limits.PLACEMENT_WAIT_S
        return [*effects, StartTimer(PlacementDue(member.number), due_s)]

    def _from_set(self, member: Member, excluded: set[LenderId], now_s: float) -> list[LenderId]:
        """The least loaded lender of the span's coding set that nobody of the span asks."""
        others = [m for m in self.spans.of(member.span) if m is not member and m.state == "placing"]
        excluded = excluded.union(*(other.asked for other in others))
        able = self.directory.eligible(now_s, self.settings.node)
        load = {lender: self.directory.load(lender) for lender in able}
        if member.span not in self._sets:
            width, beats = self.settings.width, self.directory.beats
            self._sets[member.span] = coding_sets.choose(beats, load, width, self._rng)
        asked = coding_sets.order(self._sets[member.span], load)
        return [lender for lender in asked if lender not in excluded][:1]

    def _query(self, member: Member, lender: LenderId) -> list[Effect]:
        if lender not in self.connected:
            return self._connect(lender)
        request = self._open_request(member, lender)
        return [SendToLender(lender, QueryMemory(request=request))]

    def _connect(self, lender: LenderId) -> list[Effect]:
        if lender in self._connecting or lender not in self.directory.beats:
            return []
        self._connecting.add(lender)
        addresses = self.directory.beats[lender][0].addresses
        return [ConnectLender(lender, addresses)]

    def _open_request(self, member: Member, lender: LenderId) -> int:
        self._request += 1
        self._requests[self._request] = (member, lender)
        return self._request

    def _answered(self, request: int, lender: LenderId) -> Member | None:
        """Return the member that this answer belongs to; None: it comes too late."""
        found = self._requests.pop(request, None)
        if found is None or found[1] != lender or self.spans.numbered(found[0].number) is None:
            return None
        return found[0]

    def _choose(self, member: Member, now_s: float) -> list[Effect]:
        """All have answered, or time is up: MAP to the one with the lowest usage."""
        taken = self.directory.taken_since(self.spans.all(), member.began_s)
        chosen = lower(member.answers, self._old(), taken)
        if chosen is None:
            member.excluded |= member.asked
            return self._ask(member, now_s)
        return self._map(member, chosen, now_s)

    def _map(
        self, member: Member, lender: LenderId, now_s: float, usage_max: float = 0.0
    ) -> list[Effect]:
        member.map_at(lender)
        message = MapSlab(
            request=self._open_request(member, lender),
            span=member.span,
            member=member.index,
            secret=self.settings.secret,
            hold_s=self.settings.hold_s,
            usage_max=usage_max,
        )
        due_s = now_s + limits.PLACEMENT_WAIT_S
        return [SendToLender(lender, message), StartTimer(PlacementDue(member.number), due_s)]

    def _old(self) -> set[LenderId]:
        return {m.lender for m in self.spans.all() if m.lender is not None}

    def _refused(self, member: Member, now_s: float) -> list[Effect]:
        """Try again later, less and less often: no lender has room."""
        _, pause_s = self._paused.get(member.span, (0.0, 1.0))
        following = min(2.0 * pause_s, limits.PLACEMENT_PAUSE_S_MAX)
        self._paused[member.span] = (now_s + pause_s, following)
        self.spans.forget(member)
        known, nbytes = len(self.directory.beats), self._slab_bytes
        reason = member.refusal or f"none of {known} lenders has a free slab of {nbytes} bytes"
        return [
            CancelTimer(PlacementDue(member.number)),
            self._fact(member, "refused", now_s, f"{reason}; its pages go to the backup"),
        ]

    # Messages from lenders ------------------------------------------------------------------------

    def _heard(self, lender: LenderId, message: ToDevice, now_s: float) -> list[Effect]:
        match message:
            case FreeMemory(request=request):
                member = self._answered(request, lender)
                return [] if member is None else self._free(member, lender, message, now_s)
            case SlabMapped():
                return self._mapped(lender, message)
            case NotMapped(request=request):
                member = self._answered(request, lender)
                return [] if member is None else self._not_mapped(member, message, now_s)
            case CheckActivity():
                return [SendToLender(lender, self.spans.active(lender, message, self.activity))]
            case EvictSlabs(slabs=slabs, later_s=later_s):
                return self._evict(lender, slabs, "evict", later=later_s > 0)
            case SlabsLost(slabs=slabs):
                return self._evict(lender, slabs, "lost")
        assert_never(message)

    def _free(
        self, member: Member, lender: LenderId, message: FreeMemory, now_s: float
    ) -> list[Effect]:
        """The answer to QUERY_MEM; or to MAP, by a lender that has become fuller than the other
        one was: then that one is asked, too."""
        effects: list[Effect] = []
        if member.state == "mapping":
            member.search(f"{lender} has become fuller")
            effects = self._query_all(member, sorted(member.asked - {lender}), now_s)
        elif member.state != "placing":
            return []
        member.answers.append((lender, message))
        waiting = len(member.answers) < len(member.asked)
        return effects if waiting else [*effects, *self._choose(member, now_s)]

    def _mapped(self, lender: LenderId, message: SlabMapped) -> list[Effect]:
        """MR_INFO. For an attempt that was given up, the slab goes back."""
        member = self._answered(message.request, lender)
        if member is None or member.state not in ("mapping", "claiming"):
            back = UnmapSlab(slab=message.slab, generation=message.generation)
            return [SendToLender(lender, back)]
        member.slab, member.generation = message.slab, message.generation
        member.move("opening", "MR_INFO")
        return [OpenSlab(member.number, lender, message)]

    def _not_mapped(self, member: Member, message: NotMapped, now_s: float) -> list[Effect]:
        if member.state == "claiming":
            if message.retry_after_s > 0:
                member.move("suspended", "its lender is not ready")
                due_s = now_s + max(message.retry_after_s, 0.05)
                return [StartTimer(ClaimDue(member.number), due_s)]
            return self._leave(member, "lost")
        if member.state != "mapping" or member.lender is None:
            return []
        member.excluded.add(member.lender)
        member.refusal = message.reason
        return self._ask(member, now_s)

    def _opened(self, number: int, failure: str, now_s: float) -> list[Effect]:
        member = self.spans.numbered(number)
        if member is None or member.state != "opening":
            return []
        if failure:
            return self._leave(member, "lost")
        member.move("open", "its slab is here")
        resumed = member.attempts == 0
        member.attempts = 0
        self._paused.pop(member.span, None)
        fact: Fact = "resumed" if resumed else "mapped"
        return [
            CancelTimer(PlacementDue(number)),
            CancelTimer(LossDue(number)),
            AdmitSlab(number, member.span, member.index),
            SaveMap(),
            self._fact(member, fact, now_s, took_s=now_s - member.began_s),
        ]

    # Eviction and loss (2.4.4, 2.4.5) -------------------------------------------------------------

    def _evict(
        self, lender: LenderId, slabs: Iterable[SlabId], why: Why, *, later: bool = False
    ) -> list[Effect]:
        """`later`: those that their spans need go once others have their fragments."""
        known = {m.slab: m for m in self.spans.on(lender) if m.slab is not None}
        strangers = tuple(slab for slab in slabs if slab not in known)
        effects: list[Effect] = []
        kept: list[SlabId] = []
        for slab in slabs:
            if later and slab in known and self.spans.needs(known[slab]):
                known[slab].wanted = True
                kept.append(slab)
            elif slab in known and known[slab].state != "leaving":
                effects += self._leave(known[slab], why)
            elif slab in known:
                known[slab].why = why
        if strangers and why == "evict":
            effects.append(SendToLender(lender, EvictDone(slabs=strangers)))
        if kept:
            effects.append(SendToLender(lender, EvictLater(slabs=tuple(kept))))
        return effects

    def _restored(self, number: int) -> list[Effect]:
        """Evict, one after the other, members that were asked for and are not needed any more."""
        member = self.spans.numbered(number)
        if member is None or not member.usable:
            return []
        member.whole = True
        wanted = [m for m in self.spans.of(member.span) if m.usable and m.wanted]
        able = (m for m in wanted if not self.spans.needs(m))  # Each is looked at as it is asked.
        return [effect for m in able for effect in self._leave(m, "evict")]

    def _leave(self, member: Member, why: Why) -> list[Effect]:
        """From here on the span does not use the slab; `Left` follows when nothing is under way."""
        member.leave(why)
        number = member.number
        return [
            CancelTimer(PlacementDue(number)),
            CancelTimer(ClaimDue(number)),
            CancelTimer(LossDue(number)),
            LeaveSlab(number, member.span, member.index),
        ]

    def _left(self, number: int, now_s: float) -> list[Effect]:
        member = self.spans.numbered(number)
        if member is None or member.state != "leaving":
            return []
        self.spans.forget(member)
        self.departed[member.why] += 1
        effects: list[Effect] = [self._fact(member, "unmapped", now_s, member.why)]
        hot = self.activity[member.span] > self.settings.hot
        if member.why != "cold" and (hot or member.span in self.spans.thinned()):
            # Send MAP before DONE: the process woken first gets the CPU.
            effects += self._place(member.span, now_s)
        if member.lender in self.connected and member.slab is not None:
            assert member.lender is not None
            done: ToLender = EvictDone(slabs=(member.slab,))
            if member.why != "evict":
                done = UnmapSlab(slab=member.slab, generation=member.generation)
            effects.append(SendToLender(member.lender, done))
        return [*effects, SaveMap()]

    def _connected(self, lender: LenderId) -> list[Effect]:
        self._connecting.discard(lender)
        self.connected.add(lender)
        effects: list[Effect] = []
        for member in self.spans.all():
            if member.state == "placing" and lender in member.asked:
                effects += self._query(member, lender)
            elif member.state == "suspended" and member.lender == lender:
                effects += self._claim(member)
        return effects

    def _claim(self, member: Member) -> list[Effect]:
        assert member.lender is not None
        if member.lender not in self.connected:
            return self._connect(member.lender)
        assert member.slab is not None
        member.move("claiming", f"CLAIM to {member.lender}")
        message = ClaimSlab(
            request=self._open_request(member, member.lender),
            slab=member.slab,
            generation=member.generation,
            secret=self.settings.secret,
        )
        return [SendToLender(member.lender, message)]

    def _disconnected(self, lender: LenderId, reason: str, now_s: float) -> list[Effect]:
        self.connected.discard(lender)
        self._connecting.discard(lender)
        self._requests = {n: pair for n, pair in self._requests.items() if pair[1] != lender}
        effects: list[Effect] = []
        for member in self.spans.all():
            if member.state == "placing" and lender in member.asked:
                effects += self._drop_candidate(member, lender, now_s)
            elif member.lender == lender and member.state == "mapping":
                member.excluded.add(lender)
                effects += self._ask(member, now_s)
            elif member.lender == lender and member.state == "opening" and member.attempts:
                effects += self._leave(member, "lost")
            elif member.lender == lender and member.state in ("open", "opening", "claiming"):
                effects += self._suspend(member, reason, now_s)
            elif member.lender == lender and member.state == "suspended":
                due_s = now_s + limits.CLAIM_RETRY_S
                effects.append(StartTimer(ClaimDue(member.number), due_s))
        return effects

    def _drop_candidate(self, member: Member, lender: LenderId, now_s: float) -> list[Effect]:
        member.asked.discard(lender)
        member.excluded.add(lender)
        member.answers = [pair for pair in member.answers if pair[0] != lender]
        if len(member.answers) < len(member.asked):
            return []
        return self._choose(member, now_s)

    def _suspend(self, member: Member, reason: str, now_s: float) -> list[Effect]:
        """`claiming` again: the time it may be away runs on from the first loss."""
        first = member.state == "open"
        member.suspend(reason)
        effects: list[Effect] = [StartTimer(ClaimDue(member.number), now_s + limits.CLAIM_RETRY_S)]
        if first:
            member.began_s = now_s
            effects = [
                SuspendSlab(member.number, member.span, member.index),
                *effects,
                StartTimer(LossDue(member.number), now_s + self.settings.hold_s),
                self._fact(member, "suspended", now_s, reason),
            ]
        return effects

    def _timer(self, key: object, now_s: float) -> list[Effect]:
        member = self.spans.numbered(key.member) if isinstance(key, MemberKey) else None
        if member is None:
            return []
        match key:
            case PlacementDue() if member.state == "placing":
                member.excluded |= member.asked - {lender for lender, _ in member.answers}
                return self._choose(member, now_s)
            case PlacementDue() if member.state == "mapping" and member.lender is not None:
                member.excluded.add(member.lender)
                self._drop_requests(member)
                return self._ask(member, now_s)
            case ClaimDue() if member.state == "suspended":
                return self._claim(member)
            case LossDue() if member.state in ("suspended", "claiming", "opening"):
                return self._leave(member, "lost")
        return []

    def _drop_requests(self, member: Member) -> None:
        """A mapping that comes after all finds nobody, and goes back."""
        self._requests = {n: pair for n, pair in self._requests.items() if pair[0] is not member}

    def _stop(self) -> list[Effect]:
        self._stopping = True
        effects: list[Effect] = []
        for member in self.spans.all():
            if member.state in ("open", "suspended", "claiming", "opening"):
                effects += self._leave(member, "cold")
            elif member.state in ("placing", "mapping"):
                self._drop_requests(member)
                self.spans.forget(member)
        return effects

    # Small things ---------------------------------------------------------------------------------

    def _fact(
        self, member: Member, fact: Fact, now_s: float, reason: str = "", *, took_s: float = 0.0
    ) -> Effect:
        id, lender = self.settings.id, member.lender or ""
        event = SpanEvent(
            device=id, span=member.span, fact=fact, lender=lender, reason=reason, took_s=took_s,
            at_s=now_s,
        )  # fmt: skip
        return Publish(subjects.event("device", id, fact), event)

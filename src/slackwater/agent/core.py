"""The Agent's core: where each bucket is, what is outstanding there, and what to do next.

Pure: time and randomness are arguments, everything else comes back as effects. It keeps the
mapping table of the paper (Gu et al. 2021, appendix A): bucket -> aggregator, corrected by the pull
response that names a new one (appendix B), and by the controller when an aggregator denies a bucket
or cannot be reached.

One bucket has at most one push outstanding, so the whole truth about it is short: its place, its
stage there, the newest iteration pushed, the newest version complete and the newest one whose
parameters this worker holds. A push is known by (job, bucket, iteration, worker): ringing again is
a retry, never a second push.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, Literal

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
    WriteSize,
)
from slackwater.common.base import limits
from slackwater.common.base.errors import Rejected
from slackwater.common.domains.slots.frames import (
    ENTRIES_MAX,
    Attach,
    Denied,
    Done,
    Granted,
    Moved,
    PushRefused,
    SeedAsked,
)
from slackwater.schemas.base import AggregatorId
from slackwater.schemas.placement import BucketPlace, Endpoint, Located

Stage = Literal["detached", "asked", "offered", "ready"]

_ARRIVAL_WAITS_S: Final = (0.002, 0.005, *(0.01,) * 10, *(0.02,) * 20, 0.1, 0.2)
"""After a redirect, between attempts to attach where the bucket is being copied to: as short as
what an iteration may lose by it. Then the controller is asked."""
_SOON_S: Final = 0.2
_SOON_ATTEMPTS: Final = 20
_LOCATE_AFTER_FAILURES: Final = 2
"""A restarted aggregator is back within a second: only then is the controller asked."""


@dataclass(slots=True)
class _Bucket:
    index: int
    place: BucketPlace
    stage: Stage = "detached"
    handle: int = -1
    iteration: int = 0
    version: int = 0
    held: int = -1
    """-1: none but the program's own initial values, which count as version 0."""
    attached_before: bool = False
    granted_before: bool = False
    arrivals: int = len(_ARRIVAL_WAITS_S)
    """Attempts to attach since the last redirect."""
    asked: tuple[Stage, BucketPlace, int, int] | None = None
    """The outstanding operation when repeats were looked for last; None: there was none."""

    def outstanding(self) -> tuple[Stage, BucketPlace, int, int] | None:
        if self.stage == "ready" and self.iteration <= self.version:
            return None
        return self.stage, self.place, self.iteration, self.version


class AgentCore:
    def __init__(self, rank: int, rng: Random) -> None:
        self._rank = rank
        self._rng = rng
        self._buckets: list[_Bucket] = []
        self._endpoints: dict[AggregatorId, Endpoint] = {}
        self._by_handle: dict[tuple[AggregatorId, int], _Bucket] = {}
        self._open: set[AggregatorId] = set()
        self._connecting: set[AggregatorId] = set()
        self._failures: dict[AggregatorId, int] = {}
        self._locating = False
        self._locate_failures = 0
        self._layout_epoch = -1
        self._synchronous = True
        self._unseen = 0
        """Buckets that this process was never granted. Until there is none left, it does not know
        whether the job began already."""

    # Questions of the shell -----------------------------------------------------------------------

    @property
    def location_epoch(self) -> int:
        """Changes with every migration: what a measured iteration is attributed to."""
        return sum(bucket.place.location_epoch for bucket in self._buckets)

    @property
    def aggregators(self) -> tuple[AggregatorId, ...]:
        return tuple(sorted({bucket.place.aggregator for bucket in self._buckets}))

    def expects(self, aggregator: AggregatorId, index: int) -> bool:
        """Say whether the bucket is believed to be there: only then is its region worth opening."""
        return self._at(aggregator, index) is not None

    @property
    def all_offered(self) -> bool:
        """Say whether this worker is all ready to join: it only waits for versions."""
        return bool(self._buckets) and all(each.stage == "offered" for each in self._buckets)

    def attached(self, index: int) -> bool:
        """Say whether doorbells reach the bucket at present."""
        return self._buckets[index].stage == "ready"

    def aggregator_of(self, index: int) -> AggregatorId:
        """Return who is believed to have the bucket."""
        return self._buckets[index].place.aggregator

    def version_of(self, index: int) -> int:
        """Return the newest version that is complete where the bucket is; -1: it is nowhere."""
        bucket = self._buckets[index]
        return bucket.version if bucket.stage == "ready" else -1

    def describe(self, index: int) -> str:
        """For an error: where the bucket is and what it waits for."""
        if index >= len(self._buckets):
            return "not located yet"
        bucket = self._buckets[index]
        where = bucket.place.aggregator
        channel = (
            "connected"
            if where in self._open
            else f"not connected after {self._failures.get(where, 0)} attempts"
        )
        return (
            f"aggregator {where} ({channel}, bucket {bucket.stage}), version {bucket.version}, "
            f"pushed {bucket.iteration}"
        )

    # Where things are -----------------------------------------------------------------------------

    def start(self, now_s: float) -> list[AgentAction]:
        return self._ask_location(now_s)

    def located(self, located: Located, now_s: float) -> list[AgentAction]:
        """The controller's table. A place older than one we were redirected to is ignored."""
        self._locating = False
        self._locate_failures = 0
        for endpoint in located.endpoints:
            self._endpoints[endpoint.aggregator] = endpoint
        if not self._buckets:
            self._layout_epoch = located.plan.layout_epoch
            self._synchronous = located.plan.consistency == "synchronous"
            self._buckets = [
                _Bucket(layout.index, place)
                for layout, place in zip(located.buckets, located.places, strict=True)
            ]
            self._unseen = len(self._buckets)
        elif located.plan.layout_epoch != self._layout_epoch:
            return [
                Fail(
                    f"the job's layout changed from epoch {self._layout_epoch} to "
                    f"{located.plan.layout_epoch} while its program ran; start the program again"
                )
            ]
        for bucket, place in zip(self._buckets, located.places, strict=True):
            if place.location_epoch >= bucket.place.location_epoch:
                self._place(bucket, place)
        return self._reach(self.aggregators, now_s)

    def not_located(self, why: str, retry_after_s: float, now_s: float) -> list[AgentAction]:
        """No answer, or Refused; `retry_after_s` 0: it never will be."""
        self._locating = False
        if retry_after_s <= 0.0:
            return [Fail(why)]
        self._locate_failures += 1
        return self._ask_location(now_s + max(retry_after_s, self._wait_s(self._locate_failures)))

    def _ask_location(self, at_s: float) -> list[AgentAction]:
        if self._locating:
            return []
        self._locating = True
        return [Locate(at_s)]

    def _place(self, bucket: _Bucket, place: BucketPlace) -> None:
        if place.aggregator != bucket.place.aggregator:
            self._detach(bucket)
        bucket.place = place

    def _detach(self, bucket: _Bucket) -> None:
        self._by_handle.pop((bucket.place.aggregator, bucket.handle), None)
        bucket.stage, bucket.handle = "detached", -1

    def _reach(self, aggregators: Iterable[AggregatorId], now_s: float) -> list[AgentAction]:
        """Attach what is detached, over the channel there is or one to be opened."""
        effects: list[AgentAction] = []
        for aggregator in aggregators:
            waiting = [
                bucket
                for bucket in self._buckets
                if bucket.place.aggregator == aggregator and bucket.stage == "detached"
            ]
            if not waiting:
                continue
            if aggregator in self._open:
                effects += self._attach(aggregator, waiting)
            elif aggregator not in self._endpoints:
                effects += self._ask_location(now_s)
            elif aggregator not in self._connecting:
                self._connecting.add(aggregator)
                effects.append(Connect(self._endpoints[aggregator], now_s))
        return effects

    def _attach(self, aggregator: AggregatorId, waiting: list[_Bucket]) -> list[AgentAction]:
        for bucket in waiting:
            bucket.stage = "asked"
        indices = [bucket.index for bucket in waiting]
        return [
            Send(aggregator, Attach(buckets=tuple(indices[first : first + ENTRIES_MAX])))
            for first in range(0, len(indices), ENTRIES_MAX)
        ]

    # Channels -------------------------------------------------------------------------------------

    def connected(self, aggregator: AggregatorId, now_s: float) -> list[AgentAction]:
        self._connecting.discard(aggregator)
        self._failures.pop(aggregator, None)
        self._open.add(aggregator)
        return self._reach((aggregator,), now_s)

    def connect_failed(self, aggregator: AggregatorId, now_s: float) -> list[AgentAction]:
        self._connecting.discard(aggregator)
        failures = self._failures[aggregator] = self._failures.get(aggregator, 0) + 1
        effects: list[AgentAction] = []
        if failures >= _LOCATE_AFTER_FAILURES:
            effects += self._ask_location(now_s + self._wait_s(failures))
        return effects + self._reach((aggregator,), now_s + self._wait_s(failures))

    def channel_lost(self, aggregator: AggregatorId, now_s: float) -> list[AgentAction]:
        self._open.discard(aggregator)
        for bucket in self._buckets:
            if bucket.place.aggregator == aggregator:
                self._detach(bucket)
        return self._reach((aggregator,), now_s + self._wait_s(1))

    def _wait_s(self, failures: int) -> float:
        """Exponential, with jitter: workers must not come back all at once. Short at first: a
        service that was killed is back within a second or two, and the whole job waits for it."""
        most_s = _SOON_S if failures <= _SOON_ATTEMPTS else limits.RETRY_WAIT_S_MAX
        longest = min(most_s, limits.RETRY_WAIT_S_MIN * 2.0 ** min(failures, 16))
        return longest * self._rng.uniform(0.5, 1.0)

    # Messages from aggregators --------------------------------------------------------------------

    def heard(self, aggregator: AggregatorId, entry: object, now_s: float) -> list[AgentAction]:
        """Take what an aggregator says, but for a Granted. Raises Rejected for what Agents do not
        take."""
        match entry:
            case Done():
                return self.done(aggregator, entry)
            case Moved():
                return self.moved(aggregator, entry, now_s)
            case Denied():
                return self.denied(aggregator, entry, now_s)
            case SeedAsked():
                return self.seed_asked(aggregator, entry)
            case PushRefused():
                return self.push_refused(aggregator, entry)
        raise Rejected(f"{aggregator} sent a {type(entry).__name__}, which Agents do not take")

    def granted(self, aggregator: AggregatorId, granted: Granted, pushed: int) -> list[AgentAction]:
        """The bucket's region is open; `pushed` is this worker's pushed word in it."""
        bucket = self._at(aggregator, granted.bucket)
        if bucket is None:
            return []
        bucket.handle, bucket.arrivals = granted.handle, len(_ARRIVAL_WAITS_S)
        bucket.place = BucketPlace(aggregator=aggregator, location_epoch=granted.location_epoch)
        self._by_handle[aggregator, granted.handle] = bucket
        first, bucket.granted_before = not bucket.granted_before, True
        self._unseen -= first
        if granted.initialized:
            effects = self._complete(bucket, granted.version, pushed)
        else:
            bucket.stage = "offered"
            effects = self._offers([bucket])
        if first and self._unseen == 0:
            waiting = [each for each in self._buckets if each.stage == "offered" and each.held < 0]
            effects += self._offers([each for each in waiting if each is not bucket])
        return effects

    def done(self, aggregator: AggregatorId, done: Done) -> list[AgentAction]:
        """The pull response: `version` is complete."""
        bucket = self._by_handle.get((aggregator, done.handle))
        if bucket is None:
            return []
        bucket.place = BucketPlace(aggregator=aggregator, location_epoch=done.location_epoch)
        return self._complete(bucket, done.version)

    def moved(self, aggregator: AggregatorId, moved: Moved, now_s: float) -> list[AgentAction]:
        """The pull response that names the new aggregator (appendix B, step 3)."""
        bucket = self._at(aggregator, moved.bucket)
        if bucket is None:
            return []
        if moved.location_epoch <= bucket.place.location_epoch:  # Somebody is behind: who?
            self._detach(bucket)
            return self._ask_location(now_s + limits.RETRY_WAIT_S_MIN)
        effects: list[AgentAction] = []
        if bucket.stage == "ready" and moved.version > bucket.version:
            # The parameters are complete where we read them; the training program goes on while
            # the bucket is copied.
            bucket.version = moved.version
            effects.append(Deliver(bucket.index, moved.version))
        self._detach(bucket)
        bucket.place = BucketPlace(
            aggregator=moved.to.aggregator, location_epoch=moved.location_epoch
        )
        bucket.arrivals = 0
        self._endpoints[moved.to.aggregator] = moved.to
        return effects + self._reach((moved.to.aggregator,), now_s)

    def denied(self, aggregator: AggregatorId, denied: Denied, now_s: float) -> list[AgentAction]:
        bucket = self._at(aggregator, denied.bucket)
        if bucket is None:
            return []
        self._detach(bucket)
        if bucket.arrivals < len(_ARRIVAL_WAITS_S):
            # We were sent here by who had it: it is still on its way.
            wait_s = _ARRIVAL_WAITS_S[bucket.arrivals]
            bucket.arrivals += 1
            return [Reattach(aggregator, now_s + wait_s)]
        return self._ask_location(now_s + max(denied.retry_after_s, limits.RETRY_WAIT_S_MIN))

    def reattach(self, aggregator: AggregatorId, now_s: float) -> list[AgentAction]:
        return self._reach((aggregator,), now_s)

    def repeat(self, now_s: float) -> list[AgentAction]:
        """Called every REPEAT_S: whatever has been outstanding since the last call is said again.

        Every request is idempotent, and no answer is known to get lost while its channel lives; a
        wait that depends on that nevertheless has an end.
        """
        effects: list[AgentAction] = []
        again: set[AggregatorId] = set()
        for bucket in self._buckets:
            before, bucket.asked = bucket.asked, bucket.outstanding()
            where = bucket.place.aggregator
            if bucket.asked is None or bucket.asked != before or where not in self._open:
                continue
            match bucket.stage:
                case "ready":
                    effects.append(self._ring(bucket))
                case "offered":
                    effects += self._offers([bucket])
                case "asked" | "detached":
                    bucket.stage = "detached"
                    again.add(where)
                    effects += self._ask_location(now_s)
        return effects + self._reach(sorted(again), now_s)

    def seed_asked(self, aggregator: AggregatorId, asked: SeedAsked) -> list[AgentAction]:
        bucket = self._by_handle.get((aggregator, asked.handle))
        if bucket is None:
            return []
        bare = asked.only_states or bucket.held < 0
        version = asked.version if bare else bucket.held
        return [WriteSeed(aggregator, bucket.index, asked.handle, version, asked.only_states)]

    def push_refused(self, aggregator: AggregatorId, refused: PushRefused) -> list[AgentAction]:
        """Note a refused push. Another worker's refusal only means that this one waits on."""
        bucket = self._by_handle.get((aggregator, refused.handle))
        if bucket is None or refused.worker != self._rank or refused.iteration != bucket.iteration:
            return []
        bucket.iteration -= 1
        return [Refuse(bucket.index, refused)]

    def _at(self, aggregator: AggregatorId, index: int) -> _Bucket | None:
        """The bucket, if we still believe it to be there: late frames change nothing."""
        if index >= len(self._buckets) or self._buckets[index].place.aggregator != aggregator:
            return None
        return self._buckets[index]

    def _complete(self, bucket: _Bucket, version: int, pushed: int = 0) -> list[AgentAction]:
        """The bucket's region is initialised and holds `version`.

        A version that was complete but that no worker holds may be gone with its region; one that
        the training program has seen may not.
        """
        if bucket.stage == "ready" and version <= bucket.version:
            return []  # The answer to a retry.
        if not self._synchronous:
            version = max(version, bucket.held)  # A region that was lost may answer late.
        if version < bucket.held:
            return [
                Fail(
                    f"bucket {bucket.index} went back from version {bucket.held} to {version} "
                    f"at {bucket.place.aggregator}; restart the job from its last checkpoint"
                )
            ]
        effects: list[AgentAction] = []
        if not bucket.attached_before:
            # A program that was started again goes on where the job is. A push of its former life
            # that no version answered yet stands: the slot may be in the middle of a fold.
            bucket.attached_before = True
            bucket.iteration = version + 1 if pushed == version + 1 else version
            effects.append(Resume(bucket.index, bucket.iteration))
            effects.append(Deliver(bucket.index, version))
        elif version > (bucket.version if bucket.stage == "ready" else bucket.held):
            effects.append(Deliver(bucket.index, version))
        bucket.version = version
        bucket.iteration = max(bucket.iteration, version)
        if bucket.stage != "ready" and bucket.iteration > version:
            effects.append(self._ring(bucket))
        bucket.stage = "ready"
        return effects

    # Calls of the training program ----------------------------------------------------------------

    def pushed(self, index: int, iteration: int) -> list[AgentAction]:
        """All tensors of the bucket are in its slot."""
        bucket = self._buckets[index]
        bucket.iteration = max(bucket.iteration, iteration)
        if bucket.stage != "ready" or bucket.iteration <= bucket.version:
            return []  # It rings when the bucket is attached; or it has been counted already.
        return [self._ring(bucket)]

    def sized(self, since: int) -> list[AgentAction]:
        """Another number of workers counts from the iteration `since` on: write it where the
        version before is there. Elsewhere it goes with the push."""
        return [
            WriteSize(bucket.place.aggregator, bucket.index, bucket.handle, bucket.version)
            for bucket in self._buckets
            if bucket.stage == "ready" and bucket.version == bucket.iteration == since - 1
        ]

    def held(self, index: int, version: int) -> None:
        """The shell has the parameters of `version`: they can seed a bare region."""
        self._buckets[index].held = version

    def _ring(self, bucket: _Bucket) -> Ring:
        return Ring(bucket.place.aggregator, bucket.index, bucket.handle, bucket.iteration)

    def _offers(self, buckets: Sequence[_Bucket]) -> list[AgentAction]:
        """Offer to fill these, where it is known which version they lack: a process without
        parameters learns it from the other buckets."""
        ready = (each.version for each in self._buckets if each.stage == "ready")
        newest = max(ready, default=0) if self._synchronous and buckets else 0
        return [
            MakeOffer(
                bucket.place.aggregator, bucket.index, bucket.handle, max(bucket.held, 0),
                newest if bucket.held < 0 else 0,
            )
            for bucket in buckets
            if bucket.held >= 0 or self._unseen == 0
        ]  # fmt: skip

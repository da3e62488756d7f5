"""The data plane: what Agents ask on their channels, and what the core orders about regions.

Everything here runs on the event loop, between two awaits, and asks the bucket's state machine what
a frame means; the bytes are moved by the workers (one-sided) and folded in the executor's thread.
The core hears only of what concerns the controller.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import structlog

from slackwater.common.base import limits
from slackwater.common.base.errors import (
    AccessRefused,
    DecodeRejected,
    Rejected,
    Unavailable,
)
from slackwater.common.base.rare_log import RareLog
from slackwater.common.domains.slots.frames import (
    Denied,
    Granted,
    Hello,
    Moved,
    Offer,
    Part,
    PushRefused,
    Seed,
    SeedAsked,
    decode_hello,
)
from slackwater.common.domains.slots.layout import tensor_at
from slackwater.common.domains.slots.region import SlotRegion
from slackwater.common.domains.slots.tokens import process_token
from slackwater.common.domains.slots.virtual import process_of
from slackwater.common.shell.config import is_one_of
from slackwater.common.shell.definition import Port
from slackwater.common.transport.base import Channel
from slackwater.schemas.base import JobId
from slackwater.schemas.placement import JobPlan
from slackwater.services.aggregator.bucket import Bucket, Key, Move, SeededStates, Verdict
from slackwater.services.aggregator.core import AggregatorCore
from slackwater.services.aggregator.departure import Departures
from slackwater.services.aggregator.early_fold import Ahead
from slackwater.services.aggregator.events import BucketRestored, BucketSeeded, WorkersArrived
from slackwater.services.aggregator.executor import Outcome, Task
from slackwater.services.aggregator.regions import Held, Regions
from slackwater.services.aggregator.session import Session, by_number

_log = structlog.get_logger()
_QUOTED: Final = 100
"""Characters of a name that a stranger gave."""


class DataPlane:
    """`submit` runs a fold and calls `folded`, `submit_ahead` a part of one and calls
    `folded_ahead`; `may_leave` says whether a bucket that stands still may go now; `frozen` takes a
    bucket that leaves, `taken` one that turned out to be another aggregator's."""

    submit: Callable[[Task], None]
    submit_ahead: Callable[[Bucket, SlotRegion, Ahead], None]
    may_leave: Callable[[Bucket, Held], bool]
    frozen: Callable[[Bucket, Held], None]
    taken: Callable[[Bucket], None]

    def __init__(self, core: AggregatorCore, regions: Regions, *cluster_tokens: str) -> None:
        self._core = core
        self._regions = regions
        self._cluster_tokens = cluster_tokens
        self._port: Port | None = None
        self._sessions: dict[int, Session] = {}
        self._sessions_begun = 0
        self.departures = Departures()
        """Told of flips and pushes; the shell shares it with those who ask it."""
        self._peers = 0
        self.strangers = RareLog(_log, lambda: self.port.now_s())

    def begin(self, port: Port) -> None:
        self._port = port

    @property
    def port(self) -> Port:
        assert self._port is not None
        return self._port

    # Channels -------------------------------------------------------------------------------------

    def accept(self, payload: bytes) -> None:
        """A listener's question before a channel exists. Raises AccessRefused, Unavailable."""
        try:
            hello = decode_hello(payload)
        except DecodeRejected as error:
            raise AccessRefused(str(error)) from error
        if len(self._sessions) + self._peers >= limits.CHANNELS_MAX:
            raise AccessRefused(f"{limits.CHANNELS_MAX} channels are open: none is left")
        if hello.role == "aggregator":
            self._check_token(hello, *self._cluster_tokens)
            return
        plan = self._core.plan_of(JobId(hello.job), self.port.now_s())
        if plan is None:  # Its token cannot be looked at; it may be on its way here.
            why = f"{self._core.id} has no bucket of job {hello.job[:_QUOTED]}"
            raise Unavailable(why, retry_after_s=limits.ADMIT_LOOK_S)
        self._check_agent(hello, plan)

    def prepare(self, payload: bytes, nbytes: int) -> Callable[[], None]:
        """A listener's question before memory is taken for a region that a peer hands over. The
        peer's token was right, or there would be no channel. Raises AccessRefused, Rejected."""
        if decode_hello(payload).role != "aggregator":
            raise AccessRefused("only aggregators hand regions over")
        return self._core.prepare(nbytes)

    async def serve(self, channel: Channel) -> None:
        """A listener's new channel, until it ends."""
        hello = decode_hello(channel.hello)
        if hello.role == "aggregator":
            self._peers += 1
            try:
                while True:
                    await channel.receive()
            except Unavailable:
                return  # Handovers are all that an aggregator says.
            finally:
                self._peers -= 1
        self._sessions_begun += 1
        session = Session(self, self._sessions_begun, channel, hello)
        self._sessions[session.number] = session
        await session.serve()

    def session_closed(self, session: Session) -> None:
        if self._sessions.pop(session.number, None) is None:
            return
        for bucket in session.handles.values():
            bucket.detach(session.rank, session.number)

    def _check_agent(self, hello: Hello, plan: JobPlan) -> None:
        self._check_token(hello, process_token(plan.token, hello.rank, hello.attempt))
        if hello.layout_epoch != plan.layout_epoch:
            raise AccessRefused(
                f"job {plan.job}: layout epoch {hello.layout_epoch}, here it is "
                f"{plan.layout_epoch}: start the program again"
            )
        if hello.rank >= plan.workers:
            raise AccessRefused(f"job {plan.job}: rank {hello.rank} of {plan.workers} workers")

    def _check_token(self, hello: Hello, *expected: str) -> None:
        if not is_one_of(hello.token, expected):
            who = (hello.job or hello.sender)[:_QUOTED]
            self.port.count("strangers_refused")
            raise AccessRefused(f"{hello.role} {who}: the token is wrong")

    # Requests of a session ------------------------------------------------------------------------

    def attach(self, session: Session, index: int) -> None:
        key = (JobId(session.hello.job), index)
        bucket, held = self._core.buckets.get(key), self._regions.held.get(key)
        if bucket is None or held is None:
            self._redirect(session, key)
            return
        try:
            self._check_agent(session.hello, bucket.plan)
            bucket.greet(session.rank, session.hello.attempt)
        except AccessRefused as error:
            session.tell(
                Denied(bucket=index, why=str(error), retry_after_s=limits.RETRY_WAIT_S_MAX)
            )
            return
        if bucket.phase == "moving":
            self._away(session, bucket)
            return
        if self._attached >= limits.ATTACHED_MAX:
            why = f"{self._core.id}: {limits.ATTACHED_MAX} ranks are attached"
            session.tell(Denied(bucket=index, why=why, retry_after_s=limits.RETRY_WAIT_S_MAX))
            return
        self._look_at_size(bucket, held)
        before = bucket.attach(session.rank, session.number)
        if before is not None and (other := self._sessions.get(before)) is not None:
            other.ungranted(bucket)
            other.handles.pop(bucket.handle, None)
        try:
            grant = session.channel.grant(held.region)
        except (Rejected, Unavailable) as error:
            bucket.detach(session.rank, session.number)
            session.tell(Denied(bucket=index, why=str(error)))
            return
        session.granted(bucket, grant)
        session.tell(
            Granted(
                bucket=index,
                handle=bucket.handle,
                key=grant,
                region=held.slots.identity,
                location_epoch=bucket.location_epoch,
                initialized=bucket.initialized and session.rank < bucket.active,
                version=bucket.answered(session.rank),
            )
        )

    @property
    def _attached(self) -> int:
        return sum(len(session.handles) for session in self._sessions.values())

    def offered(self, session: Session, bucket: Bucket, offer: Offer) -> None:
        held = self._regions.held.get(bucket.key)
        if bucket.phase in ("moving", "gone") or held is None:
            self._away(session, bucket)
            return
        self._look_at_size(bucket, held)
        if bucket.initialized:
            if session.rank < bucket.active:  # Else it is told once it counts.
                session.done(bucket)
        else:
            asked = bucket.offered(
                session.rank, offer.version, offer.applied, offer.states, offer.wanted
            )
            if asked and self._begun_with_spare(bucket, held):
                return
            for rank in asked:
                version, only_states = bucket.asked(rank)
                ask = SeedAsked(handle=bucket.handle, version=version, only_states=only_states)
                self._tell_rank(bucket, rank, ask)

    def seeded(self, session: Session, bucket: Bucket, seed: Seed) -> None:
        held, version = self._regions.held.get(bucket.key), seed.version
        states = SeededStates(seed.updates, seed.elements, seed.behind)
        if held is None or not bucket.seeded(session.rank, version, states):
            return
        updates = bucket.states_seeded.updates
        if bucket.spare is not None:
            updates = max(updates, bucket.spare.updates)
        held.slots.set_applied(version, bucket.applied)
        held.slots.initialize(version, updates)
        if version > 0:
            first, states = bucket.first_values, bucket.states_seeded
            self.port.post(BucketSeeded(bucket.key, session.rank, states, first))
        self._tell(bucket, bucket.attached_active)
        self.leave_if_idle(bucket, held)

    def _begun_with_spare(self, bucket: Bucket, held: Held) -> bool:
        """Go on with a checkpoint's values, where no worker has newer ones."""
        version, spare = bucket.begin_with_spare(), bucket.spare
        if version is None or spare is None:
            return False
        synchronous = bucket.bound is None
        for rank, applied in enumerate(bucket.applied):
            held.slots.set_pushed(rank, version if synchronous else applied)
        held.slots.set_applied(version, bucket.applied)
        held.slots.initialize(version, spare.updates + version - spare.iteration)
        self.port.post(BucketRestored(bucket.key, spare.iteration))
        self._tell(bucket, bucket.attached_active)
        self.leave_if_idle(bucket, held)
        return True

    def _look_at_size(self, bucket: Bucket, held: Held) -> None:
        """Read how many ranks count in the next version: rank 0 may have written it anew. The
        ranks that begin with it hear which version is there."""
        slots = held.slots
        if bucket.phase != "folding" and slots.active_now != bucket.active:
            joined = bucket.resized(slots.look())
            if bucket.initialized and bucket.phase != "moving":
                self._tell(bucket, joined)

    def on_doorbell(self, session: Session, bucket: Bucket, iteration: int) -> None:
        held = self._regions.held.get(bucket.key)
        if held is None:
            self._away(session, bucket)
            return
        self._look_at_size(bucket, held)
        pushed = held.slots.all_pushed()
        verdict = bucket.on_doorbell(session.rank, iteration, pushed)
        if verdict in (Verdict.WAIT, Verdict.FOLD):
            self.departures.pushed(bucket.key, self.port.now_s())
        match verdict:
            case Verdict.DONE:
                session.done(bucket)
            case Verdict.FOLD:
                self._fold(bucket, held, pushed)
            case Verdict.AWAY:
                self._away(session, bucket)
                return
            case Verdict.AHEAD:
                answered = bucket.answered(session.rank)
                held.slots.set_pushed(session.rank, answered)
                first = tensor_at(held.slots.tensors, 0)
                self._refuse(bucket, held, session.rank, iteration, first, (
                    f"version {answered} is complete: push iteration {answered + 1} next"
                ))  # fmt: skip
                return
            case Verdict.WAIT:
                self._fold_ahead(bucket, held, pushed)
            case Verdict.UNFOUNDED:
                pass
        if bucket.all_heard():
            self.port.post(WorkersArrived(bucket.key, bucket.location_epoch))

    def on_partial_push(self, session: Session, bucket: Bucket, part: Part) -> None:
        held = self._regions.held.get(bucket.key)
        if held is not None:  # Else its ring will hear where the bucket is.
            self._look_at_size(bucket, held)
            bucket.on_partial_push(session.rank, part.iteration, part.elements)
            self.departures.pushed(bucket.key, self.port.now_s())
            self._fold_ahead(bucket, held, held.slots.all_pushed())

    # Folding --------------------------------------------------------------------------------------

    def fold_if_complete(self, bucket: Bucket, held: Held) -> None:
        pushed = held.slots.all_pushed()
        if bucket.complete(pushed):
            self._fold(bucket, held, pushed)

    def _fold(self, bucket: Bucket, held: Held, pushed: Sequence[int]) -> None:
        alone = bucket.fold_begun(pushed)
        self.submit(Task(bucket, held.slots, alone, bucket.parts.take()))

    def _fold_ahead(self, bucket: Bucket, held: Held, pushed: Sequence[int]) -> None:
        ahead = bucket.ahead(pushed)
        if ahead is not None:
            self.submit_ahead(bucket, held.slots, ahead)

    def folded_ahead(self, bucket: Bucket) -> None:
        """Let the bucket leave, if it was ordered to: the fold has ended."""
        held = self._regions.held.get(bucket.key)
        if held is not None:
            self.leave_if_idle(bucket, held)

    def folded(self, task: Task, outcome: Outcome) -> None:
        """The task's slot ended: the pull responses go out."""
        bucket = task.bucket
        held = self._regions.held.get(bucket.key)
        if bucket.phase == "gone" or held is None or held.slots is not task.slots:
            return
        applied = held.slots.applied() if bucket.bound is not None else ()
        if outcome.version > bucket.version:
            self.departures.flipped(bucket.key, self.port.now_s())
        going_on = bucket.fold_ended(outcome.version, applied)
        if not outcome.owned:
            _log.warning("bucket.taken", job=bucket.key[0], bucket=bucket.key[1])
            self.taken(bucket)
            return
        if outcome.refused is not None:
            refused = outcome.refused
            answered = bucket.answered(refused.worker)
            held.slots.set_pushed(refused.worker, answered)
            worker, why = refused.worker, refused.why
            if bucket.plan.virtual:
                workers = held.slots.sizes.at(answered + 1).workers
                why = f"virtual rank {worker}: {why}"
                worker = process_of(worker, bucket.plan.workers, workers)
            self._refuse(bucket, held, worker, answered + 1, refused.tensor, why)
        self._look_at_size(bucket, held)
        if not self.leave_if_idle(bucket, held):
            self._tell(bucket, going_on)
        self.fold_if_complete(bucket, held)

    def _refuse(
        self, bucket: Bucket, held: Held, worker: int, iteration: int, tensor: str, why: str
    ) -> None:
        refused = PushRefused(
            handle=bucket.handle,
            iteration=iteration,
            job=bucket.plan.job,
            tensor=tensor,
            worker=worker,
            why=why,
        )
        self._tell_rank(bucket, worker, refused)
        self.port.count("pushes_refused")
        _log.warning(
            "push.refused", job=bucket.plan.job, bucket=bucket.layout.index, tensor=tensor,
            worker=worker, iteration=iteration, reason=why,
        )  # fmt: skip

    # Telling --------------------------------------------------------------------------------------

    def _tell(self, bucket: Bucket, ranks: Iterable[int]) -> None:
        """Tell these ranks that they may go on."""
        numbers = tuple(bucket.attached[rank] for rank in ranks)
        for session in by_number(self._sessions, numbers):
            session.done(bucket)

    def _tell_rank(self, bucket: Bucket, rank: int, control: PushRefused | SeedAsked) -> None:
        session = self._sessions.get(bucket.attached.get(rank, -1))
        if session is not None:
            session.tell(control)

    def _away(self, session: Session, bucket: Bucket) -> None:
        """Tell the session that the bucket leaves, or has left."""
        move = bucket.move
        if bucket.phase == "moving" and move is not None:
            answered = bucket.answered(session.rank)
            session.tell(_moved(bucket.key, move, answered, bucket.initialized))
        else:
            self._redirect(session, bucket.key)

    def _redirect(self, session: Session, key: Key) -> None:
        gone = self._core.forwarding_of(key, self.port.now_s())
        if gone is not None:
            answered = gone.answered[session.rank] if session.rank < len(gone.answered) else 0
            session.tell(_moved(key, gone.move, answered, gone.initialized))
        else:
            session.tell(Denied(bucket=key[1], why=f"{self._core.id} does not have it"))

    def part(self, bucket: Bucket, why: str) -> None:
        """Detach all sessions from the bucket, and tell them why."""
        for session in by_number(self._sessions, tuple(bucket.attached.values())):
            session.ungranted(bucket)
            session.handles.pop(bucket.handle, None)
            session.tell(Denied(bucket=bucket.layout.index, why=why))
        bucket.attached.clear()

    # Leaving --------------------------------------------------------------------------------------

    def leave_if_idle(self, bucket: Bucket, held: Held) -> bool:
        """If it is ordered to leave, no push waits for an update, and its time has come: freeze it
        where it is."""
        if bucket.move is None or not bucket.may_freeze(held.slots.all_pushed()):
            return False
        if not self.may_leave(bucket, held):
            return False
        bucket.freeze()
        self.redirect_all(bucket, held, bucket.move)
        return True

    def redirect_all(self, bucket: Bucket, held: Held, move: Move) -> None:
        """The pull response names the new aggregator (appendix B, step 2); then the copy begins."""
        held.slots.location_epoch = move.location_epoch
        for session in by_number(self._sessions, tuple(bucket.attached.values())):
            answered = bucket.answered(session.rank)
            session.tell(_moved(bucket.key, move, answered, bucket.initialized))
        self.frozen(bucket, held)


def _moved(key: Key, move: Move, version: int, initialized: bool) -> Moved:
    return Moved(
        bucket=key[1],
        version=version,
        initialized=initialized,
        location_epoch=move.location_epoch,
        to=move.to,
    )
